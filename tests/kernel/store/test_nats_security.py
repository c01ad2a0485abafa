"""NATS with TLS and credentials: what is wrong is said by the name of its setting."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import socket
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from support.shared import nats_server
from support.shared.nats_server import START_SECONDS
from support.shared.throwaway_ca import ThrowawayCa, key_pem, make_key

from fleetplane.kernel.errors import SettingsError, Unavailable
from fleetplane.kernel.store.notifiers import nats
from fleetplane.kernel.store.notifiers.nats import ATTEMPTS, NatsBus
from fleetplane.kernel.store.notifiers.notifier import NatsSettings

LINEAGE = "c" * 32
PATIENCE = int(START_SECONDS)
"""How many seconds NATS gives a client to say who it is."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late anything is, nobody is taken for one who does not answer."""
    monkeypatch.setattr(nats, "CONNECT_SECONDS", PATIENCE)


async def rung(settings: NatsSettings) -> None:
    """Ring, and hear it; raises what keeps it from that."""
    heard = asyncio.Event()
    async with asyncio.timeout(START_SECONDS):
        async with NatsBus(settings).line(LINEAGE, lambda _: heard.set()) as line:
            await line.ring(b"ring")
            await heard.wait()


async def refused(settings: NatsSettings) -> str:
    with pytest.raises(Unavailable) as told:
        await rung(settings)
    return told.value.message


def tls(ca: ThrowawayCa, folder: Path, more: str = "") -> str:
    certificate, key = ca.server(folder)
    return f'tls {{ cert_file: "{certificate}", key_file: "{key}", timeout: {PATIENCE} {more} }}'


async def test_tls_with_the_right_authority(tmp_path: Path) -> None:
    ca, other = ThrowawayCa(), ThrowawayCa(name="another")
    mine, wrong = tmp_path / "ca.pem", tmp_path / "other.pem"
    mine.write_bytes(ca.pem)
    wrong.write_bytes(other.pem)
    with nats_server.running(tmp_path, tls(ca, tmp_path)) as nats:
        await rung(NatsSettings(servers=[nats.url], ca_file=str(mine)))
        assert "bus.ca_file:" in await refused(NatsSettings(servers=[nats.url], ca_file=str(wrong)))
        only = nats.url.replace("nats://", "tls://")
        assert "bus.ca_file (not set):" in await refused(NatsSettings(servers=[only]))


async def test_a_server_that_asks_for_a_certificate(tmp_path: Path) -> None:
    ca = ThrowawayCa()
    authority = tmp_path / "ca.pem"
    authority.write_bytes(ca.pem)
    certificate, key, own = tmp_path / "client.crt", tmp_path / "client.key", make_key("p256")
    certificate.write_bytes(ca.client(own.public_key(), "fleetplane"))
    key.write_bytes(key_pem(own))
    with nats_server.running(tmp_path, tls(ca, tmp_path, f', ca_file: "{authority}", verify: true')) as nats:
        shown = NatsSettings(
            servers=[nats.url], ca_file=str(authority), cert_file=str(certificate), key_file=str(key)
        )
        await rung(shown)
        assert "bus.cert_file" in await refused(NatsSettings(servers=[nats.url], ca_file=str(authority)))


@pytest.mark.parametrize(
    ("config", "right", "wrong", "setting"),
    [
        (
            f"authorization {{ token: right, timeout: {PATIENCE} }}",
            {"token": "right"},
            {"token": "wrong"},
            "bus.token:",
        ),
        (
            f"authorization {{ user: me, password: right, timeout: {PATIENCE} }}",
            {"user": "me", "password": "right"},
            {"user": "me", "password": "wrong"},
            "bus.user and bus.password:",
        ),
        (f"authorization {{ token: right, timeout: {PATIENCE} }}", {"token": "right"}, {}, "none is set"),
    ],
)
async def test_wrong_credentials_are_named_and_not_shown(
    tmp_path: Path, config: str, right: dict[str, str], wrong: dict[str, str], setting: str
) -> None:
    with nats_server.running(tmp_path, config) as nats:
        await rung(NatsSettings(servers=[nats.url], **right))
        told = await refused(NatsSettings(servers=[nats.url], **wrong))
        assert setting in told
        assert "refused" in told
        assert not any(secret in told for secret in ("right", "wrong"))


async def test_any_of_several_servers_will_do(tmp_path: Path) -> None:
    away = nats_server.NatsServer(tmp_path)
    with nats_server.running(tmp_path) as nats:
        await rung(NatsSettings(servers=[away.url, nats.url]))


async def test_one_that_speaks_no_tls_is_told_no_password(tmp_path: Path) -> None:
    authority = tmp_path / "ca.pem"
    authority.write_bytes(ThrowawayCa().pem)
    said: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def greet() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.settimeout(START_SECONDS)
                connection.sendall(b'INFO {"server_id":"x","version":"2.9.0","max_payload":1048576}\r\n')
                while found := connection.recv(4096):
                    said.append(found)

        thread = threading.Thread(target=greet)
        thread.start()
        server = f"nats://127.0.0.1:{listening.getsockname()[1]}"
        told = await refused(
            NatsSettings(servers=[server], ca_file=str(authority), user="me", password="hidden")
        )
        thread.join(START_SECONDS)
    assert "does not speak TLS" in told
    assert said == []


