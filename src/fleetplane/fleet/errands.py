"""Asking the active server for what it alone does or knows, from any server, through the store.

Whoever asks writes down what, and waits for the answer in the log. The active server takes up what is not
answered yet, also what was asked of its predecessor, and writes down what came of it, an error with its own
reason. What it does must be good to repeat: a server that dies between doing and answering is asked again by
its successor. On a server that is active itself, or alone, nothing is written.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial

import msgspec
import structlog

from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, ResourceExhausted, Unavailable
from fleetplane.kernel.resources import Kind, Resource
from fleetplane.kernel.store import ABSENT, Draft, Store, follow
from fleetplane.kernel.store.store import SYSTEM
from fleetplane.kernel.values.times import NS
from fleetplane.kernel.watch import Watch

log = structlog.get_logger(__name__)

OPEN_LIMIT = 256
"""Errands of one channel that are open at a time: more than the active server answers within a second."""
TENANT_LIMIT = 128
"""Of those, for one tenant: nobody is refused because of the many of somebody else."""
AT_ONCE = 32
"""Of them under way at a time: some wait for somebody outside."""
TENANT_DIGITS = 16
"""Of the digest of a tenant's name, below which its errands lie."""
ABOUT_LIMIT_BYTES = 4096
ANSWER_LIMIT_BYTES = 256 * 1024
SWEEP_SECONDS = 30.0
KEPT_SECONDS = 60.0
"""After its time is over: whoever asked has long taken the answer away, or is gone."""

Doing = Callable[[str], Awaitable[str]]
"""From what an errand is about to its answer. May be called twice for one errand."""


