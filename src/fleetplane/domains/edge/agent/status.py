"""What a state folder tells a person, and forgetting it. Blocking."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import msgspec

from fleetplane.domains.edge.agent.config import document as config
from fleetplane.domains.edge.agent.config.layers import Pushed
from fleetplane.domains.edge.agent.identity import claims
from fleetplane.domains.edge.agent.identity import state_folder as state
from fleetplane.domains.edge.agent.identity.state_folder import StateFolder
from fleetplane.kernel.errors import FailedPrecondition, FleetplaneError

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
        token = _try(found, "token", lambda: claims.node(folder.load_token()))
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
