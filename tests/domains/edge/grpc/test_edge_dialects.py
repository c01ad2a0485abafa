"""Which dialect a daemon is answered in: by what it sends, and never by the library it was made with."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.edge.edge_identity_rig import identity_rig, new_key
from support.edge.edge_signer import BOSS, legacy, ok
from support.edge.edge_streams_rig import LEGACY_AGENT, Daemon, Rig, streams_rig, until

from fleetplane.domains.edge.kinds import PayloadDialect
from fleetplane.domains.edge.nodes.config_layers import LayerPlace
from fleetplane.domains.edge.wire import messages as wire
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb


async def _in_tonic(rig: Rig) -> Daemon:
    """A client of the documented contract, made with the library that daemons in the field use."""
    daemon = await rig.daemon(legacy=True)
    await daemon.open(metadata=(("authorization", f"Bearer {daemon.identity.token}"),), digest=False)
    return daemon


async def test_a_client_of_the_contract_gets_the_contract_whatever_its_library(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await _in_tonic(rig)
        assert rig.side.presences.dialect(daemon.node_id) is PayloadDialect.DOCUMENTED
        await rig.layers.put(LayerPlace(tenant="acme"), {"spec": {}}, actor=BOSS)
        raw = await daemon.read_bytes()
        rig.check_seals(raw, daemon)
        pushed = pb.EdgeCommand.FromString(raw).push_config
        assert (pushed.config_delta, bool(pushed.version)) == (b'{"spec":{}}', True)
        command = await rig.issue(daemon)
        await daemon.answer((await daemon.next("invoke_tool")).command_id, ok())
        await until(lambda: rig.outcome(command, daemon) == "ok")
        assert rig.side.presences.dialect(daemon.node_id) is PayloadDialect.DOCUMENTED


async def test_a_daemon_in_the_field_is_known_by_its_hello_without_its_user_agent(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()  # not in tonic
        await daemon.open_legacy()
        assert rig.side.presences.dialect(daemon.node_id) is PayloadDialect.LEGACY
        await rig.layers.put(LayerPlace(tenant="acme"), {"spec": {}}, actor=BOSS)
        raw = await daemon.read_bytes()
        rig.check_seals(raw, daemon)  # which that daemon passes over


@pytest.mark.parametrize(
    ("result", "dialect"), [(ok(), PayloadDialect.DOCUMENTED), (legacy(ok=True), PayloadDialect.LEGACY)]
)
async def test_the_shape_of_a_result_overrules_what_the_hello_looked_like(
    tmp_path: Path, result: bytes, dialect: PayloadDialect
) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        bearer = (("authorization", f"Bearer {daemon.identity.token}"),)
        await daemon.open(metadata=bearer if dialect is PayloadDialect.LEGACY else (), digest=False)
        command = await rig.issue(daemon)
        await daemon.answer((await daemon.next("invoke_tool")).command_id, result, digest=False)
        await until(lambda: rig.outcome(command, daemon) == "ok")
        await until(lambda: rig.side.presences.dialect(daemon.node_id) is dialect)


async def test_a_rotation_is_answered_by_what_the_request_carries(tmp_path: Path) -> None:
    """Its overlap was read as 59 s and its expiry as now, because the client was made with tonic."""
    async with identity_rig(tmp_path, client_options=[LEGACY_AGENT]) as rig:
        machine, new = await rig.enrolled(), new_key()
        told = await machine.rotate(machine.wish(new))
        assert told.overlap_window.seconds == 60
        assert told.expires_at.seconds > told.issued_at.seconds + 86_400
        machine.key, machine.token = new, told.node_security_token
        in_the_field = await machine.rotate(machine.wish(new_key(), token=""))
        assert not in_the_field.HasField("overlap_window")
        assert in_the_field.issued_at.seconds > in_the_field.expires_at.seconds  # expiry, end of overlap


def test_metadata_names_a_dialect_or_tells_nothing() -> None:
    assert wire.stated_dialect("documented") is PayloadDialect.DOCUMENTED
    assert wire.stated_dialect("tonic/0.14.5") is None
    assert wire.stated_dialect(None) is None
    assert wire.dialect_of_hello(bearer=True, short_form=True) is PayloadDialect.DOCUMENTED
    assert wire.dialect_of_hello(bearer=False, short_form=True) is PayloadDialect.LEGACY
    assert wire.dialect_of_hello(bearer=False, short_form=False) is None
