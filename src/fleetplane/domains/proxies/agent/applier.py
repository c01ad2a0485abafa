"""Changes what NGINX serves, so that it never serves something nobody has seen work.

The one place that moves the link and signals NGINX, one operation at a time. Each step is
announced in the journal before it is taken; `open` finishes what a dead agent left undone.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import structlog

from fleetplane.domains.proxies.agent import journal as journals
from fleetplane.domains.proxies.agent.checksum import checksum
from fleetplane.domains.proxies.agent.confirmation import Confirmed, Refused, Verdict
from fleetplane.domains.proxies.agent.journal import Journal, Phase, State, Status
from fleetplane.domains.proxies.agent.nginx import Nginx
from fleetplane.domains.proxies.agent.quoting import Unrenderable
from fleetplane.domains.proxies.agent.releases import Release, Releases
from fleetplane.domains.proxies.agent.rendering import render
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition

LEAST_GAP_SECONDS: Final = 1.0
"""Between two reloads: each leaves workers behind that drain their connections."""

Down = Mapping[str, frozenset[str]]
Report = Callable[[Status], Awaitable[None]]


class Step(StrEnum):
    """Where a change stands; each is announced once it is done."""

    STAGED = "staged"
    VALIDATED = "validated"
    JOURNALED = "journaled"
    SWITCHED = "switched"
    SIGNALLED = "signalled"
    RELOADED = "reloaded"
    RECORDED = "recorded"
    REVERTING = "reverting"
    SWITCHED_BACK = "switched back"
    RELOADED_BACK = "reloaded back"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    state: State
    error: str = ""


class Applier:
    """`managed`: NGINX is ours to start; otherwise somebody else's, and ours to signal."""

    def __init__(
        self,
        *,
        nginx: Nginx,
        releases: Releases,
        clock: Clock,
        log: structlog.typing.FilteringBoundLogger,
        managed: bool,
        least_gap_seconds: float = LEAST_GAP_SECONDS,
        witness: Callable[[Step], None] = lambda _: None,
    ) -> None:
        self._nginx = nginx
        self._releases = releases
        self._clock = clock
        self._log = log
        self._managed = managed
        self._least_gap_seconds = least_gap_seconds
        self._witness = witness
        self._path = nginx.site.paths.journal
        self._journal = Journal()
        self._lock = asyncio.Lock()  # one operation at a time on the link and on the process
        self._reloaded_at = -least_gap_seconds
        self.live: Release | None = None
        """The release that is trusted; there is one as soon as the applier is open."""
        self.broken = ""
        """Why NGINX does not even serve what it served before; empty while it does."""

    def __repr__(self) -> str:
        return f"<Applier live={self._journal.live} {self._journal.phase} broken={self.broken!r}>"

    @property
    def last_status(self) -> Status | None:
        """The last word about a version that the server may not have yet."""
        return self._journal.status

    @property
    def stopped(self) -> bool:
        return self._journal.stopped

    async def forget_status(self, status: Status) -> None:
        """The server has it."""
        async with self._lock:
            if self._journal.status == status:
                self._write(self._journal.with_status(None))

    # Coming to life.

    async def open(self) -> None:
        """Bring link, process and journal together, whatever the last agent was about to do."""
        async with self._lock:
            self._releases.prepare()
            self._journal = journals.read(self._path)
            if not self._journal.live:
                await self._bootstrap()
            self.live = self._releases.load(self._journal.live)
            match self._journal.phase:
                case Phase.LIVE:
                    await self._resume()
                case Phase.SWITCHING:
                    target = self._interrupted()
                    await self._try(target, tells=_is_news(target, self.live))
                case Phase.REVERTING:
                    target = self._interrupted()
                    await self._revert(target, tells=_is_news(target, self.live))
            self._releases.sweep(keep=[self._journal.live])

    def _interrupted(self) -> Release:
        self._log.warning("change_was_interrupted", release=self._journal.target, phase=self._journal.phase)
        return self._releases.load(self._journal.target)

    async def _bootstrap(self) -> None:
        """The first release serves nothing; nothing can be wrong with it, so it needs no trial."""
        journal = self._journal.take_serial()
        name = f"0-{journal.serial}"
        self._releases.discard(name)
        empty = pb.ConfigUpdate()
        bare = render(empty, replace(self._nginx.site, acme_responder=""), release=name)
        self._releases.stage(name, empty, bare, {})
        self._releases.switch(name)
        self._write(journal.begin(name).confirm(None))

    async def _resume(self) -> None:
        """Serve what was served. NGINX itself is left alone if it does so already."""
        live = self._journal.live
        if self._releases.current() != live:
            self._releases.switch(live)
        if self._nginx.master() is None:
            if self._managed and not self._journal.stopped:
                self._judge(await self._nginx.start(live))
        elif await self._nginx.answering() != live:
            self._judge(await self._nginx.reload(live))

    def _judge(self, verdict: Verdict) -> None:
        self.broken = verdict.words if isinstance(verdict, Refused) else ""
        if self.broken:
            self._log.error("nginx_does_not_serve", error=self.broken)

    # Changing.

    async def apply(self, update: pb.ConfigUpdate, report: Report) -> Outcome:
        """Bring a version to service, telling `report` of each stage as it is reached."""

        async def tell(state: State, error: str = "") -> Outcome:
            applied_at = self._clock.now_ns() // 1_000_000 if state is State.SUCCESS else 0
            status = Status(
                config_id=update.config_id,
                version=update.version,
                state=state,
                error=error,
                applied_at_ms=applied_at,
            )
            if state.final and self._journal.status != status:
                self._write(self._journal.with_status(status))
            await report(status)
            return Outcome(state=state, error=error)

        async with self._paced():
            live = self._trusted()
            await tell(State.PENDING)
            if update.version == live.manifest.version and checksum(update) == live.manifest.checksum:
                return await tell(State.SUCCESS)
            if update.version < live.manifest.version:
                return await tell(
                    State.FAILED, f"stale version: {live.manifest.version} is already in service"
                )
            await tell(State.VALIDATING)
            down = {upstream.id: live.down.get(upstream.id, frozenset()) for upstream in update.upstreams}
            staged, error = await self._stage(update, _still_listed(update, down))
            if staged is None:
                return await tell(State.FAILED, error)
            if error := self._unready():
                self._releases.discard(staged.name)
                return await tell(State.FAILED, error)
            await tell(State.APPLYING)
            outcome = await self._change(staged, tells=True)
            if self._journal.status is not None:
                await report(self._journal.status)
            return outcome

    async def mark_down(self, down: Down) -> Outcome:
        """Serve the same version without the servers that were found dead."""
        async with self._paced():
            live = self._trusted()
            down = _still_listed(live.update, down)
            if {name: servers for name, servers in down.items() if servers} == live.down:
                return Outcome(state=State.SUCCESS)
            if error := self._unready():
                return Outcome(state=State.FAILED, error=error)
            staged, error = await self._stage(live.update, down)
            if staged is None:
                return Outcome(state=State.FAILED, error=error)
            return await self._change(staged, tells=False)

    def _trusted(self) -> Release:
        if self.live is None:
            raise FailedPrecondition("the applier is not open")
        return self.live

    def _unready(self) -> str:
        if self._journal.stopped:
            return "NGINX was stopped by a command; restart it first"
        if self._nginx.master() is None and not self._managed:
            return "NGINX is not running"
        return ""

    async def _stage(self, update: pb.ConfigUpdate, down: Down) -> tuple[Release | None, str]:
        self._write(self._journal.take_serial())
        name = f"{update.version}-{self._journal.serial}"
        try:
            rendered = render(update, self._nginx.site, release=name, down=down)
            staged = await asyncio.to_thread(self._releases.stage, name, update, rendered, down)
        except (Unrenderable, OSError) as problem:
            self._releases.discard(name)
            return None, str(problem)
        self._witness(Step.STAGED)
        if error := await self._nginx.test(self._releases.config(name)):
            self._releases.discard(name)
            return None, error
        self._witness(Step.VALIDATED)
        return staged, ""

    async def _change(self, staged: Release, *, tells: bool) -> Outcome:
        self._write(self._journal.begin(staged.name))
        self._witness(Step.JOURNALED)
        return await self._try(staged, tells=tells)

    async def _try(self, target: Release, *, tells: bool) -> Outcome:
        """Link the release on trial and see it work, or go back."""
        self._releases.switch(target.name)
        self._witness(Step.SWITCHED)
        verdict = await self._take(target.name)
        self._witness(Step.RELOADED)
        if isinstance(verdict, Refused):
            self._log.warning("release_refused", release=target.name, error=verdict.words)
            self._write(self._journal.fail(verdict.words))
            self._witness(Step.REVERTING)
            return await self._revert(target, tells=tells)
        outcome = Outcome(state=State.SUCCESS)
        self._write(self._journal.confirm(self._status(target, outcome) if tells else None))
        self._witness(Step.RECORDED)
        self.live, self.broken = target, ""
        self._releases.sweep(keep=[target.name])
        self._log.info("release_in_service", release=target.name)
        return outcome

    async def _revert(self, target: Release, *, tells: bool) -> Outcome:
        """Back to the trusted release. Its workers may never have stopped; it is confirmed all the same."""
        live, error = self._journal.live, self._journal.error
        self._releases.switch(live)
        self._witness(Step.SWITCHED_BACK)
        verdict = await self._take(live)
        self._witness(Step.RELOADED_BACK)
        if isinstance(verdict, Confirmed):
            outcome = Outcome(state=State.ROLLED_BACK, error=error)
            journal = self._journal.confirm(self._status(target, outcome) if tells else None)
        else:
            words = verdict.words if verdict is not None else "not confirmed"
            outcome = Outcome(state=State.FAILED, error=f"rollback failed: {words}; at first: {error}")
            journal = self._journal.fail(words, self._status(target, outcome) if tells else None)
        self._judge(verdict)
        self._write(journal)
        self._releases.discard(target.name)
        return outcome

    async def _take(self, release: str) -> Verdict:
        """Have NGINX take what is linked: by a signal, or by starting it if it is ours and is gone."""
        self._reloaded_at = self._clock.monotonic()
        if self._nginx.master() is None and self._managed:
            return await self._nginx.start(release)
        return await self._nginx.reload(release, signalled=lambda: self._witness(Step.SIGNALLED))

    def _status(self, target: Release, outcome: Outcome) -> Status:
        return Status(
            config_id=target.manifest.config_id,
            version=target.manifest.version,
            state=outcome.state,
            error=outcome.error,
            applied_at_ms=self._clock.now_ns() // 1_000_000 if outcome.state is State.SUCCESS else 0,
        )

    def _write(self, journal: Journal) -> None:
        journals.write(self._path, journal)
        self._journal = journal

    @asynccontextmanager
    async def _paced(self) -> AsyncIterator[None]:
        async with self._lock:
            wait = self._reloaded_at + self._least_gap_seconds - self._clock.monotonic()
            if wait > 0:
                await self._clock.sleep(wait)
            yield

    # The process.

    async def reload(self) -> Outcome:
        async with self._paced():
            live = self._trusted().name
            if error := await self._nginx.test(self._releases.config(live)):
                return Outcome(state=State.FAILED, error=error)
            self._reloaded_at = self._clock.monotonic()
            return self._seen(await self._nginx.reload(live))

    async def restart(self, *, force: bool, within_seconds: float) -> Outcome:
        """Tested first: a configuration that cannot be started must not be stopped for."""
        async with self._lock:
            live = self._trusted().name
            if error := await self._nginx.test(self._releases.config(live)):
                return Outcome(state=State.FAILED, error=error)
            if not await self._nginx.stop(graceful=not force, within_seconds=within_seconds):
                return Outcome(state=State.FAILED, error="NGINX does not stop")
            self._write(self._journal.with_stopped(False))
            if self._managed:
                return self._seen(await self._nginx.start(live))
            return await self._back(within_seconds)

    async def _back(self, within_seconds: float) -> Outcome:
        """Somebody else's NGINX: wait for them to start it again."""
        deadline = self._clock.monotonic() + within_seconds
        while await self._nginx.answering() != self._trusted().name:
            if self._clock.monotonic() > deadline:
                return Outcome(state=State.FAILED, error="NGINX was stopped and nobody started it again")
            await self._clock.sleep(0.1)
        return Outcome(state=State.SUCCESS)

    async def stop(self, *, graceful: bool, within_seconds: float) -> Outcome:
        async with self._lock:
            self._write(self._journal.with_stopped(True))
            if await self._nginx.stop(graceful=graceful, within_seconds=within_seconds):
                return Outcome(state=State.SUCCESS)
            return Outcome(state=State.FAILED, error="NGINX is still running")

    async def revive(self) -> Outcome | None:
        """Start our NGINX if it should run and does not; None if there was nothing to do."""
        async with self._lock:
            if not self._managed or self._journal.stopped or self._nginx.master() is not None:
                return None
            self._log.warning("nginx_is_gone")
            return self._seen(await self._nginx.start(self._trusted().name))

    async def reopen_logs(self, rename: Callable[[], None]) -> None:
        """Rotate: not in the middle of a change, which reads the log to learn how it went."""
        async with self._lock:
            await asyncio.to_thread(rename)
            self._nginx.signal(signal.SIGUSR1)

    def _seen(self, verdict: Verdict) -> Outcome:
        self._judge(verdict)
        if isinstance(verdict, Refused):
            return Outcome(state=State.FAILED, error=verdict.words)
        return Outcome(state=State.SUCCESS)


def _is_news(target: Release, live: Release) -> bool:
    """A change of ours to the version in service is no affair of the server's."""
    return target.manifest.version != live.manifest.version


def _still_listed(update: pb.ConfigUpdate, down: Down) -> dict[str, frozenset[str]]:
    """Only servers that the update has: others would never come up again."""
    known = {upstream.id: {server.address for server in upstream.servers} for upstream in update.upstreams}
    return {
        identity: frozenset(servers & known[identity])
        for identity, servers in down.items()
        if identity in known
    }
