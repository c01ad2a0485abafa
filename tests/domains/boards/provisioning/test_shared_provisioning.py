"""Provisioning at several servers: asked for anywhere, carried out by one, taken over when that dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from support.shared import virtual_loop
from support.shared.virtual_servers import VirtualServer, VirtualServers, until, virtual_servers

from fleetplane.domains.boards.inventory.boards import Boards
from fleetplane.domains.boards.inventory.clusters import Clusters
from fleetplane.domains.boards.kinds import KINDS, BoardRole
from fleetplane.domains.boards.ports import (
    ProvisioningAction,
    ProvisioningAnswer,
    ProvisioningOrder,
    ProvisioningState,
)
from fleetplane.domains.boards.provisioning import steps
from fleetplane.domains.boards.provisioning.engine import ProvisioningEngine, ProvisioningParts
from fleetplane.domains.boards.provisioning.operations import (
    OPERATION,
    Operation,
    Operations,
    OperationTaken,
    Ownership,
    StepState,
    is_over,
    status_of,
)
from fleetplane.domains.boards.provisioning.secrets import ClusterSecrets, SshCredential, SshCredentials
from fleetplane.domains.boards.provisioning.ssh import CommandPrinted, Line, SshSession
from fleetplane.domains.boards.rules import BoardFacts
from fleetplane.kernel.errors import Conflict, FleetplaneError
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.kinds import KERNEL_KINDS

ACTOR = "operator/test"
STEPS = ["stop", "uninstall", "clean", "verify"]


@dataclass
class Board:
    """What was run on a board, by which server."""

    runs: list[tuple[str, str]] = field(default_factory=list)
    slow_seconds: float = 1.0
    exit_codes: dict[str, int] = field(default_factory=dict)
    """By server."""


@dataclass
class Login:
    board: Board
    server: VirtualServer

    async def run(
        self, command: str, *, seconds: float, stdin: str = "", line: Line | None = None
    ) -> CommandPrinted:
        assert "flock" in command
        assert seconds
        assert not stdin
        await asyncio.sleep(0.1)
        code = self.board.exit_codes.get(self.server.name, 0)
        if not code:
            self.board.runs.append((self.server.name, command))
            await asyncio.sleep(self.board.slow_seconds)
        if line is not None:
            line("printed")
        return CommandPrinted(exit_code=code, output="printed", stdout="printed")


class Rig:
    def __init__(self) -> None:
        self.board = Board()
        self.engines: dict[str, ProvisioningEngine] = {}
        self.operations: dict[str, Operations] = {}
        self.stores: dict[str, VirtualServer] = {}
        self.servers: VirtualServers
        self.number = 0

    def _make(self, server: VirtualServer) -> ProvisioningEngine:
        store, name = server.store, server.name

        @asynccontextmanager
        async def dial(
            _address: str, _credential: SshCredential, _keys: Sequence[str]
        ) -> AsyncIterator[SshSession]:
            yield Login(self.board, server)

        master = MasterKey(bytes(32), server.clock)
        self.operations[name] = Operations(store)
        self.engines[name] = ProvisioningEngine(
            ProvisioningParts(
                boards=Boards(store),
                clusters=Clusters(store),
                operations=self.operations[name],
                clock=store.clock,
                credentials=SshCredentials(store, master),
                secrets=ClusterSecrets(store, master),
                dial=dial,  # type: ignore[arg-type]  # a context manager that swallows nothing
            )
        )
        self.stores[name] = server
        return self.engines[name]

    async def here(self, server: VirtualServer) -> None:
        self._make(server)
        await asyncio.Event().wait()

    async def active(self, server: VirtualServer) -> None:
        await self._make(server).run()

    async def start(self, names: str = "abc") -> None:
        for name in names:
            await self.servers.start(name)
            await until(lambda name=name: name in self.engines)  # type: ignore[misc]
        first = self.stores[names[0]].store
        made = await Boards(first).create(
            BoardFacts(name="attic", ip_address="192.0.2.1", role=BoardRole.WORKER), actor=ACTOR
        )
        self.number = int(made.name)
        credential = SshCredential(user="pi", password="x", known_hosts="192.0.2.1 ssh-ed25519 AAAA")
        await SshCredentials(first, MasterKey(bytes(32), first.clock)).put("default", credential, actor=ACTOR)
        await until(lambda: all(one.store.revision >= first.revision for one in self.stores.values()))

    async def ask(self, name: str, action: ProvisioningAction, **more: object) -> ProvisioningAnswer:
        order = ProvisioningOrder(
            action=action,
            board_id=self.number,
            addresses={self.number: "192.0.2.1"},
            **more,  # type: ignore[arg-type]
        )
        head = max(one.store.revision for one in self.stores.values() if not one.link.cut)
        await until(lambda: self.stores[name].store.revision >= head)  # as behind the gate of a server
        with self.stores[name].store.writing_here():
            return await self.engines[name].request(order, actor=ACTOR)

    async def undo(self, name: str, request_id: str = "") -> str:
        answer = await self.ask(name, ProvisioningAction.DEPROVISION, request_id=request_id)
        return answer.operation_id

    async def ended(self, name: str, operation: str) -> Operation:
        await until(lambda: is_over(self.operations[name].get(operation)))
        return self.operations[name].get(operation)

    def runs(self) -> list[str]:
        return [server for server, _ in self.board.runs]


def _own(operation: Operation) -> Ownership:
    return Ownership(owner=status_of(operation).owner)


def play(scene: Callable[[Rig], Awaitable[None]]) -> None:
    async def run() -> None:
        rig = Rig()
        kinds = (*KERNEL_KINDS, *KINDS, OPERATION)
        async with virtual_servers(kinds, here=rig.here, active=rig.active) as rig.servers:
            await scene(rig)

    virtual_loop.run(run())


def test_what_is_asked_for_anywhere_is_carried_out_once_and_followed_anywhere() -> None:
    async def scene(rig: Rig) -> None:
        await rig.start()
        name = await rig.undo("b")
        await until(lambda: rig.board.runs)
        await until(lambda: rig.operations["c"].at_board(rig.number) is not None)
        lines = [line async for line in rig.engines["c"].follow(name)]
        assert [line for line in lines if "--" in line] == [f"[{rig.number}] -- {step}" for step in STEPS]
        done = await rig.ended("c", name)
        assert status_of(done).state is ProvisioningState.ROLLED_BACK
        assert set(rig.runs()) == {"a"}
        assert [step.state for step in status_of(done).steps] == [StepState.DONE] * len(STEPS)
        again = [line async for line in rig.engines["b"].follow(name)]
        assert again == lines

    play(scene)


def test_one_request_id_at_three_servers_is_one_operation() -> None:
    async def scene(rig: Rig) -> None:
        await rig.start()
        names = await asyncio.gather(*(rig.undo(name, "same") for name in "abc"))
        assert len(set(names)) == 1
        await rig.ended("b", names[0])
        assert len(rig.board.runs) == 6  # two commands each to stop and to uninstall
        assert rig.stores["c"].store.count(OPERATION) == 1

    play(scene)


def test_of_two_orders_for_one_board_at_two_servers_one_is_refused() -> None:
    async def scene(rig: Rig) -> None:
        await rig.start()
        said = await asyncio.gather(*(rig.undo(name) for name in "bc"), return_exceptions=True)
        assert [type(one) for one in said if isinstance(one, FleetplaneError)] == [Conflict]

    play(scene)


def test_an_operation_is_taken_back_at_another_server() -> None:
    async def scene(rig: Rig) -> None:
        await rig.start()
        rig.board.slow_seconds = 300.0
        name = await rig.undo("b")
        await until(lambda: rig.board.runs)
        answer = await rig.ask("c", ProvisioningAction.CANCEL)
        assert (answer.state, answer.message) == (ProvisioningState.CANCELLED, "cancelled")
        assert rig.operations["c"].at_board(rig.number) is None
        before = len(rig.board.runs)
        # Asked for again, it goes on where it was, also if whoever asks is elsewhere.
        rig.board.slow_seconds = 1.0
        second = await rig.undo("b")
        assert second != name
        await rig.ended("b", second)
        assert len(rig.board.runs) == before + 6

    play(scene)


def test_a_failed_operation_goes_on_for_whoever_asks_again_elsewhere() -> None:
    async def scene(rig: Rig) -> None:
        await rig.start()
        rig.board.exit_codes["a"] = steps.BUSY
        name = await rig.undo("b", "mine")
        failed = await rig.ended("b", name)
        assert status_of(failed).state is ProvisioningState.FAILED
        assert "another server" in status_of(failed).reason
        rig.board.exit_codes.clear()
        assert await rig.undo("c", "mine") == name
        await until(lambda: status_of(rig.operations["c"].get(name)).state is ProvisioningState.ROLLED_BACK)

    play(scene)


def test_the_next_active_server_goes_on_with_what_a_dead_one_was_at() -> None:
    async def scene(rig: Rig) -> None:
        await rig.start()
        rig.board.slow_seconds = 20.0
        name = await rig.undo("b")
        await until(lambda: len(rig.board.runs) == 2)
        rig.stores["a"].kill()
        done = await rig.ended("c", name)
        assert status_of(done).state is ProvisioningState.ROLLED_BACK
        owner = status_of(done).owner
        assert owner is not None
        assert (owner.server in "bc", owner.number, owner.term) == (True, 2, 2)
        assert set(rig.runs()[2:]) == {owner.server}

    play(scene)


def test_whoever_lost_an_operation_writes_nothing_of_it() -> None:
    async def scene(rig: Rig) -> None:
        await rig.start("ab")
        rig.board.slow_seconds = 20.0
        name = await rig.undo("b")
        await until(lambda: rig.board.runs)
        operations = rig.operations["a"]
        lost = operations.get(name)
        newer = await operations.own(name)
        await until(lambda: rig.engines["a"]._running == {})
        assert not is_over(operations.get(name))
        assert status_of(operations.get(name)).steps[0].state is StepState.RUNNING
        assert status_of(lost).owner != newer.owner
        for late in (
            operations.end(name, ProvisioningState.FAILED, actor=ACTOR, own=_own(lost)),
            operations.note(name, 0, lambda step: step, actor=ACTOR, own=_own(lost)),
        ):
            try:
                await late
            except OperationTaken:
                continue
            raise AssertionError("it was written")

    play(scene)


def test_a_board_that_obeys_a_newer_owner_ends_the_work_of_an_older_one() -> None:
    async def scene(rig: Rig) -> None:
        await rig.start("ab")
        rig.board.exit_codes["a"] = steps.OVERTAKEN
        name = await rig.undo("b")
        await until(lambda: status_of(rig.operations["b"].get(name)).owner is not None)
        await until(lambda: rig.engines["a"]._running == {})
        assert not is_over(rig.operations["a"].get(name))
        assert rig.board.runs == []

    play(scene)
