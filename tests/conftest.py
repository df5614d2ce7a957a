"""For all tests: how long a drawn example takes says how busy the machine is, not whether the code is right."""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):  # the environments of test-vllm and test-sglang draw no examples
    from hypothesis import settings

    settings.register_profile("kvdir", parent=settings.default, deadline=None)
    settings.load_profile("kvdir")
