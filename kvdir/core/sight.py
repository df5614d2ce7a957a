"""Which namespaces a watcher hears of. Pure.

Where a watcher may see every tenant it is the set of those it named, and the empty set is all of them; otherwise it is a
`Sight`. Both are asked `digest in digests`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvdir.core.policy import Grant


@dataclass(frozen=True, slots=True)
class Sight:
    """Namespaces of these tenants, and of those only the named ones, if there are any. Equal ones see the same.

    tenant_of: of a namespace that is or was known; None: of nobody, so it is not seen.
    """

    tenants: Grant
    named: frozenset[bytes]
    tenant_of: Callable[[bytes], str | None] = field(compare=False, repr=False)

    def __contains__(self, digest: object) -> bool:
        if not isinstance(digest, bytes) or (self.named and digest not in self.named):
            return False
        tenant = self.tenant_of(digest)
        return tenant is not None and tenant in self.tenants


Digests = frozenset[bytes] | Sight
"""As above; a Sight is never empty in the sense of `not digests`."""
