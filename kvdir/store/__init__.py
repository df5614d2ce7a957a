"""Where a directory lies that several coordinators share and that outlives them: docs/redis.md.

`base` is the port, `make_store` makes what a URL names. Only the coordinator, the command line and test support import this.
"""

from kvdir.store.base import BlockStore

__all__ = ["BlockStore", "make_store"]


def make_store(url: str) -> BlockStore:
    """The store that the URL names (kvdir.store.url), not yet open. Raises ConfigError, which shows no secret."""
    from kvdir.store.redis import RedisBlockStore
    from kvdir.store.url import StoreUrl

    return RedisBlockStore(StoreUrl.parse(url))
