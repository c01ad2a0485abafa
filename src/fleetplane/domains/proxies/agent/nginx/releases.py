"""Releases on disk: a folder each, complete before it gets its name, and a link to the one in use.

A release holds everything it needs, its certificates and the update it was made from too, so that
going back to it brings back all of it. Blocking; knows nothing of NGINX's process.
"""

from __future__ import annotations

import grp
import hashlib
import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from fleetplane.domains.proxies.nginx.rendering import RENDERING, Rendered, checksum
from fleetplane.domains.proxies.nginx.site import Paths
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.errors import IntegrityError, SettingsError
from fleetplane.kernel.files import link_durably, sync_folder, write_synced

LOG_MODE: Final = 0o640
KEPT: Final = 5
"""Releases that are left on disk for people to look at, the one in use among them."""
_UPDATE: Final = "update.pb"
_SERVED: Final = "served.pb"
_MANIFEST: Final = "manifest.json"
_UNFINISHED: Final = ".unfinished"


class VersionManifest(msgspec.Struct, frozen=True, kw_only=True):
    release: str
    version: int
    config_id: str
    checksum: str
    """Of what the server asked for; the servers we found dead do not count."""
    digest: str
    """Of the files as they were written."""
    down: dict[str, list[str]] = {}
    notes: dict[str, str] = {}
    set_aside: dict[str, str] = {}
    """Parts of what the server asked for that are not in service, each with its error."""
    rendering: int = 1
    """`rendering.RENDERING` of the agent that wrote it."""
    resolved: dict[str, list[str]] = {}
    """Where the names of upstream servers were found when this was made."""
    pinned: dict[str, list[str]] = {}
    """Names that could not be resolved, and the addresses that are served instead."""
    lineage: str = ""
    """Of the server's store: versions of another one are numbered anew. Empty if the server did not say."""


class StagedVersion(msgspec.Struct, frozen=True, kw_only=True):
    manifest: VersionManifest
    update: pb.ConfigUpdate
    """What the server asked for."""
    served: pb.ConfigUpdate
    """The same, but for the parts that were set aside."""

    @property
    def name(self) -> str:
        return self.manifest.release

    @property
    def down(self) -> dict[str, frozenset[str]]:
        return {upstream: frozenset(servers) for upstream, servers in self.manifest.down.items()}


