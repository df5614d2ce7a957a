"""Where a directory lies that several coordinators share and that outlives them: docs/redis.md.

`base` is the port, `make_store` makes what a URL names. Only the coordinator, the command line and test support import this.
"""

from kvdir.errors import ConfigError
from kvdir.store.base import BlockStore

__all__ = ["BlockStore", "make_store"]


def make_store(url: str) -> BlockStore:
    """The store that the URL names (kvdir.store.url), not yet open. Raises ConfigError, which shows no secret."""
    from kvdir.store.url import StoreUrl

    parsed = StoreUrl.parse(url)
    try:
        from kvdir.store.redis import RedisBlockStore
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "redis":
            raise
        raise ConfigError([f"store: {parsed} needs redis-py: pip install 'kvdir[redis]'"]) from error
    return RedisBlockStore(parsed)
