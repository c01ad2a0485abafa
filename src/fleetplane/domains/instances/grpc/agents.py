"""`nstance.v1.AgentService`: what passes between the server and the agents of instances.

Two streams carry work to an agent, one brings its reports. The streams to the agent are woken
rather than fed: whoever has news offers a wake-up, and the stream's own loop works out what the
agent should be sent now. An agent has one stream of each kind; a newer one ends the older
cleanly, and so does the server when it stops, because that is what agents call clean.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import structlog
from google.protobuf.empty_pb2 import Empty

from fleetplane.domains.instances import credentials, figures, wire
from fleetplane.domains.instances.configuration import InstancesDocument
from fleetplane.domains.instances.content.files import FileMaker, certificate_lives, keys_wanted
from fleetplane.domains.instances.credentials import ClientRole
from fleetplane.domains.instances.kinds import HealthReport, Instance, InstanceStatus, tenant_of
from fleetplane.domains.instances.records.groups import Groups, GroupView
from fleetplane.domains.instances.records.instances import Instances
from fleetplane.domains.instances.records.listener_activity import Activity
from fleetplane.domains.instances.records.reports import InstanceReports
from fleetplane.domains.instances.rules import decide as rules
from fleetplane.domains.instances.rules import delivery
from fleetplane.domains.instances.rules.delivery import Holding, Sent, SentPatch
from fleetplane.fleet.figures import FigureKeeper
from fleetplane.fleet.streams.presence import until_closed
from fleetplane.gen.nstance.v1 import agent_pb2
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument, PermissionDenied
from fleetplane.kernel.identity import Authority
from fleetplane.kernel.identity.certificates import peer_identity
from fleetplane.kernel.presence import PresenceRegistry
from fleetplane.kernel.sessions import SUPERSEDED, Session, Sessions
from fleetplane.kernel.values.timestamps import timestamp
from fleetplane.rpc import CallContext

log = structlog.get_logger(__name__)

FILES, KEYS, REPORTS = "files", "keys", "reports"
MAKE_SECONDS = 30.0
"""Within which a patch must be ready; an object store that hangs must not hold a stream."""
KEYS_LIMIT = 64
"""Public keys in one call."""
WAKE_UPS = 1
"""A wake-up that waits already says everything that a second one would."""

FILES_TROUBLE = "files cannot be made: "
"""Begins what stands in an instance's record until its files can be made."""

WARN_SHARE = 0.1
"""Of an agent's certificate's life, in which its operators are warned that it runs out: ours renews long
before, so whoever comes this far cannot."""
WARN_AGAIN_SECONDS = 86_400.0

ErrorSink = Callable[[str, str, str, str], None]
"""Tenant, group, instance and what went wrong."""


