"""Enrolling a machine: what is written, what is never replaced unasked, and whom we believe afterwards."""

from __future__ import annotations

import uuid
from pathlib import Path

import grpc
import pytest
import yaml
from support.edge.edge_daemon_rig import enrolled
from support.edge.edge_server_double import TENANT, EdgeServerDouble, edge_server, jwt

from fleetplane.domains.edge.agent.assembly import Reach
from fleetplane.domains.edge.agent.config import document as config
from fleetplane.domains.edge.agent.endpoint import DialTarget, target
from fleetplane.domains.edge.agent.identity.enrolment import (
    Enroller,
    EnrolmentRefused,
    EnrolmentRequest,
    Existing,
    plan,
)
from fleetplane.domains.edge.agent.identity.keyring import BadToken
from fleetplane.domains.edge.agent.identity.state_folder import StateFolder, public_bytes
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import FailedPrecondition, IntegrityError, InvalidArgument
from fleetplane.node.link import LinkLost

NOW = 1_700_000_000.0


def enroller(state: StateFolder) -> Enroller:
    return Enroller(folder=state, connect=Reach().channel, clock=SystemClock())


async def test_an_empty_folder_becomes_a_node_of_its_tenant(server: EdgeServerDouble, tmp_path: Path) -> None:
    state = await enrolled(tmp_path / "state", server, labels={"rack": "7"})
    (asked,) = server.attested
    (answered,) = server.challenged
    assert asked.role == pb.NODE_ROLE_EDGE
    assert asked.public_key == public_bytes(state.load_key())
    assert asked.HasField("capabilities")
    assert (asked.grpc_address, asked.enrolment_token) == ("", "")
    assert answered.WhichOneof("bootstrap_proof") == "enrollment_token"
    found = config.decode(state.load_document(), "f")
    assert found.spec.node.id == asked.node_id == str(uuid.UUID(asked.node_id))
    assert (found.edge.tenant_id, found.endpoint) == (TENANT, server.address)
    assert found.edge.capabilities.custom_labels == {"rack": "7"}
    assert state.load_token() == server.tokens[asked.node_id]
    assert state.load_server_key() == server.public_key
    assert state.enrollment.read_text() == answered.enrollment_token
    modes = {path.stat().st_mode & 0o777 for path in state.root.iterdir() if path.is_file()}
    assert (state.root.stat().st_mode & 0o777, modes) == (0o700, {0o600})


async def test_a_dry_run_writes_nothing_and_asks_nobody(server: EdgeServerDouble, tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "state")
    steps = plan(state, EnrolmentRequest(token=server.enrollment_token()), now=NOW).steps(state)
    assert any(TENANT in step and server.address in step for step in steps)
    assert not state.root.exists()
    assert server.attested == []


async def test_what_is_there_is_not_replaced_unasked(server: EdgeServerDouble, tmp_path: Path) -> None:
    state = await enrolled(tmp_path / "state", server)
    before = {path.name: path.read_bytes() for path in state.root.iterdir() if path.is_file()}
    with pytest.raises(FailedPrecondition, match=r"node.key is there already"):
        await enrolled(state.root, server)
    assert {path.name: path.read_bytes() for path in state.root.iterdir() if path.is_file()} == before
    assert len(server.attested) == 1


async def test_forced_it_gets_a_new_key_and_keeps_its_id(server: EdgeServerDouble, tmp_path: Path) -> None:
    state = await enrolled(tmp_path / "state", server)
    old_key, old_token = public_bytes(state.load_key()), state.load_token()
    await enrolled(state.root, server, existing=Existing.FORCE)
    assert public_bytes(state.load_key()) != old_key
    assert state.load_token() != old_token
    assert len({asked.node_id for asked in server.attested}) == 1


async def test_kept_and_enrolled_it_asks_nobody(server: EdgeServerDouble, tmp_path: Path) -> None:
    state = await enrolled(tmp_path / "state", server)
    made = await enroller(state).enrol(
        EnrolmentRequest(token=server.enrollment_token(), existing=Existing.KEEP)
    )
    assert made.already
    assert len(server.attested) == 1


async def test_kept_but_never_enrolled_it_uses_the_key_and_the_configuration(
    server: EdgeServerDouble, tmp_path: Path
) -> None:
    state = await enrolled(tmp_path / "state", server)
    key = public_bytes(state.load_key())
    document = state.load_document()
    state.store_document(yaml.safe_dump({**document, "extra": {"mine": True}}).encode())
    state.token.unlink()
    await enroller(state).enrol(EnrolmentRequest(token=server.enrollment_token(), existing=Existing.KEEP))
    assert public_bytes(state.load_key()) == key
    assert state.load_document()["extra"] == {"mine": True}
    assert state.token.exists()


async def test_a_configuration_of_another_server_is_not_kept(
    server: EdgeServerDouble, tmp_path: Path
) -> None:
    state = await enrolled(tmp_path / "state", server)
    other = server.enrollment_token(cep="elsewhere.example:443")
    with pytest.raises(FailedPrecondition, match="names the server"):
        plan(state, EnrolmentRequest(token=other, existing=Existing.KEEP), now=NOW)


