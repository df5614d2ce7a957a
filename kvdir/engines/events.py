"""What engines tell of their blocks, as values: the one form into which every dialect is translated.

Rules: hashes are packed (bytes, width), in the order told. There is no field for token ids or salts, so none can leave by
these values; `salted` says only that there was one. Positions are never derived here: engines list hashes that do not match
their tokens one by one (hybrid models), so `parent` and order are hints. What could not be told as an event is counted by
`Reason`. Values only; standard library.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvdir.location import Tier
from kvdir.namespace import NO_TENANT, StateKind

NO_ADAPTER = "none"


_DIGEST = re.compile(r"salt:[0-9a-f]{32}")
_RESERVED = frozenset({"none", "auto", "default", "unknown", ""})


def adapter_of(lora_name: str | None) -> str:
    """The `adapter` of a namespace for an engine's LoRA name. Names that mean something else there are quoted."""
    if lora_name is None:
        return NO_ADAPTER
    plain = lora_name.lower() not in _RESERVED and lora_name.strip() == lora_name and not lora_name.startswith('"')
    return lora_name if plain else json.dumps(lora_name)


def lora_name_of(adapter: str) -> str | None:
    """The engine's LoRA name of an `adapter`: the inverse of `adapter_of`. Others made it up if it is not one of those."""
    if adapter == NO_ADAPTER:
        return None
    if adapter.startswith('"'):
        with contextlib.suppress(ValueError):
            return str(json.loads(adapter))
    return adapter


def tenant_of(tenant_id: str | None, salt: str | None = None) -> str:
    """The `tenant` of a namespace for a router's tenant and salt: a digest, so neither leaves; "none" where both are unset.

    A short salt can be guessed from its digest: it keeps tenants apart, it is no secret. A salt that is such a digest already
    (an event of ours read back) stands for itself.
    """
    named = "" if tenant_id in (None, "default") else tenant_id or ""
    if not named and not salt:
        return NO_TENANT
    if salt is not None and not named and _DIGEST.fullmatch(salt):
        return salt
    raw = json.dumps([named, salt or ""]).encode()
    return "salt:" + hashlib.blake2b(raw, digest_size=16, person=b"kvdir-tenant").hexdigest()


@dataclass(frozen=True, slots=True)
class Group:
    """The engine's state group. index: None where the engine has only one. kind: None where the event does not say.

    window_tokens: of a sliding window, else 0.
    """

    index: int | None = None
    kind: StateKind | None = None
    window_tokens: int = 0


class Stored(NamedTuple):
    """These blocks are now in `tier`, one more copy of each.

    packed: n * width bytes; a 64-bit number is 8 bytes, big-endian. block_tokens: 0 where the event does not say.
    adapter: name of the LoRA, or "none". salted: a sequence begins here and carries a salt. parent: hash before the first
    block; empty at the start of a sequence or where not told. model, tenant: "" and "none" where the event does not say;
    a tenant is "salt:<digest>", never the salt.
    """

    packed: bytes
    width: int
    tier: Tier
    group: Group = Group()
    block_tokens: int = 0
    adapter: str = NO_ADAPTER
    salted: bool = False
    parent: bytes = b""
    model: str = ""
    tenant: str = NO_TENANT

    @property
    def blocks(self) -> int:
        return len(self.packed) // self.width


class Removed(NamedTuple):
    """One copy less of each of these blocks in `tier`. Whether any is left is `Residency`'s to count."""

    packed: bytes
    width: int
    tier: Tier
    group: Group = Group()

    @property
    def blocks(self) -> int:
        return len(self.packed) // self.width


class Cleared(NamedTuple):
    """Nothing is left. tier: None where the event is not scoped (vLLM, SGLang): in every tier that the engine announced."""

    tier: Tier | None = None


EngineEvent = Stored | Removed | Cleared


class Reason(enum.StrEnum):
    """Why an event was not taken. `words` is for people; `leaves_doubt`: it may have changed what the engine holds."""

    UNDECODABLE_BATCH = "undecodable_batch"
    TRUNCATED_BATCH = "truncated_batch"
    UNDECODABLE_EVENT = "undecodable_event"
    UNKNOWN_EVENT = "unknown_event"
    BAD_HASH = "bad_hash"
    TOO_LARGE = "too_large"
    UNKNOWN_MEDIUM = "unknown_medium"
    UNKNOWN_KIND = "unknown_kind"
    LORA_WITHOUT_NAME = "lora_without_name"
    OTHER_OWNER = "other_owner"
    NO_BLOCK_SIZE = "no_block_size"
    TOO_MANY_NAMESPACES = "too_many_namespaces"
    TOO_MANY_BLOCKS = "too_many_blocks"

    @property
    def words(self) -> str:
        return _WORDS[self][0]

    @property
    def leaves_doubt(self) -> bool:
        return _WORDS[self][1]


_WORDS: Mapping[Reason, tuple[str, bool]] = {
    Reason.UNDECODABLE_BATCH: (
        "a batch is not msgpack of a known shape: is the endpoint really an engine's event stream?",
        True,
    ),
    Reason.TRUNCATED_BATCH: ("a batch ends in the middle; the events before that were taken", True),
    Reason.UNDECODABLE_EVENT: ("an event's fields have types no known version sends: say the engine and its version", True),
    Reason.UNKNOWN_EVENT: ("an event of a type no known version sends: a newer kvdir may know it", True),
    Reason.BAD_HASH: ("block hashes are neither 64-bit numbers nor 8, 16 or 32 bytes of one width", True),
    Reason.TOO_LARGE: ("an event or batch is larger than any engine sends", True),
    Reason.UNKNOWN_MEDIUM: (
        "blocks in a medium whose tier is not known are not indexed, rather than taken for GPU memory",
        False,
    ),
    Reason.UNKNOWN_KIND: (
        "blocks of a state group whose restore rule is not known (or a window without its size) are not indexed",
        False,
    ),
    Reason.LORA_WITHOUT_NAME: (
        "blocks of a LoRA adapter without a name are not indexed, since its number means another adapter elsewhere: "
        "use an engine version that sends lora_name",
        False,
    ),
    Reason.OTHER_OWNER: (
        "events about the blocks of another backend or worker than this stream's are not taken: follow each as an engine of "
        "its own, with owner=",
        False,
    ),
    Reason.NO_BLOCK_SIZE: (
        "an event names no block size, and none was learned from the same group: switch on self_describing_kv_events in the "
        "engine's offloading settings, or say block_tokens for this engine",
        False,
    ),
    Reason.TOO_MANY_NAMESPACES: ("the engine announces more models, adapters and block sizes than are kept apart", True),
    Reason.TOO_MANY_BLOCKS: ("the engine announces more blocks than are kept: raise max_blocks of this engine", True),
}


class DecodedBatch(NamedTuple):
    """One message. ts_s: the engine's wall clock, informational; dp_rank: None where not told.

    rejected: how many events were not taken, by reason. mismatch: what the door found wrong with the hashes, in words, in the
    batch in which it found it.
    """

    ts_s: float
    dp_rank: int | None
    events: tuple[EngineEvent, ...]
    rejected: Mapping[Reason, int]
    mismatch: str = ""
