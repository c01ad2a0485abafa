"""The folders of a running agent, which has no room for the cryptography library.

What needs that library is done in a short-lived process, and what was found there is believed as long as the
files are the same: an agent that has its certificate starts one such process, and none to connect again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fleetplane.domains.instances.agent.identity.folder import IdentityFolder
from fleetplane.domains.instances.agent.identity.keys import KeyFolder
from fleetplane.domains.instances.rules import files as file_rules
from fleetplane.node.certificates import ConnectionCredentials, Life
from fleetplane.node.short_lived import call_elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSurvey:
    """What there is to know of an identity folder as it is."""

    public_key_pem: bytes
    life: Life | None
    complaint: str | None
    credentials: ConnectionCredentials | None
    """None for a certificate that is not ours to present."""


def survey(folder: IdentityFolder, instance_id: str) -> FolderSurvey:
    """Look at everything in the folder; a key is made if there is none. Loads the library."""
    folder.authority_pem()
    public_key_pem = folder.public_key_pem()
    life, complaint = folder.inspect(instance_id)
    usable = life is not None and complaint is None
    return FolderSurvey(
        public_key_pem=public_key_pem,
        life=life,
        complaint=complaint,
        credentials=folder.credentials() if usable else None,
    )


class LightIdentityFolder(IdentityFolder):
    """All methods block: on the disk, and on another process the first time and after a change."""

    def __init__(self, folder: Path, *, mode: int, instance_id: str) -> None:
        super().__init__(folder, mode=mode)
        self._whole = IdentityFolder(folder, mode=mode)
        self._instance_id = instance_id
        self._surveyed: tuple[tuple[bytes | None, ...], FolderSurvey] | None = None

    def authority_pem(self) -> bytes:
        self._survey()
        return self.read(self.authority_file) or b""

    def public_key_pem(self) -> bytes:
        return self._survey().public_key_pem

    def inspect(self, instance_id: str) -> tuple[Life | None, str | None]:
        if instance_id != self._instance_id:
            return call_elsewhere(IdentityFolder.inspect, self._whole, instance_id)
        found = self._survey()
        return found.life, found.complaint

    def credentials(self) -> ConnectionCredentials:
        return self._survey().credentials or call_elsewhere(IdentityFolder.credentials, self._whole)

    def store_certificate(self, pem: bytes, instance_id: str, authority_pem: bytes = b"") -> None:
        call_elsewhere(IdentityFolder.store_certificate, self._whole, pem, instance_id, authority_pem)

    def trust(self, authority_pem: bytes) -> bool:
        if authority_pem == self.read(self.authority_file):
            return False
        return call_elsewhere(IdentityFolder.trust, self._whole, authority_pem)

    def _survey(self) -> FolderSurvey:
        contents = self._contents()
        if self._surveyed is not None and self._surveyed[0] == contents:
            return self._surveyed[1]
        found = call_elsewhere(survey, self._whole, self._instance_id)
        # What changed meanwhile, if only by our making a key, is looked at again.
        self._surveyed = (contents, found) if self._contents() == contents else None
        return found

    def _contents(self) -> tuple[bytes | None, ...]:
        public_file = self.root / "identity.pub"
        files = (self.authority_file, self.key_file, public_file, self.certificate_file)
        return tuple(self.read(path) for path in files)


class LightKeyFolder(KeyFolder):
    """Makes key pairs in another process; all methods block on it."""

    def public_keys(self, names: list[str]) -> dict[str, bytes]:
        whole = KeyFolder(self._folder, mode=self._mode)
        return call_elsewhere(KeyFolder.public_keys, whole, names)


def complaints(files: Mapping[str, bytes]) -> dict[str, str]:
    """As `rules.files.complaints`: in another process, if any of these files needs the library."""
    if any(Path(name).suffix in file_rules.CRYPTOGRAPHIC for name in files):
        return call_elsewhere(file_rules.complaints, dict(files))
    return file_rules.complaints(files)
