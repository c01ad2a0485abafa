"""Commands for agents: issued through the ledger, delivered on the agent's stream."""

from __future__ import annotations

from fleetplane.domains.proxies import wire
from fleetplane.domains.proxies.kinds import Agent
from fleetplane.domains.proxies.ports import Order, Result, Verb
from fleetplane.domains.proxies.presence import Presences
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import Command, Commands, State, state_of
from fleetplane.kernel.errors import Unavailable
from fleetplane.kernel.store import Store

CHANNEL = "proxies"
ANSWER_SECONDS = {Verb.RELOAD: 15.0, Verb.RESTART: 30.0, Verb.STATUS: 15.0, Verb.VALIDATE: 15.0}
STOP_SLACK_SECONDS = 10.0
"""Beyond the time that stopping may take."""
REPEATABLE = frozenset({Verb.RELOAD, Verb.STATUS, Verb.VALIDATE})
"""Doing these twice does no harm; a restart or a stop that may have happened is not sent again."""
_WORDS = {
    Verb.RELOAD: "Nginx reloaded successfully",
    Verb.RESTART: "Nginx restarted successfully",
    Verb.STOP: "Nginx stopped successfully",
    Verb.STATUS: "Status reported",
    Verb.VALIDATE: "Configuration is valid",
}
_UNHEARD = {
    State.UNDELIVERABLE: "is not connected",
    State.EXPIRED: "did not come back in time",
    State.TIMED_OUT: "did not answer in time",
    State.CANCELLED: "had the command taken back",
}


class Commander:
    def __init__(self, store: Store, clock: Clock, presences: Presences) -> None:
        self._clock = clock
        self._presences = presences
        self.ledger = Commands(store, clock, channel=CHANNEL, courier=self)

    # For the ledger.

    def is_present(self, target: str) -> bool:
        return self._presences.open(target) is not None

    def has_room(self, _target: str) -> bool:
        return True  # agents queue what they are told themselves

    def recall(self, target: str, command: str, reason: str) -> None:
        """Agents know no way to take a command back: what they do is short."""

    def deliver(self, target: str, command: Command) -> bool:
        live = self._presences.open(target)
        if live is None:
            return False
        order = pb.Command.FromString(command.spec.payload)
        order.command_id = command.name
        return live.session.offer(
            pb.MasterMessage(timestamp=wire.moment(self._clock.now_ns()), command=order)
        )

    # For REST.

    async def order(self, agent: Agent, order: Order, *, actor: str) -> Result:
        """The agent's own answer; raises `Unavailable` if it is away or does not answer in time."""
        seconds = ANSWER_SECONDS.get(order.verb, order.timeout_seconds + STOP_SLACK_SECONDS)
        issued = await self.ledger.issue(
            agent.scope, order.verb, [agent.name], actor=actor,
            payload=wire.command(order).SerializeToString(), deliver_within_seconds=seconds,
            run_for_seconds=seconds, repeatable=order.verb in REPEATABLE,
        )  # fmt: skip
        (target,) = self.ledger.targets(await self.ledger.finished(issued))
        state = state_of(target)
        said = target.status.detail if target.status is not None else ""
        if state not in (State.OK, State.FAILED):
            raise Unavailable(f"agent {agent.spec.name} {_UNHEARD[state]}")
        success = state is State.OK
        return Result(
            success=success,
            message=said or (_WORDS[order.verb] if success else f"{order.verb} failed"),
            output=self.ledger.outputs.get(issued.name, agent.name),
        )
