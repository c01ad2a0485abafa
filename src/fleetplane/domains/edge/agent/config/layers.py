"""The configuration in force: the layers on this machine, narrowed by what the server pushed.

What the owner wrote is the ceiling: a pushed layer changes how the daemon behaves and takes away from
what commands may do, and never adds to that. It is checked as part of the whole before it counts, is on
disk before it is acknowledged, and survives restarts. One that does not fit is refused in words, and the
one before stays.
"""

from __future__ import annotations

import hashlib
import re
import threading
from pathlib import Path
from typing import Final

import msgspec
import structlog

from fleetplane.domains.edge.agent.config import document as configs
from fleetplane.domains.edge.agent.config import pushed_config
from fleetplane.domains.edge.agent.config.document import DaemonConfig, Document
from fleetplane.domains.edge.agent.identity.state_folder import StateFolder
from fleetplane.kernel.errors import SettingsError

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
        pushed_config.check_pushed(pushed.document, local, pinned_contexts=decoded.edge.pin_security_contexts)
        return pushed_config.narrowed(decoded, pushed.document, "the pushed configuration")

    def _kept(self) -> Pushed:
        try:
            return msgspec.json.decode(self._folder.pushed.read_bytes(), type=Pushed)
        except FileNotFoundError:
            return NOTHING_PUSHED
        except (OSError, msgspec.DecodeError) as error:
            self._log.warning("pushed_config_damaged", error=str(error))
            return NOTHING_PUSHED
