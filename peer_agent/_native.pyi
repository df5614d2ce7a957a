"""Types of the native movers (csrc/): slot headers, scattered verified copies, the tcp plane. No Python inside.

`region` is always a buffer over a whole arena (writable where written). Offsets are u64 little-endian, packed, of slot
headers relative to the region; every one is range- and alignment-checked, ValueError otherwise. Calls that move bytes
release the GIL. Layout: peer_agent/memory/layout.py.
"""

from typing import final

Packed = bytes | bytearray | memoryview

HEADER_BYTES: int

def xxh3_64(data: Packed) -> int:
    """XXH3-64 of the buffer, seed 0."""

def add_class(region: Packed, size_class: Packed) -> None:
    """Owner: one more size class (layout.SIZE_CLASS, 64 bytes) behind all others; readers see it whole or not at all.

    ValueError when it overlaps another, leaves the arena, or is one too many.
    """

def begin_write(region: Packed, offsets: Packed) -> bytes:
    """Makes each slot's generation odd (invisible) before its bytes may change; returns the generations, u64 LE.

    A slot that is odd already advances too, so that every reservation has a generation of its own.
    """

def commit(
    region: Packed,
    offsets: Packed,
    namespace_digest: Packed,
    fingerprints: Packed,
    width: int,
    length: int,
    checksums: Packed | None,
) -> bytes:
    """Writes headers and makes generations even; computes XXH3-64 where `checksums` is None.

    Returns n * 32-byte LockResponse.blocks records with state 1. ValueError if a slot's generation is not odd.
    """

def retire(region: Packed, offsets: Packed) -> None:
    """Makes slots invisible (generation odd, header cleared) so that they can be reserved again."""

def records(region: Packed, offsets: Packed) -> bytes:
    """n * 32-byte records of what the headers say now; state 0 for odd generations or bad magic."""

def headers(region: Packed, offsets: Packed) -> bytes:
    """n * 128-byte slot headers as found (for recovery scans and diagnosis)."""

def write_blocks(region: Packed, offsets: Packed, sources: Packed, length: int) -> bytes:
    """Scattered copy in: `sources` is n * u64 LE addresses of buffers the caller keeps alive; returns checksums u64 LE.

    Checksums are computed while the bytes are in cache. Slots must be odd (reserved).
    """

def read_blocks(
    region: Packed,
    records: Packed,
    namespace_digest: Packed,
    fingerprints: Packed,
    width: int,
    destinations: Packed,
    check: bool,
) -> bytes:
    """Verified scattered copy out of `region`; returns n bytes of ReadStatus.

    destinations: n * u64 LE addresses, `records[i].length` bytes each. Header fields and generation are compared before and
    after each copy; with `check`, the payload's XXH3-64 too (on the copy). A record that leaves the region is ABSENT, a
    present one with address 0 CORRUPT.
    """

def read_slots(
    source: Packed,
    records: Packed,
    namespace_digest: Packed,
    fingerprints: Packed,
    width: int,
    region: Packed,
    destinations: Packed,
    check: bool,
    deadline_ns: int,
    most_bytes: int,
) -> tuple[bytes, int, int] | None:
    """The shm plane: `read_blocks` from a peer's mapped region into slots of ours (payload at offset + 128).

    Returns statuses, payload bytes of the OK ones, and of all present ones. None, and nothing is done, if those are more than
    most_bytes.

    Stops at CLOCK_MONOTONIC deadline_ns; blocks not complete are LATE. Destinations must be reserved (odd) slots; a record
    longer than its destination is CORRUPT. `source` may be any mapping: records come from a peer and are checked against it.
    """

def plan_gets(
    region: Packed, records: Packed, destinations: Packed, source_bytes: int
) -> tuple[bytes, bytes, bytes, bytes, bytes]:
    """What a one-sided read of these blocks has to get: (statuses, slots, remote, local, lengths).

    statuses: a byte per record, 255 where a get is due, else final: ABSENT (absent, or outside the peer's arena of
    source_bytes) or CORRUPT (longer than its destination). The others, u64 LE of the due ones in order: offsets of header and
    of payload in the peer's arena, address of our payload, length. ValueError unless destinations are distinct reserved slots
    of ours.
    """

