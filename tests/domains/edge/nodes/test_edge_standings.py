"""Of several servers, the one that has a daemon's session writes its record."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.edge.edge_signer import BOSS, TENANT
from support.edge.edge_streams_rig import Daemon, Rig, streams_rig, until

from fleetplane.domains.edge.explain import DaemonExplainer
from fleetplane.domains.edge.kinds import tenant_scope
from fleetplane.domains.edge.nodes.config_layers import LayerPlace
from fleetplane.domains.edge.nodes.standings import Standings
from fleetplane.domains.edge.streams.live import DaemonPresences
from fleetplane.domains.edge.streams.sealing import StreamSealer
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.kernel.presence import PRESENCE, PresenceSpec


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with streams_rig(tmp_path, shared=True) as rig:
        yield rig


def standings_elsewhere(rig: Rig) -> Standings:
    """Those of a server that has no daemon."""
    nobody = DaemonPresences(StreamSealer(rig.key, rig.tokens, rig.clock))
    return Standings(rig.store, rig.clock, nobody, rig.side.whereabouts)


async def move(rig: Rig, daemon: Daemon, *, left_at_ns: int = 0) -> None:
    """The daemon has its session at another server, or had it."""
    spec = PresenceSpec(server="other", boot=1, session=2**40, left_at_ns=left_at_ns)
    await rig.store.transact(
        lambda draft: draft.put(PRESENCE, "edge", daemon.node_id, spec=spec),
        actor="test",
        action="move",
        touches=[PRESENCE.key("edge", daemon.node_id)],
    )


async def test_a_server_that_starts_leaves_daemons_of_others_connected(rig: Rig) -> None:
    daemon = await rig.daemon()
    await daemon.open()
    await until(lambda: rig.state(daemon) == "connected")
    elsewhere = standings_elsewhere(rig)
    await elsewhere.start()
    await elsewhere.ended_elsewhere(daemon.node_id)
    assert rig.state(daemon) == "connected"
    daemon.leave()
    await until(lambda: rig.state(daemon) == "disconnected")


async def test_a_stream_that_lost_its_place_writes_nothing_any_more(rig: Rig) -> None:
    daemon = await rig.daemon()
    await daemon.open()
    before = await until(lambda: rig.state(daemon) == "connected" and rig.node(daemon))
    await move(rig, daemon)
    assert (await daemon.ended()).name == "ABORTED"
    await until(lambda: rig.side.presences.current(daemon.node_id) is None)
    await rig.side.controller.standings._writer.flush()
    assert rig.node(daemon).revision == before.revision


async def test_a_late_note_about_a_session_that_was_replaced_is_not_written(rig: Rig) -> None:
    daemon = await rig.daemon()
    await daemon.open()
    before = await until(lambda: rig.state(daemon) == "connected" and rig.node(daemon))
    live = rig.side.presences.get(daemon.node_id)
    assert live is not None
    live.place += 1  # as if presence named another one, and nobody had said so here
    live.silent = True
    rig.side.controller.standings.note(live)
    await rig.side.controller.standings._writer.flush()
    assert rig.node(daemon).revision == before.revision
    live.place -= 1
    rig.side.controller.standings.note(live)
    await until(lambda: rig.state(daemon) == "unhealthy")


async def test_daemons_that_nobody_has_are_written_as_disconnected(rig: Rig) -> None:
    daemon = await rig.daemon()
    await daemon.open()
    await until(lambda: rig.state(daemon) == "connected")
    await move(rig, daemon)
    await daemon.ended()
    await until(lambda: rig.side.presences.current(daemon.node_id) is None)
    assert rig.state(daemon) == "connected"
    await move(rig, daemon, left_at_ns=1)
    await standings_elsewhere(rig).ended_elsewhere(daemon.node_id)
    assert rig.state(daemon) == "disconnected"


async def test_a_daemon_at_another_server_is_explained_by_its_record(rig: Rig) -> None:
    nobody = DaemonPresences(StreamSealer(rig.key, rig.tokens, rig.clock))
    explainer = DaemonExplainer(rig.store, nobody, rig.layers, rig.clock, whereabouts=rig.side.whereabouts)

    def codes(daemon: Daemon) -> list[str]:
        findings = explainer.explain(tenant_scope(TENANT), daemon.node_id)
        return [reason.code for finding in findings for reason in finding.explanation.reasons]

    daemon = await rig.daemon()
    assert codes(daemon) == ["NEVER_CONNECTED"]
    await daemon.open()
    await until(lambda: rig.state(daemon) == "connected")
    assert codes(daemon) == []
    await rig.layers.put(LayerPlace(tenant=TENANT, node_id=daemon.node_id), {"level": 1}, actor=BOSS)
    pushed = await daemon.next("push_config")
    assert codes(daemon) == ["CONFIG_UNCONFIRMED"]
    chunk = pb.Chunk(status=pb.StatusUpdate(state="config-refused", message="no such level"))
    await daemon.send(command_progress=daemon.sign.chunk(pushed.version, chunk))
    await until(lambda: codes(daemon) == ["CONFIG_REFUSED"])
    assert rig.status(daemon).config_refused_version == pushed.version
    daemon.leave()
    await until(lambda: codes(daemon) == ["NOT_CONNECTED"])
