"""Whether a cluster kept its promises under load, whatever happened to it meanwhile."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from contextlib import suppress

import httpx
from support.cluster.load import (
    AGAIN_SECONDS,
    BEGINNING,
    GROUPS,
    NOT_NOW,
    SCOPE,
    Load,
    clients,
    group,
)
from support.cluster.members import DEADLINE_SECONDS, ServerCluster
from support.shared.linearizability import check

from fleetplane.domains.edge.nodes.groups import EDGE_GROUP
from fleetplane.kernel.store.engines.postgres import PostgresEngine
from fleetplane.kernel.store.servers.level import FIRST, Levels

ANY_RELEASE = Levels(FIRST, 1000)


async def keeps_promises(load: Load) -> None:
    """Nothing acknowledged is lost, numbers have no gaps, watchers have each event once, reads are
    linearizable, and the audit log is what was written."""
    assert not load.wrong, load.wrong[:10]
    assert load.planned > 0
    assert load.plans_left <= load.keyed_elsewhere + 1, "a key made a plan that nobody was told of"
    logged = await _logged(load)
    revisions = [revision for revision, _ in logged]
    assert revisions == sorted(set(revisions))
    kept = set(revisions)
    lost = {name for name, revision in load.acknowledged.items() if revision not in kept}
    assert not lost, f"acknowledged and not in the log: {sorted(lost)[:10]}"
    for server, names in load.listed.items():
        assert load.acknowledged.keys() <= names, f"{server} lacks what was acknowledged"
        made = {name for name in names if name.startswith("w")}
        assert made <= load.acknowledged.keys() | load.unknown
    for number, told in enumerate(load.watchers):
        # What a caller asked for who was cancelled at the end may come after the last that was waited for.
        wanted = [one for one in logged if told.began_after < one[0] <= told.last]
        heard = [(revision, kind) for revision, kind, _ in told.events]
        assert heard == wanted, f"watcher {number}: {_difference(heard, wanted)}"
        by_name = {name: revision for revision, kind, name in told.events if kind == "added"}
        for name, revision in load.acknowledged.items():
            assert revision <= told.began_after or by_name[name] == revision
    verdict = check(load.history, BEGINNING)
    assert verdict.linearizable, str(verdict)
    code, out, err = await load.cluster.run(
        "audit", "verify", "--archived-elsewhere", "--data-dir", str(load.cluster.members[0].folder)
    )
    assert code == 0, out + err


async def _logged(load: Load) -> list[tuple[int, str]]:
    """Revision and type of each event of groups, past all servers; numbers of groups have no gaps."""
    engine = await PostgresEngine.open(load.cluster.url, levels=ANY_RELEASE)
    found: list[tuple[int, str]] = []
    number = term = 0
    try:
        while (page := await engine.groups(after=number, limit=500)).groups:
            for group in page.groups:
                assert group.mark.number == number + 1
                number = group.mark.number
                if group.author.term:
                    assert group.author.term >= term, "of one who has the seat no more"
                    term = group.author.term
                found += [
                    (row.revision, row.type.lower()) for row in group.log if row.kind == EDGE_GROUP.name
                ]
    finally:
        await engine.close()
    return found


def _difference(heard: list[tuple[int, str]], wanted: list[tuple[int, str]]) -> str:
    missed, extra = sorted(set(wanted) - set(heard)), sorted(set(heard) - set(wanted))
    twice = sorted({one for one in heard if heard.count(one) > 1})[:10]
    return f"missed {missed[:10]} of {len(wanted)}, not in the log {extra[:10]}, twice {twice}"


async def made_once(cluster: ServerCluster) -> None:
    """Of servers that begin at once, one makes keys and authorities; the others have them from it."""
    engine = await PostgresEngine.open(cluster.url)
    try:
        rows = [row async for page in engine.audit() for row in page]
    finally:
        await engine.close()
    made = Counter(
        name
        for row in rows
        for operation, _kind, _scope, name, *_ in json.loads(row.entry)[5]
        if operation == "secret.put"
    )
    assert {"authority", "signing/people/login"} <= made.keys()
    assert set(made.values()) == {1}, made


async def revoked_everywhere(load: Load) -> float:
    """Who is told at one server that a token is revoked finds it refused at all others, and watches end.

    The seconds until the last watch had ended.
    """
    cluster = load.cluster
    bearer = await cluster.token("leaver", role="viewer")
    async with clients(cluster, bearer) as leaver, asyncio.TaskGroup() as tasks:
        watching = [tasks.create_task(_watch_until_refused(one)) for one in leaver.values()]
        for one in leaver.values():
            while (await _status(one)) != 200:
                await asyncio.sleep(AGAIN_SECONDS)
        somewhere = load.random.choice(cluster.members)
        gone = await load.insist(somewhere, "DELETE", "/apis/v1/people/tokens/leaver")
        told = time.monotonic()
        assert gone.status_code in {200, 204, 404}, gone.text  # the last if an answer was lost
        for one in leaver.values():
            while (status := await _status(one)) != 401:
                assert status in {None, *NOT_NOW}, "a revoked token is good elsewhere"
                await asyncio.sleep(AGAIN_SECONDS)
        async with asyncio.timeout(DEADLINE_SECONDS):
            await asyncio.gather(*watching)
        return time.monotonic() - told


async def _status(client: httpx.AsyncClient) -> int | None:
    try:
        return (await client.get(f"{GROUPS}?limit=1")).status_code
    except (httpx.TransportError, httpx.StreamError):
        return None


async def _watch_until_refused(client: httpx.AsyncClient) -> None:
    while True:
        with suppress(httpx.TransportError, httpx.StreamError):
            async with client.stream("GET", "/apis/v1/watch?of=edge-groups") as stream:
                if stream.status_code == 401:
                    return
                async for _ in stream.aiter_raw():
                    pass
        await asyncio.sleep(AGAIN_SECONDS)


async def keys_hold_everywhere(load: Load, rounds: int) -> None:
    """A request with one idempotency key, sent to all servers at once, is carried out once."""
    for number in range(rounds):
        name = f"keyed{number}"
        body = {"objects": [group(name, "linux")], "scope": SCOPE}
        key = f"key-{number}-{load.random.random()}"
        answers = await asyncio.gather(
            *(
                load.insist(one, "POST", "/apis/v1/plans", body, idempotency_key=key)
                for one in load.cluster.members
            )
        )
        made = [one for one in answers if one.status_code == 201]
        assert {one.status_code for one in answers} <= {201, 409}, [one.text for one in answers]
        assert len({one.json()["id"] for one in made}) == 1, [one.text for one in answers]
        load.keyed_elsewhere += 1
