"""kvdir: a directory of KV-cache blocks across inference nodes.

    import kvdir
    with kvdir.connect("127.0.0.1:7400") as directory:
        answer = directory.lookup(namespace.digest, fingerprints)

On a node whose agent keeps a replica, `kvdir.attach()` answers the same from shared memory, without a call.

Names are loaded when they are used: `import kvdir` alone pulls in neither grpc nor numpy nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdir.client.aio import DirectoryClient
    from kvdir.client.attached import Attached, attach
    from kvdir.client.sync import Client
    from kvdir.core.answer import Lookup, LookupMode
    from kvdir.errors import KvdirError
    from kvdir.fingerprint import Fingerprints
    from kvdir.location import Location, NodeTrust, StreamState, Tier
    from kvdir.namespace import Namespace, StateGroup
    from kvdir.rpc.certificates import TlsFiles

__version__ = "0.1.0"

__all__ = [
    "Attached",
    "Client",
    "DirectoryClient",
    "Fingerprints",
    "KvdirError",
    "Location",
    "Lookup",
    "LookupMode",
    "Namespace",
    "NodeTrust",
    "StateGroup",
    "StreamState",
    "Tier",
    "TlsFiles",
    "__version__",
    "attach",
    "connect",
]

_HOMES = {
    "Attached": "kvdir.client.attached",
    "Client": "kvdir.client.sync",
    "DirectoryClient": "kvdir.client.aio",
    "Fingerprints": "kvdir.fingerprint",
    "KvdirError": "kvdir.errors",
    "Location": "kvdir.location",
    "Lookup": "kvdir.core.answer",
    "LookupMode": "kvdir.core.answer",
    "Namespace": "kvdir.namespace",
    "NodeTrust": "kvdir.location",
    "StateGroup": "kvdir.namespace",
    "StreamState": "kvdir.location",
    "Tier": "kvdir.location",
    "TlsFiles": "kvdir.rpc.certificates",
    "attach": "kvdir.client.attached",
}


def connect(addresses: str | Sequence[str], *, deadline_s: float = 2.0, name: str = "", tls: TlsFiles | None = None) -> Client:
    """A blocking client of coordinators ("host:port", several with commas; see docs/high-availability.md). Connects lazily.

    name: clients with different names begin at different coordinators. Empty: a name of this process.
    tls: for coordinators that want certificates; raises ConfigError when the files cannot be used.
    """
    from kvdir.client.sync import Client, process_name

    return Client(addresses, deadline_s=deadline_s, name=name or process_name(), tls=tls)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kvdir' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
