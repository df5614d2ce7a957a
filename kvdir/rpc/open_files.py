"""How many descriptors this process may have, and how many of them one port's connections may take.

Connections that say nothing cost a descriptor each. A port whose connections could take all of them would take the others down
with it: probes, scrapes, the arena. So every port has a part of the limit and closes what comes beyond. With the limit that
`raise_open_files` asks for, no part is ever reached by honest peers. Does not: look at who connects (that is policy).
"""

from __future__ import annotations

import resource

OPEN_FILES = 65_536
"""Sockets of peers and engines: as many as the system lets this process have, up to so many."""

LEAST = 16


def raise_open_files() -> None:
    """A shell and systemd give 1,024 where more is allowed, because of select(), which nothing here uses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def part_of_open_files(part: float, *, most: int = OPEN_FILES) -> int:
    """So many connections may a port have: `part` of the limit as it is now, from LEAST to `most`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = OPEN_FILES if soft == resource.RLIM_INFINITY else min(soft, OPEN_FILES)
    return max(LEAST, min(most, int(files * part)))
