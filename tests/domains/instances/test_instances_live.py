"""The stream that pages stay live by."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from support.instances.instances_lab import TENANT, until
from support.instances.instances_web_rig import OTHER, SECONDS, Told, two_tenants, web

from fleetplane.domains.instances.kinds import HealthReport
from fleetplane.domains.instances.live import feed as live_feed
from fleetplane.domains.instances.live.feed import revision_of
from fleetplane.kernel.freeze import freeze, lift


def kinds(told: list[Told]) -> list[str]:
    return [one.kind for one in told]


def of(told: list[Told], kind: str) -> list[Any]:
    return [one.data for one in told if one.kind == kind]


async def test_a_new_reader_is_told_everything_and_then_what_changes(tmp_path: Path) -> None:
    async with web(tmp_path) as site:
        made = await site.provisioned(2)
        ada = await site.viewer()
        async with ada.follow() as following:
            first = await following.until("now")
            assert kinds(first)[0] == "reset"
            assert {one["id"] for one in of(first, "instance")} == {one.name for one in made}
            assert [group["name"] for group in of(first, "groups")[0]] == ["workers"]
            await site.change(made[0].name, registered_at_ns=time.time_ns())
            told = await following.until("group", lambda group: bool(group["ready"] == 1))
            assert [(one["id"], one["state"]) for one in of(told, "instance")] == [
                (made[0].name, "registered")
            ]


async def test_a_reader_that_comes_back_is_told_what_it_missed_and_nothing_else(tmp_path: Path) -> None:
    async with web(tmp_path) as site:
        made = await site.provisioned(2)
        ada = await site.viewer()
        async with ada.follow() as following:
            mark = (await following.until("now"))[-1].mark
        await site.change(made[1].name, last_error="lost its disk")
        await site.instances.purge(TENANT, made[0].name)
        async with ada.follow(mark) as following:
            told = await following.until("now")
            assert "reset" not in kinds(told)
            assert of(told, "instance_deleted") == [{"id": made[0].name}]
            by_id = {one["id"]: one for one in of(told, "instance")}
            assert by_id[made[1].name]["last_error"] == "lost its disk"
            assert int(told[-1].mark) > int(mark)
            assert len(of(told, "groups")) == 1  # whole: what became of them is not in the mark


async def test_a_reader_cut_off_after_any_instance_is_told_the_rest_and_nothing_twice(
    tmp_path: Path,
) -> None:
    async with web(tmp_path) as site:
        made = await site.provisioned(2)
        ada = await site.viewer()
        async with ada.follow() as following:
            mark = (await following.until("now"))[-1].mark
        for one in made:
            await site.change(one.name, last_error="lost its disk")
        async with ada.follow(mark) as following:
            whole = [one for one in await following.until("now") if one.kind == "instance"]
        ids = [one.data["id"] for one in whole]
        assert len(ids) >= 2
        for place, seen in enumerate(whole, 1):
            async with ada.follow(seen.mark) as following:
                told = await following.until("now")
                assert "reset" not in kinds(told)
                assert [rest["id"] for rest in of(told, "instance")] == ids[place:]


async def test_a_mark_outlives_the_server(tmp_path: Path) -> None:
    async with web(tmp_path) as site:
        made = await site.provisioned(2)
        ada = await site.viewer()
        async with ada.follow() as following:
            mark = (await following.until("now"))[-1].mark
        await site.change(made[0].name, last_error="while nobody looked")
        headers = ada.headers
    async with web(tmp_path) as site:
        ada.http, ada.headers = site.http, headers
        async with ada.follow(mark) as following:
            told = await following.until("now")
            assert "reset" not in kinds(told)
            assert made[0].name in {one["id"] for one in of(told, "instance")}


@pytest.mark.parametrize("mark", ["999999999", "nonsense", "12345678901234567890", "-1"])
async def test_a_mark_that_means_nothing_begins_anew(tmp_path: Path, mark: str) -> None:
    async with web(tmp_path) as site:
        await site.provisioned(2)
        async with (await site.viewer()).follow(mark) as following:
            assert kinds(await following.until("now"))[0] == "reset"


async def test_a_mark_older_than_what_is_kept_begins_anew(tmp_path: Path) -> None:
    async with web(tmp_path) as site:
        made = await site.provisioned(2)
        store = site.lab.kernel.store
        for number in range(3):
            await site.change(made[0].name, last_error=str(number))
        await store.compact(store.revision)
        async with (await site.viewer()).follow("1") as following:
            told = await following.until("now")
            assert kinds(told)[0] == "reset"
            assert len(of(told, "instance")) >= 2


async def test_nothing_of_another_tenant_is_told(tmp_path: Path) -> None:
    async with web(tmp_path) as site:
        theirs = (await site.provisioned(1, tenant=OTHER))[0]
        ours = (await site.provisioned(2))[0]
        async with (await site.viewer()).follow() as following:
            told = await following.until("now")
            site.lab.domain._errors.tell(OTHER, "workers", theirs.name, "theirs")
            await site.instances.note_error(OTHER, theirs.name, "theirs")
            await site.instances.note_error(TENANT, ours.name, "ours")
            told += await following.until("now")
            assert theirs.name not in str(told)
            assert "theirs" not in str(told)
            assert {group["tenant"] for group in of(told, "groups")[0]} == {TENANT}


async def test_what_is_not_in_the_records_of_instances_is_told_too(tmp_path: Path) -> None:
    async with web(tmp_path) as site:
        name = (await site.provisioned(2))[0].name
        await site.change(name, registered_at_ns=time.time_ns())
        async with (await site.viewer()).follow() as following:
            await following.until("now")
            store, scope = site.lab.kernel.store, f"tenant/{TENANT}"
            await freeze(store, scope, reason="audit week", actor="grace")
            frozen = (await following.until("group", lambda group: bool(group["frozen"])))[-1].data["frozen"]
            assert frozen["reason"] == "audit week"
            await lift(store, scope, actor="grace")
            await following.until("group", lambda group: group["frozen"] is None)
            site.lab.domain._reports.take(HealthReport(instance=name, files={"app.env": "no space"}))
            await following.until("health", lambda health: health.get(name) == "failing")
            site.lab.domain._errors.tell(TENANT, "workers", name, "trouble")
            await following.until("errors", lambda told: [one["error"] for one in told] == ["trouble"])


async def test_a_group_that_goes_is_told(tmp_path: Path) -> None:
    async with web(tmp_path) as site:
        await site.provisioned(2)
        async with (await site.viewer()).follow() as following:
            await following.until("now")
            wanted = two_tenants()
            wanted["groups"][TENANT] = {"others": {"template": "worker", "size": 0}}
            await site.lab.configure(wanted)
            await site.lab.domain._groups.refresh()
            told = await following.until("group", lambda group: bool(group["name"] == "others"))
            assert of(told, "group_deleted") == [{"name": "workers"}]


async def test_a_revoked_token_reads_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "BEAT_SECONDS", 0.0)
    async with web(tmp_path) as site:
        name = (await site.provisioned(2))[0].name
        ada = await site.viewer("ada")
        async with ada.follow() as following:
            await following.until("now")
            await site.lab.kernel.operators.tokens.revoke("ada", actor="test")
            await site.change(name, last_error="not for them")
            assert "not for them" not in str(await following.rest())
        assert (await ada.ask("/events")).status_code == 401


async def test_readers_who_left_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "BEAT_SECONDS", 0.0)
    monkeypatch.setattr(live_feed, "TICK_SECONDS", 0.1)
    async with web(tmp_path) as site:
        feed = site.lab.domain.rest.feed
        async with (await site.viewer()).follow() as following:
            await following.until("now")
            assert feed.open_streams == 1
        await until(lambda: feed.open_streams == 0)


async def test_streams_end_with_the_server(tmp_path: Path) -> None:
    async with web(tmp_path) as site:
        ada = await site.viewer()
        async with ada.follow() as following:
            await following.until("now")
            site.lab.domain.drain()
            await following.rest()
        assert site.lab.domain.rest.feed.open_streams == 0
        assert (await ada.ask("/events")).status_code == 503


async def test_a_stream_whose_snapshot_is_sent_while_the_server_stops_ends_too(tmp_path: Path) -> None:
    async with web(tmp_path) as site:
        feed = site.lab.domain.rest.feed
        chunks = feed.follow(TENANT, mark="", check=lambda: None)
        assert b"reset" in await anext(chunks)
        feed.close()
        async with asyncio.timeout(SECONDS):
            rest = b"".join([chunk async for chunk in chunks])
        assert b"event: now" not in rest
        assert feed.open_streams == 0


async def test_one_tenant_cannot_open_streams_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_feed, "STREAMS_LIMIT", 1)
    async with web(tmp_path) as site:
        ada = await site.viewer()
        bob = await site.viewer("bob", tenant=OTHER)
        async with ada.follow() as following:
            await following.until("now")
            assert (await ada.ask("/events")).status_code == 429
            async with bob.follow() as theirs:
                await theirs.until("now")


def test_marks_are_revisions_and_nothing_else() -> None:
    assert [revision_of(text) for text in ("7", "", "-7", "7.0", "٧", "1" * 19)] == [7, *[None] * 5]