def verify_gets(
    region: Packed,
    records: Packed,
    namespace_digest: Packed,
    fingerprints: Packed,
    width: int,
    destinations: Packed,
    headers: Packed,
    statuses: Packed,
) -> bytes:
    """Statuses with every 255 decided: by the header (128 bytes of each due block, in order) and the payload's XXH3-64.

    Headers must have been asked for after all payloads had arrived; csrc/gets.hpp says why that suffices.
    """

def payload_checksums(region: Packed, offsets: Packed, length: int) -> bytes:
    """XXH3-64 of `length` payload bytes of each slot where they lie, u64 LE."""

def reserved_payloads(region: Packed, offsets: Packed, length: int) -> bytes:
    """Addresses (u64 LE) of the payloads of slots that are reserved (odd), distinct, and hold `length` bytes; else ValueError.

    For copies that a device makes; the caller keeps the region mapped until they have ended.
    """

def verify_blocks(
    region: Packed, records: Packed, namespace_digest: Packed, fingerprints: Packed, width: int, check: bool
) -> bytes:
    """`read_blocks` without the copy: n bytes of ReadStatus of what is there; `check`: payloads are hashed where they lie."""

def begin_copies(function: int, destinations: Packed, sources: Packed, lengths: Packed, stream: int) -> tuple[int, int]:
    """Calls `int function(u64 destination, u64 source, size_t bytes, void *stream)` for each copy, as long as it answers 0.

    Returns (its last answer, copies begun). All lists u64 LE; the caller answers for the addresses. For the asynchronous
    copies of the CUDA driver.
    """

def copy_spans(destinations: Packed, sources: Packed, lengths: Packed) -> None:
    """memcpy of each span, u64 LE lists, as many of each (else ValueError); the caller answers for the addresses."""

def ok_bytes(records: Packed, statuses: Packed) -> int:
    """Payload bytes of the present records whose status is OK."""

def copy_scattered(region: Packed, offsets: Packed, length: int, destination: Packed) -> None:
    """Plain memcpy of n scattered payloads into one packed buffer: the yardstick of `bench read`."""

def stream_send(fd: int, data: Packed, deadline_ns: int) -> None:
    """Sends the buffer over a connected socket: the raw TCP stream, yardstick of `bench read`. Raises ConnectionError."""

def stream_receive(fd: int, into: Packed, deadline_ns: int) -> None:
    """Fills the buffer from a connected socket. Raises ConnectionError."""

@final
class Mapping:
    """A whole file mapped shared at an address that is a multiple of 2 MiB, so that its huge pages can be mapped as such. A
    buffer of `size` bytes; it stays mapped until `close`, or until the last buffer is gone. See csrc/mapping.hpp."""

    def __init__(self, fd: int, size: int, *, writable: bool) -> None:
        """OSError when it cannot be mapped."""
    @property
    def address(self) -> int: ...
    @property
    def page_bytes(self) -> int:
        """Page size of the file's memory: more than the machine's base page on hugetlbfs only."""
    def bind(self, node: int) -> None:
        """New pages come from this NUMA node only. OSError: no such node."""
    def advise_huge(self, wanted: bool) -> None:
        """A hint that kernels and file systems without huge pages ignore."""
    def prefault(self, *, huge: bool, threads: int) -> None:
        """Allocates, zeroes and maps everything, as far as there is memory; with `huge` as huge pages where they can be had."""
    def remove(self, offset: int) -> None:
        """Gives whole pages behind `offset` back to the file system; whoever maps them finds zeros. OSError where it cannot."""
    def close(self) -> None:
        """Idempotent. BufferError while buffers of it are in use."""
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class TlsCredentials:
    """Certificate files of the tcp plane, verified. They are looked at again, at most once a second, when a connection begins;
    changed files that do not work leave the old ones in use."""

    def __init__(self, certificate: str, key: str, ca: str) -> None:
        """ValueError names the setting, the file and what to do, or says that OpenSSL 3 is missing."""
    def stats(self) -> dict[str, int]:
        """How handshakes of servers with these credentials ended: handshakes (done), not_tls, no_certificate, untrusted,
        refused_us, broken, unfinished. Of the files: reloads, failed_reloads."""
    @property
    def expires_unix_s(self) -> int:
        """When our certificate ends."""
    @property
    def failure(self) -> str:
        """Why changed files are not used; empty when the last change was."""