async def test_a_folder_that_the_other_daemon_made_is_used_as_it_is(
    server: EdgeServerDouble, tmp_path: Path
) -> None:
    """The files as daemons in the field leave them: no server's key, `node.pub`, everything spelt out."""
    from support.edge.edge_daemon_rig import running
    from support.edge.edge_server_double import until

    state = await enrolled(tmp_path / "state", server)
    document = state.load_document()
    full = config.merge(
        document,
        {
            "spec": {
                "cluster": {
                    "controller": {"endpoint": server.address, "tls": {"enabled": True}},
                    "node_keypair_path": str(state.root / "node.key"),
                    "edge": {
                        "enrollment_token_path": str(state.root / "enrollment.jwt"),
                        "node_security_token_path": str(state.root / "node.token"),
                        "capabilities": {
                            "os": "linux",
                            "arch": "x86_64",
                            "local_tools": ["shell"],
                            "mount_points": ["/"],
                        },
                    },
                },
                "security_contexts": [
                    {
                        "name": "zaru-free",
                        "description": "d",
                        "capabilities": [
                            {"tool_pattern": "*", "path_allowlist": None, "max_response_size": None}
                        ],
                        "deny_list": [],
                        "metadata": {"version": 1},
                    }
                ],
            }
        },
    )
    state.store_document(yaml.safe_dump(full).encode())
    for path in (state.root / "node.key.pub", state.server_key):
        path.unlink()
    async with running(StateFolder(state.root)):
        await until(lambda: server.hellos)
        assert (await server.outcome("cmd.run", {"command": "true"})).outcome == "ok"
    assert pb.EdgeCapabilities.FromString(server.hellos[0].capabilities).local_tools == ["shell"]


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ("nonsense", "no JSON web token"),
        ("a.b.c", "no JSON web token"),
        (jwt({"cep": "x:1"}), "tid"),
        (jwt({"tid": "u-1"}), "cep"),
        (jwt({"tid": "u-1", "cep": " "}), "cep"),
        (jwt({"tid": "u-1", "cep": "x:1", "spk": "short"}), "spk"),
        (jwt({"tid": "u-1", "cep": "x:1", "exp": NOW - 100}), "is over since 100 s"),
        ("x" * 20_000, "more than"),
    ],
)
def test_a_token_that_is_none_is_said_to_be(tmp_path: Path, token: str, words: str) -> None:
    with pytest.raises(BadToken, match=words):
        plan(StateFolder(tmp_path), EnrolmentRequest(token=token), now=NOW)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, EnrolmentRefused),
        (grpc.StatusCode.FAILED_PRECONDITION, EnrolmentRefused),
        (grpc.StatusCode.UNAVAILABLE, LinkLost),
    ],
)
async def test_refused_it_has_no_token_and_may_be_tried_again(
    server: EdgeServerDouble, tmp_path: Path, code: grpc.StatusCode, error: type[Exception]
) -> None:
    server.refuse_challenge = (code, "no")
    state = StateFolder(tmp_path / "state")
    with pytest.raises(error):
        await enrolled(state.root, server)
    assert not state.token.exists()
    server.refuse_challenge = None
    await enrolled(state.root, server, existing=Existing.KEEP)
    assert len({asked.public_key for asked in server.attested}) == 1
    assert state.token.exists()


async def test_a_server_with_another_key_than_the_tokens_is_not_believed(
    server: EdgeServerDouble, tmp_path: Path
) -> None:
    state = StateFolder(tmp_path / "state")
    with pytest.raises(IntegrityError, match="not the one that the enrollment token names"):
        await enroller(state).enrol(EnrolmentRequest(token=server.enrollment_token(spk="11" * 32)))
    assert not state.token.exists()


async def test_tls_is_not_given_up_for_a_server_nobody_vouches_for(tmp_path: Path) -> None:
    async with edge_server(tmp_path / "server", tls=True) as server:
        state = StateFolder(tmp_path / "state")
        with pytest.raises(LinkLost):
            await enroller(state).enrol(EnrolmentRequest(token=server.enrollment_token()))
        assert server.attested == []


@pytest.mark.parametrize(
    ("endpoint", "address", "tls"),
    [
        ("relay.example.com", "relay.example.com:443", True),
        ("relay.example.com:443", "relay.example.com:443", True),
        ("127.0.0.1:50056", "127.0.0.1:50056", False),
        ("[::1]:50056", "[::1]:50056", False),
        ("https://relay:8443", "relay:8443", True),
        ("https://relay", "relay:443", True),
        ("http://relay", "relay:80", False),
        ("http://relay:443/", "relay:443", False),
    ],
)
def test_an_address_says_whether_tls_is_spoken(endpoint: str, address: str, tls: bool) -> None:
    assert target(endpoint) == DialTarget(address=address, tls=tls)
    assert target(endpoint, plaintext=tls) == DialTarget(address=address, tls=not tls)


@pytest.mark.parametrize(
    "endpoint", ["", "ftp://x", "x:0", "x:99999", "a b:1", "user@x:1", "x:1/path", "unix:/x"]
)
def test_an_address_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidArgument):
        target(endpoint)
