"""Programs on many boards: waves, halts, the feed, cancelling, restarts; over REST and with real calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from support.boards.boards_rig import BoardsRig, boards_rig, until
from support.boards.boards_web import BoardsWeb, Json, boards_web, parsed
from support.boards.slow_boards import SlowNode, served
from support.fleet.declared_actions import carried_out
from support.shared.lost_answers import lost_answer

from fleetplane.domains.boards import resources
from fleetplane.domains.boards.commands.runs import BOARD_RUN
from fleetplane.domains.boards.core import BoardOptions
from fleetplane.domains.boards.kinds import BOARD, SCOPE
from fleetplane.domains.boards.pins.kinds import GPIO_DEVICE, Direction, GpioSpec
from fleetplane.domains.boards.rules import BoardFacts
from fleetplane.fleet.resources.declaration import AnyPublicResource
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.kernel.commands import COMMAND
from fleetplane.kernel.store import Draft

GOOD = pb.CommandResponse(success=True, stdout=b"fine\n", exit_code=0)
BAD = pb.CommandResponse(success=False, stderr=b"broken\n", exit_code=3, message="exit code 3")


@asynccontextmanager
async def fleet(web: BoardsWeb, number: int) -> AsyncIterator[list[SlowNode]]:
    """So many boards, each with an agent of its own that answers when it is let."""
    agents = []
    for place in range(1, number + 1):
        member, agent = await web.rig.join(f"b{place}"), SlowNode()
        agent.answer = GOOD
        await served(web.rig, member, agent)
        agents.append(agent)
    try:
        yield agents
    finally:
        for agent in agents:
            agent.let_go.set()


def under_way(agents: list[SlowNode]) -> list[int]:
    return [place for place, agent in enumerate(agents, 1) if agent.under_way]


async def start(web: BoardsWeb, target: Json, **policy: Any) -> str:
    body = {"command": "uptime", "target": target, "policy": policy}
    told = await web.post("/runs", body, status=202, role="operator")
    return str(told["id"])


async def ended(web: BoardsWeb, run_id: str) -> Json:
    await until(lambda: run_of(web.rig, run_id).status.ended_at_ns)  # one caller may not ask so often
    told = await web.get(f"/runs/{run_id}", role="viewer")
    outcomes = [one["outcome"] for one in told["results"]]
    assert len(outcomes) == told["run"]["targets"], "each target has exactly one outcome"
    assert not {"running", "pending"} & set(outcomes)
    return told


async def test_a_rolling_run_goes_wave_by_wave(web: BoardsWeb) -> None:
    async with fleet(web, 5) as agents:
        run_id = await start(web, {"all": True}, mode="rolling", batch=2)
        for wave in ([1, 2], [3, 4], [5]):
            await until(lambda wave=wave: under_way(agents) == wave)  # type: ignore[misc]
            told = (await web.get(f"/runs/{run_id}"))["run"]
            assert (told["state"], told["summary"]["running"]) == ("running", len(wave))
            for place in wave:
                agents[place - 1].let_go.set()
        told = await ended(web, run_id)
        assert told["run"]["state"] == "complete"
        assert [one["stdout"] for one in told["results"]] == ["fine\n"] * 5
        assert all(len(agent.seen) == 1 for agent in agents)


async def test_a_run_halts_when_too_much_has_failed_and_starts_nothing_more(web: BoardsWeb) -> None:
    async with fleet(web, 4) as agents:
        for agent in agents:
            agent.answer = BAD
            agent.let_go.set()
        run_id = await start(web, {"all": True}, on_failure="stop-after", stop_after=2)
        told = await ended(web, run_id)
        assert told["run"]["state"] == "halted"
        registry = CollectorRegistry()
        for collector in web.rig.domain.collectors:
            registry.register(collector)
        await until(lambda: registry.get_sample_value("fleetplane_boards_runs_open") == 0)
        assert registry.get_sample_value("fleetplane_boards_runs_total", {"outcome": "halted"}) == 1
        assert [one["outcome"] for one in told["results"]] == ["err", "err", "not_started", "not_started"]
        assert told["results"][0]["exit_code"] == 3
        assert [len(agent.seen) for agent in agents] == [1, 1, 0, 0]


async def test_nothing_begins_with_fewer_targets_than_required(web: BoardsWeb) -> None:
    async with fleet(web, 1):
        await web.rig.core.boards.create(BoardFacts(name="paper"), actor="operator/boss")
        body = {"command": "uptime", "target": {"all": True}, "policy": {"require_min": 2}}
        answer = await web.call("POST", "/runs", body)
        assert (answer.status_code, answer.json()["cause"]) == (409, "RequireMinNotSatisfied")
        alone = {"command": "uptime", "target": {"names": ["paper"]}}
        assert (await web.call("POST", "/runs", alone)).status_code == 503
        assert not web.rig.store.list(COMMAND)
        assert not web.rig.store.list(BOARD_RUN)


async def test_boards_are_chosen_by_name_number_and_selector(web: BoardsWeb) -> None:
    async with fleet(web, 3):
        await label(web.rig, 1, site="attic", role="camera")
        await label(web.rig, 2, site="attic")

        async def meant(target: Json) -> tuple[list[str], list[tuple[str, str]]]:
            told = await web.post("/runs/preview", {"target": target}, status=200, role="viewer")
            return told["resolved"], [(one["name"], one["reason"]) for one in told["skipped"]]

        assert await meant({"selector": "site=attic"}) == (["1", "2"], [])
        assert await meant({"selector": "site!=attic"}) == (["3"], [])
        assert await meant({"selector": "site in (attic,cellar),!label/role"}) == (["2"], [])
        assert await meant({"selector": "role=worker,name in (b1,b3)"}) == (["1", "3"], [])
        assert await meant({"selector": "site", "names": ["b2", "3"]}) == (["2"], [])
        assert await meant({"names": ["3", "b1", "b1", "99", "b9"]}) == (
            ["1", "3"],
            [("99", "NotFound"), ("b9", "NotFound")],
        )
        await web.rig.core.boards.create(BoardFacts(name="paper"), actor="operator/boss")
        assert (await meant({"all": True}))[1] == [("4", "Disconnected")]


async def label(rig: BoardsRig, number: int, **labels: str) -> None:
    def change(draft: Draft) -> None:
        board = draft.get(BOARD, SCOPE, str(number))
        assert board is not None
        draft.put(BOARD, SCOPE, str(number), spec=board.spec, status=board.status, labels=labels)

    await rig.store.transact(change, actor="t", action="t", touches=[BOARD.key(SCOPE, str(number))])


async def test_a_run_is_followed_live_and_again_from_a_mark(web: BoardsWeb) -> None:
    async with fleet(web, 2) as agents:
        run_id = await start(web, {"all": True}, mode="parallel")
        for agent in agents:
            agent.let_go.set()
        await ended(web, run_id)
        answer = await web.call("GET", f"/runs/{run_id}/events")
        told = parsed(answer.text)
        kinds = [kind for kind, _ in told]
        assert (kinds[0], kinds[-1]) == ("run_started", "run_ended")
        assert sorted(kinds[1:-1]) == ["target_ended"] * 2 + ["target_started"] * 2
        results = {data["name"]: data for kind, data in told if kind == "target_ended"}
        assert results["2"]["stdout"] == "fine\n"
        assert told[-1][1]["summary"]["ok"] == 2
        marks = [line[4:] for line in answer.text.splitlines() if line.startswith("id: ")]
        later = await web.call("GET", f"/runs/{run_id}/events", headers={"last-event-id": marks[-2]})
        assert [kind for kind, _ in parsed(later.text)] == ["run_ended"]


async def test_a_run_cancelled_half_way_stops_programs_and_drops_the_rest(web: BoardsWeb) -> None:
    async with fleet(web, 4) as agents:
        run_id = await start(web, {"all": True}, mode="rolling", batch=2)
        await until(lambda: under_way(agents) == [1, 2])
        agents[0].let_go.set()
        await until(lambda: web.rig.domain.nodes.runs.summary(run_of(web.rig, run_id)).ok == 1)
        told = await web.post(f"/runs/{run_id}/cancel", status=200, role="operator")
        assert (told["cancelled"], told["already_ended"]) == (3, False)
        await until(lambda: not under_way(agents))
        over = await ended(web, run_id)
        assert over["run"]["state"] == "cancelled"
        assert [one["outcome"] for one in over["results"]] == [
            "ok",
            "cancelled",
            "not_started",
            "not_started",
        ]
        assert (await web.post(f"/runs/{run_id}/cancel", status=200))["already_ended"]


async def test_a_runs_record_keeps_neither_input_nor_values_of_variables(web: BoardsWeb) -> None:
    async with fleet(web, 1) as agents:
        agents[0].let_go.set()
        body = {
            "command": "login",
            "target": {"all": True},
            "stdin": "hunter2",
            "environment": {"TZ": "hunter3"},
        }
        run_id = (await web.post("/runs", body, status=202))["id"]
        told = await ended(web, run_id)
        ((request, _),) = agents[0].seen
        assert (request.stdin, dict(request.environment)) == (b"hunter2", {"TZ": "hunter3"})
        kept = web.rig.store.get(BOARD_RUN, SCOPE, run_id)
        assert kept is not None
        assert "hunter" not in f"{kept}{told}"
        assert kept.spec.order.environment == {"TZ": ""}


async def test_a_cancelled_run_starts_nothing_more_also_if_who_cancelled_it_went_away_half_way(
    web: BoardsWeb, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(web, 3) as agents:
        run_id = await start(web, {"all": True}, mode="sequential", on_failure="continue")
        await until(lambda: under_way(agents) == [1])
        runs, reached = web.rig.domain.nodes.runs, asyncio.Event()

        async def never(*_: Any, **__: Any) -> None:
            reached.set()
            await asyncio.Event().wait()

        with monkeypatch.context() as patched:
            patched.setattr(runs.ledger, "cancel", never)
            asking = asyncio.create_task(runs.cancel(SCOPE, run_id, actor="ada"))
            await reached.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        agents[0].let_go.set()
        told = await ended(web, run_id)
        assert told["run"]["state"] == "cancelled"
        assert [one["outcome"] for one in told["results"]] == ["ok", "not_started", "not_started"]
        assert [len(agent.seen) for agent in agents] == [1, 0, 0]


async def test_a_run_goes_on_with_the_next_server_and_nothing_is_run_twice(tmp_path: Path) -> None:
    agents: list[SlowNode] = []
    async with AsyncExitStack() as outliving:
        await interrupted(tmp_path, agents, outliving)


async def interrupted(folder: Path, agents: list[SlowNode], outliving: AsyncExitStack) -> None:
    async with boards_rig(folder, options=BoardOptions()) as rig, boards_web(rig) as web:
        for place in range(1, 5):
            agents.append(SlowNode())
            agents[-1].answer = GOOD
            await served(rig, await rig.join(f"b{place}"), agents[-1], stack=outliving)
        run_id = await start(web, {"all": True}, mode="rolling", batch=2, on_failure="continue")
        await until(lambda: under_way(agents) == [1, 2])
        agents[0].let_go.set()
        await until(lambda: rig.domain.nodes.runs.summary(run_of(rig, run_id)).ok == 1)
    for agent in agents:
        agent.let_go.set()
    async with boards_rig(folder, options=BoardOptions()) as rig, boards_web(rig) as web:
        told = await ended(web, run_id)
        assert [one["outcome"] for one in told["results"]] == ["ok", "err", "ok", "ok"]
        assert told["run"]["state"] == "complete"
        assert "restarted" in told["results"][1]["message"]
        kinds = [kind for kind, _ in parsed((await web.call("GET", f"/runs/{run_id}/events")).text)]
        assert kinds.count("target_ended") == 4
    assert [len(agent.seen) for agent in agents] == [1, 1, 1, 1]


def run_of(rig: BoardsRig, run_id: str) -> Any:
    return rig.domain.nodes.runs.get(SCOPE, run_id)


async def test_a_program_for_many_boards_is_a_run_with_one_wave(web: BoardsWeb) -> None:
    async with fleet(web, 2) as agents:
        await web.rig.core.boards.create(BoardFacts(name="paper"), actor="operator/boss")
        body = {"command": "uptime", "target": {"all": True}}
        started = await web.post("/exec", body, status=202)
        assert started["node_ids"] == [1, 2, 3]
        await until(lambda: under_way(agents) == [1, 2])
        agents[0].let_go.set()
        run_id = started["command_id"]
        await until(lambda: web.rig.domain.nodes.runs.summary(run_of(web.rig, run_id)).ok == 1)
        told = await web.post(f"/commands/{started['command_id']}/cancel", status=200)
        assert told["data"]["outcomes_by_state"] == {"ok": 1, "cancelled": 1, "undeliverable": 1}
        over = await ended(web, started["command_id"])
        assert over["run"]["state"] == "cancelled"
        assert (await web.get("/runs"))["items"][0]["id"] == started["command_id"]


async def test_the_same_request_sent_twice_with_a_key_is_one_run(web: BoardsWeb) -> None:
    async with fleet(web, 1) as agents:
        agents[0].let_go.set()
        body = {"command": "uptime", "target": {"all": True}}
        both = [await web.call("POST", "/runs", body, headers={"idempotency-key": "k1"}) for _ in range(2)]
        assert [answer.status_code for answer in both] == [202, 202]
        assert both[0].json()["id"] == both[1].json()["id"]
        await ended(web, both[0].json()["id"])
        assert len(agents[0].seen) == 1
        assert len((await web.get("/runs"))["items"]) == 1


async def test_what_was_asked_of_boards_when_the_server_died_is_not_done_again(web: BoardsWeb) -> None:
    store, calls = web.rig.store, 0
    async with fleet(web, 1) as agents:
        agents[0].let_go.set()
        for path, body in (
            ("/runs", {"command": "uptime", "target": {"all": True}}),
            ("/exec", {"command": "uptime", "target": {"all": True}}),
            ("/nodes/1/exec", {"command": "uptime"}),
        ):
            key = {"idempotency-key": path}
            with lost_answer(store):
                await web.call("POST", path, body, headers=key)
            calls += 1
            again = await web.call("POST", path, body, headers=key)
            assert len(store.list(COMMAND)) == calls
            if path == "/nodes/1/exec":  # answered from what the board says
                assert again.status_code == 409
                assert "its outcome is unknown" in again.text
            else:
                assert (again.status_code, again.headers["idempotency-replayed"]) == (202, "true")
                assert (await ended(web, again.json().get("id") or again.json()["command_id"]))["results"]


async def test_a_pin_that_was_being_written_when_the_server_died_is_not_written_again(web: BoardsWeb) -> None:
    agent, member = PinNode(), await web.rig.join("attic")
    await served(web.rig, member, agent)
    lamp = GpioSpec(name="lamp", board=member.number, pin=17, direction=Direction.OUTPUT)
    made = await web.rig.domain.nodes.devices.create(lamp, actor="tester")
    path, body, key = f"/gpio/{made.name}/write", {"value": 1}, {"idempotency-key": "k"}
    with lost_answer(web.rig.store):
        await web.call("POST", path, body, headers=key)
    driven = list(agent.driven)
    again = await web.call("POST", path, body, headers=key)
    assert (again.status_code, agent.driven) == (409, driven), again.text
    assert "its outcome is unknown" in again.text


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"target": {}}, "target"),
        ({"target": {"all": True, "names": ["b1"]}}, "target"),
        ({"target": {"names": [str(number) for number in range(1, 10_002)]}}, "target"),
        ({"target": {"names": ["x" * 129]}}, "target"),
        ({"target": {"selector": "site in ("}}, "target.selector"),
        ({"target": {"selector": "x" * 3000}}, "target.selector"),
        ({"target": {"all": True}, "policy": {"mode": "rolling"}}, "policy.batch"),
        ({"target": {"all": True}, "policy": {"on_failure": "stop-after"}}, "policy.stop_after"),
        ({"target": {"all": True}, "policy": {"require_min": -1}}, "policy.require_min"),
        ({"target": {"all": True}, "policy": {"max_concurrency": 0}}, "policy.max_concurrency"),
        ({"target": {"all": True}, "policy": {"deadline_seconds": 301}}, "policy.deadline_seconds"),
        (
            {"target": {"all": True}, "policy": {"deliver_within_seconds": -1}},
            "policy.deliver_within_seconds",
        ),
        ({"target": {"all": True}, "command": " "}, "command"),
        ({"target": {"all": True}, "args": ["a\0b"]}, "args"),
    ],
)
async def test_what_cannot_be_meant_is_refused_by_field_and_nothing_begins(
    web: BoardsWeb, body: Json, field: str
) -> None:
    answer = await web.call("POST", "/runs", {"command": "uptime", **body})
    assert (answer.status_code, answer.json().get("field")) == (400, field)
    assert not web.rig.store.list(COMMAND)


async def test_runs_are_started_by_operators_and_seen_by_viewers(web: BoardsWeb) -> None:
    body = {"command": "uptime", "target": {"all": True}}
    assert await web.refused("POST", "/runs", body, role="viewer") == 403
    assert await web.refused("POST", "/runs", body, role=None) == 401
    assert await web.refused("GET", f"/runs/{'0' * 32}", role="viewer") == 404
    assert await web.refused("GET", "/runs/..%2f..%2fetc", role="viewer") == 404
    assert (await web.get("/runs", role="viewer"))["items"] == []
    assert await web.refused("GET", "/runs?state=odd", role="viewer") == 400


class PinNode(SlowNode):
    """A board that also has pins."""

    def __init__(self) -> None:
        super().__init__()
        self.driven: list[tuple[int, int]] = []

    async def ControlGPIO(self, request: pb.GPIORequest, _context: Any) -> pb.GPIOResponse:
        self.driven.append((request.pin, int(request.state)))
        return pb.GPIOResponse(success=True, state=request.state)


async def test_the_actions_run_cancel_and_write_reach_the_board(web: BoardsWeb) -> None:
    rig = web.rig
    agent, member = PinNode(), await rig.join("attic")
    await served(rig, member, agent)
    clock, domain = rig.kernel.clock, rig.domain

    async def done(resource: AnyPublicResource, name: str, action: str, body: Any = None) -> str:
        answer = await carried_out(resource, domain, rig.store, clock, name, action, body)
        return "" if answer.begun is None else answer.begun.name

    run_id = await done(resources.BOARDS, "attic", "run", {"command": "uptime"})
    await until(lambda: agent.under_way == 1)
    agent.let_go.set()
    assert (await ended(web, run_id))["run"]["state"] == "complete"
    agent.let_go.clear()
    run_id = await done(resources.BOARDS, "attic", "run", {"command": "uptime"})
    await until(lambda: agent.under_way == 1)
    await done(resources.RUNS, run_id, "cancel")
    agent.let_go.set()
    assert (await ended(web, run_id))["run"]["state"] == "cancelled"

    lamp = GpioSpec(name="lamp", board=member.number, pin=17, direction=Direction.OUTPUT)
    await domain.nodes.devices.create(lamp, actor="tester")
    await done(resources.PINS, "attic.17", "write", {"value": 1})
    assert (17, 1) in agent.driven
    (stored,) = rig.store.list(GPIO_DEVICE)
    assert stored.spec.level == 1
