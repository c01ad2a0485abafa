"""Watches of what is not stored: groups, providers, tokens, servers and the audit log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.fleet.resources_rig import ResourcesRig, WatchReader, resources_rig, watched
from support.fleet.started_domains import started_domains
from support.instances.instances_lab import TENANT

from fleetplane.domains.gpus.kinds import PROVIDER_LABEL
from fleetplane.domains.gpus.server import BLUEPRINT as GPUS
from fleetplane.domains.instances.kinds import GROUP, GroupOverride
from fleetplane.domains.instances.server import BLUEPRINT as INSTANCES
from fleetplane.fleet.resources import computed

SCOPE = f"tenant/{TENANT}"
KINDS = "groups,providers,tokens,servers,gpus"


@pytest_asyncio.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ResourcesRig]:
    monkeypatch.setattr(computed, "LOOK_SECONDS", 0.05)
    async with resources_rig(tmp_path, (GPUS, INSTANCES), started=started_domains(tmp_path)) as made:
        yield made


async def scaled(rig: ResourcesRig, size: int) -> None:
    await rig.put(GROUP, SCOPE, "workers", spec=GroupOverride(size=size))


async def told(reader: WatchReader, word: str, kind: str, name: str) -> tuple[str, Any]:
    """The id and the object of the next event of a type about an object."""
    async with asyncio.timeout(60):
        while True:
            found, mark, data = await reader.next()
            assert found, f"the watch ended before {word} {kind} {name}"
            if (found, data.get("kind"), data.get("metadata", {}).get("name")) == (word, kind, name):
                return mark, data


async def test_one_stream_tells_what_is_stored_and_what_is_computed(rig: ResourcesRig) -> None:
    owner = await rig.token("owner", "owner", "admin", "viewer")
    async with watched(rig, owner, of=KINDS) as reader:
        begun = await reader.until("bookmark")
        assert ("added", "workers") in begun
        assert ("added", "owner") in begun
        await scaled(rig, 5)
        mark, group = await told(reader, "modified", "group", "workers")
        assert (group["spec"]["size"], int(mark) >= rig.store.revision) == (5, True)
        await rig.token("robot", "viewer")
        await told(reader, "added", "token", "robot")
        await rig.put(GROUP, SCOPE, "mine", spec=GroupOverride(template="worker", size=1))
        await told(reader, "added", "group", "mine")
        await rig.gpu("g1", **{PROVIDER_LABEL: "nvml"})
        await told(reader, "added", "provider", "nvml")
        await rig.remove_gpu("g1")
        await told(reader, "deleted", "provider", "nvml")
        await rig.remove(GROUP, SCOPE, "mine")
        await told(reader, "deleted", "group", "mine")
        await rig.kernel.operators.tokens.revoke("robot", actor="tester")
        await told(reader, "deleted", "token", "robot")
    assert rig.api.watching.streams == 0


async def test_a_watch_that_goes_on_misses_nothing_of_what_is_computed(rig: ResourcesRig) -> None:
    owner = await rig.token("owner", "owner", "viewer")
    await rig.put(GROUP, SCOPE, "mine", spec=GroupOverride(template="worker", size=1))
    await rig.gpu("past the beginning")
    async with watched(rig, owner, of="groups") as reader:
        await reader.until("bookmark")
        await scaled(rig, 3)
        mark, _ = await told(reader, "modified", "group", "workers")
    # Nobody watches meanwhile.
    await rig.remove(GROUP, SCOPE, "mine")
    await scaled(rig, 4)
    async with watched(rig, owner, of="groups,gpus", after=mark) as reader:
        seen = {}
        while True:
            word, _, data = await reader.next()
            if word == "bookmark":
                break
            seen[data["metadata"]["name"]] = (word, data["spec"].get("size"))
        assert seen == {"mine": ("deleted", 1), "workers": ("modified", 4)}
        await scaled(rig, 6)
        assert (await told(reader, "modified", "group", "workers"))[1]["spec"]["size"] == 6
    # What was gone before this server began to look, nobody knows.
    for after in (str(rig.api.observations.floor), "0"):
        async with watched(rig, owner, of="groups", after=after) as reader:
            assert (await reader.next())[0] == "compacted"


async def test_a_slow_reader_is_told_everything_again(
    rig: ResourcesRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computed, "KEPT_CHANGES", 2)
    owner = await rig.token("owner", "owner", "viewer")
    async with watched(rig, owner, of="groups") as reader:
        await reader.until("bookmark")
        for size in range(10, 16):
            await scaled(rig, size)
            rig.api.observations.look()
        group: dict[str, Any] = {}
        async with asyncio.timeout(60):
            while group.get("spec", {}).get("size") != 15:
                _, group = await told(reader, "modified", "group", "workers")


async def test_strangers_are_told_nothing_and_each_only_what_is_theirs(rig: ResourcesRig) -> None:
    stranger = await rig.token("stranger", "viewer", tenant="other")
    viewer = await rig.token("viewer", "viewer", tenant=TENANT)
    assert (await rig.get("/watch", stranger, of="tokens")).status_code == 403
    async with watched(rig, stranger, of="groups") as theirs, watched(rig, viewer, of="groups") as own:
        assert await theirs.until("bookmark") == []
        assert await own.until("bookmark") == [("added", "workers")]
        await scaled(rig, 7)
        await told(own, "modified", "group", "workers")
        await rig.put(GROUP, "tenant/other", "x", spec=GroupOverride(template="worker", size=1))
        await rig.remove(GROUP, "tenant/other", "x")
        word, _, _ = await theirs.next()
        assert word == "bookmark"


async def test_the_audit_log_is_followed_from_any_revision_without_loss(rig: ResourcesRig) -> None:
    auditor = await rig.token("eye", "fleet.auditor", "gpus.viewer")
    first = await rig.gpu("g1")
    async with watched(rig, auditor, of="audit-entries,gpus") as reader:
        assert await reader.until("bookmark") == [("added", "g1")]
        await rig.gpu("g2")
        await rig.token("robot", "gpus.viewer")  # changes no revision
        await rig.gpu("g3")
        entries: list[Any] = []
        async with asyncio.timeout(60):
            while len(entries) < 3:
                word, mark, data = await reader.next()
                if data.get("kind") == "audit-entry":
                    assert word == "added"
                    entries.append((int(mark), data))
    changed = [[one["name"] for one in data["spec"]["changes"]] for _, data in entries]
    assert changed == [["g2"], ["name=robot", "token/robot"], ["g3"]]
    # Whatever was the last that was seen, nothing after it is missing.
    numbers = [int(data["metadata"]["name"]) for _, data in entries]
    for after, number in zip((first, *(mark for mark, _ in entries)), (numbers[0], *numbers), strict=True):
        async with watched(rig, auditor, of="audit-entries", after=str(after)) as reader:
            seen: list[int] = []
            async with asyncio.timeout(60):
                while numbers[-1] not in seen:
                    word, _, data = await reader.next()
                    assert word in ("added", "bookmark")
                    seen += [int(data["metadata"]["name"])] if word == "added" else []
        assert seen == list(range(seen[0], numbers[-1] + 1))
        assert seen[0] <= number
    viewer = await rig.token("viewer", "viewer")
    assert (await rig.get("/watch", viewer, of="audit-entries")).status_code == 403
    async with watched(rig, auditor, of="*") as reader:
        assert ("added", "g3") in await reader.until("bookmark")
