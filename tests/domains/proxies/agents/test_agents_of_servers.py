"""What servers on one database tell each other about agents: sessions, answers, challenges."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from support.shared.virtual_loop import run
from support.shared.virtual_servers import virtual_servers

from fleetplane.domains.proxies import wire
from fleetplane.domains.proxies.acme.issuers import AccountVault, AcmeAccount
from fleetplane.domains.proxies.acme.responder import CHALLENGE, ChallengeBoard, ShownChallenges
from fleetplane.domains.proxies.agents import commands
from fleetplane.domains.proxies.agents.commands import AgentCommander, CommandAnswers
from fleetplane.domains.proxies.agents.live import CHANNEL, AgentPresences, AgentStanding, LiveAgent
from fleetplane.domains.proxies.agents.ports import AgentVerb
from fleetplane.domains.proxies.agents.records import AgentRoster
from fleetplane.domains.proxies.kinds.records import (
    AGENT,
    WORKSPACE,
    Agent,
    AgentSpec,
    AgentStatus,
    WorkspaceSpec,
    workspace_scope,
)
from fleetplane.domains.proxies.kinds.values import AgentState
from fleetplane.domains.proxies.rules.deployment import WantedVersion
from fleetplane.domains.proxies.server import BLUEPRINT
from fleetplane.kernel.commands import Command
from fleetplane.kernel.freeze import FREEZE, FreezeSpec
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.presence import LastSeen, PresenceRegistry
from fleetplane.kernel.sessions import Sessions
from fleetplane.kernel.store import Draft, Store, StoreSettings
from fleetplane.sim.clock import VirtualClock

SCOPE = workspace_scope("o", "w")
OFFLINE = AgentStanding(state=AgentState.OFFLINE, reasons=("stream_closed",))
DEGRADED = AgentStanding(state=AgentState.DEGRADED, reasons=("NGINX is not running",))


def _both(work: Callable[[Store, Store], Awaitable[None]]) -> None:
    async def servers() -> None:
        async with virtual_servers([*KERNEL_KINDS, *BLUEPRINT.kinds]) as servers:
            stores = [(await servers.start(name)).store for name in ("one", "two")]
            await work(*stores)

    run(servers())


@asynccontextmanager
async def _whereabouts(store: Store) -> AsyncIterator[PresenceRegistry]:
    where = PresenceRegistry(store, store.clock, channel=CHANNEL)
    task = asyncio.create_task(where.run_here())
    try:
        yield where
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _agent(store: Store) -> Agent:
    def change(draft: Draft) -> Agent:
        draft.put(WORKSPACE, SCOPE, "w", spec=WorkspaceSpec(name="Ws", slug="ws"))
        status = AgentStatus(state=AgentState.ONLINE)
        return draft.put(AGENT, SCOPE, "a", spec=AgentSpec(name="web-1"), status=status)

    touches = [WORKSPACE.key(SCOPE, "w"), AGENT.key(SCOPE, "a")]
    return (await store.transact(change, actor="test", action="test", touches=touches)).value


def _live(agent: Agent, place: int) -> LiveAgent:
    session = cast("Any", None)  # nothing is sent
    return LiveAgent(agent=agent.name, session=session, since_ns=1, heard_ns=1, record=agent, place=place)


def _state(store: Store) -> AgentState:
    found = store.get(AGENT, SCOPE, "a")
    assert found is not None
    assert found.status is not None
    return found.status.state


def test_only_the_session_that_presence_names_writes_about_an_agent() -> None:
    async def work(one: Store, two: Store) -> None:
        agent = await _agent(one)
        await two.confirmed()
        async with _whereabouts(one) as here, _whereabouts(two) as there:
            first = _live(agent, await here.enter("a"))
            second = _live(agent, await there.enter("a"))
            assert first.place < second.place
            # Its older stream ended, and its server does not know better yet.
            for standing in (DEGRADED, OFFLINE):
                await AgentRoster(one, here).note_standing(agent, standing, first)
                await one.confirmed()
                assert _state(one) is AgentState.ONLINE
            await AgentRoster(two, there).note_standing(agent, DEGRADED, second)
            assert _state(two) is AgentState.DEGRADED
            # It is called offline once it has no session anywhere, by whichever server.
            assert await there.leave("a", second.place)
            await one.confirmed()
            known = one.get(AGENT, SCOPE, "a")
            assert known is not None
            await AgentRoster(one, here).note_standing(known, OFFLINE, None)
            assert _state(one) is AgentState.OFFLINE

    _both(work)


def test_somebody_who_wants_a_retry_is_heard_by_the_server_that_has_the_agent() -> None:
    async def work(one: Store, two: Store) -> None:
        agent = await _agent(one)
        await two.confirmed()
        async with _whereabouts(two) as there:
            roster = AgentRoster(one)
            assert not await roster.ask_retry(agent), "nobody has it"
            await there.enter("a")
            assert await roster.ask_retry(agent)
            await two.confirmed()
            found = two.get(AGENT, SCOPE, "a")
            assert found is not None
            assert found.status is not None
            assert found.status.retry_asked_at_ns

    _both(work)


def test_what_an_agent_shows_is_given_once_and_only_sealed() -> None:
    async def work(one: Store, two: Store) -> None:
        asked = cast("Command", type("Asked", (), {"name": "c1", "created_at_ns": one.clock.now_ns()})())
        here, there = (
            CommandAnswers(store, store.clock, MasterKey(b"k" * 32, store.clock)) for store in (one, two)
        )
        await there.pass_on(asked, "server { }")
        (name,) = await one.secret_names(commands.PREFIX)
        sealed = await one.get_secret(name)
        assert sealed is not None
        assert b"server" not in sealed
        assert await here.given(asked) == "server { }"
        assert await here.given(asked) == ""
        # What nobody came for is deleted.
        await there.pass_on(asked, "left behind")
        await here._sweep()
        assert await one.secret_names(commands.PREFIX)
        await asyncio.sleep(commands.KEEP_SECONDS + 1)
        await here._sweep()
        assert not await one.secret_names(commands.PREFIX)

    _both(work)


async def test_what_an_agent_shows_may_be_large_but_not_beyond_what_can_be_kept(tmp_path: Path) -> None:
    clock = VirtualClock()
    async with Store.open(StoreSettings(path=tmp_path / "s.db"), kinds=(), clock=clock) as store:
        passed = CommandAnswers(store, clock, MasterKey(b"k" * 32, clock))
        asked = cast("Command", type("Asked", (), {"name": "c1", "created_at_ns": 1})())
        large, too_large = "server { }\n" * 1_000_000, random.Random(1).randbytes(2**21).hex()
        for text, given in ((large, large), (too_large, "")):
            await passed.pass_on(asked, text)
            assert await passed.given(asked) == given


def test_nobody_but_the_agent_that_was_asked_shows_something_and_only_until_it_has() -> None:
    async def work(one: Store, two: Store) -> None:
        agent = await _agent(one)
        await two.confirmed()
        async with _whereabouts(two) as there:
            heard = LastSeen(two, two.clock, channel=CHANNEL)
            commander = AgentCommander(
                two,
                two.clock,
                AgentPresences(Sessions(), there, heard, two.clock),
                whereabouts=there,
                answers=CommandAnswers(two, two.clock, MasterKey(b"k" * 32, two.clock)),
            )
            place = await there.enter("a")
            asked = await commander.ledger.issue(
                SCOPE, AgentVerb.SHOW, ["a"], actor="test", deliver_within_seconds=60.0, run_for_seconds=60.0
            )
            said = wire.CommandAnswer(command=asked.name, success=True, message="", output="server { }")
            neighbour = LiveAgent(
                agent="b", session=cast("Any", None), since_ns=1, heard_ns=1, record=agent, place=place
            )
            await commander.answered(neighbour, said)
            assert not await two.secret_names(commands.PREFIX)
            await commander.answered(_live(agent, place), said)
            (name,) = await two.secret_names(commands.PREFIX)
            await two.delete_secret(name)
            await commander.answered(_live(agent, place), said)
            assert not await two.secret_names(commands.PREFIX)

    _both(work)


def test_an_agent_that_another_server_froze_is_sent_nothing_more() -> None:
    async def work(one: Store, two: Store) -> None:
        agent = await _agent(one)
        await two.confirmed()
        async with _whereabouts(two) as there:
            live, roster = _live(agent, await there.enter("a")), AgentRoster(two, there)
            await one.confirmed()
            spec = FreezeSpec(reason="holidays", actor="test", frozen_at_ns=1, domains=("proxies",))
            await one.transact(
                lambda draft: draft.put(FREEZE, SCOPE, "f", spec=spec),
                actor="test",
                action="test",
                touches=[FREEZE.key(SCOPE, "f")],
            )
            wanted = WantedVersion(version=1, config_id="c", checksum="s")
            assert not await roster.note_sent(live, wanted)
            await two.transact(
                lambda draft: draft.delete(FREEZE, SCOPE, "f"),
                actor="test",
                action="test",
                touches=[FREEZE.key(SCOPE, "f")],
            )
            assert await roster.note_sent(live, wanted)

    _both(work)


def test_an_agent_that_another_server_deleted_is_sent_nothing_more() -> None:
    async def work(one: Store, two: Store) -> None:
        agent = await _agent(one)
        await two.confirmed()
        async with _whereabouts(two) as there:
            live, roster = _live(agent, await there.enter("a")), AgentRoster(two, there)
            wanted = WantedVersion(version=1, config_id="c", checksum="s")
            assert await roster.note_sent(live, wanted)
            await one.confirmed()
            await one.transact(
                lambda draft: draft.delete(AGENT, SCOPE, "a"),
                actor="test",
                action="test",
                touches=[AGENT.key(SCOPE, "a")],
            )
            assert not await roster.note_sent(live, wanted)

    _both(work)


def test_a_challenge_is_answered_by_every_server_for_its_workspace_alone() -> None:
    async def work(one: Store, two: Store) -> None:
        ordering, asked = (
            ChallengeBoard(store.clock, strict=True, shown=ShownChallenges(store)) for store in (one, two)
        )
        async with ordering.answered_anywhere("token", "token.thumbprint", workspace="w"):
            for board in (ordering, asked):
                assert await board.find_anywhere("token", workspace="w") == "token.thumbprint"
                assert await board.find_anywhere("token", workspace="other") is None
                assert await board.find_anywhere("token") is None
                assert await board.find_anywhere("another", workspace="w") is None
        assert await asked.find_anywhere("token", workspace="w") is None
        # One whose server died is there for an hour at most, and swept by the next that orders.
        shown = ShownChallenges(two)
        ends_at_ns = two.clock.now_ns() + 1_000_000_000
        await shown.show("left", "text", workspace="w", ends_at_ns=ends_at_ns)
        assert await ordering.find_anywhere("left", workspace="w") == "text"
        await asyncio.sleep(2)
        assert await ordering.find_anywhere("left", workspace="w") is None
        await ShownChallenges(one).sweep()
        assert one.count(CHALLENGE) == 0

    _both(work)


def test_servers_that_first_order_at_once_have_one_account() -> None:
    async def work(one: Store, two: Store) -> None:
        vaults = [AccountVault(store, MasterKey(b"k" * 32, store.clock)) for store in (one, two)]
        accounts = await asyncio.gather(*(vault.load_or_create("https://ca", "o") for vault in vaults))
        assert accounts[0] == accounts[1]
        for vault in vaults:
            await vault.save("https://ca", "o", AcmeAccount(key_pem=accounts[0].key_pem, uri="https://ca/1"))
        await one.confirmed()
        assert (await vaults[0].load_or_create("https://ca", "o")).uri == "https://ca/1"

    _both(work)
