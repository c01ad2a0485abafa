"""What this daemon is configured to be: the document, its rules, and how layers of it become one.

Of the layers on this machine later ones win: what is built in, what the user shares between programs,
what was written for this daemon. Objects are merged key by key, anything else replaces what was below.
What the server pushed is not merged, but narrows what came of this (`layers`).

Keys that the daemon does not read are left alone: other programs read the same file. Security
contexts are the exception: there a misspelt word would be a hole. Pure.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Final, cast

import msgspec
import yaml

from fleetplane.domains.edge.agent.commands.policy import SecurityContext
from fleetplane.kernel.errors import SettingsError
from fleetplane.node import variables

API_VERSION: Final = "100monkeys.ai/v1"
KIND: Final = "NodeConfig"
DOCUMENT_LIMIT_BYTES: Final = 1024 * 1024
DEPTH_LIMIT: Final = 32
BACKOFF_SECONDS: Final = (1.0, 2.0, 5.0, 15.0, 60.0)
DEFAULT_GRPC_PORT: Final = 50056

Document = dict[str, object]


class ServerProof(StrEnum):
    REQUIRED = "required"
    """Commands without a proof of the pinned key end the stream."""
    TOLERATED = "tolerated"
    """Commands may come without proof, as from servers that give none; a wrong one still ends the stream."""


class DaemonPart(msgspec.Struct, frozen=True, kw_only=True):
    pass


class Tls(DaemonPart, frozen=True):
    enabled: bool = True


class Controller(DaemonPart, frozen=True):
    endpoint: str = ""
    tls: Tls | None = None


class CapabilitySettings(DaemonPart, frozen=True):
    """What is not given is looked up on the machine."""

    os: str | None = None
    arch: str | None = None
    local_tools: tuple[str, ...] | None = None
    mount_points: tuple[str, ...] | None = None
    custom_labels: dict[str, str] = {}


class Limits(DaemonPart, frozen=True):
    """Resource limits of one program and everything it starts; 0 means none."""

    processes: int = 1024
    memory_bytes: int = 8 * 1024**3
    """Of data, as Linux counts it: what a program only reserves is none."""
    open_files: int = 4096
    file_bytes: int = 0
    """Of a file that it writes."""


class Programs(DaemonPart, frozen=True):
    """What programs may do; the safe choice by default."""

    run_as: str = ""
    """A user's name, for a daemon that is root; empty for the daemon's own user."""
    no_new_privileges: bool = True
    """Programs with the set-user-id bit, such as sudo, have no effect."""
    may_detach: bool = False
    """Processes that make a session of their own may outlive the command that started them."""


class EdgeSection(DaemonPart, frozen=True):
    tenant_id: str = ""
    enrollment_token_path: str = ""
    node_security_token_path: str = ""
    stream_reconnect_backoff_secs: tuple[float, ...] = BACKOFF_SECONDS
    capabilities: CapabilitySettings = CapabilitySettings()
    server_proof: ServerProof = ServerProof.REQUIRED
    pin_security_contexts: bool = False
    """The owner's contexts stay as they are, whatever is pushed."""
    max_concurrent_commands: int = 16
    output_limit_bytes: int = 16 * 1024 * 1024
    """Of one command; what comes after is read and thrown away."""
    rotate_key_every_secs: float = 0.0
    """0: only when asked to."""
    environment: dict[str, str] = {}
    """Variables for every program, besides the few that are handed on."""
    limits: Limits = Limits()
    programs: Programs = Programs()


class ClusterSection(DaemonPart, frozen=True):
    edge: EdgeSection | None = None
    controller: Controller = Controller()
    enabled: bool = True
    role: str = "edge"
    node_keypair_path: str = ""
    heartbeat_interval_secs: float = 30.0
    cluster_grpc_port: int = DEFAULT_GRPC_PORT


class DaemonNodeSection(DaemonPart, frozen=True):
    id: str = ""
    type: str = "edge"


class DaemonSpec(DaemonPart, frozen=True):
    node: DaemonNodeSection = DaemonNodeSection()
    cluster: ClusterSection = ClusterSection()
    security_contexts: tuple[SecurityContext, ...] = ()


class DaemonConfig(DaemonPart, frozen=True):
    api_version: str = msgspec.field(default=API_VERSION, name="apiVersion")
    kind: str = KIND
    metadata: dict[str, object] = {}
    spec: DaemonSpec = DaemonSpec()

    @property
    def edge(self) -> EdgeSection:
        return self.spec.cluster.edge or EdgeSection()

    @property
    def endpoint(self) -> str:
        return self.spec.cluster.controller.endpoint

    @property
    def heartbeat_seconds(self) -> float:
        return max(1.0, self.spec.cluster.heartbeat_interval_secs)

    def context(self, name: str) -> SecurityContext | None:
        return next((context for context in self.spec.security_contexts if context.name == name), None)


# Reading.


