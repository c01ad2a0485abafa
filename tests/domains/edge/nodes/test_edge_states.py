"""In which state daemons are: the rule, and what of it is written down."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.edge.edge_signer import BOSS
from support.edge.edge_streams_rig import DEADLINE_SECONDS, Daemon, Rig, streams_rig, until

from fleetplane.domains.edge.kinds import (
    Capabilities,
    Desired,
    NodeSpec,
    NodeState,
    NodeStatus,
    PayloadDialect,
)
from fleetplane.domains.edge.streams.assembly import StreamOptions
from fleetplane.domains.edge.streams.live import DaemonSighting, StreamTail, state_of, status_after

SPEC = NodeSpec(display_name="", public_key=b"k" * 32, token_id="t", token_expires_at_ns=0, enrolled_at_ns=0)
SEEN = DaemonSighting(
    stream_id="s",
    dialect=PayloadDialect.DOCUMENTED,
    capabilities=Capabilities(os="linux"),
    last_heartbeat_at_ns=5,
    config_version="",
)
SILENT = msgspec.structs.replace(SEEN, silent=True)


def spec(**changed: Any) -> NodeSpec:
    return msgspec.structs.replace(SPEC, **changed)


@pytest.mark.parametrize(
    ("about", "seen", "state"),
    [
        (SPEC, None, NodeState.DISCONNECTED),
        (SPEC, SEEN, NodeState.CONNECTED),
        (SPEC, SILENT, NodeState.UNHEALTHY),
        (spec(desired=Desired.DRAINING), SEEN, NodeState.DRAINING),
        (spec(desired=Desired.DRAINING), SILENT, NodeState.DRAINING),
        (spec(desired=Desired.DRAINING), None, NodeState.DISCONNECTED),
        (spec(desired=Desired.SHUTDOWN), SEEN, NodeState.DRAINING),
        (spec(revoked_at_ns=1), SEEN, NodeState.REVOKED),
        (spec(revoked_at_ns=1), None, NodeState.REVOKED),
    ],
)
def test_the_state_follows_from_what_is_wanted_and_seen(
    about: NodeSpec, seen: DaemonSighting | None, state: NodeState
) -> None:
    assert state_of(about, seen) is state


def test_a_heartbeat_alone_changes_nothing_that_is_written() -> None:
    first = status_after(SPEC, None, SEEN, now_ns=10)
    later = msgspec.structs.replace(SEEN, last_heartbeat_at_ns=99)
    assert status_after(SPEC, first, later, now_ns=100) is first
    silent = status_after(SPEC, first, msgspec.structs.replace(later, silent=True), now_ns=200)
    assert (silent.state, silent.since_ns, silent.last_heartbeat_at_ns) == (NodeState.UNHEALTHY, 200, 99)


def test_a_stream_that_ended_leaves_what_it_told_and_when_it_was_heard_last() -> None:
    before = status_after(SPEC, None, SEEN, now_ns=10)
    after = status_after(SPEC, before, None, heard_at_ns=77, now_ns=100)
    assert after == msgspec.structs.replace(
        before, state=NodeState.DISCONNECTED, since_ns=100, last_heartbeat_at_ns=77
    )
    assert status_after(SPEC, after, None, now_ns=200) is after


def test_other_capabilities_are_written_without_a_new_state() -> None:
    before = NodeStatus(state=NodeState.CONNECTED, since_ns=1, stream_id="s")
    after = status_after(SPEC, before, SEEN, now_ns=100)
    assert (after.since_ns, after.capabilities.os) == (1, "linux")


def test_the_tail_keeps_the_end_of_what_went_by() -> None:
    tail = StreamTail()
    for piece in (b"a" * 5000, b"bc", b"", b"d"):
        tail.add(piece)
    assert bytes(tail) == b"a" * 4093 + b"bcd"
    assert tail.dropped == 5003 - 4096


# Over the wire.


async def test_silence_makes_unhealthy_and_the_next_heartbeat_well_again(tmp_path: Path) -> None:
    async with streams_rig(tmp_path, options=StreamOptions(stale_seconds=0.5)) as rig:
        daemon = await rig.daemon()
        await daemon.open()
        await _beaten(rig, daemon)
        await until(lambda: rig.state(daemon) == "unhealthy")
        assert rig.side.presences.is_connected(daemon.node_id), "its stream is left alone"
        await _beaten(rig, daemon)
        daemon.leave()


async def _beaten(rig: Rig, daemon: Daemon) -> None:
    """Send heartbeats until it is written down as well: that may take longer than one of them counts for."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while rig.state(daemon) != "connected":
            await daemon.beat()
            await asyncio.sleep(0.05)


async def test_a_draining_daemon_may_be_silent(tmp_path: Path) -> None:
    async with streams_rig(tmp_path, options=StreamOptions(stale_seconds=0.3)) as rig:
        daemon = await rig.daemon()
        await daemon.open()
        await rig.nodes.set_desired("acme", daemon.node_id, Desired.DRAINING, actor=BOSS)
        await daemon.next("drain")
        await until(lambda: rig.state(daemon) == "draining")
        live = rig.side.presences.get(daemon.node_id)
        assert live is not None
        await until(lambda: live.silent)
        await rig.nodes.set_tags("acme", daemon.node_id, ["x"], actor=BOSS)  # and something is written again
        await until(lambda: rig.node(daemon).spec.tags == ("x",))
        assert rig.state(daemon) == "draining"
        daemon.leave()


async def test_a_fleet_that_comes_at_once_is_written_in_few_transactions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with streams_rig(tmp_path) as rig:
        daemons = [await rig.daemon() for _ in range(60)]
        here = asyncio.Event()
        written: list[int] = []
        transact = rig.store.transact

        async def when_all_are_here(*args: Any, **options: Any) -> Any:
            if options["action"] == "edge.state":
                await here.wait()
                written.append(len(options["touches"]))
            return await transact(*args, **options)

        monkeypatch.setattr(rig.store, "transact", when_all_are_here)
        for daemon in daemons:
            await daemon.open()
        here.set()
        await until(lambda: all(rig.state(daemon) == "connected" for daemon in daemons))
        assert sum(written) >= 60
        assert len(written) < 6
        for daemon in daemons:
            await daemon.beat()
        await until(lambda: rig.side.streams.heartbeats["acme"] == 60)
        quiet = rig.store.revision
        for daemon in daemons:
            await daemon.beat()
        await until(lambda: rig.side.streams.heartbeats["acme"] == 120)
        assert rig.store.revision == quiet, "heartbeats are not written down"
        for daemon in daemons:
            daemon.leave()
