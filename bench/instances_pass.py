"""What one pass of the reconciler over a group costs, by the group's size, and growing one from nothing.

A pass is measured as it runs in the server: with the store, the index of instances, the provider's
last list and the agents' last reports. Right before each pass one record is changed, so that nothing
is answered from a list that was put together for the pass before.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench import servers
from bench.figures import Effort, Row, alone

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

SIZES = (10, 100, 1_000, 10_000)
QUICK_SIZES = (10, 100)
GROWN = 500
QUICK_GROWN = 20
MUST_GROW_SECONDS = 10.0
SLACK = 1.5
"""How much more than ten times a group of ten times the size may take, for noise and caches."""
WRITES_AT_ONCE = 256


async def _populated(size: int, directory: Path, passes: int) -> float:
    """The best time of a pass over a healthy group of that size."""
    from support.instances.controller_rig import GROUP, KEY, Rig, rig, wanted
    from support.instances.instances_lab import TENANT

    from fleetplane.domains.instances.kinds import InstanceSpec, InstanceStatus
    from fleetplane.domains.instances.providers.contract import ObservedMachine, ProviderStatus

    async def fill(place: Rig) -> None:
        infra = place.view().infra_hash
        now_ns = place.clock.now_ns()

        async def one(number: int) -> None:
            name = f"wkr{number:026}"
            spec = InstanceSpec(
                cluster="lab", shard="local", group=GROUP, template="worker", prefix="wkr", infra_hash=infra
            )
            status = InstanceStatus(provider_id=f"mock-{name}", registered_at_ns=now_ns)
            await place.instances.record(TENANT, name, spec, status)
            place.provider._put(
                ObservedMachine(
                    instance_id=name,
                    provider_id=f"mock-{name}",
                    status=ProviderStatus.RUNNING,
                    cluster="lab",
                    shard="local",
                    tags={"tenant": TENANT, "group": GROUP},
                )
            )

        for start in range(0, size, WRITES_AT_ONCE):
            await asyncio.gather(*map(one, range(start, min(size, start + WRITES_AT_ONCE))))

    # The reconciler itself stays away while the records are made: the group is not configured yet.
    empty = wanted(0)
    full = wanted(size)
    async with rig(directory, empty) as place:
        from fleetplane.kernel.freeze import freeze, lift

        await freeze(place.store, reason="measuring", actor="bench")
        await fill(place)
        await place.configure(full)
        await place.machinery.observations.look_at_all("lab", "local")
        place._beat()
        await lift(place.store, actor="bench")
        await place.idle()
        best = float("inf")
        for turn in range(passes):

            def touched(status: InstanceStatus, _now_ns: int, turn: int = turn) -> InstanceStatus:
                return msgspec.structs.replace(status, agent_version=f"v{turn}")

            await place.instances.step(TENANT, f"wkr{0:026}", touched, action="agent_version")
            begun = time.perf_counter()
            result = await place.machinery.controller._pass(KEY)
            best = min(best, time.perf_counter() - begun)
            if result.explanation or len(place.machines()) != size:
                raise RuntimeError(f"the group was not healthy: {result.explanation[:3]}")
        return best


async def _grown(size: int, directory: Path) -> float:
    """From the configuration that asks for so many until the last has its machine, in real time."""
    from support.instances.instances_lab import document, lab, until

    from fleetplane.domains.instances.rules import decide as rules

    async with lab(directory, document(0)) as place:
        begun = time.perf_counter()
        await place.configure(document(size))
        await place.domain._groups.refresh()
        await until(lambda: len(place.provider.instances) >= size, seconds=120)
        await until(
            lambda: sum(rules.state(one) is rules.State.PROVISIONED for one in place.instances()) >= size,
            seconds=120,
        )
        seconds = time.perf_counter() - begun
        if len(place.instances()) != size:
            raise RuntimeError("some were made twice")
    return seconds


def measure(effort: Effort) -> Sequence[Row]:
    quick = effort.gpus is not None
    sizes, grown = (QUICK_SIZES, QUICK_GROWN) if quick else (SIZES, GROWN)
    costs: dict[int, float] = {}
    with servers.scratch() as directory:
        for size in sizes:
            costs[size] = asyncio.run(_populated(size, directory / str(size), 2 if quick else 10))
        rounds = 1 if quick else 3
        growing = min(asyncio.run(_grown(grown, directory / f"grown-{turn}")) for turn in range(rounds))
    rows = [
        Row(
            figure=f"A pass over a group of {size:,}",
            ours=_shown(costs[size]),
            reference="" if before is None else f"{_shown(costs[before])} for {before:,}",
            ratio=None if before is None else costs[size] / costs[before],
            must_reach="" if before is None else f"at most {size // before * SLACK:g} ×",
            reached=before is None or costs[size] <= costs[before] * size / before * SLACK,
            note=f"{costs[size] / size * 1e6:.1f} µs an instance",
        )
        for before, size in zip((None, *sizes), sizes, strict=False)
    ]
    rows.append(
        Row(
            figure=f"A group from 0 to {grown:,}, mock provider",
            ours=f"{growing:.2f} s",
            reference="",
            ratio=None,
            must_reach=f"under {MUST_GROW_SECONDS:g} s",
            reached=growing < MUST_GROW_SECONDS,
            note=f"{grown / growing:,.0f} instances/s, one after the other, two durable writes each",
        )
    )
    return rows


def _shown(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


if __name__ == "__main__":
    alone(measure, __doc__)
