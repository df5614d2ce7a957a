"""Types of the UCX binding (csrc/): one worker, used by one thread; nothing in it blocks. libucp is loaded by path at run time.

Tickets are the caller's numbers, not 0; what ends is reported once by `progress` as (ticket, status): 0, or a UCX error for
`reason`. Packed arguments are u64 little endian.
"""

from typing import final

Packed = bytes | bytearray | memoryview

def version(library: str) -> tuple[int, int, int]:
    """Loads libucp from this path, once for all. RuntimeError: cannot be loaded, before 1.19, or not 1.x."""

@final
class Worker:
    def __new__(cls, library: str, settings: tuple[tuple[str, str], ...], incarnation: Packed) -> Worker:
        """settings: of UCX, names without UCX_. incarnation: ours, 16 bytes. RuntimeError: no such lane, unknown setting."""
    def fileno(self) -> int:
        """Readable when `progress` is due."""
    def address(self) -> bytes: ...
    def map(self, address: int, size: int, serve: bool) -> bytes:
        """Registers memory for gets into it. serve (once): for peers' gets as well; returns the remote key. RuntimeError."""
    def progress(self, budget_ns: int) -> tuple[bool, list[tuple[int, int]]]:
        """Moves things along for at most about budget_ns. (nothing to do until fileno is readable, what has ended)."""
    def connect(self, address: Packed, key: Packed, incarnation: Packed, ticket: int) -> int:
        """A new link's number. `ticket` ends when the peer of this incarnation has answered, or another, or cannot.

        ValueError: garbage; RuntimeError: unreachable.
        """
    def get(self, link: int, to: Packed, remote: Packed, lengths: Packed, ticket: int) -> None:
        """Posts all gets: lengths[i] bytes from offset remote[i] of what the peer serves to address to[i] here.

        `ticket` ends when the last one has, after which none writes any more. ValueError, and no ticket then: `to` is not
        mapped, or the peer serves less.
        """
    def close(self, link: int, ticket: int) -> None:
        """`ticket` ends when the endpoint is closed and all its gets have ended. Idempotent."""
    def failed(self, link: int) -> bool: ...
    def lanes(self, link: int) -> list[tuple[str, str]]:
        """(transport, device) of every lane of the endpoint."""
    def reason(self, status: int) -> str: ...
