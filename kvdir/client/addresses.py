"""Which coordinator to ask next. Pure.

Rules: every coordinator is as good as any other (soft state). A client begins with the one that its own name leads to, so that
clients spread, and stays with it while it answers. One that failed, or that another one outpaced by far, is asked later for a
while that doubles each time, and tried again when nothing better is left. An extra question to a second coordinator (a hedge)
is paid for by ten ordinary ones, so that hedging never doubles the load of coordinators that are all slow. One that has failed
comes first again only while a hedge beside it is affordable: or one that hangs would cost a share of a deadline each time.
Does not: find out which coordinators there are (discovery.py), or run a question (race.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvdir.errors import InvalidInput

_BASE_S, _LIMIT_S = 0.5, 10.0
_HEDGE_PRICE, _MAX_SAVINGS = 10, 50
_OUTPACED_TIMES = 2


class Addresses:
    """ "host:port" of each coordinator, with what is known of it. None given: none known yet, `replace` brings them.

    name: of who asks; clients with different names begin at different coordinators (rendezvous hashing: one that comes or goes
    moves only the clients that it serves). Empty: in the order given. `replace` may be called from another thread. generation:
    moves with each change.
    """

    def __init__(self, addresses: str | Sequence[str] | None = None, *, name: str = "") -> None:
        self.generation = 0
        self._name = name
        self._listed = () if addresses is None else _ordered(checked(addresses), name)
        self._failures: dict[str, int] = {}
        self._outpaced: dict[str, int] = {}
        self._later_until_s: dict[str, float] = {}
        self._savings = _MAX_SAVINGS

    def __len__(self) -> int:
        return len(self._listed)

    def __contains__(self, address: str) -> bool:
        return address in self._listed

    def replace(self, addresses: Sequence[str]) -> None:
        """These are the coordinators now. What is known of those that stay is kept."""
        self._listed = listed = _ordered(checked(addresses), self._name)
        for known in (self._failures, self._outpaced, self._later_until_s):
            for address in [item for item in tuple(known) if item not in listed]:
                known.pop(address, None)
        self.generation += 1

    def order(self, *, now_s: float) -> list[str]:
        """In which order to try them now."""
        return sorted(self._listed, key=lambda item: self.put_off(item, now_s=now_s))

    def put_off(self, address: str, *, now_s: float) -> bool:
        """Whether it is asked after the others now."""
        return self._pauses(address, now_s) or (address in self._failures and self._savings < _HEDGE_PRICE)

    def failed(self, address: str, *, now_s: float) -> None:
        """It gave no answer, or one so late that another's came first: it is asked later for a while.

        Questions that fail together count once, or a crowd of them would make the longest pause of the first failure.
        """
        if self._pauses(address, now_s):
            return
        failures = self._failures[address] = self._failures.get(address, 0) + 1
        self._later_until_s[address] = now_s + min(_BASE_S * 2 ** min(failures - 1, 10), _LIMIT_S)

    def outpaced(self, address: str, *, far: bool, now_s: float) -> None:
        """Another one, asked later, answered first. far: by so much that once suffices; otherwise twice running does.

        Where every answer takes long, as on a busy machine, none is far quicker than one that hangs has been waited for.
        """
        self._outpaced[address] = times = self._outpaced.get(address, 0) + 1
        if far or times >= _OUTPACED_TIMES:
            self.failed(address, now_s=now_s)

    def answered(self, address: str) -> None:
        self._failures.pop(address, None)
        self._outpaced.pop(address, None)
        self._later_until_s.pop(address, None)

    def save(self) -> None:
        """One question was asked that may be hedged."""
        self._savings = min(self._savings + 1, _MAX_SAVINGS)

    def spend(self) -> bool:
        """Whether a hedge is affordable; then it is paid."""
        if self._savings < _HEDGE_PRICE:
            return False
        self._savings -= _HEDGE_PRICE
        return True

    def _pauses(self, address: str, now_s: float) -> bool:
        return self._later_until_s.get(address, 0.0) > now_s


def checked(addresses: str | Sequence[str]) -> tuple[str, ...]:
    """Each once. Raises InvalidInput for none, and for what is no host:port."""
    listed = addresses.split(",") if isinstance(addresses, str) else list(addresses)
    listed = [item.strip() for item in listed if item.strip()]
    if not listed:
        raise InvalidInput("no coordinator address given; write host:port, several with commas")
    wrong = [item for item in listed if not item.rpartition(":")[0] or not is_port(item.rpartition(":")[2])]
    if wrong:
        raise InvalidInput(f"not an address: {', '.join(wrong)}; write host:port, such as 127.0.0.1:7400")
    return tuple(dict.fromkeys(listed))


def is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) < 65_536


def _ordered(addresses: tuple[str, ...], name: str) -> tuple[str, ...]:
    if not name:
        return addresses
    return tuple(sorted(addresses, key=lambda item: hashlib.blake2b(f"{name} {item}".encode(), digest_size=8).digest()))
