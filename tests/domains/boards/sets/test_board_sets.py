"""Sets of boards: what may stand in one, who belongs to which, and rollouts of them to real agents."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest
from support.boards.board_node_rig import NodeRig, configured, node_rig
from support.boards.boards_rig import BOSS, BoardsRig, boards_rig, until
from support.boards.debian_root import DebianRoot
from support.fleet.plans_rig import plans_rig
from support.fleet.started_domains import started_domains

from fleetplane.domains.boards.agent.desired import packages
from fleetplane.domains.boards.agent.desired.packages import Packages
from fleetplane.domains.boards.core import BoardOptions
from fleetplane.domains.boards.inventory import liveness
from fleetplane.domains.boards.kinds import BOARD, SCOPE
from fleetplane.domains.boards.resources import TENANT
from fleetplane.domains.boards.server import BLUEPRINT as BOARDS
from fleetplane.domains.boards.sets import rules
from fleetplane.domains.boards.sets.delivery import TOO_OLD
from fleetplane.domains.boards.sets.rules import (
    BOARD_APPLIED,
    BOARD_SET,
    SUBJECT,
    AppliedPackage,
    AppliedStatus,
    BoardSetSpec,
    PackageSpec,
    PinLevelSpec,
    ProgramSpec,
    set_scope,
)
from fleetplane.fleet.freeze import Freezes
from fleetplane.fleet.rollouts.gates import Prober
from fleetplane.fleet.rollouts.holds import digest
from fleetplane.fleet.rollouts.records import (
    HOLD,
    ROLLOUT,
    ROLLOUT_POLICY,
    PolicySpec,
    Rollout,
    RolloutSpec,
    RolloutStatus,
    records_of,
    status_of,
)
from fleetplane.fleet.rollouts.rollouts import Rollouts
from fleetplane.fleet.rollouts.rules.policy import OnHalt, Policy
from fleetplane.fleet.rollouts.rules.states import RolloutPhase
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.store import Draft

SET = "sensors"
AT = set_scope(SET)
FAST = BoardOptions(plain=True, heartbeat_seconds=1.0)
SLEEP = {"program": "/usr/bin/sleep", "forms": [["[0-9]+"]]}
TRUE = {"program": "/usr/bin/true", "forms": [[]]}
"""Allowed, and ends at once."""


def sleeping(seconds: int, *pins: PinLevelSpec, selector: str = "") -> BoardSetSpec:
    args = (str(seconds),)
    program = ProgramSpec(name="sensor", command="/usr/bin/sleep", args=args, up_seconds=0.0)
    return BoardSetSpec(selector=selector, programs=(program,), pins=pins)


def ending() -> BoardSetSpec:
    """A program that boards allow, and that ends long before it would count as up."""
    program = ProgramSpec(name="sensor", command="/usr/bin/true", up_seconds=300.0)
    return BoardSetSpec(programs=(program,))


# Pure.


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("selector", BoardSetSpec(selector="=")),
        ("selector", BoardSetSpec(selector="status=ready")),
        ("priority", BoardSetSpec(priority=1001)),
        ("programs[0].name", BoardSetSpec(programs=(ProgramSpec(name="A b", command="/x"),))),
        ("programs[0].name", BoardSetSpec(programs=(ProgramSpec(name="a", command="/x"),) * 2)),
        ("programs[0].command", BoardSetSpec(programs=(ProgramSpec(name="a", command="sh"),))),
        ("programs[0].command", BoardSetSpec(programs=(ProgramSpec(name="a", command="/a/../b"),))),
        ("programs[0].args", BoardSetSpec(programs=(ProgramSpec(name="a", command="/x", args=("\0",)),))),
        (
            "programs[0].environment",
            BoardSetSpec(programs=(ProgramSpec(name="a", command="/x", environment={"A=": "b"}),)),
        ),
        (
            "programs",
            BoardSetSpec(programs=tuple(ProgramSpec(name=f"p{i}", command="/x") for i in range(33))),
        ),
        ("pins[0].pin", BoardSetSpec(pins=(PinLevelSpec(pin=28, level=1),))),
        ("pins[0].pin", BoardSetSpec(pins=(PinLevelSpec(pin=4, level=1),) * 2)),
        ("pins[0].level", BoardSetSpec(pins=(PinLevelSpec(pin=4, level=2),))),
        ("packages[0].name", BoardSetSpec(packages=(PackageSpec(name="--yes"),))),
        ("packages[0].name", BoardSetSpec(packages=(PackageSpec(name="sensor"),) * 2)),
        ("packages[0].version", BoardSetSpec(packages=(PackageSpec(name="sensor", version="new"),))),
    ],
)
def test_what_cannot_stand_in_a_set_is_refused_by_its_field(field: str, spec: BoardSetSpec) -> None:
    with pytest.raises(InvalidArgument) as caught:
        rules.checked(SET, spec)
    assert caught.value.field == field


def test_a_report_is_news_only_where_it_says_something_new() -> None:
    said = pb.AppliedState(set=SET, version="1", wanted_set=SET, wanted="2", error="no\nsuch", failures=1)
    first = rules.reported(SET, said, AppliedStatus(), now_ns=10)
    assert (first.version, first.error, first.failed_at_ns) == ("1", "no such", 10)
    assert rules.reported(SET, said, first, now_ns=20) == first
    said.failures = 2
    assert rules.reported(SET, said, first, now_ns=20).failed_at_ns == 20
    assert rules.reported("other", said, first, now_ns=20) == AppliedStatus()
    assert rules.encoded(sleeping(7)) == rules.encoded(sleeping(7, selector="ring=canary"))
    assert b"packages" not in rules.encoded(sleeping(7)), "versions from before packages keep their names"


# With real agents.


@dataclass
class Site:
    server: BoardsRig
    rollouts: Rollouts
    boards: list[NodeRig]

    async def write(self, spec: BoardSetSpec, name: str = SET) -> None:
        checked = rules.checked(name, spec)
        await self.change(lambda draft: draft.put(BOARD_SET, SCOPE, name, spec=checked), name)

    async def change(self, change: Callable[[Draft], object], name: str = SET) -> None:
        touches = [BOARD_SET.key(SCOPE, name)]
        await self.server.store.transact(change, actor=BOSS, action="write", touches=touches)

    def applied(self, board: int, name: str = SET) -> AppliedStatus:
        found = self.server.store.get(BOARD_APPLIED, set_scope(name), str(board))
        return found.status if found is not None and found.status is not None else AppliedStatus()

    async def have(self, spec: BoardSetSpec, *boards: int, name: str = SET) -> None:
        """In place, running, and reported."""
        version = digest(rules.encoded(spec))

        def is_so(board: int) -> bool:
            found = self.applied(board, name)
            return found.version == version and not found.error and rules.is_running(found)

        await until(lambda: all(is_so(one) for one in boards))

    def levels(self, pin: int) -> list[int]:
        return [board.copper.wire(pin, "look").level() for board in self.boards]

    async def ended(self, spec: BoardSetSpec, phase: RolloutPhase) -> Mapping[str, str]:
        """What became of the boards in the rollout of a set, once that has ended so."""
        version = digest(rules.encoded(spec))

        def found() -> Rollout | None:
            of_it = [one for one in self.rollouts.book.list() if one.spec.to == version]
            return next((one for one in of_it if status_of(one).settled == phase), None)

        records = records_of(self.server.store, await until(found))
        return {name: str(one.state) for name, one in records.items()}


@contextlib.asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Site]:
    """Two boards; the first is the canary. None is missed because three reports in a row are late."""
    async with contextlib.AsyncExitStack() as stack:
        with patch.object(liveness, "STALE_INTERVALS", 600), patch.object(liveness, "DEAD_INTERVALS", 6000):
            server = await stack.enter_async_context(boards_rig(folder, options=FAST))
        clock = server.kernel.clock
        freezes = Freezes(server.store, clock)
        rollouts = Rollouts(server.store, clock, [server.domain.programs], freezes)
        boards = []
        for name, ring in (("one", "canary"), ("two", "late")):
            config = configured(
                node={"name": name, "labels": {"ring": ring}},
                programs={"rules": [SLEEP, TRUE]},
                packages={"allow": ["sensor*"]},
                commands={"profiles": [{"name": "probes", "rules": [TRUE]}]},
            )
            boards.append(await stack.enter_async_context(node_rig(folder / name, server, config=config)))
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(rollouts.run())
            yield Site(server, rollouts, boards)
            running.cancel()


async def test_sets_go_out_in_waves_to_real_agents_and_programs_that_end_are_rolled_back(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as site:
        store = site.server.store
        first = sleeping(1001, PinLevelSpec(pin=17, level=1))
        await site.write(first)
        await site.have(first, 1, 2)  # without a policy, everyone at once
        assert site.levels(17) == [1, 1]

        policy = Policy(
            waves=("label ring=canary", "rest"),
            soak_seconds=0.0,
            unhealthy_seconds=600.0,  # a report that is late on a slow machine is no failure
            confirm_seconds=600.0,
            on_halt=OnHalt.ROLL_BACK,
        )
        await store.transact(
            lambda draft: draft.put(ROLLOUT_POLICY, AT, SUBJECT, spec=PolicySpec(policy=policy)),
            actor=BOSS,
            action="policy",
            touches=[ROLLOUT_POLICY.key(AT, SUBJECT)],
        )
        stayed = {"1": "rolled_back", "2": "never_started"}
        await site.write(ending())
        assert await site.ended(ending(), RolloutPhase.ROLLED_BACK) == stayed
        await site.have(first, 1, 2)

        refused = BoardSetSpec(programs=(ProgramSpec(name="sensor", command="/usr/bin/id"),))
        await site.write(refused)  # which no board allows
        assert await site.ended(refused, RolloutPhase.ROLLED_BACK) == stayed
        await site.have(first, 1, 2)

        second = sleeping(1002, PinLevelSpec(pin=17, level=0))
        await site.write(second)
        assert await site.ended(second, RolloutPhase.DONE) == {"1": "confirmed", "2": "confirmed"}
        await site.have(second, 1, 2)
        assert site.levels(17) == [0, 0]
        programs = site.server.domain.programs
        assert isinstance(programs, Prober)
        ran = await programs.probe(AT, ["1", "2"], ["/usr/bin/true"], seconds=60.0)
        assert ran == {"1": 0, "2": 0}
        refused_probe = await programs.probe(AT, ["1"], ["/usr/bin/id"], seconds=60.0)
        assert refused_probe == {"1": None}, "what a board does not allow is no exit code"

        other = sleeping(1003, selector="ring=late")
        await site.write(msgspec.structs.replace(other, priority=1), "late")
        await site.have(other, 2, name="late")  # it belongs to another set now
        await until(lambda: store.get(BOARD_APPLIED, AT, "2") is None)
        await site.change(lambda draft: draft.delete(BOARD_SET, SCOPE, "late"), "late")
        await site.have(second, 2)
        await site.change(lambda draft: draft.delete(BOARD_SET, SCOPE, SET))
        await until(lambda: not store.list(BOARD_APPLIED))
        await until(lambda: store.get(HOLD, AT, SUBJECT) is None)


async def test_packages_go_out_in_waves_and_one_that_cannot_be_installed_is_rolled_back(
    tmp_path: Path,
) -> None:
    debian = DebianRoot(tmp_path / "debian")
    debian.add("sensor", "1.0")
    debian.add("sensor", "2.0")
    debian.update()  # two boards share it, and apt does not wait for others who fetch lists
    environment = {**packages.ENVIRONMENT, **debian.environment}
    turn, install = asyncio.Lock(), Packages.install

    async def in_turn(board: Packages, wanted: Mapping[str, str]) -> None:
        async with turn:  # else what one plans is there by the time it asks apt, by the other's hand
            await install(board, wanted)

    with patch.object(packages, "ENVIRONMENT", environment), patch.object(Packages, "install", in_turn):
        async with opened(tmp_path) as site:
            store = site.server.store
            first = BoardSetSpec(packages=(PackageSpec(name="sensor", version="1.0"),))
            await site.write(first)
            await site.have(first, 1, 2)
            assert site.applied(1).packages == (AppliedPackage(name="sensor", version="1.0"),)
            policy = Policy(
                waves=("label ring=canary", "rest"),
                soak_seconds=0.0,
                confirm_seconds=600.0,
                on_halt=OnHalt.ROLL_BACK,
            )
            await store.transact(
                lambda draft: draft.put(ROLLOUT_POLICY, AT, SUBJECT, spec=PolicySpec(policy=policy)),
                actor=BOSS,
                action="policy",
                touches=[ROLLOUT_POLICY.key(AT, SUBJECT)],
            )
            stayed = {"1": "rolled_back", "2": "never_started"}
            for bad in (PackageSpec(name="sensor", version="3.0"), PackageSpec(name="stranger")):
                await site.write(BoardSetSpec(packages=(bad,)))
                assert await site.ended(BoardSetSpec(packages=(bad,)), RolloutPhase.ROLLED_BACK) == stayed
                await site.have(first, 1, 2)
                assert debian.file("sensor") == "1.0"
            second = BoardSetSpec(packages=(PackageSpec(name="sensor", version="2.0"),))
            await site.write(second)
            assert await site.ended(second, RolloutPhase.DONE) == {"1": "confirmed", "2": "confirmed"}
            assert debian.file("sensor") == "2.0"

            sets, board = site.server.domain.core.sets, store.get(BOARD, SCOPE, "1")
            assert board is not None
            assert board.status is not None
            older = msgspec.structs.replace(
                board, status=msgspec.structs.replace(board.status, capabilities=("programs",))
            )
            told = pb.AppliedState(set=SET, version="x", wanted_set=SET, wanted="x")
            async with asyncio.timeout(60):
                while TOO_OLD not in site.applied(1).error:  # the real one reports as well
                    assert await sets.heard(older, told) is None, "it would pass packages over"


async def test_a_set_is_not_deleted_while_its_rollout_is_under_way(tmp_path: Path) -> None:
    made = {"boards": started_domains(tmp_path)["boards"]}
    roles = ("boards.admin", "operator")
    async with plans_rig(tmp_path / "site", (BOARDS,), roles=roles, started=made) as rig:
        pins = [{"pin": 17, "level": 1}]
        body = {"kind": "board-set", "metadata": {"name": SET, "scope": TENANT}, "spec": {"pins": pins}}
        await rig.applied(body)
        shown = (await rig.call("GET", f"/board-sets/{SET}", scope=TENANT)).json()
        assert shown["spec"]["pins"] == pins
        assert (shown["status"]["boards"], shown["status"]["problems"]) == (0, {})
        spec = RolloutSpec(
            subject=SUBJECT, to="x", policy=Policy(), actor="ada", started_at_ns=10**18, total=1
        )
        status = RolloutStatus(phase=RolloutPhase.PAUSED, wave=1, counts={"pending": 1})
        await rig.rig.put(ROLLOUT, AT, "r1", spec=spec, status=status)
        refused = await rig.call("DELETE", f"/board-sets/{SET}", scope=TENANT)
        assert refused.status_code in (400, 409), refused.text
        assert "rollout r1 of it has not ended" in refused.text
        await rig.rig.remove(ROLLOUT, AT, "r1")
        assert (await rig.call("DELETE", f"/board-sets/{SET}", scope=TENANT)).status_code == 204
