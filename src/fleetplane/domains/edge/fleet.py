"""Runs: one tool on many daemons, in the order and with the care that the run's policy asks for.

A run is a command of the ledger whose targets are held, and a record beside it, written in one
transaction. A driver per run sees it through. What became of each target is the ledger's; a run
is over when every target has its outcome, also across a restart of the server. Does not know how
a command travels.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import structlog

from fleetplane.domains.edge import targets
from fleetplane.domains.edge.calls import ANSWER_GRACE_SECONDS, ToolCall, encode_call, public_id
from fleetplane.domains.edge.groups import Groups
from fleetplane.domains.edge.kinds import EdgeNode, tenant_scope
from fleetplane.domains.edge.policy import RunPolicy
from fleetplane.domains.edge.run_driver import Driver, Ground
from fleetplane.domains.edge.run_feed import RunFeed, RunFeeds
from fleetplane.domains.edge.runs import Run, RunBeside, RunBook, RunSpec, RunState, Summary
from fleetplane.domains.edge.targets import Resolution, Skipped, Target, TargetKind
from fleetplane.kernel.actors import who
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import COMMAND, COMMAND_TARGET, Commands, CommandTarget
from fleetplane.kernel.commands.kinds import targets_scope
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from fleetplane.kernel.store import Store

log = structlog.get_logger(__name__)

ARGS_LIMIT_BYTES = 128 * 1024
SKIPPED_LIMIT = 1000
"""Of those who were left out, written down with a run."""
LONGEST_SECONDS = 7 * 86_400.0
"""Of a run, from its start: what is still held then expires."""
SWEEP_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesOf:
    """How daemons are found; kept small so that runs can be tried without any."""

    list: Callable[[str], Sequence[EdgeNode]]
    get: Callable[[str, str], EdgeNode]
    is_connected: Callable[[str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What an operator wants to have run."""

    tenant: str
    target: Target
    tool: str
    args_json: bytes
    security_context: str
    policy: RunPolicy
    actor: str
    user_security_token: str = ""


