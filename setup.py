"""Native extensions only; everything else is in pyproject.toml.

NATIVE_SANITIZE=1 builds with AddressSanitizer and UBSan, NATIVE_DEBUG=1 without optimisation. All extensions use the
limited API of CPython 3.11, so that one abi3 wheel serves every later version.
"""

import glob
import os

from setuptools import Extension, setup

flags = ["-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-missing-field-initializers"]
link: list[str] = []
if os.environ.get("NATIVE_DEBUG"):
    flags += ["-O0", "-g"]
if os.environ.get("NATIVE_SANITIZE"):
    flags += ["-O1", "-g", "-fsanitize=address,undefined", "-fno-omit-frame-pointer"]
    link += ["-fsanitize=address,undefined"]


def extension(name: str, source_dir: str) -> Extension:
    return Extension(
        name,
        sources=sorted(glob.glob(f"{source_dir}/*.cpp")),
        depends=sorted(glob.glob(f"{source_dir}/*.hpp")),
        include_dirs=["third_party/xxhash"],
        language="c++",
        extra_compile_args=flags,
        extra_link_args=link,
        libraries=["dl"],
        define_macros=[("Py_LIMITED_API", "0x030B0000")],
        py_limited_api=True,
    )


setup(
    ext_modules=[
        extension("kvdir.index._native", "kvdir/index/csrc"),
        extension("kvdir.hashing._native", "kvdir/hashing/csrc"),
        extension("peer_agent._native", "peer_agent/csrc"),
        extension("peer_agent.mover._ucx", "peer_agent/mover/csrc"),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
