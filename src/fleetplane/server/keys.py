"""The server's master key: where the settings say it is, and what is derived from it."""

from __future__ import annotations

from pathlib import Path

from fleetplane.kernel.audit.checkpoints import CheckpointSigner
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.identity import MasterKey
from fleetplane.settings import Settings

AUDIT_CHAIN = "fleetplane/audit-chain"
AUDIT_CHECKPOINTS = "fleetplane/audit-checkpoints"
BACKUPS = "fleetplane/backup-manifest"


class MasterKeys:
    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._given = settings.identity.master_key
        self.file = Path(settings.identity.master_key_file or Path(settings.data_dir) / "master.key")
        self._clock = clock
        self._master: MasterKey | None = None

    def __repr__(self) -> str:
        return f"<MasterKeys {'given' if self._given else self.file}>"

    def of_text(self, text: str) -> MasterKeys:
        """Those of a key that is given as text, whatever the settings say."""
        other = MasterKeys.__new__(MasterKeys)
        other._given, other.file, other._clock, other._master = text, self.file, self._clock, None
        return other

    @property
    def is_given(self) -> bool:
        """Whether the key comes from the settings, and not from a file."""
        return bool(self._given)

    def master(self, *, may_create: bool) -> MasterKey:
        if self._master is None:
            if self._given:
                self._master = MasterKey.from_text(self._given, self._clock)
            else:
                self._master = MasterKey.from_file(self.file, self._clock, may_create=may_create)
        return self._master

    def checkpoints(self) -> CheckpointSigner:
        """Who signs checkpoints of the audit log."""
        return CheckpointSigner(self.master(may_create=False).derive(AUDIT_CHECKPOINTS))

    def audit(self, *, may_create: bool = False) -> bytes:
        """What the entries of the audit log are chained under."""
        return self.master(may_create=may_create).derive(AUDIT_CHAIN)

    def backups(self) -> bytes:
        """What the manifests of backups are authenticated under."""
        return self.master(may_create=False).derive(BACKUPS)
