"""Sessions and controllers show their numbers to Prometheus."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.reconcile import PassResult, Reconciler
from fleetplane.kernel.reconcile.reconciler import ReconcileCollector
from fleetplane.kernel.sessions import Session, SessionCollector, Sessions
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.sim.clock import VirtualClock


def scrape(registry: CollectorRegistry) -> dict[str, float]:
    lines = generate_latest(registry).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


async def test_the_numbers_of_sessions_are_shown_by_domain() -> None:
    sessions, registry = Sessions(), CollectorRegistry()
    registry.register(SessionCollector(sessions, domain="lab"))
    first: Session[None] = sessions.open("agent", "files", limit=1)
    assert first.offer(None)
    assert not first.offer(None)
    second: Session[None] = sessions.open("agent", "files", limit=1)
    second.offer(None)

    assert scrape(registry) == {
        'fleetplane_sessions_open{domain="lab"}': 1,
        'fleetplane_sessions_queued{domain="lab"}': 1,
        'fleetplane_sessions_opened_total{domain="lab"}': 2,
        'fleetplane_sessions_superseded_total{domain="lab"}': 1,
        'fleetplane_sessions_revoked_total{domain="lab"}': 0,
        'fleetplane_sessions_refused_total{domain="lab"}': 1,
    }


async def test_the_numbers_of_controllers_are_shown_by_name(tmp_path: Path) -> None:
    async def nothing(_key: str) -> PassResult:
        return PassResult()

    clock, registry = VirtualClock(), CollectorRegistry()
    settings = StoreSettings(path=tmp_path / "state.db")
    controllers: list[Reconciler] = []
    registry.register(ReconcileCollector(lambda: controllers))
    assert scrape(registry) == {}
    async with Store.open(settings, kinds=KERNEL_KINDS, clock=clock) as store:
        controllers.append(Reconciler("groups", nothing, clock=clock, store=store))
        controllers[0].enqueue("a")
        controllers[0].enqueue("b")

        assert scrape(registry) == {
            'fleetplane_reconcile_queued{controller="groups"}': 2,
            'fleetplane_reconcile_running{controller="groups"}': 0,
            'fleetplane_reconcile_passes_total{controller="groups"}': 0,
            'fleetplane_reconcile_failures_total{controller="groups"}': 0,
            'fleetplane_reconcile_leases_lost_total{controller="groups"}': 0,
        }