class InstanceAgentService:
    def __init__(
        self,
        *,
        instances: Instances,
        groups: Groups,
        reports: InstanceReports,
        activity: Activity,
        measured: FigureKeeper,
        files: FileMaker,
        workloads: Authority,
        sessions: Sessions,
        clock: Clock,
        look_at: Callable[[str, str], None],
        disconnected: Callable[[Instance], None],
        complain: ErrorSink,
        places: PresenceRegistry,
    ) -> None:
        """`places` knows on which server each stream of an agent is, where there are several."""
        self._instances = instances
        self._groups = groups
        self._reports = reports
        self._activity = activity
        self._figures = measured
        self._files = files
        self._workloads = workloads
        self._sessions = sessions
        self._clock = clock
        self._look_at = look_at
        self._disconnected = disconnected
        self._complain = complain
        self._places = places
        self._sessions_at: dict[tuple[str, int], Session[None]] = {}
        """By the name of a stream's place and the number it has there."""
        self._sent: dict[str, Sent] = {}
        self._warned_at_ns: dict[str, int] = {}
        groups.on_change(self.wake_groups)
        places.on_moved(self._moved)

    # Waking.

    def wake(self, instance: str) -> None:
        for stream in (FILES, KEYS):
            session = self._sessions.get(instance, stream)
            if session is not None and not session.queued:
                session.offer(None)

    def wake_groups(self, groups: set[tuple[str, str]]) -> None:
        for instance in self._instances.all():
            if (tenant_of(instance), instance.spec.group) in groups:
                self.wake(instance.name)

    def keys_came(self, instance: str) -> None:
        """A certificate that waited for its key may go out now."""
        self._sent.pop(instance, None)
        self.wake(instance)

    def forget(self, instance: str) -> None:
        """The instance is gone for good."""
        self._sent.pop(instance, None)
        self._warned_at_ns.pop(instance, None)

    # The methods.

    async def ReceiveKeyRequests(
        self, _request: Empty, context: CallContext
    ) -> AsyncIterator[agent_pb2.KeyGenerationRequest]:
        tenant, name = credentials.client_of(context.principal)
        async with self._opened(context, KEYS) as session:
            asked: dict[str, int] = {}
            await context.send_initial_metadata(())
            session.offer(None)
            async for _ in session:
                names = self._keys_to_ask(tenant, name, asked)
                if names:
                    yield agent_pb2.KeyGenerationRequest(key_names=names)

    async def ReceiveFiles(
        self, _request: Empty, context: CallContext
    ) -> AsyncIterator[agent_pb2.FileTransfer]:
        tenant, name = credentials.client_of(context.principal)
        async with self._opened(context, FILES) as session:
            self._sent.pop(name, None)
            await context.send_initial_metadata(())
            session.offer(None)
            try:
                async for _ in session:
                    for transfer in await self._patch(tenant, name, session):
                        yield transfer
            finally:
                if not session.superseded:  # else it is the newer stream's by now
                    self._sent.pop(name, None)

    async def SubmitPublicKeys(self, request: agent_pb2.PublicKeysRequest, context: CallContext) -> Empty:
        tenant, name = credentials.client_of(context.principal)
        self._same_instance(request.instance_id, name)
        if len(request.keys) > KEYS_LIMIT:
            raise InvalidArgument(f"keys has more than {KEYS_LIMIT} entries", field="keys")
        self._instances.get(tenant, name)
        pems = {}
        for index, entry in enumerate(request.keys):
            field = f"keys[{index}].public_key_pem"
            key = credentials.load_public_key(entry.public_key_pem, field=field)
            filename = entry.filename.removesuffix(".pub")
            if not filename or "/" in filename or filename.startswith("."):
                raise InvalidArgument("filename must be a base name", field=f"keys[{index}].filename")
            pems[filename] = credentials.key_pem(key).decode()
        await self._instances.keep_keys(tenant, name, pems, actor=context.principal.name)
        self.keys_came(name)
        return Empty()

    async def SubmitHealthReport(self, requests: AsyncIterator[bytes], context: CallContext) -> Empty:
        tenant, name = credentials.client_of(context.principal)
        async with self._opened(context, REPORTS) as session:
            try:
                async with until_closed(session):
                    async for body in requests:
                        report = wire.health_report(body)
                        self._same_instance(report.instance, name)
                        await self._take(tenant, report)
            finally:
                instance = self._instances.find(tenant, name)
                if instance is not None and not session.superseded:
                    self._disconnected(instance)
        return Empty()

    KeyGenRequests, ReportHealth = ReceiveKeyRequests, SubmitHealthReport

    # How they do it.

    @asynccontextmanager
    async def _opened(self, context: CallContext, stream: str) -> AsyncIterator[Session[None]]:
        """A stream that ends the agent's older one of that kind, on whichever server that is."""
        with self._open(context, stream) as session:
            if not self._places.shared:
                yield session
                return
            place = place_of(session.agent, stream)
            number = await self._places.enter(place)
            self._sessions_at[place, number] = session
            try:
                if self._places.session_here(place) != number:
                    session.close(SUPERSEDED)
                yield session
            finally:
                del self._sessions_at[place, number]
                await self._places.leave(place, number)

    def _moved(self, place: str, number: int) -> None:
        session = self._sessions_at.get((place, number))
        if session is not None:
            session.close(SUPERSEDED)

    def _open(self, context: CallContext, stream: str) -> Session[None]:
        tenant, name = credentials.client_of(context.principal)
        instance = self._instances.find(tenant, name)
        if instance is None or rules.state(instance) is rules.State.DELETED:
            # Its certificate may be good for months; what it was made for is over.
            raise PermissionDenied(f"instance {name!r} is not known any more")
        serial = peer_identity(context.connection.certificates).serial
        return self._sessions.open(
            name, stream, limit=WAKE_UPS, principal=context.principal.name, serial=serial
        )

    def _same_instance(self, said: str, proven: str) -> None:
        if said != proven:
            raise PermissionDenied("instance ID mismatch", details={"instance_id": said[:64]})

    async def _take(self, tenant: str, report: HealthReport) -> None:
        instance = self._instances.find(tenant, report.instance)
        if instance is None:
            raise PermissionDenied(f"instance {report.instance!r} is not known any more")
        heard = self._reports.last(report.instance)
        if not self._places.shared:
            self._reported(instance, heard.report if heard is not None else None, report)
        self._figures.take(
            instance.scope, instance.name, figures.figures(report, heard, self._clock.now_ns())
        )
        self._reports.take(report)
        await self._note_version(tenant, instance, report)
        self._warn_of_end(tenant, instance)
        broken = sorted(name for name, error in report.files.items() if error)
        if broken:
            text = f"file {broken[0]} was refused: {report.files[broken[0]]}"
            self._complain(tenant, instance.spec.group, instance.name, text)
        if not self._places.shared:
            self.wake(report.instance)

    def reported_anywhere(self, before: HealthReport | None, report: HealthReport) -> None:
        """A report has been written down, by this server or another one."""
        tenant = self._instances.tenant_of(report.instance)
        instance = self._instances.find(tenant, report.instance) if tenant is not None else None
        if instance is not None:
            self._reported(instance, before, report)
            self.wake(report.instance)

    def _reported(self, instance: Instance, before: HealthReport | None, report: HealthReport) -> None:
        tenant, group = tenant_of(instance), instance.spec.group
        if report.connections and before is not None:
            self._activity.compare(tenant, group, before.connections, report.connections)
        if report.termination_action:
            self._look_at(tenant, group)

    def _warn_of_end(self, tenant: str, instance: Instance) -> None:
        """Tell operators, once a day, of an agent that will soon not be let in any more."""
        ends_ns = instance.status.certificate_expires_at_ns if instance.status is not None else None
        if ends_ns is None or self._groups.configuration is None:
            return
        now_ns = self._clock.now_ns()
        left_seconds = (ends_ns - now_ns) / 1e9
        if left_seconds > self._groups.certificate_hours(ClientRole.AGENT) * 3600 * WARN_SHARE:
            return
        if now_ns - self._warned_at_ns.get(instance.name, 0) >= WARN_AGAIN_SECONDS * 1e9:
            self._warned_at_ns[instance.name] = now_ns
            text = (
                f"the agent's certificate runs out in {left_seconds / 3600:.1f} hours and was not renewed; "
                "replace the instance before"
            )
            self._complain(tenant, instance.spec.group, instance.name, text)

    async def _note_version(self, tenant: str, instance: Instance, report: HealthReport) -> None:
        if instance.status is None or instance.status.agent_version == report.version:
            return

        def noted(status: InstanceStatus, _now_ns: int) -> InstanceStatus:
            return msgspec.structs.replace(status, agent_version=report.version)

        await self._instances.step(tenant, instance.name, noted, action="agent_version")

    def _view(self, tenant: str, name: str) -> tuple[Instance, GroupView] | None:
        instance = self._instances.find(tenant, name)
        view = self._groups.view_of(instance) if instance is not None else None
        return (instance, view) if instance is not None and view is not None else None

    def _keys_to_ask(self, tenant: str, name: str, asked: dict[str, int]) -> list[str]:
        found = self._view(tenant, name)
        if found is None:
            return []
        wanted = keys_wanted(found[1].group)
        present = self._instances.keys(tenant, name, wanted)
        now_ns = self._clock.now_ns()
        names = delivery.keys_to_ask(wanted, present, asked, now_ns=now_ns)
        asked.update(dict.fromkeys(names, now_ns))
        return names

    async def _patch(self, tenant: str, name: str, session: Session[None]) -> list[agent_pb2.FileTransfer]:
        """The next patch for the agent, whole, with the message that commits it."""
        found = self._view(tenant, name)
        configuration = self._groups.configuration
        if found is None or configuration is None:
            return []
        instance, view = found
        now_ns = self._clock.now_ns()
        holding = self._holding(name, configuration, view, now_ns)
        patch = delivery.next_patch(
            view.group.files, view.runtime_hash, holding, self._sent.get(name), now_ns=now_ns
        )
        if patch is None:
            return []
        keys = self._instances.keys(tenant, name, keys_wanted(view.group))
        try:
            async with asyncio.timeout(MAKE_SECONDS):
                made = await self._files.make(
                    patch.names, configuration=configuration, group=view.group, instance=instance, keys=keys
                )
        except (FleetplaneError, TimeoutError) as error:
            text = error.message if isinstance(error, FleetplaneError) else "making the files took too long"
            log.info("instances.files_not_ready", instance=name, why=text)
            if not isinstance(error, FleetplaneError) or error.reason != "FILE_NOT_READY":
                self._complain(tenant, instance.spec.group, name, f"{FILES_TROUBLE}{text}")
                await self._instances.note_error(tenant, name, f"{FILES_TROUBLE}{text}")
            return []
        if instance.status is not None and instance.status.last_error.startswith(FILES_TROUBLE):
            await self._instances.note_error(tenant, name, "")
        if session.superseded:
            return []  # the newer stream sends it, and must not wait for an answer to this one
        self._sent[name] = Sent(
            at_ns=now_ns, config_hash=patch.config_hash, names=patch.names, attempt=patch.attempt
        )
        return _transfers(patch, made, now_ns)

    def _holding(
        self, name: str, configuration: InstancesDocument, view: GroupView, now_ns: int
    ) -> Holding | None:
        """What the agent's last report says that it holds, if there was one."""
        heard = self._reports.last(name)
        if heard is None:
            return None
        report = heard.report
        outdated = delivery.outdated(
            certificate_lives(configuration, view.group) if report.issued else {},
            report.issued,
            signing_since_ns=self._workloads.signing_since_ns,
            now_ns=now_ns,
        )
        return Holding(
            at_ns=heard.at_ns, config_hash=report.config_hash, files=report.files, outdated=outdated
        )


def place_of(instance: str, stream: str) -> str:
    """What one of an agent's streams is called among those who have it."""
    return f"{instance}/{stream}"


def _transfers(patch: SentPatch, made: dict[str, bytes], now_ns: int) -> list[agent_pb2.FileTransfer]:
    stamp = timestamp(now_ns)
    files = [
        agent_pb2.FileTransfer(filename=name, content=content, last_modified=stamp)
        for name, content in sorted(made.items())
    ]
    return [*files, agent_pb2.FileTransfer(config_hash=patch.config_hash)]
