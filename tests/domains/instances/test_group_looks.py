"""Which groups are looked at again when something changes: those that it concerns, and no others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from support.instances.controller_rig import GROUP, Rig, rig, wanted
from support.instances.instances_lab import TENANT

from fleetplane.domains.instances.kinds import (
    GROUP as OVERRIDE,
)
from fleetplane.domains.instances.kinds import (
    TENANT as TENANT_KIND,
)
from fleetplane.domains.instances.kinds import (
    GroupOverride,
    TenantSleep,
    tenant_scope,
)
from fleetplane.kernel.freeze import freeze

OTHER = "other"


async def override(place: Rig) -> None:
    await place.store.transact(
        lambda draft: draft.put(OVERRIDE, tenant_scope(TENANT), GROUP, spec=GroupOverride(size=0)),
        actor="t",
        action="t",
        touches=[OVERRIDE.key(tenant_scope(TENANT), GROUP)],
    )


async def sleep(place: Rig) -> None:
    await place.store.transact(
        lambda draft: draft.put(TENANT_KIND, tenant_scope(TENANT), TENANT, spec=TenantSleep(asleep=False)),
        actor="t",
        action="t",
        touches=[TENANT_KIND.key(tenant_scope(TENANT), TENANT)],
    )


def frozen(scope: str) -> Callable[[Rig], Awaitable[object]]:
    return lambda place: freeze(place.store, scope, reason="r", actor="a")


EVERY = {f"{TENANT}/{GROUP}", f"{TENANT}/db", f"{OTHER}/{GROUP}"}


@pytest.mark.parametrize(
    ("change", "looked_at"),
    [
        (override, {f"{TENANT}/{GROUP}"}),
        (sleep, {f"{TENANT}/{GROUP}", f"{TENANT}/db"}),
        (frozen(f"tenant/{TENANT}/group/db"), {f"{TENANT}/db"}),
        (frozen(f"tenant/{OTHER}"), {f"{OTHER}/{GROUP}"}),
        (frozen("tenant/nobody"), set()),
        (frozen(""), EVERY),
    ],
    ids=["group", "tenant", "freeze-group", "freeze-tenant", "freeze-elsewhere", "freeze-everywhere"],
)
async def test_a_change_concerns_the_groups_at_and_below_its_scope(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Rig], Awaitable[object]],
    looked_at: set[str],
) -> None:
    document = wanted(0)
    groups = document["groups"]
    groups[TENANT]["db"] = groups[TENANT][GROUP]
    groups[OTHER] = {GROUP: groups[TENANT][GROUP]}
    async with rig(tmp_path, document) as place:
        await place.advance()
        found: set[str] = set()
        reconciler = place.machinery.controller.reconciler
        enqueue = reconciler.enqueue

        def note(key: str, after_seconds: float = 0.0) -> None:
            found.add(key)
            enqueue(key, after_seconds)

        monkeypatch.setattr(reconciler, "enqueue", note)
        await change(place)
        await place.idle()
        assert found == looked_at
