"""One authority follows another at the active server, while an agent works at one that stands by."""

from __future__ import annotations

import json
import os
import socket
import ssl
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from support.instances.agent_at_standby import Place, agent_at_standby
from support.shared.cli_runner import execute
from support.shared.postgres_server import PostgresServer

from fleetplane.gen.nstance.v1 import agent_pb2, agent_pb2_grpc
from fleetplane.kernel.identity.certificates import peer_identity

SUCCESSIONS = int(os.environ.get("AUTHORITY_SUCCESSIONS", "0"))
QUICK_TRUST = """
import sys

if "agent" in sys.orig_argv:
    from fleetplane.domains.instances.agent.identity import renewal

    renewal.TRUST_SECONDS = 0.5
"""


@pytest.mark.skipif(not SUCCESSIONS, reason="a long form, of `make faults`")
@pytest.mark.timeout(3600)
def test_an_agent_at_a_standby_works_through_successions_at_the_active_server(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    with agent_at_standby(tmp_path, postgres, more=QUICK_TRUST) as place:
        told = place.received("worker.env")
        place.all_know_that_it_is_well()
        identity = next(place.folder.rglob("identity.crt")).parent
        for number in range(SUCCESSIONS):
            old = {name: (identity / name).read_bytes() for name in ("identity.crt", "identity.key")}
            announced = _step(place, "rotate")
            place.until(lambda text=announced["trust_pem"]: (identity / "ca.crt").read_text() == text)  # type: ignore[misc]

            switched = _step(place, "switch")
            signing = _signing(switched)
            begun = time.monotonic()
            [root] = [pem for pem in _certificates(switched["trust_pem"]) if _key_id(pem) == signing]
            place.until(lambda root=root: _presents(place.registration, root))  # type: ignore[misc]
            presented = time.monotonic() - begun
            place.until(lambda key=signing: _issuer(identity) == key)  # type: ignore[misc]

            assert _answer(place, root, old) is not grpc.StatusCode.UNAUTHENTICATED, "it is still trusted"
            _step(place, "retire")
            begun = time.monotonic()
            refused = _answer(place, root, old)
            assert refused is grpc.StatusCode.UNAUTHENTICATED, refused
            print(
                f"\nsuccession {number + 1}: after {presented:.2f} s the other server showed what the new one"
                f" signed; its first answer to the old one, after {time.monotonic() - begun:.2f} s, was no"
            )
            place.configure(f"colour{number}")
            place.until(lambda colour=f"colour{number}": colour in told.read_text())  # type: ignore[misc]
            place.all_know_that_it_is_well()
        assert len(list(place.folder.rglob("identity.crt"))) == 1, "nobody was replaced"


def _step(place: Place, name: str) -> dict[str, Any]:
    """Without force: it is refused until the server has heard that the agent is ready for it."""
    said = ""

    def done() -> Any:
        nonlocal said
        found = execute("instances", "ca", name, "--data-dir", str(place.data), "-o", "json")
        said = found.err
        return json.loads(found.out) if found.code == 0 else None

    found: dict[str, Any] = place.until(done, lambda: f"{name}: {said}")
    return found


def _signing(found: dict[str, Any]) -> str:
    return next(str(one["key_id"]) for one in found["authorities"] if one["role"] == "signing")


def _certificates(text: str) -> list[str]:
    end = "-----END CERTIFICATE-----\n"
    return [part + end for part in text.split(end) if part.strip()]


def _key_id(pem: str) -> str:
    found = x509.load_pem_x509_certificate(pem.encode())
    return found.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest.hex()


def _issuer(identity: Path) -> str:
    return peer_identity((identity / "identity.crt").read_bytes()).issuer_key_id


def _presents(address: str, root: str) -> bool:
    """Whether the listener shows a certificate that this authority alone vouches for."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(cadata=root)
    try:
        with (
            socket.create_connection((host, int(port)), 10) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return True
    except (ssl.SSLError, OSError):
        return False


def _answer(place: Place, root: str, identity: dict[str, bytes]) -> grpc.StatusCode | None:
    """What the standby says to whoever shows this certificate; None if it serves him."""
    credentials = grpc.ssl_channel_credentials(
        root.encode(), identity["identity.key"], identity["identity.crt"]
    )
    with grpc.secure_channel(place.agent, credentials) as channel:
        stub = agent_pb2_grpc.AgentServiceStub(channel)
        try:
            stub.SubmitPublicKeys(agent_pb2.PublicKeysRequest(), timeout=60)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            print(f"{code.name}: {error.details()}")
            return code
        return None
