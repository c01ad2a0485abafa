"""Changes what NGINX serves, so that it never serves something nobody has seen work.

The one place that moves the link and signals NGINX, one operation at a time. Each step is
announced in the journal before it is taken; `open` finishes what a dead agent left undone.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import structlog

from fleetplane.domains.proxies.agent.nginx import confirmation as journals
from fleetplane.domains.proxies.agent.nginx import parts
from fleetplane.domains.proxies.agent.nginx.confirmation import (
    ChangeJournal,
    ChangePhase,
    Confirmed,
    RefusedVersion,
    Verdict,
    VersionState,
    VersionStatus,
)
from fleetplane.domains.proxies.agent.nginx.control import Nginx
from fleetplane.domains.proxies.agent.nginx.releases import StagedVersion, StagedVersions
from fleetplane.domains.proxies.agent.nginx.staging import (
    Down,
    Stager,
    StagingStep,
    keep_busy_ports_aside,
    still_listed,
    with_keys,
)
from fleetplane.domains.proxies.nginx.rendering import RENDERING, checksum, render
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition
from fleetplane.node.tasks import in_thread

LEAST_GAP_SECONDS: Final = 1.0
"""Between two reloads: each leaves workers behind that drain their connections."""

Report = Callable[[VersionStatus], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyOutcome:
    state: VersionState
    error: str = ""
    set_aside: Mapping[str, str] = field(default_factory=dict)
    """With SUCCESS: parts that are not in service, each with its error."""


class VersionApplier:
    """`managed`: NGINX is ours to start; otherwise somebody else's, and ours to signal."""

    def __init__(
        self,
        *,
        nginx: Nginx,
        releases: StagedVersions,
        clock: Clock,
        log: structlog.typing.FilteringBoundLogger,
        managed: bool,
        least_gap_seconds: float = LEAST_GAP_SECONDS,
        witness: Callable[[StagingStep], None] = lambda _: None,
    ) -> None:
        self._nginx = nginx
        self._releases = releases
        self._clock = clock
        self._log = log
        self._managed = managed
        self._least_gap_seconds = least_gap_seconds
        self._witness = witness
        self._path = nginx.site.paths.journal
        self._journal = ChangeJournal()
        self._stager = Stager(nginx, releases, serial=self._next_serial, witness=witness)
        self._lock = asyncio.Lock()  # one operation at a time on the link and on the process
        self._reloaded_at = -least_gap_seconds
        self.live: StagedVersion | None = None
        """The release that is trusted; there is one as soon as the applier is open."""
        self.lineage = ""
        """Of the server's store, as it last said; empty if it did not."""
        self.broken = ""
        """Why NGINX does not even serve what it served before; empty while it does."""
        self.held = ""
        """Why nothing of ours may be started: another NGINX serves here. Empty while ours does."""

    def __repr__(self) -> str:
        return f"<Applier live={self._journal.live} {self._journal.phase} broken={self.broken!r}>"

    @property
    def last_status(self) -> VersionStatus | None:
        """The last status of a version that the server may not have received yet."""
        return self._journal.status

    def learn_lineage(self, lineage: str) -> None:
        """Which store the server has now; empty if it did not say."""
        self.lineage = lineage

    @property
    def stopped(self) -> bool:
        return self._journal.stopped

    async def forget_status(self, status: VersionStatus) -> None:
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
            if self.held and self._journal.phase is not ChangePhase.LIVE:
                self._abandon()
            match self._journal.phase:
                case ChangePhase.LIVE if self._is_outdated(self.live):
                    await self._write_anew(self.live)
                case ChangePhase.LIVE:
                    await self._resume()
                case ChangePhase.SWITCHING:
                    target = self._interrupted()
                    await self._try(target, tells=_is_news(target, self.live))
                case ChangePhase.REVERTING:
                    target = self._interrupted()
                    await self._revert(target, tells=_is_news(target, self.live))
            self._releases.sweep(keep=[self._journal.live])

    def _interrupted(self) -> StagedVersion:
        self._log.warning("change_was_interrupted", release=self._journal.target, phase=self._journal.phase)
        return self._releases.load(self._journal.target)

    def _abandon(self) -> None:
        """Forget a change that was under way when another NGINX had to serve again."""
        target, journal = self._journal.target, self._journal
        self._releases.switch(journal.live)
        self._write((journal.fail("") if journal.phase is ChangePhase.SWITCHING else journal).confirm(None))
        self._releases.discard(target)

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

    def _is_outdated(self, live: StagedVersion) -> bool:
        """Whether it was written by an agent that wrote what this one would not."""
        return live.manifest.rendering != RENDERING and not self._unready()

    async def _write_anew(self, live: StagedVersion) -> None:
        """Serve the same version as this agent writes it. What it would not write is set aside."""
        nothing = pb.ConfigUpdate()  # what is in service has no precedence here
        setting = parts.Setting(live.update, nothing)
        staged, error = await self._stager.what_can_be(setting, live, lineage=live.manifest.lineage)
        if staged is not None:
            outcome = await self._change(staged, tells=False)
        elif error:
            outcome = ApplyOutcome(state=VersionState.FAILED, error=error)
        else:
            outcome = await self._renew(live, live.down)
        self._log.warning(
            "release_written_anew", state=outcome.state, error=outcome.error, set_aside=list(setting.aside)
        )
        if self.live is live:
            await self._resume()

    async def _resume(self) -> None:
        """Serve what was served. NGINX itself is left alone if it does so already."""
        live = self._journal.live
        if self._releases.current() != live:
            self._releases.switch(live)
        if self._nginx.master() is None:
            if self._managed and not self._journal.stopped and not self.held:
                self._judge(await self._start())
        elif await self._nginx.answering() != live:
            self._judge(await self._nginx.reload(live))

    def _judge(self, verdict: Verdict) -> None:
        self.broken = verdict.words if isinstance(verdict, RefusedVersion) else ""
        if self.broken:
            self._log.error("nginx_does_not_serve", error=self.broken)

    # Changing.

    async def apply(
        self, update: pb.ConfigUpdate, report: Report, *, takes_over: bool = False
    ) -> ApplyOutcome:
        """Bring a version to service, telling `report` of each stage as it is reached.

        `takes_over`: the other NGINX that served here is gone; nothing but this version is started instead.
        """

        async def tell(
            state: VersionState, error: str = "", set_aside: Mapping[str, str] | None = None
        ) -> ApplyOutcome:
            outcome = ApplyOutcome(state=state, error=error, set_aside=set_aside or {})
            status = self._status(update.config_id, update.version, outcome)
            if state.final and self._journal.status != status:
                self._write(self._journal.with_status(status))
            await report(status)
            return outcome

        async with self._paced():
            if takes_over:
                self.held = ""
            live = self._trusted()
            await tell(VersionState.PENDING)
            same = update.version == live.manifest.version and checksum(update) == live.manifest.checksum
            if same and not live.manifest.set_aside:
                return await tell(VersionState.SUCCESS)
            if self._is_stale(update, live):
                return await tell(
                    VersionState.FAILED, f"stale version: {live.manifest.version} is already in service"
                )
            await tell(VersionState.VALIDATING)
            outcome = await self._bring(
                update, live, again=same, applying=lambda: tell(VersionState.APPLYING)
            )
            if same and outcome.state is not VersionState.SUCCESS:
                # Nothing was lost by trying: the version is in service as it was before.
                aside = live.manifest.set_aside
                outcome = ApplyOutcome(
                    state=VersionState.SUCCESS, error=parts.summary(aside), set_aside=aside
                )
            return await tell(outcome.state, outcome.error, outcome.set_aside)

    def _is_stale(self, update: pb.ConfigUpdate, live: StagedVersion) -> bool:
        """A lower version is a late one, unless the server's store is another than the one it came from."""
        known = live.manifest.lineage
        reborn = bool(self.lineage and known) and self.lineage != known
        return update.version < live.manifest.version and not reborn

    async def _bring(
        self,
        update: pb.ConfigUpdate,
        live: StagedVersion,
        *,
        again: bool,
        applying: Callable[[], Awaitable[object]],
    ) -> ApplyOutcome:
        """Bring as much of a version to service as can be; what cannot is set aside."""
        setting = parts.Setting(update, live.served, known=live.manifest.resolved)
        if again:
            await asyncio.to_thread(keep_busy_ports_aside, setting, live)
        rolled_back: ApplyOutcome | None = None
        while True:
            staged, error = await self._stager.what_can_be(setting, live, lineage=self.lineage)
            if staged is None:
                if not error:
                    return _in_service(setting.aside)
                return rolled_back or ApplyOutcome(state=VersionState.FAILED, error=error)
            if error := self._unready():
                self._releases.discard(staged.name)
                return ApplyOutcome(state=VersionState.FAILED, error=error)
            if rolled_back is None:
                await applying()
            outcome = await self._change(staged, tells=True)
            if outcome.state is not VersionState.ROLLED_BACK:
                return outcome
            rolled_back = rolled_back or outcome
            blamed = parts.blamed_by_reload(outcome.error, staged.served, self._nginx.site)
            if not setting.blame(blamed, outcome.error):
                return rolled_back

    async def mark_down(self, down: Down) -> ApplyOutcome:
        """Serve the same version without the servers that were found dead."""
        async with self._paced():
            live = self._trusted()
            down = still_listed(live.served, down)
            if {name: servers for name, servers in down.items() if servers} == live.down:
                return ApplyOutcome(state=VersionState.SUCCESS)
            if error := self._unready():
                return ApplyOutcome(state=VersionState.FAILED, error=error)
            return await self._renew(live, down)

    async def repair(self) -> ApplyOutcome:
        """Write the live release anew, because somebody changed its files by hand."""
        async with self._paced():
            live = self._trusted()
            if error := self._unready():
                return ApplyOutcome(state=VersionState.FAILED, error=error)
            return await self._renew(live, live.down)

    async def try_out(self, candidate: pb.ConfigUpdate) -> str:
        """What NGINX has against virtual hosts and upstreams beside what it serves; empty for nothing."""
        async with self._lock:
            live = self._trusted()
            whole = parts.merged(live.served, await asyncio.to_thread(with_keys, candidate, live.served))
            staged, fault = await self._stager.stage(
                candidate, whole, live.down, beside=live.served, pinned=live.manifest.pinned
            )
            if staged is not None:
                self._releases.discard(staged.name)
            return "" if fault is None else fault.words

    async def _renew(self, live: StagedVersion, down: Down) -> ApplyOutcome:
        """Write the same version as a new release."""
        staged, fault = await self._stager.stage(
            live.update,
            live.served,
            down,
            beside=live.served,
            set_aside=live.manifest.set_aside,
            pinned=live.manifest.pinned,
            lineage=live.manifest.lineage,
        )
        if fault is not None:
            return ApplyOutcome(state=VersionState.FAILED, error=fault.words)
        assert staged is not None
        return await self._change(staged, tells=False)

    def _trusted(self) -> StagedVersion:
        if self.live is None:
            raise FailedPrecondition("the applier is not open")
        return self.live

    def _unready(self) -> str:
        if self.held:
            return self.held
        if self._journal.stopped:
            return "NGINX was stopped by a command; restart it first"
        if self._nginx.master() is None and not self._managed:
            return "NGINX is not running"
        return ""

    async def _change(self, staged: StagedVersion, *, tells: bool) -> ApplyOutcome:
        self._write(self._journal.begin(staged.name))
        self._witness(StagingStep.JOURNALED)
        return await self._try(staged, tells=tells)

    async def _try(self, target: StagedVersion, *, tells: bool) -> ApplyOutcome:
        """Link the release on trial and see it work, or go back."""
        self._releases.switch(target.name)
        self._witness(StagingStep.SWITCHED)
        verdict = await self._take(target.name)
        self._witness(StagingStep.RELOADED)
        if isinstance(verdict, RefusedVersion):
            self._log.warning("release_refused", release=target.name, error=verdict.words)
            self._write(self._journal.fail(verdict.words))
            self._witness(StagingStep.REVERTING)
            return await self._revert(target, tells=tells)
        outcome = _in_service(target.manifest.set_aside)
        self._write(self._journal.confirm(self._status_of(target, outcome) if tells else None))
        self._witness(StagingStep.RECORDED)
        self.live, self.broken = target, ""
        self._releases.sweep(keep=[target.name])
        self._log.info("release_in_service", release=target.name)
        return outcome

    async def _revert(self, target: StagedVersion, *, tells: bool) -> ApplyOutcome:
        """Back to the trusted release. Its workers may never have stopped; it is confirmed all the same."""
        live, error = self._journal.live, self._journal.error
        self._releases.switch(live)
        self._witness(StagingStep.SWITCHED_BACK)
        verdict = await self._take(live)
        self._witness(StagingStep.RELOADED_BACK)
        if isinstance(verdict, Confirmed):
            outcome = ApplyOutcome(state=VersionState.ROLLED_BACK, error=error)
            journal = self._journal.confirm(self._status_of(target, outcome) if tells else None)
        else:
            words = verdict.words if verdict is not None else "not confirmed"
            outcome = ApplyOutcome(
                state=VersionState.FAILED, error=f"rollback failed: {words}; at first: {error}"
            )
            journal = self._journal.fail(words, self._status_of(target, outcome) if tells else None)
        self._judge(verdict)
        self._write(journal)
        self._releases.discard(target.name)
        return outcome

    async def _take(self, release: str) -> Verdict:
        """Have NGINX take what is linked: by a signal, or by starting it if it is ours and is gone."""
        self._reloaded_at = self._clock.monotonic()
        if self._nginx.master() is None and self._managed:
            return await self._nginx.start(release)
        return await self._nginx.reload(release, signalled=lambda: self._witness(StagingStep.SIGNALLED))

    def _status_of(self, target: StagedVersion, outcome: ApplyOutcome) -> VersionStatus:
        return self._status(target.manifest.config_id, target.manifest.version, outcome)

    def _status(self, config_id: str, version: int, outcome: ApplyOutcome) -> VersionStatus:
        return VersionStatus(
            config_id=config_id,
            version=version,
            state=outcome.state,
            error=outcome.error,
            applied_at_ms=self._clock.now_ns() // 1_000_000 if outcome.state is VersionState.SUCCESS else 0,
            set_aside=dict(outcome.set_aside),
        )

    def _next_serial(self) -> int:
        self._write(self._journal.take_serial())
        return self._journal.serial

    def _write(self, journal: ChangeJournal) -> None:
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

    async def reload(self) -> ApplyOutcome:
        async with self._paced():
            live = self._trusted().name
            if error := self.held or await self._nginx.test(self._releases.config(live)):
                return ApplyOutcome(state=VersionState.FAILED, error=error)
            self._reloaded_at = self._clock.monotonic()
            return self._seen(await self._nginx.reload(live))

    async def restart(self, *, force: bool, within_seconds: float) -> ApplyOutcome:
        """Tested first: a configuration that cannot be started must not be stopped for."""
        async with self._lock:
            live = self._trusted().name
            if error := self.held or await self._nginx.test(self._releases.config(live)):
                return ApplyOutcome(state=VersionState.FAILED, error=error)
            if not await self._nginx.stop(graceful=not force, within_seconds=within_seconds):
                return ApplyOutcome(state=VersionState.FAILED, error="NGINX does not stop")
            self._write(self._journal.with_stopped(False))
            if self._managed:
                return self._seen(await self._nginx.start(live))
            return await self._back(within_seconds)

    async def _back(self, within_seconds: float) -> ApplyOutcome:
        """Somebody else's NGINX: wait for them to start it again."""
        deadline = self._clock.monotonic() + within_seconds
        while await self._nginx.answering() != self._trusted().name:
            if self._clock.monotonic() > deadline:
                return ApplyOutcome(
                    state=VersionState.FAILED, error="NGINX was stopped and nobody started it again"
                )
            await self._clock.sleep(0.1)
        return ApplyOutcome(state=VersionState.SUCCESS)

    async def stop(self, *, graceful: bool, within_seconds: float) -> ApplyOutcome:
        async with self._lock:
            if self.held:
                return ApplyOutcome(state=VersionState.FAILED, error=self.held)
            self._write(self._journal.with_stopped(True))
            if await self._nginx.stop(graceful=graceful, within_seconds=within_seconds):
                return ApplyOutcome(state=VersionState.SUCCESS)
            return ApplyOutcome(state=VersionState.FAILED, error="NGINX is still running")

    async def revive(self) -> ApplyOutcome | None:
        """Start our NGINX if it should run and does not; None if there was nothing to do."""
        async with self._lock:
            if self.held or not self._managed or self._journal.stopped or self._nginx.master() is not None:
                return None
            self._log.warning("nginx_is_gone")
            return self._seen(await self._start())

    async def _start(self) -> Verdict:
        """Start NGINX on the live release, by last addresses where it does not find names any more.

        A machine that starts before its name servers would otherwise serve nothing at all.
        """
        live = self._trusted()
        verdict = await self._nginx.start(live.name)
        if not isinstance(verdict, RefusedVersion):
            return verdict
        words, setting = verdict.words, parts.Setting(live.update, live.served, known=live.manifest.resolved)
        setting.aside, setting.pinned = dict(live.manifest.set_aside), dict(live.manifest.pinned)
        while setting.pin(parts.blamed_by_test(words), words):
            staged, fault = await self._stager.stage(
                live.update,
                live.served,
                live.down,
                beside=live.served,
                set_aside=setting.aside,
                pinned=setting.pinned,
                lineage=live.manifest.lineage,
            )
            if staged is not None:
                outcome = await self._change(staged, tells=True)
                return Confirmed() if outcome.state is VersionState.SUCCESS else RefusedVersion(outcome.error)
            words = fault.words if fault is not None else ""
        return verdict

    # Changing hands with another NGINX.

    async def stand_down(self, why: str, *, within_seconds: float) -> bool:
        """Stop what is served and start nothing until told otherwise; False if it does not stop."""
        async with self._lock:
            self.held = why
            return self._nginx.master() is None or await self._nginx.stop(
                graceful=True, within_seconds=within_seconds
            )

    async def stand_up(self) -> ApplyOutcome:
        """Serve again what was served before `stand_down`."""
        async with self._lock:
            self.held = ""
            return self._seen(await self._start())

    async def forget_all(self) -> None:
        """Begin anew with a release that serves nothing: what was served is another NGINX's again."""
        async with self._lock:
            self._write(self._journal.with_status(None).with_stopped(False))
            await self._bootstrap()
            self.live, self.broken = self._releases.load(self._journal.live), ""
            self._releases.sweep(keep=[self._journal.live])

    async def reopen_logs(self, rename: Callable[[], None]) -> None:
        """Rotate: not in the middle of a change, which reads the log to learn how it went."""

        def rotate() -> None:
            rename()
            self._releases.make_logs()

        async with self._lock:
            try:
                await in_thread(rotate)
            finally:  # an agent that ends here would leave NGINX writing into a file that is removed later
                self._nginx.signal(signal.SIGUSR1)

    def _seen(self, verdict: Verdict) -> ApplyOutcome:
        self._judge(verdict)
        if isinstance(verdict, RefusedVersion):
            return ApplyOutcome(state=VersionState.FAILED, error=verdict.words)
        return ApplyOutcome(state=VersionState.SUCCESS)


def _in_service(aside: Mapping[str, str]) -> ApplyOutcome:
    return ApplyOutcome(state=VersionState.SUCCESS, error=parts.summary(aside), set_aside=dict(aside))


def _is_news(target: StagedVersion, live: StagedVersion) -> bool:
    """A change of ours to the version in service is no affair of the server's."""
    return target.manifest.version != live.manifest.version
