"""Configuration layers that go out in waves, to daemons on real streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import structlog
from support.edge.edge_signer import BOSS, ok
from support.edge.edge_streams_rig import Daemon, Rig, streams_rig, until

from fleetplane.domains.edge.agent.config.layers import DaemonConfiguration
from fleetplane.domains.edge.agent.identity.state_folder import StateFolder
from fleetplane.domains.edge.nodes.config_layers import LayerPlace, put_layer, version_of
from fleetplane.domains.edge.rollout import LayerConfiguration
from fleetplane.domains.edge.streams.live import DaemonPresences
from fleetplane.domains.edge.streams.sealing import StreamSealer
from fleetplane.fleet.freeze import Freezes
from fleetplane.fleet.rollouts.records import ROLLOUT_POLICY, PolicySpec, Rollout, records_of, status_of
from fleetplane.fleet.rollouts.rollouts import Rollouts, RolloutVerb, Start
from fleetplane.fleet.rollouts.rules.policy import OnHalt, Policy
from fleetplane.fleet.rollouts.rules.states import RolloutPhase
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.kernel.errors import NotFound, SettingsError
from fleetplane.kernel.store import Draft

SCOPE = "tenant/acme"
ACME, EVERYONE = LayerPlace(tenant="acme"), LayerPlace()
CANARY = Policy(waves=("label canary", "rest"), soak_seconds=0.0, on_halt=OnHalt.ROLL_BACK)


@dataclass
class Site:
    rig: Rig
    subject: LayerConfiguration
    rollouts: Rollouts
    daemons: list[Daemon] = field(default_factory=list)
    seen: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    """Configurations that each daemon was sent, in order."""
    codes: dict[str, int] = field(default_factory=dict)
    """With what probes end."""
    owners: dict[str, DaemonConfiguration] = field(default_factory=dict)
    """Daemons that do with what is pushed what our own do."""
    refuses: set[int] = field(default_factory=set)
    """Levels that no daemon takes."""

    async def work(self, daemon: Daemon) -> None:
        """Take configurations, and say so, until the stream ends."""
        while True:
            command = await daemon.read()
            if command.WhichOneof("command") == "invoke_tool":
                code = self.codes[daemon.node_id]
                await daemon.answer(command.invoke_tool.command_id, ok(code))
                continue
            pushed = command.push_config
            config = json.loads(pushed.config_delta)
            self.seen[daemon.node_id].append(config)
            refused = config.get("level") in self.refuses
            if daemon.node_id in self.owners:
                await self._answer_as_a_daemon(daemon, pushed)
                continue
            state, message = ("config-refused", "no such level") if refused else ("config-applied", "")
            chunk = pb.Chunk(status=pb.StatusUpdate(state=state, message=message or pushed.version))
            await daemon.send(command_progress=daemon.sign.chunk(pushed.version, chunk))

    async def _answer_as_a_daemon(self, daemon: Daemon, pushed: pb.PushConfig) -> None:
        """By what our own daemon does with it, under the configuration of its owner."""
        state, message = "config-applied", pushed.version
        try:
            await asyncio.to_thread(self.owners[daemon.node_id].push, pushed.version, pushed.config_delta)
        except SettingsError as error:
            state, message = "config-refused", error.message
        chunk = pb.Chunk(status=pb.StatusUpdate(state=state, message=message))
        await daemon.send(command_progress=daemon.sign.chunk(pushed.version, chunk))

    def has(self, daemon: Daemon) -> Mapping[str, Any]:
        return self.seen[daemon.node_id][-1] if self.seen[daemon.node_id] else {}

    async def all_have(self, config: Mapping[str, Any]) -> None:
        """Sent, and acknowledged in their records."""
        version = version_of(json.dumps(config, separators=(",", ":"), sort_keys=True).encode())
        await until(lambda: all(self.rig.status(one).config_version == version for one in self.daemons))

    def only(self) -> Rollout:
        (found,) = self.rollouts.book.list()
        return found

    async def ended(self, phase: RolloutPhase) -> Rollout:
        await until(lambda: [one for one in self.rollouts.book.list() if status_of(one).settled == phase])
        return self.only()


@asynccontextmanager
async def opened(folder: Path, *, elsewhere: bool = False) -> AsyncIterator[Site]:
    """Three daemons that have {"level": 1}; the second is tagged as canary.

    `elsewhere`: rollouts are driven by a server that has none of the daemons.
    """
    async with streams_rig(folder, shared=elsewhere) as rig, asyncio.TaskGroup() as tasks:
        side = rig.side
        nobody = DaemonPresences(StreamSealer(rig.key, rig.tokens, rig.clock))
        subject = LayerConfiguration(
            rig.store,
            rig.layers,
            presences=nobody if elsewhere else side.presences,
            whereabouts=side.whereabouts,
            pushes=side.pushes,
            controller=side.controller,
            ledger=side.dispatcher.ledger,
            clock=rig.clock,
        )
        rig.store.add_hook(subject.commit_hook)
        rollouts = Rollouts(rig.store, rig.clock, [subject], Freezes(rig.store, rig.clock))
        site = Site(rig, subject, rollouts)
        await rig.layers.put(ACME, {"level": 1}, actor=BOSS)
        for _ in range(3):
            daemon = await rig.daemon()
            site.daemons.append(daemon)
            site.seen[daemon.node_id] = []
            await daemon.open()
        await rig.nodes.set_tags("acme", site.daemons[1].node_id, ["canary"], actor=BOSS)
        running = [tasks.create_task(site.work(daemon)) for daemon in site.daemons]
        running.append(tasks.create_task(rollouts.run()))
        await site.all_have({"level": 1})
        yield site
        for task in running:
            task.cancel()
        for daemon in site.daemons:
            daemon.leave()


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
async def test_a_policy_brings_layers_to_the_canary_first_and_then_to_the_rest(
    tmp_path: Path, elsewhere: bool
) -> None:
    async with opened(tmp_path, elsewhere=elsewhere) as site:
        first, canary, last = site.daemons
        await site.rollouts.set_policy("edge.config", SCOPE, PolicySpec(policy=CANARY), actor=BOSS)
        approved = Policy(waves=CANARY.waves, soak_seconds=0.0, approvals=(2,))
        await site.rollouts.set_policy("edge.config", SCOPE, PolicySpec(policy=approved), actor=BOSS)
        await site.rig.layers.put(ACME, {"level": 2}, actor=BOSS)
        await until(lambda: site.rollouts.book.list() and status_of(site.only()).wave == 1)
        await until(lambda: status_of(site.only()).phase is RolloutPhase.WAITING)
        assert site.has(canary) == {"level": 2}
        assert site.seen[first.node_id] == site.seen[last.node_id] == [{"level": 1}]

        # A daemon's own layer does not wait, and does not bring the version that waits.
        await site.rig.layers.put(LayerPlace(tenant="acme", node_id=last.node_id), {"mine": 1}, actor=BOSS)
        await until(lambda: site.has(last) == {"level": 1, "mine": 1})
        await site.rollouts.order(site.only(), RolloutVerb(verb="approve", actor="boss"))
        done = await site.ended(RolloutPhase.DONE)
        assert status_of(done).counts == {"confirmed": 3}
        assert site.has(first) == {"level": 2}
        assert site.has(last) == {"level": 2, "mine": 1}

        # Undone, everybody goes back, whoever has a layer of its own as well.
        await site.rollouts.order(done, RolloutVerb(verb="undo", actor="boss"))
        await site.ended(RolloutPhase.ROLLED_BACK)
        assert (site.has(first), site.has(canary)) == ({"level": 1}, {"level": 1})
        assert site.has(last) == {"level": 1, "mine": 1}


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
async def test_a_configuration_that_the_canary_refuses_reaches_nobody_else(
    tmp_path: Path, elsewhere: bool
) -> None:
    async with opened(tmp_path, elsewhere=elsewhere) as site:
        first, canary, last = site.daemons
        site.refuses.add(2)
        await site.rollouts.set_policy("edge.config", "", PolicySpec(policy=CANARY), actor=BOSS)
        await site.rig.layers.put(
            EVERYONE, {"level": 3, "other": True}, actor=BOSS
        )  # the tenant's level wins
        await site.rig.layers.put(ACME, {"level": 2}, actor=BOSS)
        await until(
            lambda: [
                one for one in site.rollouts.book.list() if status_of(one).phase is RolloutPhase.ROLLED_BACK
            ]
        )
        (halted,) = [
            one for one in site.rollouts.book.list() if status_of(one).phase is RolloutPhase.ROLLED_BACK
        ]
        assert "refused the configuration: no such level" in status_of(halted).halt[0].message
        assert {config["level"] for config in site.seen[first.node_id]} == {1}
        assert {config["level"] for config in site.seen[last.node_id]} == {1}
        assert 2 in {config["level"] for config in site.seen[canary.node_id]}
        assert site.rig.status(canary).config_version != version_of(b'{"level":2,"other":true}')

        # Once it would be taken, somebody rolls the same version out again.
        site.refuses.clear()
        again = Start(subject="edge.config", scope=SCOPE, to="newest", policy=CANARY, actor="boss")
        await site.rollouts.start(again)
        await site.all_have({"level": 2, "other": True})


def owned(folder: Path, *, pins: bool) -> DaemonConfiguration:
    """The configuration of a daemon whose owner keeps its security contexts to himself, or does not."""
    state = StateFolder(folder)
    state.make()
    edge = {"tenant_id": "acme", "pin_security_contexts": pins}
    cluster = {"enabled": True, "role": "edge", "controller": {"endpoint": "fleet:443"}, "edge": edge}
    node = {"id": "11111111-2222-4333-8444-555555555555", "type": "edge"}
    state.store_document(json.dumps({"spec": {"node": node, "cluster": cluster}}).encode())
    made = DaemonConfiguration(state, user_config=None, log=structlog.get_logger())
    made.load()
    return made


async def test_security_contexts_are_rolled_out_and_an_owner_who_pins_his_own_halts_them(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as site:
        _, canary, _ = site.daemons
        site.owners = {one.node_id: owned(tmp_path / one.node_id, pins=one is canary) for one in site.daemons}
        await site.rollouts.set_policy("edge.config", SCOPE, PolicySpec(policy=CANARY), actor=BOSS)
        contexts: dict[str, Any] = {
            "spec": {"security_contexts": [{"name": "night", "deny_list": ["cmd.run"]}]}
        }
        await site.rig.layers.put(ACME, contexts, actor=BOSS)
        halted = await site.ended(RolloutPhase.ROLLED_BACK)
        assert "spec.security_contexts is decided on this machine" in status_of(halted).halt[0].message
        assert all(one.current.context("night") is None for one in site.owners.values())

        site.owners[canary.node_id] = owned(tmp_path / "free", pins=False)
        again = Start(subject="edge.config", scope=SCOPE, to="newest", policy=CANARY, actor="boss")
        await site.rollouts.start(again)
        await site.all_have(contexts)
        assert all(one.current.context("night") is not None for one in site.owners.values())


async def test_without_a_policy_a_layer_goes_to_all_and_an_earlier_version_can_be_rolled_out(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as site:
        earlier = site.subject.newest(SCOPE)
        await site.rig.layers.put(ACME, {"level": 2}, actor=BOSS)
        await site.all_have({"level": 2})
        assert site.rollouts.book.list() == []
        assert site.subject.waiting(SCOPE) == ""
        with pytest.raises(NotFound):  # nothing was held, so nothing was kept
            site.subject.version(SCOPE, earlier)

        manual = PolicySpec(policy=CANARY, automatic=False)
        await site.rollouts.set_policy("edge.config", "", manual, actor=BOSS)
        await site.rig.layers.put(EVERYONE, {"extra": 1}, actor=BOSS)
        assert site.subject.waiting(SCOPE) == site.subject.newest(SCOPE)
        await site.rollouts.start(
            Start(subject="edge.config", scope="acme", to="newest", policy=None, actor="boss")
        )
        await site.ended(RolloutPhase.DONE)
        await site.all_have({"level": 2, "extra": 1})
        assert site.subject.waiting(SCOPE) == ""

        # A gate's probe runs on the daemons themselves.
        ids = [daemon.node_id for daemon in site.daemons]
        site.codes = dict(zip(ids, (0, 3, 0), strict=True))
        found = await site.subject.probe(SCOPE, ids, ["/usr/bin/check", "--fast"], seconds=60.0)
        assert found == site.codes

        # Without the policy the next change goes to everyone again.
        await site.rollouts.remove_policy("edge.config", "", actor=BOSS)
        await site.rig.layers.put(ACME, {"level": 4}, actor=BOSS)
        await site.all_have({"level": 4, "extra": 1})


async def test_a_policy_for_one_change_goes_once_its_rollout_has_started(tmp_path: Path) -> None:
    async with opened(tmp_path) as site:
        first, canary, last = site.daemons
        spec = PolicySpec(policy=CANARY, once=True)

        def change(draft: Draft) -> None:
            draft.put(ROLLOUT_POLICY, SCOPE, "edge.config", spec=spec)
            put_layer(draft, ACME, {"level": 2}, actor=BOSS)

        touches = [ROLLOUT_POLICY.key(SCOPE, "edge.config"), ACME.key]
        await site.rig.store.transact(change, actor=BOSS, action="test", touches=touches)
        done = await site.ended(RolloutPhase.DONE)
        assert [len(site.seen[one.node_id]) for one in (first, canary, last)] == [2, 2, 2]
        assert done.spec.automatic
        assert [one.wave for one in records_of(site.rig.store, done).values()].count(1) == 1
        await until(lambda: not site.rig.store.list(ROLLOUT_POLICY))

        # The next change is nobody's but everyone's; and one that changes nothing leaves no policy.
        await site.rig.layers.put(ACME, {"level": 3}, actor=BOSS)
        await site.all_have({"level": 3})
        await site.rollouts.set_policy("edge.config", "", spec, actor=BOSS)
        await until(lambda: not site.rig.store.list(ROLLOUT_POLICY))
        assert len(site.rollouts.book.list()) == 1
        assert site.rollouts.holders([("edge-config", "/tenants/acme", "tenant")]) == [("edge.config", SCOPE)]
        assert site.rollouts.holders([("edge-config", "/", "global")]) == [("edge.config", "")]
        assert site.rollouts.holders([("edge-config", "/tenants/acme", first.node_id)]) == []
