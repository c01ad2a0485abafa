"""What one tenant or agent can make all of them hold in memory: output of runs, selectors, freezes."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from fleetplane.domains.edge.runs import selectors as edge_selectors
from fleetplane.fleet import freeze as freezing
from fleetplane.fleet import selectors
from fleetplane.fleet.freeze import Freezable, FreezeSwitch
from fleetplane.fleet.runs import feed as feeds
from fleetplane.fleet.runs.feed import RunFeed, RunFeeds
from fleetplane.fleet.runs.targets import RunTarget
from fleetplane.kernel.errors import InvalidArgument, ResourceExhausted
from fleetplane.kernel.freeze import FREEZE
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.sim.clock import VirtualClock


def test_output_of_all_runs_together_is_bounded_and_who_prints_most_loses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feeds, "ALL_BYTES_LIMIT", 1024 * 1024)
    kept = RunFeeds(VirtualClock())
    quiet, *loud = [kept.open(str(number)) for number in range(11)]
    kept.add_output("0", "a", "stdout", b"q" * feeds.GATHERED_BYTES)
    for place in range(1, len(loud) + 1):
        for _ in range(10):
            kept.add_output(str(place), "a", "stdout", b"x" * feeds.GATHERED_BYTES)
    assert sum(feed.held for feed in (quiet, *loud)) <= 1024 * 1024
    assert (quiet.held, quiet.dropped) == (feeds.GATHERED_BYTES, 0)
    assert any(feed.dropped for feed in loud)
    for feed in (quiet, *loud):
        feed.end()
    for number in range(feeds.RUNS_LIMIT + 1):
        kept.open(f"later-{number}")
    kept.add_output("later-0", "a", "stdout", b"y" * feeds.GATHERED_BYTES)
    last = kept.get("later-0")
    assert last is not None
    assert last.dropped == 0, "what is forgotten takes no room"


def test_output_that_is_nothing_is_not_gathered() -> None:
    feed = RunFeed()
    tracemalloc.start()
    try:
        for _ in range(200_000):
            feed.add_output("a", "stdout", b"")
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 100_000


def test_remembered_selectors_are_bounded_in_bytes() -> None:
    def long_one(number: int) -> str:
        return ",".join(f"k{place % 90}=v{number}" for place in range(170))[: selectors.SELECTOR_LIMIT]

    tracemalloc.start()
    try:
        for number in range(400):
            assert selectors.parse(long_one(number)).requirements
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 16 * 1024 * 1024, held
    assert selectors.parse("a=b") is selectors.parse("a=b")
    assert selectors.parse(long_one(999)) is selectors.parse(long_one(999))


def test_a_selector_in_a_request_has_only_so_many_requirements() -> None:
    most = ",".join(f"!k{number}" for number in range(selectors.REQUIREMENTS_LIMIT))
    RunTarget(selector=most).check()
    assert edge_selectors.parse(f"where:{most}").where == most
    with pytest.raises(InvalidArgument) as refused:
        RunTarget(selector=f"{most},x").check()
    assert refused.value.field == "target.selector"
    with pytest.raises(InvalidArgument):
        edge_selectors.parse(f"where:{most},x")
    with pytest.raises(InvalidArgument):
        edge_selectors.from_json({"where": f"{most},x"})


async def test_one_tenant_cannot_set_freezes_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freezing, "FREEZES_LIMIT", 3)
    clock = VirtualClock()
    shapes = Freezable(stops="all", scopes=("tenant/{tenant}", "tenant/{tenant}/daemon/{daemon}"))
    async with Store.open(StoreSettings(path=tmp_path / "s.db"), kinds=(FREEZE,), clock=clock) as store:
        switch = FreezeSwitch(store, clock, {"edge": shapes})

        async def stop(scope: str) -> None:
            await switch.freeze(scope, domains=["edge"], reason="audit", actor="ada", expires_at_ns=None)

        for number in range(3):
            await stop(f"tenant/acme/daemon/{number}")
        with pytest.raises(ResourceExhausted):
            await stop("tenant/acme/daemon/3")
        await stop("tenant/acme/daemon/1")  # for longer, or for another reason
        await stop("tenant/acme")  # and the whole tenant, which is one more
        await stop("tenant/acme2/daemon/1")
        await stop("")
        await switch.lift("tenant/acme/daemon/0", domains=["edge"], actor="ada")
        await switch.lift("tenant/acme", domains=["edge"], actor="ada")
        await stop("tenant/acme/daemon/3")
