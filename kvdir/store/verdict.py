"""What an error reply means: try again, or which of the store's errors it is. Pure.

Owns the table of error words of Redis 7 and Valkey, and of ours (KV..., from the functions).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvdir.errors import KvdirError
from kvdir.store.base import Fenced, StoreFull, StoreLost, StoreRefused, StoreUnavailable
from kvdir.store.reply import ReplyError

_LATER = frozenset({"TRYAGAIN", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY", "NOREPLICAS", "BUSY", "MISCONF"})
_DENIED = frozenset({"NOAUTH", "WRONGPASS", "NOPERM"})


@dataclass(frozen=True, slots=True)
class Again:
    """Try again. reason: one word of few, for figures. elsewhere: who serves the slot may have changed. load: the server lacks
    the functions. words: more about it, for people.
    """

    reason: str
    elsewhere: bool = False
    load: bool = False
    words: str = ""


def judge(error: ReplyError, where: str) -> Again | KvdirError:
    """What to do about an error reply of the server at `where`. Never shows an argument of the command."""
    kind, rest = error.kind, error.rest
    match kind:
        case "MOVED":
            return Again("moved", elsewhere=True)
        case "ASK":
            # A slot on its way to another master. Not followed: the shard's record is there, but maybe not yet all its buckets,
            # and a function there would take those for evicted. It lasts as long as the slot takes to move.
            return Again("migrating")
        case "KVLOST":
            return StoreLost(f"{where}: {rest}: take the node again and compare counts, or open the store again")
        case "KVFENCED":
            return Fenced(f"{where}: {rest}")
        case "KVTAKEN":
            return StoreUnavailable(f"{where}: {rest}: try again, with another number")
        case "KVLATE":
            return StoreUnavailable(f"{where}: {rest}: this one was overtaken, so it changed nothing")
        case "OOM":
            return StoreFull(
                f"{where} has reached its maxmemory and evicts nothing: raise maxmemory, add masters, or hold fewer blocks"
            )
        case "WRONGTYPE":
            return StoreRefused(
                f"{where}: another application uses our keys: choose another prefix (…?prefix=name) or database"
            )
    if kind in _LATER:
        return Again(kind.lower(), elsewhere=kind in ("READONLY", "CLUSTERDOWN", "MASTERDOWN"))
    if kind in _DENIED or "ACL failure" in rest or "user executing the script" in rest:
        return StoreRefused(f"{where} does not let us in or do this ({kind}): check user, password and ACL of the store URL")
    if "max number of clients" in rest:
        return Again("clients", words=rest)
    if rest.startswith("Function not found"):
        return Again("no-functions", load=True)
    if "non local key" in rest:  # the same, found out by the function
        return Again("migrating")
    if rest.lower().startswith("unknown command"):
        return StoreRefused(f"{where} knows no functions: kvdir needs Redis 7.0 or Valkey 7.2, or newer")
    return StoreRefused(f"{where}: {error}")
