"""What the daemon says of itself: its state folder to a person, its machine to the server. Blocking.

The machine's capabilities are looked up unless its owner set them. `forget` removes the state folder's
content.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from fleetplane.domains.edge.agent.config import document as config
from fleetplane.domains.edge.agent.config.document import CapabilitySettings
from fleetplane.domains.edge.agent.config.layers import Pushed
from fleetplane.domains.edge.agent.identity import keyring
from fleetplane.domains.edge.agent.identity import state_folder as state
from fleetplane.domains.edge.agent.identity.state_folder import StateFolder
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.kernel.errors import FailedPrecondition, FleetplaneError
from fleetplane.node.host import proc

TOOLS: Final = (
    "bash",
    "zsh",
    "sh",
    "docker",
    "podman",
    "kubectl",
    "helm",
    "git",
    "curl",
    "jq",
    "terraform",
    "ansible",
)
ALWAYS: Final = "shell"
MOUNT_POINTS: Final = {
    "linux": ("/", "/home", "/etc", "/var/log"),
    "macos": ("/", "/Users", "/Library", "/var/log"),
}
SYSTEMS: Final = {"darwin": "macos"}
RUNTIMES: Final = ("docker", "podman")
GIBIBYTE: Final = 1024**3


def capabilities(
    said: CapabilitySettings,
    *,
    tools: tuple[str, ...],
    path: str,
    config_version: str = "",
    draining: bool = False,
) -> pb.EdgeCapabilities:
    """Blocking. `tools` are the daemon's own; `path` is where programs are looked for."""
    system = said.os or SYSTEMS.get(platform.system().lower(), platform.system().lower())
    found = said.local_tools
    if found is None:
        found = (ALWAYS, *(name for name in TOOLS if shutil.which(name, path=path) is not None), *tools)
    mounts = said.mount_points
    if mounts is None:
        mounts = tuple(place for place in MOUNT_POINTS.get(system, ("/",)) if Path(place).is_dir())
    return pb.EdgeCapabilities(
        os=system,
        arch=said.arch or platform.machine().lower(),
        local_tools=found,
        mount_points=mounts,
        custom_labels=_labels(said.custom_labels),
        node_capabilities=pb.NodeCapabilities(
            cpu_cores=os.cpu_count() or 0,
            available_memory_gb=proc.memory_bytes() // GIBIBYTE,
            supported_runtimes=[name for name in RUNTIMES if shutil.which(name, path=path) is not None],
        ),
        config_version=config_version,
        draining=draining,
    )


def _labels(said: Mapping[str, str]) -> dict[str, str]:
    return dict(sorted(said.items()))


T = TypeVar("T")


def overview(folder: StateFolder) -> dict[str, object]:
    """Everything that can be said, whatever is missing or broken."""
    found: dict[str, object] = {"state_dir": str(folder.root), "enrolled": False}
    document = _try(found, "config", folder.load_document)
    node = _try(found, "config", lambda: config.decode(document, str(folder.config))) if document else None
    if node is not None:
        folder.use(node)
        found |= {"node_id": node.spec.node.id, "tenant": node.edge.tenant_id, "server": node.endpoint}
        found["security_contexts"] = ", ".join(context.name for context in node.spec.security_contexts)
    if folder.key.exists():
        key = _try(found, "key", folder.load_key)
        if key is not None:
            found["key"] = fingerprint(state.public_bytes(key))
    if folder.token.exists():
        token = _try(found, "token", lambda: keyring.node(folder.load_token()))
        if token is not None:
            found["enrolled"] = "key" in found
            found["token_expires"] = _when(token.exp)
    if folder.root.is_dir():
        pinned = folder.load_server_key()
        found["server_key"] = fingerprint(pinned) if pinned else "not pinned"
        found["daemon"] = _daemon(folder)
    with suppress(OSError, msgspec.DecodeError):
        found["pushed_config"] = msgspec.json.decode(folder.pushed.read_bytes(), type=Pushed).version
    return found


def fingerprint(public_key: bytes) -> str:
    return "SHA256:" + hashlib.sha256(public_key).hexdigest()


def forget(folder: StateFolder, *, purge: bool, force: bool) -> list[Path]:
    """Remove what makes this machine the server's; with `purge`, what makes it someone at all."""
    if not folder.root.is_dir():
        raise FailedPrecondition(f"{folder.root} is no folder", hint="this machine is not enrolled")
    if not force and folder.daemon_pid() is not None:
        raise FailedPrecondition(f"a daemon works in {folder.root}", hint="stop it first, or use --force")
    given = [
        folder.token,
        folder.enrollment,
        folder.server_key,
        folder.pushed,
        folder.journal,
        folder.next_key,
    ]
    if purge:
        key = folder.key
        given += [key, key.with_suffix(".pub"), key.with_name(f"{key.name}.pub"), folder.config]
        given += sorted(folder.archive.glob("*.key*"))
    removed = []
    for path in given:
        with suppress(FileNotFoundError):
            path.unlink()
            removed.append(path)
    return removed


def _daemon(folder: StateFolder) -> str:
    pid = folder.daemon_pid()
    return "not running" if pid is None else f"running as process {pid}"


def _when(at: float | None) -> str:
    return "never" if at is None else f"{datetime.fromtimestamp(at, tz=UTC):%Y-%m-%dT%H:%M:%SZ}"


def _try(found: dict[str, object], name: str, read: Callable[[], T]) -> T | None:
    """What cannot be read is shown as the reason why."""
    try:
        return read()
    except FleetplaneError as error:
        found[name] = f"unusable: {error.message}"
        return None
