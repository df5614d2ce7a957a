"""Which coordinator to ask next. Pure.

Rules: every coordinator is as good as any other (soft state), so one that failed is put at the end for a while that
doubles with each failure, and tried again when nothing better is left. One that answered stays first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvdir.errors import InvalidInput

_BASE_S, _LIMIT_S = 0.5, 10.0


class Addresses:
    """ "host:port" of each coordinator, with what is known of it."""

    def __init__(self, addresses: str | Sequence[str]) -> None:
        listed = addresses.split(",") if isinstance(addresses, str) else list(addresses)
        self._order = list(dict.fromkeys(item.strip() for item in listed if item.strip()))
        if not self._order:
            raise InvalidInput("no coordinator address given; write host:port, several with commas")
        wrong = [item for item in self._order if ":" not in item]
        if wrong:
            raise InvalidInput(f"not an address: {', '.join(wrong)}; write host:port, such as 127.0.0.1:7400")
        self._failures: dict[str, int] = {}
        self._shunned_until_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._order)

    def order(self, *, now_s: float) -> list[str]:
        """In which order to try them now."""
        return sorted(self._order, key=lambda item: self._shunned_until_s.get(item, 0.0) > now_s)

    def shares(self, end_s: float, *, clock: Callable[[], float]) -> Iterator[tuple[str, float]]:
        """In that order, each with the moment until which it may take: one that hangs leaves the others their share.

        Ends early when `end_s` has passed. clock: monotonic seconds.
        """
        order = self.order(now_s=clock())
        for tried, address in enumerate(order):
            now_s = clock()
            if tried and now_s >= end_s:
                return
            yield address, now_s + (end_s - now_s) / (len(order) - tried)

    def failed(self, address: str, *, now_s: float) -> None:
        failures = self._failures[address] = self._failures.get(address, 0) + 1
        self._shunned_until_s[address] = now_s + min(_BASE_S * 2 ** min(failures - 1, 10), _LIMIT_S)

    def answered(self, address: str) -> None:
        self._failures.pop(address, None)
        self._shunned_until_s.pop(address, None)