class StagedVersions:
    def __init__(self, paths: Paths) -> None:
        self._paths = paths

    def __repr__(self) -> str:
        return f"<Releases in {self._paths.releases} current={self.current()}>"

    def prepare(self) -> None:
        """Make the folders. What workers must reach as another user lies outside the state directory."""
        apart = self._paths.work is not None
        for folder, mode in (
            (self._paths.state, 0o700),
            (self._paths.releases, 0o700),
            (self._paths.run, 0o700),
            *(((self._paths.work, 0o711),) if self._paths.work is not None else ()),
            (self._paths.logs, 0o711 if apart else 0o700),
            (self._paths.temporary, 0o711 if apart else 0o700),
            (self._paths.users, 0o711 if apart else 0o700),
        ):
            folder.mkdir(parents=True, exist_ok=True)
            _check_owner(folder, linked=folder == self._paths.state)
            folder.chmod(mode)
        self.make_logs()

    def make_logs(self) -> None:
        """Make the logs before NGINX does, which would let every user of the machine read them."""
        for log in (self._paths.access_log, self._paths.error_log):
            with suppress(OSError):  # something else lies there, which `open_log` tells of
                descriptor = os.open(
                    log, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, LOG_MODE
                )
                with os.fdopen(descriptor, "wb"):
                    os.fchmod(descriptor, LOG_MODE)

    def folder(self, release: str) -> Path:
        return self._paths.releases / release

    def config(self, release: str) -> Path:
        return self.folder(release) / "nginx.conf"

    def current(self) -> str:
        """The release the link points to; empty if there is none."""
        try:
            return self._paths.current.readlink().name
        except FileNotFoundError:
            return ""

    def stage(
        self,
        release: str,
        update: pb.ConfigUpdate,
        rendered: Rendered,
        down: Mapping[str, frozenset[str]],
        *,
        served: pb.ConfigUpdate | None = None,
        set_aside: Mapping[str, str] | None = None,
        resolved: Mapping[str, list[str]] | None = None,
        pinned: Mapping[str, list[str]] | None = None,
        lineage: str = "",
    ) -> StagedVersion:
        manifest = VersionManifest(
            release=release,
            version=update.version,
            config_id=update.config_id,
            checksum=checksum(update),
            digest=_digest((name, file.content) for name, file in rendered.files.items()),
            down={upstream: sorted(servers) for upstream, servers in down.items() if servers},
            rendering=RENDERING,
            notes={note.id: note.message for note in rendered.notes},
            set_aside=dict(set_aside or {}),
            resolved={**(resolved or {}), **(pinned or {})},
            pinned=dict(pinned or {}),
            lineage=lineage,
        )
        served = update if served is None or not manifest.set_aside else served
        staged = self.folder(f"{release}{_UNFINISHED}")
        shutil.rmtree(staged, ignore_errors=True)
        folders = (staged / "conf.d", staged / "certs", staged / "stream.d")
        for folder in (staged, *folders):
            folder.mkdir(mode=0o700)
        for name, file in rendered.files.items():
            write_synced(staged / name, file.content, mode=file.mode)
        write_synced(staged / _UPDATE, update.SerializeToString(), mode=0o600)
        if served is not update:
            write_synced(staged / _SERVED, served.SerializeToString(), mode=0o600)
        write_synced(staged / _MANIFEST, msgspec.json.encode(manifest), mode=0o600)
        for folder in (*folders, staged):
            sync_folder(folder)
        self._write_users(release, rendered)
        staged.rename(self.folder(release))
        sync_folder(self._paths.releases)
        return StagedVersion(manifest=manifest, update=update, served=served)

    def _write_users(self, release: str, rendered: Rendered) -> None:
        """Files of users and passwords, readable by the workers and nobody else."""
        folder = self._paths.users / release
        shutil.rmtree(folder, ignore_errors=True)
        if not rendered.user_files:
            return
        apart = self._paths.work is not None and bool(rendered.user_group)
        group = grp.getgrnam(rendered.user_group).gr_gid if apart else -1
        folder.mkdir(mode=0o700)
        for name, content in rendered.user_files.items():
            write_synced(folder / name, content, mode=0o600)
            if apart:
                os.chown(folder / name, -1, group)
                (folder / name).chmod(0o640)
        if apart:
            os.chown(folder, -1, group)
            folder.chmod(0o710)
        sync_folder(folder)

    def load(self, release: str) -> StagedVersion:
        folder = self.folder(release)
        try:
            manifest = msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=VersionManifest)
            update = pb.ConfigUpdate.FromString((folder / _UPDATE).read_bytes())
            served = update
            if manifest.set_aside:
                served = pb.ConfigUpdate.FromString((folder / _SERVED).read_bytes())
        except (OSError, msgspec.MsgspecError) as error:
            raise IntegrityError(f"release {release} cannot be read: {error}") from error
        return StagedVersion(manifest=manifest, update=update, served=served)

    def switch(self, release: str) -> None:
        link_durably(self._paths.current, os.path.relpath(self.folder(release), self._paths.current.parent))

    def discard(self, release: str) -> None:
        shutil.rmtree(self.folder(release), ignore_errors=True)
        shutil.rmtree(self._paths.users / release, ignore_errors=True)

    def drifted(self, release: StagedVersion) -> bool:
        """Did somebody change the files by hand?"""
        folder = self.folder(release.name)
        try:
            names = [
                path.relative_to(folder).as_posix()
                for path in folder.rglob("*")
                if path.is_file() and path.name not in (_UPDATE, _SERVED, _MANIFEST)
            ]
            found = _digest((name, (folder / name).read_bytes()) for name in names)
        except OSError:
            return True
        return found != release.manifest.digest

    def sweep(self, *, keep: Iterable[str]) -> None:
        """Remove what was never finished and what is too old to be of interest."""
        kept = set(keep)
        names = [path.name for path in self._paths.releases.iterdir()]
        finished = sorted((name for name in names if not name.endswith(_UNFINISHED)), key=_serial)
        recent = set(finished[-KEPT:])
        for name in names:
            if name not in kept | recent:
                self.discard(name)


def _check_owner(folder: Path, *, linked: bool) -> None:
    """In a folder of somebody else's, or through their link, they would choose where keys and logs go.

    `linked`: the folder itself was named by the node's owner and may be a link to the real one.
    """
    status = folder.stat(follow_symlinks=linked)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise SettingsError(
            f"{folder} is a link or belongs to somebody else", hint="remove it, or choose another folder"
        )


def _serial(name: str) -> int:
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def _digest(files: Iterable[tuple[str, bytes]]) -> str:
    whole = hashlib.sha256()
    for name, content in sorted(files):
        whole.update(f"{name}\0{len(content)}\0".encode())
        whole.update(content)
    return whole.hexdigest()
