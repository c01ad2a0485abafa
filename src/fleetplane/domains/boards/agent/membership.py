"""The folder that says who this node is: key, certificate, authority, and what the server was last told.

    node.key              made here, and never leaves
    node.crt, ca.crt      from the server
    membership.json       the server's address, our number, and a digest of what we registered with
    desired.json          what the server wants run and driven here, for the next start
    packages.json         packages that were changed for the server, each with what was there before
    packages.log          the end of what apt wrote last

Every file is the owner's alone, replaced as a whole, and on disk before a method returns. A certificate
that does not belong to our key, or that nobody we trust has signed, is not kept. All methods block.

What is known of this node without asking anyone: from its folder.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from fleetplane.kernel.errors import FleetplaneError, IntegrityError, Unavailable
from fleetplane.node.certificates import (
    CertificateFolder,
    load_private_key,
    private_pem,
    signing_request,
)

URI_NODE: Final = "fleetplane://boards/node/"


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    server: str
    server_name: str = ""
    """The name in the server's certificate, where that is not what is dialled."""
    node_id: int
    name: str = ""
    heartbeat_seconds: int = 30
    registered: str = ""
    """The digest of what we registered with last."""


class BoardIdentityFolder(CertificateFolder):
    def __init__(self, root: Path) -> None:
        super().__init__(root, stem="node", hint="join a server first")
        self.membership = root / "membership.json"
        self.audit = root / "audit.jsonl"
        self.revocations = root / "revocations"
        self.desired = root / "desired.json"
        self.packages = root / "packages.json"
        self.packages_log = root / "packages.log"
        self.running = root / "running.json"

    # The key.

    def load_or_make_key(self) -> ec.EllipticCurvePrivateKey:
        pem = self.read(self.key_file)
        if pem is None:
            made = ec.generate_private_key(ec.SECP256R1())
            self.write(self.key_file, private_pem(made))
            return made
        key = load_private_key(pem, self.key_file)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise IntegrityError(f"{self.key_file} holds a key of another kind than P-256")
        return key

    def csr_pem(self) -> str:
        """A request signed by our key. The names in it count for nothing: the server decides them."""
        return signing_request(self.load_or_make_key(), name="board")

    # Who we are.

    def load_membership(self) -> Membership | None:
        raw = self.read(self.membership)
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw, type=Membership)
        except msgspec.DecodeError as error:
            raise IntegrityError(f"{self.membership} cannot be read: {error}") from error

    def store_membership(self, membership: Membership) -> None:
        self.write(self.membership, msgspec.json.encode(membership) + b"\n")

    def store_certificate(self, certificate_pem: bytes, authority_pem: bytes, *, node_id: int) -> None:
        """Keep what the server issued, or IntegrityError."""
        key, whom = self.load_or_make_key(), f"node {node_id}"
        is_named = partial(_is_named, node_id)
        self.keep_issued(certificate_pem, authority_pem, key=key, is_named=is_named, whom=whom)

    def forget(self) -> list[Path]:
        """Remove everything but the audit log."""
        return self.remove(
            self.membership,
            self.certificate_file,
            self.authority_file,
            self.key_file,
            self.revocations,
            self.desired,
            self.packages,
            self.packages_log,
        )

    def alone(self) -> AbstractContextManager[None]:
        """Two agents in one folder would fight over the pins and the port."""
        return self.sole_user("agent.lock", whose="another agent")


def _is_named(node_id: int, leaf: x509.Certificate) -> bool:
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    return f"{URI_NODE}{node_id}" in names.get_values_for_type(x509.UniformResourceIdentifier)


def overview(folder: BoardIdentityFolder) -> dict[str, Any]:
    found: dict[str, Any] = {"state_dir": str(folder.root)}
    membership = folder.load_membership()
    found["member"] = membership is not None
    if membership is not None:
        found |= {
            "board": membership.node_id,
            "name": membership.name,
            "server": membership.server,
            "heartbeat_seconds": membership.heartbeat_seconds,
        }
        try:
            identity = folder.credentials()
        except FleetplaneError as error:
            found["certificate"] = error.message
        else:
            found["certificate_serial"] = identity.serial
            found["certificate_ends"] = datetime.fromtimestamp(identity.life.end, UTC).isoformat()
            found["renewed_from"] = datetime.fromtimestamp(identity.life.renewal_at(), UTC).isoformat()
    running = _running(folder)
    found["running"] = running is not None
    if running:
        found |= {"pid": running["pid"], "listeners": running["listeners"]}
    return found


def _running(folder: BoardIdentityFolder) -> dict[str, Any] | None:
    """Where the agent is. A file that a killed one left behind does not count: nobody holds its lock."""
    if not folder.root.is_dir():
        return None
    try:
        with folder.alone():
            return None
    except Unavailable:
        pass
    try:
        said: dict[str, Any] = json.loads(folder.running.read_bytes())
    except (OSError, ValueError):
        return {"pid": 0, "listeners": {}}
    return said
