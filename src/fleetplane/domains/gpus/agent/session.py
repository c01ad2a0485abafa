"""The provider's connection to the device API: introduce all GPUs, report each change, send heartbeats.

One connection, one call at a time, every call bounded. `DeviceLink` speaks protobuf outward and verdicts
inward; whether and when to call is decided by the session, which owes the server the present verdict of
every GPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Final, NoReturn, Protocol, Self

import grpc
import grpc.aio
from google.protobuf.timestamp_pb2 import Timestamp

from fleetplane.domains.gpus.agent.health import CONDITION_TYPE, ConditionStatus, GpuUuid, HealthVerdict
from fleetplane.domains.gpus.agent.ledger import Ledger, ManagedGpu
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2, gpu_pb2_grpc, provider_pb2, provider_pb2_grpc
from fleetplane.kernel.clock import Backoff, Clock
from fleetplane.kernel.unbroken import run_to_completion
from fleetplane.node import link
from fleetplane.node.connection import Follow, no_check_in, no_metadata
from fleetplane.node.link import LinkLost, LinkOptions

CALL_LIMIT_SECONDS = 5.0
CONNECT_LIMIT_SECONDS = 5.0

OPTIONS: Final = LinkOptions()

LINK_LOST_CODES = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
)


class DeviceLink:
    """A connection to the device API as one provider; an async context manager."""

    def __init__(self, address: str, provider_id: str) -> None:
        self._address = address
        self._provider_id = provider_id
        self.channel = link.channel(address, link.PLAINTEXT, OPTIONS)
        self._gpus = gpu_pb2_grpc.GpuServiceStub(self.channel)
        self._provider = provider_pb2_grpc.ProviderServiceStub(self.channel)

    def __repr__(self) -> str:
        return f"<DeviceLink {self._address} as {self._provider_id}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.channel.close()

    async def connected(self) -> None:
        """Return when the connection is up; raise when the first attempt at it failed."""
        state = self.channel.get_state(try_to_connect=True)
        while state is not grpc.ChannelConnectivity.READY:
            if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                raise LinkLost(f"nothing answers at {self._address}")
            await self.channel.wait_for_state_change(state)
            state = self.channel.get_state(try_to_connect=True)

    async def lost(self) -> None:
        """Return when the connection that `connected` saw is gone.

        gRPC would reconnect without a word, to a server that may have forgotten everything.
        """
        await self.channel.wait_for_state_change(grpc.ChannelConnectivity.READY)

    async def read_verdict(self, name: str) -> HealthVerdict | None:
        """What the device API holds of our condition on that GPU."""
        try:
            answer = await self._gpus.GetGpu(gpu_pb2.GetGpuRequest(name=name), timeout=CALL_LIMIT_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return None
            raise
        held = (entry for entry in answer.gpu.status.conditions if entry.type == CONDITION_TYPE)
        action = answer.gpu.status.recommended_action
        return next((_verdict(entry, action) for entry in held), None)

    async def register(self, name: str, uuid: GpuUuid, verdict: HealthVerdict, *, parent: str = "") -> bool:
        """Register with that first verdict; False when the GPU was there, and is as it was."""
        request = provider_pb2.RegisterGpuRequest(
            name=name,
            spec=gpu_pb2.GpuSpec(uuid=uuid, parent=parent),
            provider_id=self._provider_id,
            initial_status=gpu_pb2.GpuStatus(
                conditions=[_condition(verdict)], recommended_action=verdict.action
            ),
        )
        answer = await self._provider.RegisterGpu(request, timeout=CALL_LIMIT_SECONDS)
        return bool(answer.created)

    async def unregister(self, name: str) -> None:
        request = provider_pb2.UnregisterGpuRequest(name=name, provider_id=self._provider_id)
        await self._provider.UnregisterGpu(request, timeout=CALL_LIMIT_SECONDS)

    async def report(self, name: str, verdict: HealthVerdict) -> None:
        request = provider_pb2.UpdateGpuConditionRequest(
            name=name,
            condition=_condition(verdict),
            provider_id=self._provider_id,
            recommended_action=verdict.action,
        )
        await self._provider.UpdateGpuCondition(request, timeout=CALL_LIMIT_SECONDS)

    async def heartbeat(self, names: list[str]) -> bool:
        request = provider_pb2.HeartbeatRequest(provider_id=self._provider_id, gpu_names=names)
        answer = await self._provider.Heartbeat(request, timeout=CALL_LIMIT_SECONDS)
        return bool(answer.acknowledged)


def _condition(verdict: HealthVerdict) -> gpu_pb2.Condition:
    since = Timestamp()
    since.FromNanoseconds(verdict.since_ns)
    return gpu_pb2.Condition(
        type=CONDITION_TYPE,
        status=verdict.status,
        last_transition_time=since,
        reason=verdict.reason,
        message=verdict.message,
    )


def _verdict(condition: gpu_pb2.Condition, action: str) -> HealthVerdict:
    known = condition.status in {ConditionStatus.TRUE, ConditionStatus.FALSE}
    return HealthVerdict(
        status=ConditionStatus(condition.status) if known else ConditionStatus.UNKNOWN,
        reason=condition.reason,
        message=condition.message,
        since_ns=condition.last_transition_time.ToNanoseconds(),
        action="" if condition.status == ConditionStatus.TRUE else action,
    )


class SessionLog(Protocol):
    """The part of a structured logger that is used here."""

    def info(self, event: str, **fields: object) -> object: ...

    def warning(self, event: str, **fields: object) -> object: ...


class ProviderSession:
    def __init__(
        self,
        link: DeviceLink,
        ledger: Ledger,
        changed: asyncio.Event,
        *,
        on_settled: Callable[[], None],
        heartbeat_seconds: Callable[[], float],
        backoff: Backoff,
        clock: Clock,
        log: SessionLog,
        check_in: Follow = no_check_in,
        settings: Follow = no_check_in,
    ) -> None:
        """`heartbeat_seconds` is asked before every pause, since settings may change it."""
        self._link = link
        self._ledger = ledger
        self._changed = changed
        self._on_settled = on_settled
        self._heartbeat_seconds = heartbeat_seconds
        self._backoff = backoff
        self._clock = clock
        self._log = log
        self._check_in = check_in
        self._settings = settings
        self._vouches = asyncio.Event()
        """The server has a report of ours: from here on it must notice if we fall silent."""
        self._spoke = asyncio.Event()
        self.settled = False
        """The server has received every report at least once."""

    def __repr__(self) -> str:
        return f"<Session {self._link!r} {'settled' if self.settled else 'introducing'}>"

    async def run(self) -> NoReturn:
        """Until the connection is lost, which is an error, or until cancelled."""
        try:
            async with asyncio.timeout(CONNECT_LIMIT_SECONDS):
                await self._link.connected()
        except TimeoutError:
            raise LinkLost(f"no connection within {CONNECT_LIMIT_SECONDS:.0f} s") from None
        self._ledger.begin_session()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publish())
            tasks.create_task(self._beat())
            tasks.create_task(self._say_version())
            tasks.create_task(self._follow_settings())
            await self._link.lost()
            raise LinkLost("the connection was closed")

    async def _publish(self) -> NoReturn:
        """Bring the server's view to ours, whenever ours changes."""
        failures = 0
        while True:
            self._changed.clear()
            refused = [gpu for gpu in self._ledger.owed() if not await self._tell(gpu)]
            refused += [gpu for gpu in self._ledger.gone() if not await self._take_leave(gpu)]
            self._spoke.set()
            if not refused and not self.settled:
                self.settled = True
                self._on_settled()
                self._log.info("device_api_joined", gpus=len(self._ledger.gpus))
            failures = failures + 1 if refused else 0
            pause = self._backoff.delay_seconds(failures, jitter=self._clock.random()) if refused else None
            try:
                async with asyncio.timeout(pause):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _say_version(self) -> None:
        """A version that cannot report its GPUs is not worth keeping: it says hello once it has."""
        await self._spoke.wait()
        await self._check_in(self._link.channel, no_metadata)

    async def _follow_settings(self) -> None:
        await self._spoke.wait()
        await self._settings(self._link.channel, no_metadata)

    async def _tell(self, gpu: ManagedGpu) -> bool:
        """Whether the server took our verdict on the GPU."""
        try:
            held = None if gpu.introduced else await self._link.read_verdict(gpu.name)
            self._ledger.reconcile(gpu, held)
            verdict = gpu.verdict  # the driver may change it while we speak; then it is owed again
            if held == verdict == gpu.said:  # to say it again would be a change to whoever watches
                self._ledger.told(gpu, verdict)
            elif gpu.introduced or not await run_to_completion(self._register(gpu, verdict)):
                await self._link.report(gpu.name, verdict)
                self._ledger.told(gpu, verdict)
        except grpc.aio.AioRpcError as error:
            gpu.introduced = False  # it may be gone from the server: begin with it anew
            return self._is_refusal(error, gpu)
        self._vouches.set()
        return True

    async def _register(self, gpu: ManagedGpu, verdict: HealthVerdict) -> bool:
        """Whether that created the GPU. Only the answer says that it is ours to remove."""
        whole = gpu.sighting.parent
        parent = "" if whole is None else self._ledger.name_of(whole)
        created = await self._link.register(gpu.name, gpu.uuid, verdict, parent=parent)
        if created:
            self._ledger.told(gpu, verdict, created=True)
            self._log.info("gpu_registered", gpu=gpu.name)
        return created

    async def _take_leave(self, gpu: ManagedGpu) -> bool:
        """A GPU vanished: remove it if we brought it, else say that it is lost."""
        try:
            if self._ledger.is_ours_to_remove(gpu):
                await self._link.unregister(gpu.name)
                self._log.info("gpu_unregistered", gpu=gpu.name)
            else:
                await self._link.report(gpu.name, gpu.verdict)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                return self._is_refusal(error, gpu)
        self._ledger.forget(gpu)
        return True

    async def _beat(self) -> NoReturn:
        """Renew the lease for the GPUs that this provider vouches for, never before its first report.

        And at once after that, however many are still to be told of: a provider without a lease is never
        missed. A heartbeat that names no GPU would vouch for all we ever reported, so there is none then.
        """
        complained = False
        await self._vouches.wait()
        while True:
            try:
                if names := self._ledger.vouched_for:
                    await self._link.heartbeat(names)
            except grpc.aio.AioRpcError as error:
                if error.code() in LINK_LOST_CODES:
                    raise
                if not complained:  # an older server has no leases, and is served all the same
                    complained = True
                    self._log.warning("heartbeat_refused", code=error.code().name, error=error.details())
            if self._spoke.is_set():
                await self._clock.sleep(self._heartbeat_seconds())
            else:
                await self._spoke.wait()

    def _is_refusal(self, error: grpc.aio.AioRpcError, gpu: ManagedGpu) -> bool:
        """False (not told) for an answer about this GPU; the end of the session for no answer."""
        if error.code() in LINK_LOST_CODES:
            raise error
        self._log.warning("gpu_refused", gpu=gpu.name, code=error.code().name, error=error.details())
        return False