def parse(text: bytes, source: str) -> Document:
    """A layer from its file's bytes, YAML or JSON."""
    if len(text) > DOCUMENT_LIMIT_BYTES:
        raise SettingsError(f"{source} has more than {DOCUMENT_LIMIT_BYTES} bytes")
    try:
        found = _load(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise SettingsError(f"{source} cannot be read: {_one_line(error)}") from error
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise SettingsError(f"{source} is no object with named keys")
    _check_depth(found, source, DEPTH_LIMIT)
    return _below_spec(cast("Document", found))


def _load(text: bytes) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return yaml.load(text, Loader=_PlainLoader)  # noqa: S506  # it is the safe one, and less


class _PlainLoader(yaml.SafeLoader):
    """No aliases: a few lines of them describe gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("aliases are not taken")
        return super().compose_node(parent, index)


def _check_depth(value: object, source: str, left: int) -> None:
    if left == 0:
        raise SettingsError(f"{source} is nested more than {DEPTH_LIMIT} deep")
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for entry in inner:
        _check_depth(entry, source, left - 1)


def _below_spec(document: Document) -> Document:
    """Some write the sections at the top."""
    if "spec" in document or not document.keys() & {"cluster", "node", "security_contexts"}:
        return document
    outer = {"apiVersion", "kind", "metadata"}
    above = {key: value for key, value in document.items() if key in outer}
    return {**above, "spec": {key: value for key, value in document.items() if key not in outer}}


def merge(*layers: Mapping[str, object]) -> Document:
    merged: Document = {}
    for layer in layers:
        for key, value in layer.items():
            below = merged.get(key)
            both = isinstance(below, dict) and isinstance(value, dict)
            merged[key] = merge(cast("Document", below), cast("Document", value)) if both else value
    return merged


def decode(document: Mapping[str, object], source: str) -> DaemonConfig:
    """The configuration that a merged document describes, or which key is wrong and why."""
    try:
        config = msgspec.convert(document, DaemonConfig)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{source}: {by_key(error)}") from error
    return checked(config, source)


def checked(config: DaemonConfig, source: str) -> DaemonConfig:
    """The configuration, if nothing is wrong with it; else which key is, and why."""
    for key, why in _problems(config):
        raise SettingsError(f"{source}: {key}: {why}", field=key)
    return config


def _problems(config: DaemonConfig) -> Iterator[tuple[str, str]]:
    cluster, edge = config.spec.cluster, config.edge
    if config.kind != KIND:
        yield "kind", f"is {config.kind!r} and not {KIND!r}"
    if config.api_version != API_VERSION:
        yield "apiVersion", f"is {config.api_version!r} and not {API_VERSION!r}"
    if cluster.role != "edge":
        yield "spec.cluster.role", f"is {cluster.role!r}; a daemon's is 'edge'"
    if not cluster.enabled:
        yield "spec.cluster.enabled", "must be true"
    if cluster.edge is None:
        yield "spec.cluster.edge", "is missing"
    if not cluster.controller.endpoint.strip():
        yield "spec.cluster.controller.endpoint", "is missing"
    if cluster.cluster_grpc_port != DEFAULT_GRPC_PORT:
        yield "spec.cluster.cluster_grpc_port", "must not be set: a daemon serves nothing"
    if not 0 <= cluster.heartbeat_interval_secs <= 3600:
        yield "spec.cluster.heartbeat_interval_secs", "is not between 0 and 3600"
    if not _is_uuid(config.spec.node.id):
        yield "spec.node.id", f"is {config.spec.node.id!r} and no UUID"
    yield from _edge_problems(edge)
    names = [context.name for context in config.spec.security_contexts]
    if len(set(names)) < len(names):
        yield "spec.security_contexts", "names one context twice"
    yield from _context_problems(config.spec.security_contexts)


def _edge_problems(edge: EdgeSection) -> Iterator[tuple[str, str]]:
    at = "spec.cluster.edge"
    waits = edge.stream_reconnect_backoff_secs
    if not waits or not all(1 <= wait <= 3600 for wait in waits):
        yield f"{at}.stream_reconnect_backoff_secs", "needs entries between 1 and 3600"
    if not 1 <= edge.max_concurrent_commands <= 1024:
        yield f"{at}.max_concurrent_commands", "is not between 1 and 1024"
    if not 0 <= edge.output_limit_bytes <= 2**40:
        yield f"{at}.output_limit_bytes", "is not between 0 and 2^40"
    if edge.rotate_key_every_secs and edge.rotate_key_every_secs < 300:
        yield f"{at}.rotate_key_every_secs", "is neither 0 nor at least 300"
    for name in edge.environment:
        if variables.chooses_code(name):
            yield f"{at}.environment.{name}", "chooses code; set it for the daemon itself, or in a script"
    for name, limit in msgspec.structs.asdict(edge.limits).items():
        if not 0 <= limit <= 2**53:
            yield f"{at}.limits.{name}", "is not between 0 and 2^53"


def _context_problems(contexts: tuple[SecurityContext, ...]) -> Iterator[tuple[str, str]]:
    for context in contexts:
        for capability in context.capabilities:
            for name in capability.env_allowlist or ():
                if variables.chooses_code(name):
                    yield (
                        "spec.security_contexts",
                        f"{context.name}: {name} chooses code and is never allowed",
                    )


def _is_uuid(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text.lower()
    except ValueError:
        return False


# Words.


def by_key(error: msgspec.ValidationError) -> str:
    """`Expected `int`, got `str` - at `$.spec.x`` with the key in front."""
    matched = re.fullmatch(r"(.*) - at `\$?\.?(.*)`", str(error), re.DOTALL)
    return f"{matched[2]}: {matched[1].replace('`', '')}" if matched else str(error).replace("`", "")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
