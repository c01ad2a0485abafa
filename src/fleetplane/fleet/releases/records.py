"""The stored kinds of releases and of agents' versions, and the key that signs releases and orders.

A release is named by its version. Agents lie at `agents/DOMAIN`, named as their domain knows them; beside
them, one record holds the default version of the domain. The key is Ed25519, made once and kept sealed;
agents are given its public half when they are installed (`--release-key`).
"""

from __future__ import annotations

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.master_key import SealedSecret
from fleetplane.kernel.release_documents import FileEntry, key_text
from fleetplane.kernel.resources import Kind, Nothing, Resource
from fleetplane.kernel.store import Store

SECRET = "releases/key"  # noqa: S105  # the name it is kept under
ACTOR = "system/releases"


class ReleaseKey:
    """See `load_or_create`."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.text = key_text(key.public_key().public_bytes_raw())

    def __repr__(self) -> str:
        return f"<ReleaseKey {self.text}>"

    @classmethod
    async def load_or_create(cls, store: Store, master: MasterKey) -> ReleaseKey:
        """The key of this installation."""

        async def made() -> bytes:
            return Ed25519PrivateKey.generate().private_bytes_raw()

        found = await SealedSecret(store, master, name=SECRET).read_or_make(made, actor=ACTOR)
        return cls(Ed25519PrivateKey.from_private_bytes(found.content))

    def sign(self, payload: bytes) -> bytes:
        """A signature of 64 bytes."""
        return self._key.sign(payload)


PREFIX = "agents"
DEFAULT = "default"


class ReleaseSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Never changes."""

    manifest: bytes
    """As it was signed."""
    signature: bytes
    files: tuple[FileEntry, ...]
    added_at_ns: int
    floor: str = ""
    ignores_floor: bool = False
    hello_seconds: float = 0.0
    """The time that it has to say hello; the server's setting if 0."""
    notes: str = ""
    actor: str = ""


class AgentWish(msgspec.Struct, frozen=True, kw_only=True):
    """What one agent should run."""

    version: str = ""
    """Empty: the default of its domain."""
    attempt: int = 0
    """Counts how often it was asked: an agent does not try again under the same number."""


class AgentHello(msgspec.Struct, frozen=True, kw_only=True):
    """What one agent said of itself when it last checked in."""

    version: str
    since_ns: int
    """Since when it has run that version."""
    kept: tuple[str, ...] = ()
    can_upgrade: bool = False
    python: str = ""
    platform: str = ""
    failed_version: str = ""
    failed_attempt: int = 0
    failed_reason: str = ""
    failed_at_ns: int = 0


class DefaultSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What agents of a domain should run unless they are named."""

    version: str = ""
    """Empty: what each has."""


Release = Resource[ReleaseSpec, Nothing]
AgentVersion = Resource[AgentWish, AgentHello]

RELEASE: Kind[ReleaseSpec, Nothing] = Kind("agent-release", ReleaseSpec, Nothing)
AGENT_VERSION: Kind[AgentWish, AgentHello] = Kind("agent-version", AgentWish, AgentHello)
AGENT_DEFAULT: Kind[DefaultSpec, Nothing] = Kind("agent-version-default", DefaultSpec, Nothing)
KINDS = (RELEASE, AGENT_VERSION, AGENT_DEFAULT)


def agents_scope(domain: str) -> str:
    """Where the agents of a domain lie."""
    return f"{PREFIX}/{domain}"


def wanted_version(wish: AgentWish, default: DefaultSpec) -> str:
    """The version that an agent should run; empty for whichever it has."""
    return wish.version or default.version
