"""Addresses of peers that advertise a name.

The system's lookup knows no deadline, cannot be stopped, and takes many seconds where a name server is silent. So lookups
have threads of their own, at most MOST_LOOKUPS, and nobody waits for one longer than it wants to: names that never resolve hold
up other names at worst, never addresses, other users of the loop's thread pool, or the end of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
import time

MOST_LOOKUPS = 4


class Names:
    """Lookups under way, each name once however many ask for it."""

    def __init__(self) -> None:
        self._under_way: dict[str, asyncio.Future[str]] = {}

    async def resolve(self, host: str, *, until_s: float) -> str:
        """A numeric address by time.monotonic() until_s. ConnectionError: no such name, or no answer in time."""
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_address(host))
        try:
            async with asyncio.timeout(until_s - time.monotonic()):
                return await self._look_up(host)
        except (OSError, UnicodeError, RuntimeError, TimeoutError) as error:  # RuntimeError: no more threads
            reason = str(error) or "no answer in time"
            raise ConnectionError(f"cannot resolve {host!r}: {reason}; advertise an address") from error

    async def _look_up(self, host: str) -> str:
        while host not in self._under_way and len(self._under_way) >= MOST_LOOKUPS:
            await asyncio.wait(self._under_way.values(), return_when=asyncio.FIRST_COMPLETED)
        return await asyncio.shield(self._under_way.get(host) or self._begin(host))

    def _begin(self, host: str) -> asyncio.Future[str]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str] = loop.create_future()

        def end(address: str | Exception) -> None:
            del self._under_way[host]
            if isinstance(address, str):
                answer.set_result(address)
            else:
                answer.set_exception(address)
                answer.exception()  # nobody may be waiting any more

        def look() -> None:
            address: str | Exception
            try:
                address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
            except (OSError, UnicodeError) as error:
                address = error
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(end, address)

        threading.Thread(target=look, name="kvdir-lookup", daemon=True).start()
        self._under_way[host] = answer
        return answer
