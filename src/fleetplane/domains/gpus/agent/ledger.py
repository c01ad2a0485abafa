"""Which GPUs this provider answers for, what it holds of each, and what it still has to say.

Pure bookkeeping between the driver's facts and the device API's view: no I/O, no clock. A new
enumeration replaces the GPUs; a new session forgets what was told, never what is true.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fleetplane.domains.gpus.agent import health
from fleetplane.domains.gpus.agent.health import ConditionStatus, GpuSighting, GpuUuid, HealthVerdict


@dataclass(slots=True, kw_only=True)
class ManagedGpu:
    name: str
    uuid: GpuUuid
    sighting: GpuSighting
    verdict: HealthVerdict
    reconciled: bool = False
    """The verdict takes into account what was said of the GPU before this enumeration."""
    introduced: bool = False
    """This session knows the device API to have the GPU."""
    told: HealthVerdict | None = None
    """What this session last told the device API."""
    said: HealthVerdict | None = None
    """What any session last told it."""


class Ledger:
    def __init__(self, *, ignored_xids: frozenset[int], lower_case_names: bool = False) -> None:
        self.ignored_xids = ignored_xids
        self._lower_case_names = lower_case_names
        self._gpus: dict[GpuUuid, ManagedGpu] = {}
        self._gone: dict[GpuUuid, ManagedGpu] = {}
        self._created: set[GpuUuid] = set()

    def __repr__(self) -> str:
        ready = sum(gpu.verdict.status is ConditionStatus.TRUE for gpu in self.gpus)
        return f"<Ledger gpus={len(self._gpus)} ready={ready} owed={len(self.owed())} gone={len(self._gone)}>"

    @property
    def gpus(self) -> list[ManagedGpu]:
        return list(self._gpus.values())

    def name_of(self, uuid: GpuUuid) -> str:
        return uuid.lower() if self._lower_case_names else uuid

    @property
    def names(self) -> list[str]:
        return [gpu.name for gpu in self._gpus.values()]

    @property
    def vouched_for(self) -> list[str]:
        """The GPUs of which the device API holds what we hold.

        Only these may be named in a heartbeat: it lets the server believe again what we said
        before a silence, and of the others we have something else to say by now.
        """
        return [gpu.name for gpu in self._gpus.values() if gpu.told == gpu.verdict]

    def adopt(self, sightings: Iterable[GpuSighting], *, now_ns: int) -> None:
        """Replace the GPUs by those of a new enumeration."""
        former, self._gpus = self._gpus | self._gone, {}
        for sighting in sightings:
            uuid = sighting.uuid
            earlier = former.pop(uuid, None)
            own = health.on_enumeration(sighting, now_ns=now_ns)
            self._gpus[uuid] = ManagedGpu(
                name=self.name_of(uuid),
                uuid=uuid,
                sighting=sighting,
                verdict=health.reconcile(own, sighting, earlier.verdict if earlier else None),
                reconciled=earlier is not None and earlier.reconciled,
                said=earlier.said if earlier is not None else None,
            )
        self._gone = former
        for gpu in self._gone.values():
            gpu.verdict = health.on_vanished(gpu.verdict, now_ns=now_ns)

    def reconcile(self, gpu: ManagedGpu, earlier: HealthVerdict | None) -> None:
        """Learn what the device API held of a GPU before we first spoke of it."""
        if not gpu.reconciled:
            gpu.verdict = health.reconcile(gpu.verdict, gpu.sighting, earlier)
            gpu.reconciled = True

    def on_xid(
        self, uuid: GpuUuid, xid: int, *, now_ns: int, instance: int | None = None
    ) -> list[ManagedGpu]:
        """The GPUs whose verdict this changed: a GPU with all its MIG devices, or those of one instance."""
        gpu = self._gpus.get(uuid)
        if gpu is None:
            return []
        parts = [part for part in self._gpus.values() if part.sighting.parent == uuid]
        meant = [part for part in parts if instance is not None and part.sighting.instance == instance]
        return [
            changed
            for one in meant or [gpu, *parts]
            for changed in self._judge(
                one, health.on_xid(one.verdict, xid, ignored=self.ignored_xids, now_ns=now_ns)
            )
        ]

    def on_lost(self, answering: Mapping[GpuUuid, bool], *, now_ns: int) -> list[ManagedGpu]:
        """The GPUs whose verdict this changed. Only ours can be among them."""
        ours = {uuid: answers for uuid, answers in answering.items() if uuid in self._gpus}
        return [
            changed
            for uuid in health.lost_among(ours)
            for changed in self._judge(
                self._gpus[uuid], health.on_lost(self._gpus[uuid].verdict, now_ns=now_ns)
            )
        ]

    def begin_session(self) -> None:
        for gpu in [*self._gpus.values(), *self._gone.values()]:
            gpu.introduced, gpu.told = False, None

    def owed(self) -> list[ManagedGpu]:
        """The GPUs whose verdict the device API has not heard in this session, bad news first."""
        behind = [gpu for gpu in self._gpus.values() if gpu.told != gpu.verdict]
        return sorted(behind, key=lambda gpu: gpu.verdict.status is ConditionStatus.TRUE)

    def told(self, gpu: ManagedGpu, verdict: HealthVerdict, *, created: bool = False) -> None:
        gpu.introduced, gpu.told, gpu.said = True, verdict, verdict
        if created:
            self._created.add(gpu.uuid)

    def gone(self) -> list[ManagedGpu]:
        """GPUs of an earlier enumeration that are no longer there."""
        return list(self._gone.values())

    def is_ours_to_remove(self, gpu: ManagedGpu) -> bool:
        """Who registered a GPU may remove it; a GPU that was there before us is another's."""
        return gpu.uuid in self._created

    def forget(self, gpu: ManagedGpu) -> None:
        self._gone.pop(gpu.uuid, None)
        self._created.discard(gpu.uuid)

    def _judge(self, gpu: ManagedGpu, verdict: HealthVerdict) -> list[ManagedGpu]:
        if verdict == gpu.verdict:
            return []
        gpu.verdict = verdict
        return [gpu]
