"""What is stored of releases of agents, and of the version that each agent has and should have.

A release is named by its version. Agents lie at `agents/DOMAIN`, named as their domain knows them; beside
them, one record says which version whoever is not named should have.
"""

from __future__ import annotations

import msgspec

from fleetplane.kernel.release.documents import FileEntry
from fleetplane.kernel.resources import Kind, Nothing, Resource

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
