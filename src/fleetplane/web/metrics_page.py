"""`/metrics`: the server's numbers, at a cost that callers cannot raise.

Numbers are collected on the event loop, where they belong, and at most once a second however many
ask; where collecting takes long, less often than that. They are turned into text in a thread, one
text at a time, and everybody who asks meanwhile gets the same. An address may have a few answers
under way, and all addresses together a few more: a scraper needs one. Families of the same name from
several domains are merged.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import math
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from fleetplane.kernel.clock import Clock, SystemClock
from fleetplane.kernel.networks import network_of


class MergedMetrics(Collector):
    """A registry takes each name once; domains tell theirs apart by a label."""

    def __init__(self, collectors: Iterable[Collector]) -> None:
        self._collectors = tuple(collectors)

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for collector in self._collectors:
            for metric in collector.collect():
                known = families.setdefault(metric.name, metric)
                if known is not metric:
                    known.samples.extend(metric.samples)
        yield from families.values()


FRESH_SECONDS: Final = 1.0
SHARE: Final = 20
"""Numbers that took a second to collect are kept for so many seconds: a twentieth of the loop at most."""
PER_ADDRESS: Final = 4
IN_ALL: Final = 32
"""Answers under way. Each is the same bytes; what they cost is the sending."""
TEXTS_KEPT: Final = 4
"""Forms of one text: two formats, and ways to spell names in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsAnswer:
    status: int
    content_type: str = "text/plain; charset=utf-8"
    body: bytes = b""
    retry_seconds: int = 0


class _Collected:
    """What a registry collected at one moment, in the form that encoders ask for."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = tuple(metrics)

    def collect(self) -> Iterable[Metric]:
        return self._metrics


class MetricsPage:
    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        token: str = "",
        needs_token: bool = False,
        clock: Clock | None = None,
    ) -> None:
        """`needs_token` for a page that others can reach; without a token nobody can then read it."""
        self._registry = registry
        self._digest = hashlib.sha256(token.encode()).digest() if token else None
        self._needs_token = needs_token or bool(token)
        self._clock = clock or SystemClock()
        self._collected: _Collected | None = None
        self._fresh_until = -math.inf
        self._texts: OrderedDict[str, bytes] = OrderedDict()
        self._rendering = asyncio.Lock()
        """One text at a time, whatever its form."""
        self._under_way: Counter[str] = Counter()
        self.refused = 0

    def __repr__(self) -> str:
        return f"<MetricsPage under_way={self._under_way.total()} refused={self.refused}>"

    def admits(self, authorization: str) -> bool:
        """Whether the header `authorization` lets its sender read the numbers."""
        if not self._needs_token:
            return True
        scheme, _, shown = authorization.partition(" ")
        if self._digest is None or scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(hashlib.sha256(shown.strip().encode()).digest(), self._digest)

    async def answer(
        self,
        address: str,
        accept: str,
        authorization: str,
        tell: Callable[[MetricsAnswer], Awaitable[None]],
        *,
        host: str = "",
    ) -> None:
        """Answer one request; `tell` sends, and counts as under way until it returns.

        `host` is the name that it asked for. Without a token, a page of a browser on this machine could read
        the numbers by a name of its own that leads here.
        """
        if not self._needs_token and not is_own_name(host):
            await tell(_MISDIRECTED)
            return
        if not self.admits(authorization):
            await tell(_refusal(has_token=self._digest is not None))
            return
        address = network_of(address)
        if self._under_way[address] >= PER_ADDRESS or self._under_way.total() >= IN_ALL:
            self.refused += 1
            await tell(MetricsAnswer(status=429, body=b"one scrape at a time, please\n", retry_seconds=1))
            return
        with self._counted(address):
            content_type, body = await self.text(accept)
            await tell(MetricsAnswer(status=200, content_type=content_type, body=body))

    @contextmanager
    def _counted(self, address: str) -> Iterator[None]:
        self._under_way[address] += 1
        try:
            yield
        finally:
            self._under_way[address] -= 1
            if not self._under_way[address]:
                del self._under_way[address]

    async def text(self, accept: str) -> tuple[str, bytes]:
        """The numbers in the form that a scraper accepts, as of a moment ago."""
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # a version that is none
            encode, content_type = choose_encoder("")
        async with self._rendering:
            collected = self._numbers()
            body = self._texts.get(content_type)
            if body is None:
                body = await asyncio.to_thread(encode, collected)
                if self._collected is collected:
                    self._texts[content_type] = body
                    while len(self._texts) > TEXTS_KEPT:
                        self._texts.popitem(last=False)
            return content_type, body

    def _numbers(self) -> _Collected:
        began = self._clock.monotonic()
        if self._collected is None or began >= self._fresh_until:
            self._collected = _Collected(self._registry.collect())
            self._texts.clear()
            ended = self._clock.monotonic()
            self._fresh_until = ended + max(FRESH_SECONDS, SHARE * (ended - began))
        return self._collected


_MISDIRECTED: Final = MetricsAnswer(
    status=421,
    body=b"host: must be an IP address or localhost; to read this page by another name, set metrics.token\n",
)


def is_own_name(host: str) -> bool:
    """Whether a `Host` header cannot be a name that somebody else made lead here; an absent one cannot."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return not name or name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _refusal(*, has_token: bool) -> MetricsAnswer:
    wanted = (
        "authorization: show the bearer token of metrics.token\n"
        if has_token
        else "other machines can reach this page: set metrics.token, and show it as a bearer token\n"
    )
    return MetricsAnswer(status=401, body=wanted.encode())
