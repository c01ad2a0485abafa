"""The provider's side of the device API: one connection, one call at a time, every call bounded.

Speaks protobuf outward and verdicts inward. Whether and when to call is decided in `provider`.
"""

from __future__ import annotations

from types import TracebackType
from typing import Final, Self

import grpc
import grpc.aio
from google.protobuf.timestamp_pb2 import Timestamp

from fleetplane.domains.gpus.agent.health import CONDITION_TYPE, ConditionStatus, GpuUuid, HealthVerdict
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2, gpu_pb2_grpc, provider_pb2, provider_pb2_grpc
from fleetplane.node import link
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
