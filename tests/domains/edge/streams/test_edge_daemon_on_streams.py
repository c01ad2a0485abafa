"""Our own daemon on the server's real streams: enrolled, connected, at work, rotated, drained, stopped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.edge.edge_daemon_rig import running
from support.edge.edge_streams_rig import until

from fleetplane.domains.blueprint import prepare_both, run_both
from fleetplane.domains.edge.agent.assembly import Reach
from fleetplane.domains.edge.agent.identity.enrolment import Enroller, EnrolmentRequest
from fleetplane.domains.edge.agent.identity.state_folder import StateFolder
from fleetplane.domains.edge.identity import assembly as identity_side
from fleetplane.domains.edge.identity.assembly import IdentitySide
from fleetplane.domains.edge.identity.policy import IdentityPolicy
from fleetplane.domains.edge.kinds import Desired, EdgeNode, tenant_scope
from fleetplane.domains.edge.nodes.config_layers import CONFIG_LAYER, ConfigLayers, LayerPlace
from fleetplane.domains.edge.streams.assembly import StreamOptions, StreamSide
from fleetplane.domains.edge.streams.call_encoding import ToolCall, ToolOutcome, decode_outcome, encode_call
from fleetplane.domains.edge.streams.verification import RejectionCause, SealPolicy
from fleetplane.domains.edge.wire.messages import CommandProgress
from fleetplane.fleet.people.door import Authenticators
from fleetplane.fleet.rollouts.records import KINDS as ROLLOUT_KINDS
from fleetplane.kernel.access import AccessTable, Principal
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.commands import COMMAND, COMMAND_TARGET, OPEN, Command, CommandTarget, state_of
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.rpc import (
    Authentication,
    CallStatistics,
    GrpcApp,
    ListenerSpec,
    MethodTable,
    open_listener,
)

TENANT, BOSS = "acme", "user/boss"
STRICT = StreamOptions(seal=SealPolicy(strict=True))


@dataclass(slots=True, kw_only=True)
class House:
    identity: IdentitySide
    streams: StreamSide
    layers: ConfigLayers

    async def enrol(self, folder: Path) -> StateFolder:
        invitation = await self.identity.enrollments.issue(TENANT, "box", actor=BOSS)
        state = StateFolder(folder)
        enroller = Enroller(folder=state, connect=Reach().channel, clock=SystemClock())
        await enroller.enrol(EnrolmentRequest(token=invitation.token))
        return state

    @property
    def node(self) -> EdgeNode:
        (found,) = self.identity.nodes.list(TENANT)
        return found

    def state(self) -> str:
        status = self.node.status
        return status.state.value if status is not None else "none"

    async def connected(self) -> None:
        await until(lambda: self.streams.presences.is_connected(self.node.name))

    async def issue(self, tool: str, args: dict[str, Any], deadline_seconds: float = 20) -> Command:
        call = ToolCall(
            tool=tool,
            args_json=json.dumps(args).encode(),
            security_context="zaru-free",
            tenant=TENANT,
            actor=BOSS,
            deadline_seconds=deadline_seconds,
        )
        self.streams.dispatcher.check(call)
        return await self.streams.dispatcher.ledger.issue(
            tenant_scope(TENANT),
            tool,
            [self.node.name],
            actor=BOSS,
            payload=encode_call(call),
            repeatable=False,
            run_for_seconds=deadline_seconds + 5,
        )

    async def outcome(self, command: Command) -> tuple[str, ToolOutcome]:
        target = await until(lambda: self._ended(command))
        return state_of(target).value, decode_outcome(target.status.result)

    def _ended(self, command: Command) -> CommandTarget | None:
        (target,) = self.streams.dispatcher.ledger.targets(command)
        return None if state_of(target) in OPEN else target


@asynccontextmanager
async def house(folder: Path, *, overlap_seconds: float = 60.0) -> AsyncIterator[House]:
    clock = SystemClock()
    master = MasterKey(b"k" * 32, clock)
    kinds = [*KERNEL_KINDS, *identity_side.KINDS, CONFIG_LAYER, *ROLLOUT_KINDS, COMMAND, COMMAND_TARGET]
    address = [""]
    async with Store.open(StoreSettings(path=folder / "state.db"), kinds=kinds, clock=clock) as store:
        revocations, layers = Revocations(store, clock), ConfigLayers(store)
        operators = await Operators.load(store, master, clock)
        identity = await IdentitySide.load(
            store,
            master,
            clock,
            revocations=revocations,
            door=Authenticators(operators, revocations),
            layers=layers,
            issuer="",
            policy=IdentityPolicy(attests_per_minute=0, overlap_seconds=overlap_seconds),
            endpoint=lambda: address[0],
        )
        streams = StreamSide(
            store,
            clock,
            tokens=identity.tokens,
            key=identity.key,
            revocations=revocations,
            layers=layers,
            options=STRICT,
        )
        await prepare_both(streams)
        app = _app(identity, streams)
        spec = ListenerSpec(name=identity_side.LISTENER, addresses=("127.0.0.1:0",), app=app)
        async with open_listener(spec, grace_seconds=2) as listener, asyncio.TaskGroup() as tasks:
            address[0] = listener.addresses[0]
            serving = tasks.create_task(run_both(streams))
            yield House(identity=identity, streams=streams, layers=layers)
            streams.drain()
            await app.drain(2)
            serving.cancel()


def _app(identity: IdentitySide, streams: StreamSide) -> GrpcApp:
    app = GrpcApp(
        listener=identity_side.LISTENER,
        table=MethodTable(identity_side.METHODS),
        access=AccessTable(identity_side.GRANTS),
        authenticators={
            Authentication.ANONYMOUS: lambda _connection: Principal(name="anonymous", roles=frozenset()),
            **identity.authenticators[identity_side.LISTENER],
        },
        clock=SystemClock(),
        statistics=CallStatistics(),
    )
    service = identity.service(streams.streams)
    app.add_service(service.descriptor, service.servicer, raw_requests=service.raw_requests)
    app.seal()
    return app


async def test_it_enrols_connects_and_works_under_strict_verification(tmp_path: Path) -> None:
    async with house(tmp_path) as h:
        state = await h.enrol(tmp_path / "edge")
        told: list[CommandProgress] = []
        h.streams.dispatcher.watch(lambda _node, _command, said: told.append(said))
        async with running(state):
            await h.connected()
            await until(lambda: h.state() == "connected")
            script = "printf 'one\\ntwo\\n'; printf oops >&2; exit 3"
            command = await h.issue("cmd.run", {"command": "/bin/sh", "args": ["-c", script]})
            found, kept = await h.outcome(command)
            assert (found, kept.exit_code) == ("failed", 3)
            assert (kept.stdout_tail, kept.stderr_tail) == (b"one\ntwo\n", b"oops")
            assert b"".join(said.data for said in told if said.stream == "stdout") == b"one\ntwo\n"
            found, kept = await h.outcome(await h.issue("cmd.run", {"command": "true"}))
            assert (found, kept.exit_code) == ("ok", 0)
        await until(lambda: h.state() == "disconnected")
        assert sum(h.streams.verifier.refused.values()) == 0


async def test_a_cancelled_command_is_stopped(tmp_path: Path) -> None:
    async with house(tmp_path) as h:
        state = await h.enrol(tmp_path / "edge")
        async with running(state):
            await h.connected()
            command = await h.issue("cmd.run", {"command": "sleep", "args": ["60"]}, 60)
            node = h.node.name
            await until(lambda: h.streams.presences.in_flight(node) == 1)
            await h.streams.dispatcher.ledger.cancel(command.scope, command.name, actor=BOSS)
            assert (await h.outcome(command))[0] == "cancelled"
            # Its place is free as soon as the process is gone, long before the deadline.
            await until(lambda: h.streams.presences.in_flight(node) == 0)


async def test_a_pushed_configuration_is_acknowledged_and_remembered(tmp_path: Path) -> None:
    async with house(tmp_path) as h:
        state = await h.enrol(tmp_path / "edge")
        layer = await h.layers.put(
            LayerPlace(tenant=TENANT), {"spec": {"cluster": {"heartbeat_interval_secs": 1}}}, actor=BOSS
        )
        node = h.node.name
        async with running(state):
            await h.connected()
            live = h.streams.presences.get(node)
            assert live is not None
            await until(lambda: live.config_version == layer.spec.version or live.config_refused)
            assert live.config_refused == ""
            assert live.config_pushed == layer.spec.version
        async with running(state):
            # The record may still say "connected" of the stream before.
            await until(lambda: h.streams.presences.get(node) not in (None, live))
            again = h.streams.presences.get(node)
            assert again is not None
            await h.outcome(await h.issue("cmd.run", {"command": "true"}))
            assert (again.config_version, again.config_pushed) == (layer.spec.version, "")


async def test_it_drains_and_says_so_and_works_again_when_that_is_taken_back(tmp_path: Path) -> None:
    async with house(tmp_path) as h:
        state = await h.enrol(tmp_path / "edge")
        node = h.node.name
        async with running(state):
            await h.connected()
            await h.identity.nodes.set_desired(TENANT, node, Desired.DRAINING, actor=BOSS)
            live = h.streams.presences.get(node)
            assert live is not None
            await until(lambda: live.drained)
            await until(lambda: h.state() == "draining")
            await h.identity.nodes.set_desired(TENANT, node, Desired.ACTIVE, actor=BOSS)
            await until(lambda: h.streams.presences.get(node) not in (None, live))
            assert (await h.outcome(await h.issue("cmd.run", {"command": "true"})))[0] == "ok"


async def test_a_shutdown_ends_it(tmp_path: Path) -> None:
    async with house(tmp_path) as h:
        state = await h.enrol(tmp_path / "edge")
        node = h.node.name
        async with running(state) as made:
            await h.connected()
            command = await h.issue("cmd.run", {"command": "sleep", "args": ["60"]}, 60)
            await until(lambda: h.streams.presences.in_flight(node) == 1)
            await h.identity.nodes.set_desired(TENANT, node, Desired.SHUTDOWN, grace_seconds=0.5, actor=BOSS)
            await until(lambda: not h.streams.presences.is_connected(node))
            assert (await h.outcome(command))[0] in ("cancelled", "failed")
            assert made.daemon is not None
        await until(lambda: h.state() == "disconnected")


async def test_a_revoked_daemon_is_cut_off_and_stays_away(tmp_path: Path) -> None:
    async with house(tmp_path) as h:
        state = await h.enrol(tmp_path / "edge")
        node = h.node.name
        async with running(state):
            await h.connected()
            await h.identity.nodes.revoke(TENANT, node, reason="stolen", actor=BOSS)
            await until(lambda: not h.streams.presences.is_connected(node))
            await until(lambda: h.streams.verifier.refused[RejectionCause.REVOKED] >= 1)
            assert h.state() == "revoked"
