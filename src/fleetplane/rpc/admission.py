"""Whether there is room for one more call: rates and concurrency, per method.

Pure decisions on a clock that is handed in. Knows neither calls nor wires.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from fleetplane.rpc.methods import Rate
from fleetplane.rpc.serving.limits import CALLERS_TRACKED


@dataclass(slots=True)
class TokenBucket:
    """Tokens that refill with time."""

    tokens: float
    filled_at: float

    def take(self, rate: Rate, now: float) -> float:
        """0.0 when a token was there; otherwise the seconds until there is one."""
        self.tokens = min(float(rate.burst), self.tokens + (now - self.filled_at) * rate.per_second)
        self.filled_at = now
        if self.tokens >= 1.0:
            self.tokens -= 1.0
            return 0.0
        return (1.0 - self.tokens) / rate.per_second


class RateLimiter:
    """One rate over a bounded number of callers.

    When more callers than that come along, the one not heard of for longest is forgotten and
    starts again with a full bucket; `forgotten` counts how often that happened.
    """

    def __init__(self, rate: Rate, *, callers_tracked: int = CALLERS_TRACKED) -> None:
        self._rate = rate
        self._callers_tracked = callers_tracked
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()
        self.forgotten = 0

    def take(self, caller: str, now: float) -> float:
        """0.0 to go ahead, otherwise the seconds to wait."""
        key = caller if self._rate.per == "caller" else ""
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = TokenBucket(tokens=float(self._rate.burst), filled_at=now)
            if len(self._buckets) > self._callers_tracked:
                self._buckets.popitem(last=False)
                self.forgotten += 1
        else:
            self._buckets.move_to_end(key)
        return bucket.take(self._rate, now)

    def __repr__(self) -> str:
        rate = self._rate
        callers = len(self._buckets)
        return f"<RateLimiter {rate.per_second:g}/s burst={rate.burst} per={rate.per} callers={callers}>"
