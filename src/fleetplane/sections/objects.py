"""Where large things lie: a directory, or a bucket of S3. Tables with these fields build on this one."""

from __future__ import annotations

from pathlib import Path

from fleetplane.kernel.objects import LocalObjects, Objects
from fleetplane.sections.base import Secret, SettingsSection


class ObjectStorageSettings(SettingsSection, frozen=True):
    storage: str = "file"
    directory: str = ""
    """Of the storage `file`; `objects` in the data directory when empty."""
    bucket: str = ""
    region: str = "us-east-1"
    endpoint: str = ""
    prefix: str = ""
    access_key_id: str = ""
    secret_access_key: Secret = ""

    @property
    def is_shared(self) -> bool:
        """Whether other servers reach the same objects: in S3, or in a folder that was chosen for them."""
        return self.storage != "file" or bool(self.directory)

    def folder(self, data_dir: Path) -> Path | None:
        """Where objects lie, if they lie in files."""
        return Path(self.directory or data_dir / "objects") if self.storage == "file" else None

    def open(self, data_dir: Path) -> Objects:
        """The storage itself."""
        if (folder := self.folder(data_dir)) is not None:
            return LocalObjects(folder)
        from fleetplane.kernel.objects.s3 import S3Bucket, StoreObjects

        return StoreObjects(
            S3Bucket(
                bucket=self.bucket,
                region=self.region,
                endpoint=self.endpoint,
                prefix=self.prefix,
                access_key_id=self.access_key_id,
                secret_access_key=self.secret_access_key,
            )
        )