class ErrandSpec(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    about: str
    until_ns: int
    """When whoever asks has given up; it is not begun any more then."""


class RemoteRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """An error, as it is told at another server."""

    reason: str
    message: str
    field: str | None = None
    hint: str = ""


class ErrandStatus(msgspec.Struct, frozen=True, kw_only=True):
    answer: str = ""
    refused: RemoteRefusal | None = None


Errand = Resource[ErrandSpec, ErrandStatus]
ERRAND: Kind[ErrandSpec, ErrandStatus] = Kind("errand", ErrandSpec, ErrandStatus, is_secret=True)


class Errands:
    """Errands of one domain."""

    def __init__(self, store: Store, clock: Clock, *, channel: str) -> None:
        self._store = store
        self._clock = clock
        self._channel = channel
        self._doing: dict[str, Doing] = {}
        self._taken: set[str] = set()
        self.asked = 0
        self.done = 0

    def __repr__(self) -> str:
        return f"<Errands {self._channel} asked={self.asked} done={self.done}>"

    def does(self, what: str, doing: Doing) -> None:
        """Say how the active server does it."""
        self._doing[what] = doing

    # Asking.

    async def ask(self, what: str, about: str, *, seconds: float, tenant: str = "") -> str:
        """What the active server answers; raises what it raises, or `Unavailable` if it does not answer.

        It is asked for a `tenant`; empty for the owner of the server.
        """
        if self._store.leads:
            return await self._doing[what](about)
        if len(about.encode()) > ABOUT_LIMIT_BYTES:
            raise ResourceExhausted(f"more than {ABOUT_LIMIT_BYTES} bytes are asked about")
        self.asked += 1
        name = self._clock.token_bytes(16).hex()
        whose = hashlib.sha256(tenant.encode()).hexdigest()[:TENANT_DIGITS]
        scope = f"{self._channel}/{whose}/{name}"
        try:
            async with asyncio.timeout(seconds):
                status = await self._answered(scope, name, what, about, seconds)
        except TimeoutError:
            raise Unavailable(f"the active server did not answer within {seconds:g} s") from None
        finally:
            await self._forget(scope, name)
        if status.refused is not None:
            raise rebuilt(status.refused)
        return status.answer

    async def _answered(self, scope: str, name: str, what: str, about: str, seconds: float) -> ErrandStatus:
        async def begin(_watch: Watch) -> None:
            if self._store.get(ERRAND, scope, name) is None:
                await self._put(scope, name, what, about, seconds)

        async for _batch in follow(self._store, ERRAND, scope, begin=begin):
            found = self._store.get(ERRAND, scope, name)
            if found is None:
                break  # swept
            if found.status is not None:
                return found.status
        raise Unavailable("the active server did not answer in time")

    async def _put(self, scope: str, name: str, what: str, about: str, seconds: float) -> None:
        def change(draft: Draft) -> None:
            if draft.count(ERRAND, self._channel) >= OPEN_LIMIT:
                raise ResourceExhausted(f"{OPEN_LIMIT} questions wait for the active server already")
            if draft.count(ERRAND, scope.rpartition("/")[0]) >= TENANT_LIMIT:
                raise ResourceExhausted(
                    f"{TENANT_LIMIT} questions of this tenant wait for the active server already"
                )
            until_ns = draft.now_ns + round(seconds * NS)
            spec = ErrandSpec(what=what, about=about, until_ns=until_ns)
            draft.put(ERRAND, scope, name, spec=spec, expect=ABSENT)

        await self._store.transact(
            change,
            actor=SYSTEM,
            action=f"errand.{self._channel}.{what}",
            touches=[ERRAND.key(scope, name)],
        )

    async def _forget(self, scope: str, name: str) -> None:
        """What cannot be taken away is swept."""

        def change(draft: Draft) -> None:
            if draft.get(ERRAND, scope, name) is not None:
                draft.delete(ERRAND, scope, name)

        with suppress(FleetplaneError):
            await self._store.transact(
                change, actor=SYSTEM, action="errand.end", touches=[ERRAND.key(scope, name)]
            )

    # Doing.

    async def run_active(self) -> None:
        """Do what other servers ask for, until cancelled: for the active server."""
        turns = asyncio.Semaphore(AT_ONCE)
        async with Boundary() as tasks:
            tasks.keep(f"errands/{self._channel}/sweep", self._sweep)

            def take(found: Errand) -> None:
                if found.status is None and found.name not in self._taken:
                    self._taken.add(found.name)
                    tasks.once(f"errands/{self._channel}", partial(self._do, found, turns), about=found.name)

            def begin(_watch: Watch) -> None:
                for found in self._store.list(ERRAND, self._channel):
                    take(found)

            async for batch in follow(self._store, ERRAND, self._channel, begin=begin):
                for event in batch.events:
                    if (
                        found := self._store.get(ERRAND, event.resource.scope, event.resource.name)
                    ) is not None:
                        take(found)

    async def _do(self, errand: Errand, turns: asyncio.Semaphore) -> None:
        try:
            async with turns:
                left_seconds = (errand.spec.until_ns - self._store.clock.now_ns()) / NS
                if left_seconds > 0:
                    await self._answer(errand, await self._outcome(errand.spec, left_seconds))
        except FleetplaneError as error:  # whoever asks is told that nobody has answered
            log.warning("errands.not_answered", channel=self._channel, error=error.message)
        finally:
            self._taken.discard(errand.name)

    async def _outcome(self, spec: ErrandSpec, left_seconds: float) -> ErrandStatus:
        doing = self._doing.get(spec.what)
        try:
            if doing is None:  # asked by a server of another version
                raise Unavailable(f"the active server does not know {spec.what[:64]!r}")
            async with asyncio.timeout(left_seconds):
                answer = await doing(spec.about)
            if len(answer.encode()) > ANSWER_LIMIT_BYTES:
                raise ResourceExhausted(f"the answer has more than {ANSWER_LIMIT_BYTES} bytes")
        except FleetplaneError as error:
            refused = RemoteRefusal(
                reason=error.reason, message=error.message, field=error.field, hint=error.advice
            )
            return ErrandStatus(refused=refused)
        except TimeoutError:
            return ErrandStatus(refused=RemoteRefusal(reason=Unavailable.reason, message="it took too long"))
        self.done += 1
        return ErrandStatus(answer=answer)

    async def _answer(self, errand: Errand, status: ErrandStatus) -> None:
        def change(draft: Draft) -> None:
            found = draft.get(ERRAND, errand.scope, errand.name)
            if found is not None and found.status is None:
                draft.put(ERRAND, found.scope, found.name, spec=found.spec, status=status)

        await self._store.transact(change, actor=SYSTEM, action="errand.answer", touches=[errand.key])

    async def _sweep(self) -> None:
        """Forget what was asked by a server that is gone."""
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            before_ns = self._store.clock.now_ns() - round(KEPT_SECONDS * NS)
            for found in self._store.list(ERRAND, self._channel):
                if found.spec.until_ns < before_ns:
                    await self._forget(found.scope, found.name)


def rebuilt(refused: RemoteRefusal) -> FleetplaneError:
    """The error that the other server had; by its reason, which says what it means to callers."""
    sort = next((one for one in _errors(FleetplaneError) if one.reason == refused.reason), Unavailable)
    return sort(refused.message, field=refused.field, hint=refused.hint)


def _errors(of: type[FleetplaneError]) -> Iterator[type[FleetplaneError]]:
    """The class and those below it that are made from a message."""
    if of.__init__ is FleetplaneError.__init__:
        yield of
    for one in of.__subclasses__():
        yield from _errors(one)
