"""Commands for agents: issued through the ledger, delivered on the agent's stream, and their sealed answers.

An answer may hold secrets, so it is not stored as a record: it is sealed under the master key, read once and
deleted. On a database file, and where the agent is connected to the server that asked, it stays in memory.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from typing import Final, NoReturn

import structlog

from fleetplane.domains.proxies import wire
from fleetplane.domains.proxies.agents.live import CHANNEL, AgentPresences, LiveAgent
from fleetplane.domains.proxies.agents.ports import AgentOrder, AgentResult, AgentVerb
from fleetplane.domains.proxies.kinds.records import Agent
from fleetplane.fleet.streams.courier import StreamCourier
from fleetplane.fleet.streams.presence import Flight
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import (
    COMMAND,
    COMMAND_TARGET,
    OPEN,
    Command,
    Commands,
    CommandState,
    CommandTarget,
    state_of,
)
from fleetplane.kernel.commands.courier import CommandLimits
from fleetplane.kernel.commands.rules import targets_scope
from fleetplane.kernel.errors import FleetplaneError, Unavailable
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.presence import PresenceRegistry
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.times import NS

log = structlog.get_logger(__name__)

PREFIX: Final = "proxies/answer/"
ACTOR: Final = "system/answers"
KEEP_SECONDS: Final = 600.0
"""Longer than any command has to be answered: whoever asked has it by then, or is gone."""
SWEEP_SECONDS: Final = 300.0
PACKED_LIMIT_BYTES: Final = 1024 * 1024 - 1024
"""What a secret may hold, sealed."""
SMALL_BYTES: Final = 16 * 1024


class CommandAnswers:
    def __init__(self, store: Store, clock: Clock, master: MasterKey) -> None:
        self._store = store
        self._clock = clock
        self._master = master

    def __repr__(self) -> str:
        return f"<Answers {'shared' if self._store.shared else 'in memory'}>"

    async def pass_on(self, command: Command, text: str) -> None:
        """Keep what the one target of a command shows for the server that asked, unless it is too large."""
        name = _secret(command)
        packed = await _worked(zlib.compress, text.encode())
        if len(packed) > PACKED_LIMIT_BYTES:
            log.warning("proxies.answer_too_large", command=command.name, packed_bytes=len(packed))
            return
        await self._store.put_secret(name, self._master.seal(packed, purpose=name), actor=ACTOR)

    async def given(self, command: Command) -> str:
        """What was passed on, once; empty if nothing was."""
        name = _secret(command)
        sealed = await self._store.get_secret(name)
        if sealed is None:
            return ""
        await self._store.delete_secret(name, actor=ACTOR)
        packed = self._master.open(sealed, purpose=name)
        return (await _worked(zlib.decompress, packed)).decode(errors="replace")

    async def run_for_all(self) -> NoReturn:
        """Delete what nobody asked for any more, until cancelled."""
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            try:
                await self._sweep()
            except FleetplaneError as error:
                log.warning("proxies.answers_not_swept", error=error.message)

    async def _sweep(self) -> None:
        before_ns = self._store.clock.now_ns() - round(KEEP_SECONDS * NS)
        for name in await self._store.secret_names(PREFIX):
            issued, _, _ = name.removeprefix(PREFIX).partition("/")
            if not issued.isdecimal() or int(issued) < before_ns:
                await self._store.delete_secret(name, actor=ACTOR)


async def _worked(work: Callable[[bytes], bytes], data: bytes) -> bytes:
    """Off the event loop, where it takes long enough to be worth it."""
    return work(data) if len(data) <= SMALL_BYTES else await asyncio.to_thread(work, data)


def _secret(command: Command) -> str:
    return f"{PREFIX}{command.created_at_ns}/{command.name}"


ANSWER_SECONDS = {
    AgentVerb.RELOAD: 15.0,
    AgentVerb.RESTART: 30.0,
    AgentVerb.STATUS: 15.0,
    AgentVerb.VALIDATE: 15.0,
    AgentVerb.SHOW: 15.0,
    # The version has 30 s to come, the other NGINX 10 s to stop, ours 10 s to be confirmed; and the way back.
    AgentVerb.TAKE_OVER: 120.0,
    AgentVerb.GIVE_BACK: 60.0,
}
STOP_SLACK_SECONDS = 10.0
"""Beyond the time that stopping may take."""
RESULT_BYTES = CommandLimits().result_bytes
"""Of what an agent prints, kept in the record where servers share a database: its end."""
IN_FLIGHT = 16
"""Commands that an agent has at once, as daemons of edge do; it works on them one after the other."""
REPEATABLE = frozenset({AgentVerb.RELOAD, AgentVerb.STATUS, AgentVerb.VALIDATE, AgentVerb.SHOW})
"""Doing these twice does no harm; a restart or a stop that may have happened is not sent again."""
_WORDS = {
    AgentVerb.RELOAD: "Nginx reloaded successfully",
    AgentVerb.RESTART: "Nginx restarted successfully",
    AgentVerb.STOP: "Nginx stopped successfully",
    AgentVerb.STATUS: "Status reported",
    AgentVerb.VALIDATE: "Configuration is valid",
    AgentVerb.SHOW: "Shown",
    AgentVerb.TAKE_OVER: "NGINX was taken over",
    AgentVerb.GIVE_BACK: "NGINX was given back",
}
_UNHEARD = {
    CommandState.UNDELIVERABLE: "is not connected",
    CommandState.EXPIRED: "did not come back in time",
    CommandState.TIMED_OUT: "did not answer in time",
    CommandState.CANCELLED: "had the command taken back",
}


class AgentCommander:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        presences: AgentPresences,
        *,
        whereabouts: PresenceRegistry,
        answers: CommandAnswers,
    ) -> None:
        """`answers` carry what agents show from their server to the one that asked."""
        self._store = store
        self._clock = clock
        self._presences = presences
        self._answers = answers
        self._places = whereabouts
        self.courier: StreamCourier[pb.MasterMessage, LiveAgent, Flight] = StreamCourier(
            presences, self, clock, channel=CHANNEL
        )
        self.ledger = Commands(
            store,
            clock,
            channel=CHANNEL,
            courier=self.courier,
            stops=lambda _agent: False,
            whereabouts=whereabouts,
        )

    # For the courier.

    def takes_work(self, _live: LiveAgent) -> bool:
        return True

    def room(self, _live: LiveAgent) -> int:
        return IN_FLIGHT

    def encode(self, _live: LiveAgent, command: Command) -> tuple[pb.MasterMessage, Flight]:
        order = pb.Command.FromString(command.spec.payload)
        order.command_id = command.name
        now_ns = self._clock.now_ns()
        flight = Flight(sent_at_ns=now_ns, over_at_ns=now_ns + command.spec.run_for_ns)
        return pb.MasterMessage(timestamp=wire.moment(now_ns), command=order), flight

    def encode_recall(self, _live: LiveAgent, _command: str, _reason: str) -> None:
        """Agents know no way to take a command back: what they do is short."""

    # For the stream.

    async def settle(self, agent_id: str) -> None:
        """Before a stream is open: what may have been lost with an earlier one and can be repeated waits."""
        await self.ledger.renewed(agent_id)

    async def arrived(self, live: LiveAgent) -> None:
        """Send what waits."""
        await self.ledger.room(live.agent)

    async def answered(self, live: LiveAgent, said: wire.CommandAnswer) -> None:
        """Take an agent's answer in, also for a command of an earlier stream."""
        flight = self.courier.landed(live, said.command)
        command = self._store.get(COMMAND, live.record.scope, said.command) if self._store.shared else None
        if (
            command is not None
            and command.spec.verb == AgentVerb.SHOW
            and said.output
            and self._is_asked(live, command)
        ):
            await self._answers.pass_on(command, said.output)  # before anybody is told that it is there
        if command is None or command.spec.verb == AgentVerb.SHOW:
            await self.ledger.answered(
                live.agent, said.command, ok=said.success, detail=said.message, output=said.output
            )
        else:  # whoever asked may be at another server
            outcome = CommandState.OK if said.success else CommandState.FAILED
            kept = said.output.encode()[-RESULT_BYTES:]
            await self.ledger.ended(live.agent, said.command, outcome, detail=said.message, result=kept)
        if flight is not None:
            await self.ledger.room(live.agent)

    def _is_asked(self, live: LiveAgent, command: Command) -> bool:
        """Whether an agent's answer to a command is waited for: others of its workspace must not answer."""
        target = self._store.get(COMMAND_TARGET, targets_scope(command.scope, command.name), live.agent)
        return target is not None and state_of(target) in OPEN

    # For REST.

    def output(self, target: CommandTarget) -> str:
        """What an agent printed: in memory, or in the record where servers share a database."""
        return printed(self.ledger, target)

    async def order(self, agent: Agent, order: AgentOrder, *, actor: str) -> AgentResult:
        """The agent's own answer; raises `Unavailable` if it is away or does not answer in time."""
        seconds = ANSWER_SECONDS.get(order.verb, order.timeout_seconds + STOP_SLACK_SECONDS)
        issued = await self.ledger.issue(
            agent.scope,
            order.verb,
            [agent.name],
            actor=actor,
            payload=wire.command(order).SerializeToString(),
            deliver_within_seconds=seconds,
            run_for_seconds=seconds,
            repeatable=order.verb in REPEATABLE,
        )
        (target,) = self.ledger.targets(await self.ledger.finished(issued))
        state = state_of(target)
        said = target.status.detail if target.status is not None else ""
        if state is CommandState.EXPIRED and self._presences.is_present(agent.name):
            raise Unavailable(
                f"agent {agent.spec.name} has {IN_FLIGHT} commands to answer, and took no other in time",
                hint="try again when those have ended",
            )
        if state not in (CommandState.OK, CommandState.FAILED):
            raise Unavailable(f"agent {agent.spec.name} {_UNHEARD[state]}")
        success = state is CommandState.OK
        output = self.output(target)
        if order.verb is AgentVerb.SHOW:  # it may hold secrets, and whoever asked has it
            self.ledger.outputs.forget(issued.name, agent.name)
            if self._store.shared:
                output = await self._answers.given(issued) or output
                if success and not output:
                    raise Unavailable(
                        f"what agent {agent.spec.name} shows is too large to be passed on between servers",
                        hint=f"ask {self._places.server_of(agent.name) or 'the server that has the agent'}",
                    )
        return AgentResult(
            success=success,
            message=said or (_WORDS[order.verb] if success else f"{order.verb} failed"),
            output=output,
        )


def printed(ledger: Commands, target: CommandTarget) -> str:
    """What a target printed, as far as it is known at this server."""
    kept = target.status.result.decode(errors="replace") if target.status is not None else ""
    return ledger.outputs.get(target.spec.command, target.name) or kept
