"""Watches of `/apis/v1`: snapshot, changes, resuming, scopes and limits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.fleet.resources_rig import EDGE_ADMIN, VIEWER, ResourcesRig, WatchReader, resources_rig, watched

from fleetplane.fleet.resources import watching
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.telemetry import Point, Telemetry


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[ResourcesRig]:
    async with resources_rig(tmp_path) as made:
        yield made


async def test_a_watch_begins_with_what_there_is_and_goes_on_with_changes_of_every_kind(
    rig: ResourcesRig,
) -> None:
    await rig.gpu("g1")
    await rig.node("acme", "n1")
    token = await rig.token("t", VIEWER, EDGE_ADMIN)
    async with watched(rig, token, of="gpus,edge-nodes@/tenants/acme") as reader:
        assert await reader.until("bookmark") == [("added", "g1"), ("added", "n1")]
        revisions = [
            await rig.gpu("g2"),
            await rig.node("acme", "n2"),
            await rig.gpu("g1", "False"),
        ]
        await rig.node("other", "n3")
        await rig.remove_gpu("g2")
        seen = [await reader.next() for _ in range(4)]
    told = [(word, data["kind"], data["metadata"]["name"]) for word, _, data in seen]
    assert told == [
        ("added", "gpu", "g2"),
        ("added", "edge-node", "n2"),
        ("modified", "gpu", "g1"),
        ("deleted", "gpu", "g2"),
    ]
    assert [int(mark) for _, mark, _ in seen[:3]] == revisions
    assert seen[2][2]["status"]["health"] == "unhealthy"
    assert rig.api.watching.streams == 0


async def test_a_watch_goes_on_after_any_event_without_loss(rig: ResourcesRig) -> None:
    viewer = await rig.token("v", VIEWER)
    marks = [await rig.gpu(f"g{number}") for number in range(6)]
    for after, mark in enumerate(marks):
        async with watched(rig, viewer, of="gpus", after=str(mark)) as reader:
            last = await rig.gpu("last", "True" if after % 2 else "False")
            seen: list[tuple[str, str, Any]] = []
            while not seen or int(seen[-1][1]) < last:
                seen.append(await reader.next())
        names = [data["metadata"]["name"] for _, _, data in seen]
        assert [name for name in names if name != "last"] == [f"g{n}" for n in range(after + 1, 6)]


async def test_what_fell_off_the_ring_is_read_from_the_log(tmp_path: Path) -> None:
    async with resources_rig(tmp_path, ring_events=4) as rig:
        viewer = await rig.token("v", VIEWER)
        async with watched(rig, viewer, of="gpus") as reader:
            await reader.until("bookmark")
            for number in range(300):  # more than a chunk, and far more than the ring has
                await rig.gpu(f"g{number}")
            seen: list[str] = []
            while "g299" not in seen:
                word, _, data = await reader.next()
                assert word in ("added", "bookmark")
                seen += [data["metadata"]["name"]] if word == "added" else []
        assert seen == [f"g{number}" for number in range(300)]


async def test_a_revision_that_is_no_longer_kept_is_told_as_compacted(rig: ResourcesRig) -> None:
    viewer = await rig.token("v", VIEWER)
    old = await rig.gpu("g1")
    for number in range(5):
        await rig.gpu(f"h{number}")
    await rig.store.compact(rig.store.revision)
    for after in (str(old - 1), str(rig.store.revision + 1000)):
        if after == str(old - 1):
            rig.forget_ring()
        async with watched(rig, viewer, of="gpus", after=after) as reader:
            word, mark, data = await reader.next()
            assert (word, mark, data["reason"]) == ("compacted", "", "Compacted")
            assert (await reader.next())[0] == ""


async def test_what_leaves_the_selection_is_told_as_deleted_and_what_enters_it_as_added(
    rig: ResourcesRig,
) -> None:
    viewer = await rig.token("v", VIEWER)
    await rig.gpu("g1", rack="a")
    await rig.gpu("g2", rack="b")
    start = rig.store.revision
    async with watched(rig, viewer, of="gpus", labels="rack=a") as reader:
        assert await reader.until("bookmark") == [("added", "g1")]
        await rig.gpu("g1", rack="b")
        await rig.gpu("g2", rack="a")
        await rig.gpu("g2", "False", rack="a")
        seen = [await reader.next() for _ in range(3)]
    assert [(word, data["metadata"]["name"]) for word, _, data in seen] == [
        ("deleted", "g1"),
        ("added", "g2"),
        ("modified", "g2"),
    ]
    rig.forget_ring()
    async with watched(rig, viewer, of="gpus", labels="rack=a", after=str(start)) as reader:
        seen = [await reader.next() for _ in range(3)]
    assert [(word, data["metadata"]["name"]) for word, _, data in seen] == [
        ("deleted", "g1"),
        ("modified", "g2"),
        ("modified", "g2"),
    ]


async def test_a_tenant_is_told_nothing_of_another(rig: ResourcesRig) -> None:
    await rig.node("other", "o1")
    acme = await rig.token("a", EDGE_ADMIN, tenant="acme")
    async with watched(rig, acme, of="edge-nodes") as reader:
        assert await reader.until("bookmark") == []
        await rig.node("other", "o2")
        await rig.node("acme", "a1")
        assert (await reader.next())[2]["metadata"]["name"] == "a1"
    elsewhere = await rig.get("/watch", acme, of="edge-nodes@/tenants/other")
    assert (elsewhere.status_code, elsewhere.json()["reason"]) == (404, "NotFound")
    forbidden = await rig.get("/watch", acme, of="gpus@/tenants/acme")
    assert forbidden.status_code == 403
    async with watched(rig, acme, of="*") as reader:
        node, event = sorted(await reader.until("bookmark"), reverse=True)
        assert node == ("added", "a1")
        shown = await rig.get(f"/events/{event[1]}", acme)
        assert shown.json()["spec"]["about"] == "edge-nodes/a1"


async def test_a_watch_ends_when_its_credential_is_revoked(rig: ResourcesRig) -> None:
    viewer = await rig.token("v", VIEWER)
    async with watched(rig, viewer, of="gpus") as reader:
        await reader.until("bookmark")
        await rig.kernel.revocations.revoke(principal="token/v", reason="lost", actor="tester")
        words = [word async for word in _words(reader)]
    assert set(words) <= {"bookmark"}
    assert (await rig.get("/watch", viewer, of="gpus")).status_code == 401


async def test_a_reader_that_stalls_costs_one_chunk_and_nobody_else_waits(rig: ResourcesRig) -> None:
    viewer = await rig.token("v", VIEWER)
    async with watched(rig, viewer, of="gpus") as stalled, watched(rig, viewer, of="gpus") as reader:
        await reader.until("bookmark")
        for number in range(50):
            await rig.gpu("g", "True" if number % 2 else "False")
        last = 0
        while last < rig.store.revision:
            last = int((await reader.next())[1])
        assert stalled._chunks.qsize() == 0
        assert stalled.status == 200


async def test_too_much_at_once_is_refused(rig: ResourcesRig) -> None:
    viewer = await rig.token("v", VIEWER)
    many = ",".join(["gpus"] * 5000)
    for query, field in (
        ({"of": many}, "of"),
        ({"of": ""}, "of"),
        ({"of": "gpus@nowhere"}, "of"),
        ({"of": "gpus", "after": "-1"}, "after"),
        ({"of": "gpus", "after": "9" * 40}, "after"),
        ({"of": "gpus", "labels": "((("}, "labels"),
        ({"of": "gpus", "form": "poem"}, "form"),
    ):
        answer = await rig.get("/watch", viewer, **query)
        assert (answer.status_code, answer.json()["field"]) == (400, field)
    unknown = await rig.get("/watch", viewer, of="gpuz")
    assert (unknown.status_code, unknown.json()["hint"]) == (404, "did you mean gpu, gpus?")
    rig.api.watching._open["token/v"] = watching.STREAMS_OF_CALLER
    crowded = await rig.get("/watch", viewer, of="gpus")
    assert (crowded.status_code, crowded.json()["reason"]) == (429, "ResourceExhausted")


async def test_rows_of_tables_can_be_watched_too(rig: ResourcesRig) -> None:
    await rig.gpu("g1", "False")
    async with watched(rig, await rig.token("v", VIEWER), of="gpus", form="table") as reader:
        _, _, row = await reader.next()
        assert row["cells"][:3] == ["g1", "unhealthy", "Said"]
        assert row["object"]["resource"] == "gpus"


async def test_rows_can_carry_their_objects_for_those_who_show_both(rig: ResourcesRig) -> None:
    await rig.gpu("g1", role="web")
    token = await rig.token("v", VIEWER)
    async with watched(rig, token, of="gpus,providers", form="full") as reader:
        word, _, row = await reader.next()
        assert (word, row["cells"][0], row["object"]["name"]) == ("added", "g1", "g1")
        assert row["value"] == (await rig.get("/gpus/g1", token)).json()
        await reader.until("bookmark")
        revision = await rig.gpu("g1", "False")
        word, mark, row = await reader.next()
        assert (word, mark, row["value"]["conditions"][0]["status"]) == ("modified", str(revision), "False")
        await rig.remove_gpu("g1")
        word, _, row = await reader.next()
        assert (word, row["object"]["name"]) == ("deleted", "g1")


async def test_watches_end_when_their_server_goes_away_and_go_on_elsewhere(rig: ResourcesRig) -> None:
    viewer = await rig.token("v", VIEWER)
    await rig.gpu("g1")
    async with watched(rig, viewer, of="gpus") as reader:
        assert await reader.until("bookmark") == [("added", "g1")]
        rig.api.watching.end()
        words = [word async for word in _words(reader)]
    assert set(words) <= {"bookmark"}
    assert rig.api.watching.streams == 0


async def _words(reader: WatchReader) -> AsyncIterator[str]:
    """Types of events, until the watch ends."""
    while word := (await reader.next())[0]:
        yield word


async def test_who_asks_is_told_that_something_was_measured_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(watching, "MEASURED_SECONDS", 3600.0)
    clock = SystemClock()

    def point(value: float) -> Point:
        return Point(scope="tenant/acme", series="cpu", source="n1", at_ns=clock.now_ns(), value=value)

    async with (
        Telemetry.open(tmp_path / "telemetry.db", clock) as telemetry,
        resources_rig(tmp_path, telemetry=telemetry) as rig,
    ):
        viewer = await rig.token("v", VIEWER, EDGE_ADMIN)
        await rig.node("acme", "n1")
        telemetry.offer(points=[point(1.0)])
        await telemetry.flush()
        async with (
            watched(rig, viewer, of="gpus", measured="1") as asking,
            watched(rig, viewer, of="gpus") as other,
        ):
            await asking.until("bookmark")
            await other.until("bookmark")
            telemetry.offer(points=[point(2.0)])
            word, mark, data = await asking.next()
            assert (word, mark, data) == ("measured", "", {}), "what was there before is no news"
            telemetry.offer(points=[point(3.0)])
            await telemetry.flush()
            await rig.gpu("g1")
            assert [(await one.next())[0] for one in (asking, other)] == ["added", "added"], (
                "now and then only"
            )


async def test_a_word_that_is_neither_yes_nor_no_is_refused(rig: ResourcesRig) -> None:
    answer = await rig.get("/watch", await rig.token("v", VIEWER), of="gpus", measured="perhaps")
    assert (answer.status_code, answer.json()["field"]) == (400, "measured"), answer.text
