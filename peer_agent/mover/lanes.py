"""Which paths UCX may take. Pure.

Rules:
- In production only lanes on which a get is carried out by hardware: the adapter checks key and range. Whatever is not known
  to be one is refused (fail closed): tcp, posix, sysv, cma, self and what later versions may bring.
- Over emulated lanes the owner's process answers gets from any address to anybody. They exist for tests (`allow_emulated_rma`).
- What UCX was told is one thing, what an endpoint uses another: both are checked.
"""

from __future__ import annotations

from collections.abc import Iterable

RDMA = ("rc", "dc", "srd")
CUDA = ("cuda_copy", "cuda_ipc", "gdr_copy")
EMULATED = ("tcp",)

_REAL = frozenset({"rc_verbs", "rc_mlx5", "dc_mlx5", "srd", "srd_verbs", *CUDA})


def enforced(*, emulated: str, gpu: bool) -> dict[str, str]:
    """UCX settings (names without UCX_) that nobody overrules. emulated: lanes for tests, comma separated, or ""."""
    if emulated:
        return {"TLS": emulated}
    return {"TLS": ",".join(RDMA + (CUDA if gpu else ())), "PROTO_EMULATION_ENABLE": "n"}


def defaults(*, emulated: str) -> dict[str, str]:
    """UCX settings unless somebody says otherwise. A dead peer is noticed within about KEEPALIVE_INTERVAL.

    Emulated lanes stay on this host, since they serve any byte to anybody who reaches them. TCP_TX_SEG_SIZE: 1.9 to 2.7 times
    the speed of UCX's own default.
    """
    common = {"KEEPALIVE_INTERVAL": "1s"}
    return common | {"NET_DEVICES": "lo", "TCP_TX_SEG_SIZE": "64K"} if emulated else common


def refused(transports: Iterable[str]) -> list[str]:
    """Those of an endpoint's transports that the policy forbids in production."""
    return sorted({name for name in transports if name not in _REAL})
