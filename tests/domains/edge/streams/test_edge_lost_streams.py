"""What becomes of commands when the stream they went out on ends, stalls or is replaced."""

from __future__ import annotations

from pathlib import Path

import grpc
import msgspec
from support.edge.edge_streams_rig import Daemon, Rig, streams_rig, until

from fleetplane.domains.edge.nodes.config_layers import LayerPlace
from fleetplane.domains.edge.streams.assembly import StreamOptions
from fleetplane.domains.edge.streams.call_encoding import public_id
from fleetplane.fleet.streams.host import StreamPolicy
from fleetplane.kernel.commands import COMMAND_TARGET, Command, CommandState

Code = grpc.StatusCode
ACME = LayerPlace(tenant="acme")


async def test_a_disconnect_ends_what_the_daemon_was_doing_at_once(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        await daemon.open()
        command = await rig.issue(daemon, deadline_seconds=600)
        await daemon.next("invoke_tool")
        daemon.leave()
        await until(lambda: rig.outcome(command, daemon) == "failed")
        status = rig.target(command, daemon).status
        assert status is not None
        assert status.detail == "edge_disconnected"


async def test_a_reconnect_while_the_old_stream_lingers_ends_the_old_work_and_not_the_new(
    tmp_path: Path,
) -> None:
    async with streams_rig(tmp_path) as rig:
        older = await rig.daemon()
        await older.open()
        old = await rig.issue(older)
        await older.next("invoke_tool")
        newer = await rig.client(older.identity)
        await newer.open()
        assert rig.outcome(old, older) == "failed"
        new = await rig.issue(newer)
        assert await older.ended() is Code.ABORTED
        call = await newer.next("invoke_tool")
        assert call.command_id == public_id(new)
        await newer.answer(call.command_id)
        await until(lambda: rig.outcome(new, newer) == "ok")
        newer.leave()


async def test_a_command_for_someone_who_is_away_ends_at_once_or_waits_if_asked_to(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        now, later = await rig.issue(daemon), await rig.issue(daemon, wait=True)
        assert rig.outcome(now, daemon) == "undeliverable"
        assert rig.outcome(later, daemon) == "waiting"
        await daemon.open()
        assert (await daemon.next("invoke_tool")).command_id == public_id(later)
        daemon.leave()


async def test_what_may_be_repeated_is_sent_again_only_to_those_who_would_recognise_it(
    tmp_path: Path,
) -> None:
    async with streams_rig(tmp_path) as rig:
        ours, field = await rig.daemon(), await rig.daemon(legacy=True)
        await ours.open()
        await field.open_legacy()
        command = await rig.issue(ours, field, wait=True, repeatable=True)
        for daemon in (ours, field):
            await daemon.next("invoke_tool")
            daemon.leave()
        await until(lambda: rig.outcome(command, field) == "failed")
        await until(lambda: not rig.side.presences.is_connected(ours.node_id))
        assert rig.outcome(command, ours) == "sent"
        await ours.open()
        assert (await ours.next("invoke_tool")).command_id == public_id(command)
        ours.leave()


async def test_a_restart_does_not_make_a_daemon_in_the_field_work_twice(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        field = await rig.daemon(legacy=True)
        waiting = await rig.issue(field, wait=True, repeatable=True)
        await _mark_sent(rig, waiting, field)
    async with streams_rig(tmp_path) as rig:
        again = await rig.client(field.identity, legacy=True)
        assert rig.outcome(waiting, again) == "sent"
        later = await rig.issue(again, wait=True, repeatable=True)
        await again.open_legacy()
        assert (await again.next("invoke_tool")).command_id == public_id(later)
        assert rig.outcome(waiting, again) == "failed"
        again.leave()


async def _mark_sent(rig: Rig, command: Command, daemon: Daemon) -> None:
    """As a server leaves it behind that died right after it had sent a command."""
    target = rig.target(command, daemon)
    assert target.status is not None
    run_by_ns = rig.clock.now_ns() + 60_000_000_000
    sent = msgspec.structs.replace(target.status, state=CommandState.SENT, deliveries=1, run_by_ns=run_by_ns)
    await rig.store.transact(
        lambda draft: draft.put(COMMAND_TARGET, target.scope, target.name, spec=target.spec, status=sent),
        actor="test",
        action="test",
        touches=[target.key],
    )


async def test_a_daemon_that_does_not_read_is_let_go(tmp_path: Path) -> None:
    options = StreamOptions(stream=StreamPolicy(write_seconds=0.3, queue_limit=4))
    async with streams_rig(tmp_path, options=options) as rig:
        daemon = await rig.daemon()
        await daemon.open()
        await rig.layers.put(ACME, {"bulk": "x" * 200_000}, actor="user/boss")
        for number in range(64):
            if not rig.side.presences.is_connected(daemon.node_id):
                break
            await rig.layers.put(ACME, {"bulk": "x" * 200_000, "number": number}, actor="user/boss")
        await until(lambda: not rig.side.presences.is_connected(daemon.node_id))
        assert await daemon.ended() is Code.RESOURCE_EXHAUSTED
