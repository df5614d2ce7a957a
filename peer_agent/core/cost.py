"""What a block is worth (recompute time) and what it costs (transfer time). Pure arithmetic on seconds and bytes.

    recompute of n blocks = n * block_tokens / prefill_tokens_per_s
    transfer of b bytes from one source = start_s + b / bytes_per_s       (start_s: round trip, latency, its queue)
    transfer from several sources at once = the T at which sum(max(0, T - start_s) * bytes_per_s) reaches b

Source: design 06 "Admission"; the shared T is water filling, the optimal split of divisible work over processors with
release times (Bharadwaj et al., "Divisible Load Theory", Cluster Computing 6, 2003).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recompute:
    """The engine's price for a block. prefill_tokens_per_s 0: not known, then every hit is worth its transfer."""

    block_tokens: int = 0
    prefill_tokens_per_s: float = 0.0

    @property
    def known(self) -> bool:
        return self.block_tokens > 0 and self.prefill_tokens_per_s > 0

    @property
    def block_s(self) -> float:
        """Recompute time of one block; infinite while it is not known."""
        return self.block_tokens / self.prefill_tokens_per_s if self.known else math.inf

    def worth(self, blocks: int, *, cost_s: float) -> bool:
        """Whether waiting cost_s longer for so many blocks is less than recomputing them."""
        return blocks > 0 and blocks * self.block_s > cost_s

    def net_gain_s(self, blocks: int, *, spent_s: float) -> float:
        """Recompute time saved by hits minus time spent on them. Negative: they cost more. 0 while the price is not known."""
        return blocks * self.block_s - spent_s if self.known else 0.0


UNKNOWN_PRICE = Recompute()


@dataclass(frozen=True, slots=True)
class Offer:
    """One source's terms: it begins to deliver in start_s, then at bytes_per_s."""

    start_s: float
    bytes_per_s: float

    def bytes_by(self, until_s: float) -> float:
        return max(0.0, until_s - self.start_s) * self.bytes_per_s

    def finish_s(self, size_bytes: float) -> float:
        return self.start_s + size_bytes / self.bytes_per_s


def finish_s(offers: Iterable[Offer], size_bytes: float) -> float:
    """When all of size_bytes is here at the earliest, if every offer may serve any of it. Infinite without offers."""
    best_s, rate, weighted = math.inf, 0.0, 0.0
    for offer in sorted(offers, key=lambda offer: offer.start_s):
        if offer.start_s >= best_s:
            break
        rate += offer.bytes_per_s
        weighted += offer.start_s * offer.bytes_per_s
        best_s = (size_bytes + weighted) / rate
    return best_s