@final
class TcpServer:
    """Owner's side of the tcp plane: a native thread that serves granted slots of `region`. Takes no GIL while serving."""

    def __init__(
        self,
        region: Packed,
        epoch: int,
        host: str,
        port: int,
        *,
        max_connections: int = 256,
        tls: TlsCredentials | None = None,
    ) -> None:
        """`host` is numeric. Raises OSError when it cannot listen."""
    @property
    def port(self) -> int: ...
    def grant(self, capability: Packed, records: Packed) -> None:
        """Who shows the capability may read these slots until it expires. Replaces an earlier grant of the same lock. Records
        with state 0 are left out; ValueError for other memory, and for a capability of another epoch, version or size."""
    def revoke(self, lock: int) -> None: ...
    def stats(self) -> dict[str, int]:
        """connections (open now), reads, blocks, bytes (payload), refused (blocks), torn, protocol_errors,
        connections_refused, capability_uncovered (blocks that what was shown does not cover), and requests that were served
        nothing, by what was wrong with it: capability_malformed, _epoch, _expired, _ended, _forged."""
    def close(self) -> None:
        """Stops the thread and joins it; idempotent. The region may be unmapped afterwards."""

@final
class TcpConnection:
    """Reader's side: one connection; `read` blocks without the GIL until done or the deadline."""

    def __init__(self, host: str, port: int, deadline_ns: int, *, tls: TlsCredentials | None = None) -> None:
        """`host` is numeric. Raises ConnectionError: unreachable, no hello in time, another protocol or version."""
    def read(
        self,
        capability: Packed,
        epoch: int,
        records: Packed,
        namespace_digest: Packed,
        fingerprints: Packed,
        width: int,
        region: Packed,
        destinations: Packed,
        check: bool,
        deadline_ns: int,
    ) -> bytes:
        """n bytes of ReadStatus. After it returned nothing writes to `region`. A connection that missed a deadline or broke
        the protocol is closed and answers PEER_LOST from then on."""
    @property
    def broken(self) -> bool: ...
    def close(self) -> None:
        """From any thread; a `read` in progress ends with PEER_LOST."""

@final
class Movers:
    """A few native threads that run any number of jobs in turns; an event loop hears of their ends through a descriptor.

    No thread takes the GIL. The reads take what `read_slots` and `TcpConnection.read` take and hold every buffer until they
    are collected. Each job ends by its deadline. Small tcp reads, up to loop_bytes at once, are moved by `collect` itself.
    """

    def __init__(self, threads: int, loop_bytes: int) -> None: ...
    def read_slots(
        self,
        source: Packed,
        records: Packed,
        namespace_digest: Packed,
        fingerprints: Packed,
        width: int,
        region: Packed,
        destinations: Packed,
        check: bool,
        deadline_ns: int,
    ) -> int:
        """Begins a read and returns its ticket. RuntimeError after close."""
    def read_tcp(
        self,
        connection: TcpConnection,
        capability: Packed,
        epoch: int,
        records: Packed,
        namespace_digest: Packed,
        fingerprints: Packed,
        width: int,
        region: Packed,
        destinations: Packed,
        check: bool,
        deadline_ns: int,
    ) -> int:
        """RuntimeError after close, or when the connection has a read already."""
    def connect_tcp(self, host: str, port: int, deadline_ns: int, *, tls: TlsCredentials | None = None) -> int:
        """Begins to connect and returns its ticket. ConnectionError when that fails at once, or after close."""
    def abort(self, ticket: int) -> None:
        """Ends a job that waits, now, and one that moves bytes soon (shm: with its current block; tcp: its connection is
        closed). It still has to be collected. Unknown tickets are ignored."""
    def collect(self) -> list[tuple[int, tuple[bytes, int] | str | TcpConnection]]:
        """Moves what has arrived for small reads (GIL released); (ticket, result) of jobs that have ended, each exactly once.

        Reads give n bytes of ReadStatus and the payload bytes of the OK ones; connects a TcpConnection, or a str with the
        reason why there is none."""
    def fileno(self) -> int:
        """Readable when `collect` has something to do."""
    def close(self) -> None:
        """Ends all jobs and joins the threads, GIL released; what ended can still be collected. Idempotent."""