class FleetRuns:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        ledger: Commands,
        groups: Groups,
        nodes: NodesOf,
        check: Callable[[ToolCall], None] = lambda _: None,
        grace_seconds: float = 0.0,
    ) -> None:
        """`check` refuses what could not be sent; a daemon's word may be `grace_seconds` late."""
        self._store = store
        self._clock = clock
        self._ledger = ledger
        self._groups = groups
        self._nodes = nodes
        self._check = check
        self._grace_seconds = grace_seconds
        self._feeds = RunFeeds(clock)
        self._book = RunBook(store)
        self._ground = Ground(
            store=store, clock=clock, ledger=ledger, book=self._book, is_connected=nodes.is_connected
        )
        self._wanted: asyncio.Queue[Driver] = asyncio.Queue()
        self.ended: Counter[RunState] = Counter()
        """Runs that came to their end here."""

    def __repr__(self) -> str:
        return f"<FleetRuns {self._feeds!r}>"

    # Who is meant.

    def preview(self, tenant: str, target: Target, *, wait: bool = False) -> Resolution:
        everyone = self._nodes.list(tenant)
        missing: list[Skipped] = []
        match target.kind:
            case TargetKind.NODE:
                chosen = [self._node(tenant, target.name, everyone)]
            case TargetKind.GROUP:
                group = self._groups.get(tenant, target.name).spec
                chosen, missing = targets.choose(everyone, group.selector, group.pinned_members)
            case TargetKind.SELECTOR | TargetKind.ALL:
                chosen, missing = targets.choose(everyone, target.selector)
        return targets.resolve(chosen, missing, is_connected=self._nodes.is_connected, wait=wait)

    def _node(self, tenant: str, name: str, everyone: Iterable[EdgeNode]) -> EdgeNode:
        named = [node for node in everyone if node.spec.display_name == name and name]
        if len(named) > 1:
            raise InvalidArgument(f"{len(named)} daemons are named {name!r}; say which by id", field="target")
        node = named[0] if named else self._nodes.get(tenant, name)
        if node.spec.revoked_at_ns is not None:
            raise NotFound(f"there is no daemon {name!r}")
        return node

    # Starting and stopping.

    async def start(self, order: Order) -> Run:
        """Begin a run; it goes on by itself. Nothing begins unless enough targets can be reached."""
        policy = order.policy
        policy.check()
        if not order.tool:
            raise InvalidArgument("must not be empty", field="tool")
        if len(order.args_json) > ARGS_LIMIT_BYTES:
            raise InvalidArgument(f"takes more than {ARGS_LIMIT_BYTES} bytes", field="args")
        found = self.preview(order.tenant, order.target, wait=policy.wait)
        if len(found.resolved) < policy.require_min:
            raise FailedPrecondition(
                f"{len(found.resolved)} targets can be reached, {policy.require_min} are required",
                details={"cause": "RequireMinNotSatisfied"},
            )
        if not found.resolved:
            raise Unavailable(
                "no daemon that is meant can be reached", details={"cause": "EdgeUnavailable"},
                hint="`preview` tells who is meant, and who is left out and why",
            )  # fmt: skip
        return await self._issue(order, found)

    async def _issue(self, order: Order, found: Resolution) -> Run:
        policy = order.policy
        call = ToolCall(
            tool=order.tool, args_json=order.args_json, security_context=order.security_context,
            tenant=order.tenant, actor=who(order.actor), deadline_seconds=policy.deadline_seconds,
            user_security_token=order.user_security_token,
        )  # fmt: skip
        self._check(call)
        beside = RunBeside(
            scope=tenant_scope(order.tenant),
            spec=RunSpec(
                target=order.target, tool=order.tool, args_json=order.args_json,
                security_context=order.security_context, policy=policy, actor=who(order.actor),
                targets=len(found.resolved), skipped_count=len(found.skipped),
                skipped=found.skipped[:SKIPPED_LIMIT], started_at_ns=self._clock.now_ns(),
            ),
        )  # fmt: skip
        command = await self._ledger.issue(
            beside.scope, order.tool, list(found.resolved), actor=order.actor, payload=encode_call(call),
            wait=policy.wait, repeatable=policy.wait, hold=True, beside=beside,
            deliver_within_seconds=policy.deliver_within_seconds if policy.wait else LONGEST_SECONDS,
            run_for_seconds=policy.deadline_seconds + ANSWER_GRACE_SECONDS,
        )  # fmt: skip
        run = self.get(order.tenant, command.name)
        log.info("edge.run.started", run=public_id(command), tool=order.tool, targets=len(found.resolved))
        await self._wanted.put(Driver(self._ground, run, command, self._feeds.open(command.name)))
        return run

    async def cancel(self, tenant: str, run_id: str, *, actor: str) -> int:
        """Take a run back: those who have it are told, the rest never get it. How many that were."""
        run = self.get(tenant, run_id)
        command = self._store.get(COMMAND, run.scope, run.name)
        if command is None or command.status is None or not command.status.open:
            return 0
        await self._book.conclude(run, RunState.CANCELLED, actor=actor)
        await self._ledger.cancel(run.scope, run.name, actor=actor)
        return command.status.open

    # Looking.

    def get(self, tenant: str, run_id: str) -> Run:
        return self._book.get(tenant, run_id)

    def list(self, tenant: str) -> list[Run]:
        """The newest first."""
        return self._book.list(tenant)

    def targets(self, run: Run) -> Sequence[CommandTarget]:
        """What became of each; nothing is known of runs that ended long ago."""
        command = self._store.get(COMMAND, run.scope, run.name)
        return self._ledger.targets(command) if command is not None else ()

    def target(self, run: Run, node_id: str) -> CommandTarget | None:
        """What became of one of them."""
        return self._store.get(COMMAND_TARGET, targets_scope(run.scope, run.name), node_id)

    def summary(self, run: Run) -> Summary:
        kept = run.status.summary if run.status is not None else None
        return kept or Summary.of(self.targets(run))

    def feed(self, run: Run) -> RunFeed | None:
        """What is still known of how it went; None after a restart."""
        return self._feeds.get(run.name)

    def progressed(self, node_id: str, command: str, kind: str, data: bytes) -> None:
        """Some output of a daemon, or its own words on how far it is."""
        feed = self._feeds.get(command)
        if feed is not None:
            feed.add("progress", node_id, size=len(data), stream=kind, output=data)

    # Going on.

    async def prepare(self) -> None:
        """Take up the runs that an earlier server left unfinished; after the ledger has recovered."""
        for run in self._book.unfinished():
            command = self._store.get(COMMAND, run.scope, run.name)
            assert command is not None, "a run's command is kept for as long as it goes on"
            feed = self._feeds.open(run.name)
            await self._wanted.put(Driver(self._ground, run, command, feed, resumed=True))

    async def run(self) -> None:
        """Drive every run and forget the oldest, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._sweep(), name="edge/runs/sweep")
            while True:
                driver = await self._wanted.get()
                tasks.create_task(self._drive(driver), name=f"edge/run/{driver.name}")

    async def _drive(self, driver: Driver) -> None:
        self.ended[await driver.drive()] += 1

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            await self._book.sweep(self._clock.now_ns())
