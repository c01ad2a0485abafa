"""Frozen daemons: heard as ever, told nothing, and they say so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.edge.edge_signer import BOSS
from support.edge.edge_streams_rig import Daemon, Rig, streams_rig, until

from fleetplane.domains.edge.explain import DaemonExplainer
from fleetplane.domains.edge.kinds import Desired, daemon_scope, tenant_scope
from fleetplane.domains.edge.nodes.config_layers import LayerPlace
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.freeze import freeze, lift

ACME = tenant_scope("acme")


def why(rig: Rig) -> DaemonExplainer:
    return DaemonExplainer(rig.store, rig.side.presences, rig.layers, rig.clock)


def codes(rig: Rig, daemon: Daemon) -> Sequence[str]:
    scope = why(rig).locate("", daemon.node_id)
    found = why(rig).explain(scope, daemon.node_id)
    return [one.code for finding in found for one in finding.explanation.reasons]


async def stop(rig: Rig, scope: str, **more: int) -> None:
    await freeze(rig.store, scope, reason="works", actor="ada", domains=("edge",), **more)


async def test_a_frozen_daemon_is_told_nothing_until_the_freeze_is_lifted(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        await stop(rig, ACME)
        await rig.layers.put(LayerPlace(tenant="acme"), {"level": 1}, actor=BOSS)
        await rig.nodes.set_desired("acme", daemon.node_id, Desired.DRAINING, actor=BOSS)
        await daemon.open()

        await until(lambda: codes(rig, daemon) == ["CONFIG_NOT_SENT", "DRAINING"])
        await until(lambda: rig.state(daemon) == "draining")  # observed all the same
        live = rig.side.presences.get(daemon.node_id)
        assert live is not None
        assert (live.config_pushed, live.draining) == ("", False)

        assert await lift(rig.store, ACME, actor="ada", domains=("edge",))
        assert json.loads((await daemon.next("push_config")).config_delta) == {"level": 1}
        await daemon.next("drain")
        daemon.leave()


async def test_a_freeze_of_one_daemon_ends_by_itself_and_holds_for_no_other(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        held, free = await rig.daemon(), await rig.daemon()
        await freeze(rig.store, reason="elsewhere", actor="ada")  # instances alone
        await stop(rig, daemon_scope(ACME, held.node_id), expires_at_ns=rig.clock.now_ns() + 600_000_000)
        await rig.layers.put(LayerPlace(tenant="acme"), {"level": 1}, actor=BOSS)
        await held.open()
        await free.open()

        await free.next("push_config")
        await held.next("push_config")  # within a second or so after its end
        for daemon in (held, free):
            daemon.leave()


async def test_runs_and_revocations_are_not_frozen(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        await daemon.open()
        await stop(rig, "")
        command = await rig.issue(daemon)
        call = await daemon.next("invoke_tool")
        await daemon.answer(call.command_id)
        await until(lambda: rig.outcome(command, daemon) == "ok")

        await rig.nodes.revoke("acme", daemon.node_id, reason="lost", actor=BOSS)
        await daemon.ended()
        await until(lambda: codes(rig, daemon) == ["REVOKED"])


async def test_a_daemon_says_why_it_is_not_connected(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        assert codes(rig, daemon) == ["NEVER_CONNECTED"]
        await daemon.open()
        await until(lambda: rig.state(daemon) == "connected")
        assert codes(rig, daemon) == []
        daemon.leave()
        await until(lambda: codes(rig, daemon) == ["NOT_CONNECTED"])


@pytest.mark.parametrize("within", ["tenant/other", "tenant/acme2", "worker", "tenant"])
async def test_another_tenants_daemon_is_not_found(tmp_path: Path, within: str) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        for name in (daemon.node_id, daemon.node_id.upper(), "x" * 1000, "../" + daemon.node_id):
            with pytest.raises(NotFound):
                why(rig).locate(within, name)
        assert why(rig).locate(ACME, daemon.node_id) == daemon_scope(ACME, daemon.node_id)
