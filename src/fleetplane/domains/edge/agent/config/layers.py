"""The configuration in force: the layers on this machine, narrowed by what the server pushed.

The owner's layers are the ceiling. Only what stands in `PushedConfig` is taken from a pushed document; a
limit counts if it is smaller, contexts and mount points hold beside the owner's. What is the owner's
alone (`OWN_PATHS`) may be repeated, and is refused when it differs. A pushed layer is checked as part of
the whole before it counts, is on disk before it is acknowledged, and survives restarts; the one before
stays in force when it is refused.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import structlog

from fleetplane.domains.edge.agent.commands.policy import SecurityContext
from fleetplane.domains.edge.agent.config import document as configs
from fleetplane.domains.edge.agent.config.document import (
    DaemonConfig,
    DaemonPart,
    Document,
    by_key,
    checked,
    merge,
)
from fleetplane.domains.edge.agent.identity.state_folder import StateFolder
from fleetplane.kernel.errors import SettingsError

OWN_PATHS: Final = (
    ("spec", "node"),
    ("spec", "cluster", "enabled"),
    ("spec", "cluster", "role"),
    ("spec", "cluster", "controller"),
    ("spec", "cluster", "node_keypair_path"),
    ("spec", "cluster", "edge", "tenant_id"),
    ("spec", "cluster", "edge", "enrollment_token_path"),
    ("spec", "cluster", "edge", "node_security_token_path"),
    ("spec", "cluster", "edge", "server_proof"),
    ("spec", "cluster", "edge", "pin_security_contexts"),
    ("spec", "cluster", "edge", "environment"),
    ("spec", "cluster", "edge", "limits"),
    ("spec", "cluster", "edge", "programs"),
)
"""Identity, trusted server and containment: the server may repeat these settings, not change them."""
CONTEXTS_PATH: Final = ("spec", "security_contexts")


class PushedCapabilities(DaemonPart, frozen=True):
    os: str | None = None
    arch: str | None = None
    local_tools: tuple[str, ...] | None = None
    mount_points: tuple[str, ...] | None = None
    custom_labels: dict[str, str] = msgspec.field(default_factory=dict)


class PushedEdge(DaemonPart, frozen=True):
    stream_reconnect_backoff_secs: tuple[float, ...] | None = None
    capabilities: PushedCapabilities = PushedCapabilities()
    max_concurrent_commands: int | None = None
    output_limit_bytes: int | None = None
    rotate_key_every_secs: float | None = None


class PushedCluster(DaemonPart, frozen=True):
    edge: PushedEdge = PushedEdge()
    heartbeat_interval_secs: float | None = None


class PushedSpec(DaemonPart, frozen=True):
    cluster: PushedCluster = PushedCluster()
    security_contexts: tuple[SecurityContext, ...] | None = None


class PushedConfig(DaemonPart, frozen=True):
    """All that a server may say; whatever else it says is not read."""

    spec: PushedSpec = PushedSpec()


def narrowed(owner: DaemonConfig, document: Mapping[str, object], source: str) -> DaemonConfig:
    """The owner's configuration as far as a pushed one leaves it.

    Contexts of the result are the pushed ones, if there are any: whoever judges by them judges by the
    owner's as well. The same for mount points.
    """
    try:
        said = msgspec.convert(document, PushedConfig).spec
    except msgspec.ValidationError as error:
        raise SettingsError(f"{source}: {by_key(error)}") from error
    replace, own, pushed = msgspec.structs.replace, owner.edge, said.cluster.edge
    found, shown = own.capabilities, pushed.capabilities
    edge = replace(
        own,
        stream_reconnect_backoff_secs=pushed.stream_reconnect_backoff_secs
        or own.stream_reconnect_backoff_secs,
        max_concurrent_commands=_lower(own.max_concurrent_commands, pushed.max_concurrent_commands),
        output_limit_bytes=_lower(own.output_limit_bytes, pushed.output_limit_bytes),
        rotate_key_every_secs=_oftener(own.rotate_key_every_secs, pushed.rotate_key_every_secs),
        capabilities=replace(
            found,
            os=_first(shown.os, found.os),
            arch=_first(shown.arch, found.arch),
            local_tools=_first(shown.local_tools, found.local_tools),
            mount_points=_first(shown.mount_points, found.mount_points),
            custom_labels={**found.custom_labels, **shown.custom_labels},
        ),
    )
    beats = _first(said.cluster.heartbeat_interval_secs, owner.spec.cluster.heartbeat_interval_secs)
    cluster = replace(owner.spec.cluster, edge=edge, heartbeat_interval_secs=beats)
    contexts = _first(said.security_contexts, owner.spec.security_contexts)
    spec = replace(owner.spec, cluster=cluster, security_contexts=contexts)
    return checked(replace(owner, spec=spec), source)


V = TypeVar("V")


def _first(said: V | None, otherwise: V) -> V:
    return otherwise if said is None else said


def _lower(own: int, said: int | None) -> int:
    return own if said is None else min(own, said)


def _oftener(own: float, said: float | None) -> float:
    """The shorter of two intervals, where 0 means never."""
    return min((one for one in (own, said or 0.0) if one), default=0.0)


def check_pushed(pushed: Mapping[str, object], local: Mapping[str, object], *, pinned_contexts: bool) -> None:
    """Refuse a layer that would change who we are, or whom we obey."""
    own = (*OWN_PATHS, CONTEXTS_PATH) if pinned_contexts else OWN_PATHS
    for path in own:
        said = _at(pushed, path)
        if said is not _ABSENT and merge({"it": _at(local, path)}, {"it": said})["it"] != _at(local, path):
            raise SettingsError(
                f"{'.'.join(path)} is decided on this machine and cannot be pushed", field=".".join(path)
            )


_ABSENT: Final = object()


def _at(document: Mapping[str, object], path: tuple[str, ...]) -> object:
    value: object = document
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return _ABSENT
        value = value[key]
    return value


VERSION_LIMIT: Final = 256
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


class Pushed(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    document: dict[str, object]


NOTHING_PUSHED: Final = Pushed(version="", document={})


class DaemonConfiguration:
    """Blocking where it reads or writes; the value itself is read at will."""

    def __init__(
        self, folder: StateFolder, *, user_config: Path | None, log: structlog.typing.FilteringBoundLogger
    ) -> None:
        self._folder = folder
        self._user_config = user_config
        self._log = log
        self._local: Document = {}
        self._pushed = NOTHING_PUSHED
        self._changing = threading.Lock()
        """Of the owner's layers and the server's, neither is replaced while the other is joined to it."""
        self.owner = DaemonConfig()
        """The configuration of the layers on this machine alone."""
        self.current = DaemonConfig()
        """The owner's, as far as what was pushed leaves it."""

    def __repr__(self) -> str:
        return f"<Configuration of {self._folder.root} pushed={self._pushed.version[:12] or 'nothing'}>"

    @property
    def version(self) -> str:
        """The version of the pushed configuration; empty if there is none."""
        return self._pushed.version

    def load(self) -> None:
        """Read all layers anew. A pushed one that no longer fits is put aside: the owner goes first."""
        with self._changing:
            user = {} if self._user_config is None else self._folder.load_document(self._user_config)
            local = configs.merge(user, self._folder.load_document())
            owner = configs.decode(local, str(self._folder.config))
            found, pushed = owner, self._kept()
            try:
                found = self._with(local, owner, pushed)
            except SettingsError as error:
                self._log.warning("pushed_config_put_aside", version=pushed.version, reason=error.message)
                pushed = NOTHING_PUSHED
            self._local, self._pushed, self.owner, self.current = local, pushed, owner, found

    def push(self, version: str, delta: bytes) -> None:
        """Take what the server sent, or raise SettingsError with the reason."""
        if not version or len(version) > VERSION_LIMIT:
            raise SettingsError("version: is missing or too long", field="version")
        if _DIGEST.fullmatch(version) and hashlib.sha256(delta).hexdigest() != version:
            raise SettingsError("version: is not the digest of this configuration", field="version")
        pushed = Pushed(version=version, document=configs.parse(delta, "the pushed configuration"))
        with self._changing:
            local = configs.decode(self._local, str(self._folder.config))
            found = self._with(self._local, local, pushed)
            self._folder.write(self._folder.pushed, msgspec.json.encode(pushed))
            self._pushed, self.current = pushed, found

    def _with(self, local: Document, decoded: DaemonConfig, pushed: Pushed) -> DaemonConfig:
        if not pushed.document:
            return decoded
        check_pushed(pushed.document, local, pinned_contexts=decoded.edge.pin_security_contexts)
        return narrowed(decoded, pushed.document, "the pushed configuration")

    def _kept(self) -> Pushed:
        try:
            return msgspec.json.decode(self._folder.pushed.read_bytes(), type=Pushed)
        except FileNotFoundError:
            return NOTHING_PUSHED
        except (OSError, msgspec.DecodeError) as error:
            self._log.warning("pushed_config_damaged", error=str(error))
            return NOTHING_PUSHED