async def test_a_connection_that_the_client_leaves_half_made_is_not_used(tmp_path: Path) -> None:
    """Whatever comes before the answer to its first question leaves it so, and it says nothing of it."""
    info = b'INFO {"server_id":"x","version":"2.9.0","max_payload":1048576}\r\n'
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def greet() -> None:
            for _ in range(ATTEMPTS):
                connection, _ = listening.accept()
                with connection:
                    connection.settimeout(START_SECONDS)
                    connection.sendall(info)
                    asked = b""
                    while b"PING" not in asked:
                        asked += connection.recv(4096)
                    connection.sendall(b"PING\r\nPONG\r\n")
                    while connection.recv(4096):
                        pass

        thread = threading.Thread(target=greet)
        thread.start()
        told = await refused(NatsSettings(servers=[f"nats://127.0.0.1:{listening.getsockname()[1]}"]))
        thread.join(START_SECONDS)
    assert "not completed" in told


async def test_a_reader_that_died_is_noticed(tmp_path: Path) -> None:
    with nats_server.running(tmp_path) as nats:
        async with NatsBus(NatsSettings(servers=[nats.url])).line(LINEAGE, lambda _: None) as line:
            reading = line._client._reading_task
            assert reading is not None
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            with pytest.raises(Unavailable):
                await line.check()
            with pytest.raises(Unavailable):
                await line.ring(b"ring")


def test_files_that_cannot_be_used_are_refused_at_the_start(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    for field in ("ca_file", "credentials_file"):
        for path in (empty, tmp_path / "missing"):
            with pytest.raises(SettingsError, match=f"bus.{field}: "):
                NatsBus(NatsSettings(servers=["nats://x:1"], **{field: str(path)}))
    with pytest.raises(SettingsError, match=r"bus\.cert_file"):
        NatsBus(NatsSettings(servers=["nats://x:1"], cert_file=str(empty), key_file=str(empty)))


# A NATS whose users show tokens that their account has signed.


def _packed(prefix: int, raw: bytes) -> str:
    """As NATS writes keys: a letter, the key, and a checksum."""
    body = bytes([prefix]) + raw
    return base64.b32encode(body + _checksum(body)).decode().rstrip("=")


def _checksum(body: bytes) -> bytes:
    crc = 0
    for byte in body:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1) ^ 0x1021 if crc & 0x8000 else crc << 1
    return (crc & 0xFFFF).to_bytes(2, "little")


class Signer:
    OPERATOR, ACCOUNT, USER, SEED = 14 << 3, 0, 20 << 3, 18 << 3

    def __init__(self, kind: int) -> None:
        self._key = Ed25519PrivateKey.generate()
        self._kind = kind
        self.name = _packed(kind, self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))

    def seed(self) -> str:
        raw = self._key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
        body = bytes([self.SEED | self._kind >> 5, (self._kind & 31) << 3]) + raw
        return base64.b32encode(body + _checksum(body)).decode().rstrip("=")

    def token(self, subject: str, claims: dict[str, object]) -> str:
        said: dict[str, object] = {"iss": self.name, "sub": subject, "iat": 1, "name": "x", "nats": claims}
        digest = hashlib.sha256(json.dumps(said).encode()).digest()
        said["jti"] = base64.b32encode(digest).decode().rstrip("=")
        parts = [
            base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=")
            for part in ({"typ": "JWT", "alg": "ed25519-nkey"}, said)
        ]
        signature = self._key.sign(".".join(parts).encode())
        return ".".join([*parts, base64.urlsafe_b64encode(signature).decode().rstrip("=")])


def credentials(path: Path, user: Signer, token: str) -> str:
    path.write_text(
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed()}\n------END USER NKEY SEED------\n"
    )
    return str(path)


async def test_a_credentials_file(tmp_path: Path) -> None:
    operator, account, user = Signer(Signer.OPERATOR), Signer(Signer.ACCOUNT), Signer(Signer.USER)
    limits = {"subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "conn": -1, "leaf": -1}
    unlimited = {"limits": {**limits, "wildcards": True}, "type": "account", "version": 2}
    allowed = {"subs": -1, "data": -1, "payload": -1, "type": "user", "version": 2}
    config = (
        f"operator: {operator.token(operator.name, {'type': 'operator', 'version': 2})}\n"
        f"resolver: MEMORY\n"
        f"authorization {{ timeout: {PATIENCE} }}\n"
        f"resolver_preload: {{ {account.name}: {operator.token(account.name, unlimited)} }}\n"
    )
    right = credentials(tmp_path / "right.creds", user, account.token(user.name, allowed))
    stranger = Signer(Signer.ACCOUNT)
    wrong = credentials(tmp_path / "wrong.creds", user, stranger.token(user.name, allowed))
    with nats_server.running(tmp_path, config) as nats:
        await rung(NatsSettings(servers=[nats.url], credentials_file=right))
        told = await refused(NatsSettings(servers=[nats.url], credentials_file=wrong))
        assert "bus.credentials_file: refused" in told
