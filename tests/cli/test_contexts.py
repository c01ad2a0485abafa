"""`fleetplane login` and `fleetplane context` against a real server that other machines could reach."""

from __future__ import annotations

import json
import os
import pty
import re
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from support.shared.cli_runner import COMMAND, Outcome, execute
from support.shared.server_process import running_server

from fleetplane.client import connect_sync
from fleetplane.client.calls import Request
from fleetplane.client.contexts import ContextFile
from fleetplane.client.sync import Fleet

FINGERPRINT = re.compile(r"SHA256:[0-9A-F:]{95}")


class Person:
    """Somebody with a token, as on another machine: with a folder and contexts of their own."""

    def __init__(self, folder: Path, server: str, token: str) -> None:
        self.server = server
        self.file = folder / "contexts.json"
        (folder / "token").write_text(token)
        self.token = folder / "token"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FLEETPLANE_")},
            "FLEETPLANE_CONTEXTS": str(self.file),
        }

    def __call__(self, *words: str) -> Outcome:
        return execute(*words, environment=self.environment, folder=self.file.parent)

    def login(self, *words: str) -> Outcome:
        return self("login", self.server, "--token-file", str(self.token), *words)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("contexts") / "data"


@pytest.fixture
def owner(place: tuple[str, str], data: Path) -> Iterator[Fleet]:
    with connect_sync(data_dir=data) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def place(data: Path) -> Iterator[tuple[str, str]]:
    """The URL of a server with TLS, and a token that may look at freezes and make them."""
    with running_server(data, "--only", "edge", "--set", "listeners.web.addresses=0.0.0.0:0") as server:
        made = execute("tokens", "create", "me", "--role", "fleet.operator", "--data-dir", str(data))
        port = server.web.rpartition(":")[2]
        assert server.web.startswith("https://")
        yield f"https://localhost:{port}", made.out.strip()


@pytest.fixture
def person(place: tuple[str, str], tmp_path: Path) -> Person:
    return Person(tmp_path, *place)


def test_an_authority_is_kept_only_after_somebody_confirmed_its_fingerprint(person: Person) -> None:
    refused = person.login("--name", "lab")
    assert refused.code == 5
    shown = FINGERPRINT.search(refused.err)
    assert shown is not None
    assert not person.file.exists()

    wrong = person.login("--name", "lab", "--fingerprint", "SHA256:" + ":".join(["00"] * 32))
    assert (wrong.code, person.file.exists()) == (5, False)
    assert "not the one that was expected" in wrong.err

    assert person.login("--name", "lab", "--fingerprint", shown[0].lower()).code == 0
    assert person.file.stat().st_mode & 0o777 == 0o600
    assert shown[0] in person("context", "show", "lab").out


def test_a_login_does_not_change_which_server_is_meant(person: Person) -> None:
    shown = FINGERPRINT.search(person.login().err)
    assert shown is not None
    done = person.login("--name", "lab", "--fingerprint", shown[0])
    assert "still local" in done.err
    listed = json.loads(person("context", "list", "-o", "json").out)
    assert [(one["name"], one["current"]) for one in listed] == [("local", True), ("lab", False)]

    assert person("freezes", "--context", "lab").code == 0
    assert person("context", "use", "lab").code == 0
    frozen = person("freeze", "--reason", "moving house")
    assert (frozen.code, frozen.err) == (0, "")
    assert "moving house" in person("freezes").out
    assert person("unfreeze").code == 0

    asked_at_socket = person("revocations")
    assert asked_at_socket.code == 2
    assert "lab is elsewhere" in asked_at_socket.err
    assert person("context", "delete", "lab").code == 6
    assert person("context", "use", "local").code == 0
    assert person("context", "delete", "lab").code == 0
    assert "secret" not in person.file.read_text()
    assert person("freezes", "--context", "lab").code == 4


def test_a_person_at_a_terminal_is_asked(person: Person) -> None:
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "login", person.server, "--name", "lab", "--token-file", str(person.token)],
        stdin=follower,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=person.environment,
    ) as asking:
        os.close(follower)
        os.write(leader, b"y\n")
        assert asking.stderr is not None
        told = asking.stderr.read()
    os.close(leader)
    assert asking.returncode == 0, told
    assert FINGERPRINT.search(told)
    assert "owner told you?" in told


def test_a_person_logs_in_and_stays_logged_in(
    person: Person, owner: Fleet, data: Path, tmp_path: Path
) -> None:
    name = f"ann-{tmp_path.name[-8:].strip('_0123456789').lower() or 'x'}"
    account = {"name": name, "password": "correct horse battery staple"}
    owner.call(Request(method="POST", path="/apis/v1/people/accounts", body=account))
    binding = {"subject": f"account/{name}", "role": "viewer", "scope": "/"}
    owner.call(Request(method="POST", path="/apis/v1/people/bindings", body=binding))
    shown = FINGERPRINT.search(person.login().err)
    assert shown is not None
    (tmp_path / "password").write_text(account["password"])
    known = ("login", person.server, "--name", "lab", "--fingerprint", shown[0], "--account", name)
    wrong = person(*known, "--password-file", str(person.token))
    assert (wrong.code, person.file.exists()) == (5, False), wrong.err
    done = person(*known, "--use", "--password-file", str(tmp_path / "password"))
    assert done.code == 0, done.err
    assert json.loads(person("whoami", "-o", "json").out)["subject"] == f"account/{name}"

    file = ContextFile(person.file)
    with connect_sync(data_dir=data) as again:  # the first was idle for as long as all that took
        again.call(Request(method="DELETE", path=f"/apis/v1/people/accounts/{name}"))
    with file.changing() as held:
        file.write(held.with_context(replace(held.get("lab"), expires_at=1)))
    ended = person("whoami")
    assert ended.code == 5
    assert "the login of context lab has ended" in ended.err


def test_a_server_with_another_authority_is_refused_before_it_learns_the_token(person: Person) -> None:
    shown = FINGERPRINT.search(person.login().err)
    assert shown is not None
    person.login("--name", "lab", "--fingerprint", shown[0], "--use")
    with impostor(person.file.parent) as (port, heard):
        told = json.loads(person.file.read_text())
        told["contexts"]["lab"]["server"] = f"https://localhost:{port}"
        person.file.write_text(json.dumps(told))
        done = person("freezes")
    assert done.code == 5
    assert "is not the server that this context trusts" in done.err
    assert "log in again" in done.err
    assert heard == []


def test_a_context_file_that_others_can_read_stops_every_command(person: Person) -> None:
    person.file.write_text('{"current": "local", "contexts": {}}')
    person.file.chmod(0o644)
    done = person("freezes")
    assert done.code == 6
    assert f"chmod 600 {person.file}" in done.err


@pytest.mark.parametrize("url", ["http://fleet.example", "ftp://x", "https://", "https://a/b", "https://a:b"])
def test_addresses_that_cannot_be_safe_are_refused(person: Person, url: str) -> None:
    assert person("login", url, "--token-file", str(person.token)).code == 2


@contextmanager
def impostor(folder: Path) -> Iterator[tuple[int, list[bytes]]]:
    """A server of the right name that another authority vouches for, and what it heard."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = folder / "impostor.pem"
    pem.write_bytes(
        certificate.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen() -> None:
            while True:
                try:
                    plain, _ = listener.accept()
                except OSError:  # closed: the test is over
                    return
                with plain:
                    try:
                        with context.wrap_socket(plain, server_side=True) as shown:
                            heard.append(shown.recv(1000))
                    except OSError:  # the handshake was refused, as it should be
                        continue

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield listener.getsockname()[1], heard
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(60)
