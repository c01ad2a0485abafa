"""The releases of a server: taken, listed, deleted."""

from __future__ import annotations

import asyncio
import re
import zipfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from fleetplane.fleet.releases.records import (
    AGENT_DEFAULT,
    AGENT_VERSION,
    PREFIX,
    RELEASE,
    Release,
    ReleaseKey,
    ReleaseSpec,
)
from fleetplane.fleet.releases.shelf import Incoming, Shelf
from fleetplane.kernel import release_documents as documents
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)
from fleetplane.kernel.release_documents import (
    AGENT,
    FileEntry,
    ReleaseManifest,
    is_older,
    parse_wheel,
    version_key,
)
from fleetplane.kernel.resources import Nothing
from fleetplane.kernel.store import Draft, Store

log = structlog.get_logger(__name__)

RELEASES_LIMIT = 50
"""Of 512 MiB each at most."""
NOTES_LIMIT = 2000
HELLO_LIMIT_SECONDS = 3600.0
_OWN_VERSION = re.compile(rb'^__version__ = "([^"]+)"', re.MULTILINE)
SOURCE_LIMIT_BYTES = 64 * 1024
"""Of the one small file that says which version a wheel is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRelease:
    """What a person says of a release beside its files."""

    floor: str = ""
    ignores_floor: bool = False
    hello_seconds: float = 0.0
    """0: as the server's setting says."""
    notes: str = ""
    actor: str = ""


Pieces = AsyncIterator[tuple[str, bytes]]
"""The name of a file, or a piece of the file that was named last; the other is empty."""


class Releases:
    def __init__(self, store: Store, clock: Clock, shelf: Shelf, key: ReleaseKey) -> None:
        self._store = store
        self._clock = clock
        self._adding = asyncio.Lock()  # guards: no file is swept before its release is stored
        self.shelf = shelf
        self.key = key

    def __repr__(self) -> str:
        return f"<Releases {len(self.list())}>"

    # Reading.

    def list(self) -> Sequence[Release]:
        """Every release, the oldest version first."""
        return sorted(self._store.list(RELEASE), key=lambda one: version_key(one.name))

    def find(self, version: str) -> Release | None:
        """A release by its version."""
        return self._store.get(RELEASE, "", version)

    def get(self, version: str) -> Release:
        """A release by its version; `NotFound` if there is none."""
        found = self.find(version)
        if found is None:
            raise NotFound(
                f"there is no release {version[:64]!r}", hint="`fleetplane releases list` shows them"
            )
        return found

    def has_file(self, sha256: str) -> bool:
        """Whether a release has such a file."""
        return any(entry.sha256 == sha256 for one in self._store.list(RELEASE) for entry in one.spec.files)

    def users(self, version: str) -> int:
        """How many agents said that they run a version."""
        found = self._store.list(AGENT_VERSION, PREFIX)
        return sum(one.status is not None and one.status.version == version for one in found)

    # Adding.

    async def add(self, wanted: NewRelease, pieces: Pieces) -> Release:
        """Take a release's files, check them, sign what they are, and keep all of it; or nothing."""
        _check_words(wanted)
        files: Sequence[FileEntry] = ()
        async with self._adding:
            try:
                if len(self._store.list(RELEASE)) >= RELEASES_LIMIT:
                    raise ResourceExhausted(
                        f"there are {RELEASES_LIMIT} releases, the most there may be",
                        hint="delete old ones with `fleetplane releases delete`",
                    )
                files = await self._receive(pieces)
                version = await asyncio.to_thread(self._check_files, files)
                for entry in files:
                    await self.shelf.share(entry.sha256)
                return await self._keep(version, files, wanted)
            finally:
                await self._sweep(files)

    async def _receive(self, pieces: Pieces) -> Sequence[FileEntry]:
        files: list[FileEntry] = []
        incoming: Incoming | None = None
        try:
            async for name, piece in pieces:
                if name:
                    if incoming is not None:
                        files.append(await asyncio.to_thread(incoming.finish))
                    incoming = None
                    _check_next(name, files)
                    incoming = await asyncio.to_thread(self.shelf.receive, name)
                elif incoming is None:
                    raise InvalidArgument("content came before the name of its file", field="file")
                else:
                    await asyncio.to_thread(incoming.write, piece)
            if incoming is not None:
                files.append(await asyncio.to_thread(incoming.finish))
            incoming = None
        finally:
            if incoming is not None:
                incoming.drop()
        return files

    def _check_files(self, files: Sequence[FileEntry]) -> str:
        """The version of a release with these files; raises for what agents would refuse. Blocking."""
        total = sum(entry.size for entry in files)
        if total > documents.RELEASE_LIMIT_BYTES:
            raise ResourceExhausted(
                f"the files have {total} bytes, more than {documents.RELEASE_LIMIT_BYTES}"
            )
        versions = set()
        for entry in files:
            wheel = parse_wheel(entry.name)
            said = _version_inside(self.shelf.path(entry.sha256), entry.name, own=wheel.distribution == AGENT)
            if wheel.distribution == AGENT:
                versions.add(wheel.version)
                if said != wheel.version:
                    raise InvalidArgument(f"{entry.name} is of version {said} inside", field="file")
        if len(versions) != 1:
            raise InvalidArgument(
                f"a release has wheels of one version of {AGENT}, not of {len(versions)}",
                field="file",
                hint="give the wheel that `make wheel` builds, and those of its dependencies",
            )
        (version,) = versions
        version_key(version)
        return version

    async def _keep(self, version: str, files: Sequence[FileEntry], wanted: NewRelease) -> Release:
        if wanted.floor and is_older(version, wanted.floor):
            raise InvalidArgument(f"{wanted.floor} is newer than the release, {version}", field="floor")
        now_ns = self._clock.now_ns()
        entries = tuple(sorted(files, key=lambda entry: entry.name))
        manifest = documents.encode(
            ReleaseManifest(
                version=version,
                files=entries,
                created_at_ns=now_ns,
                floor=wanted.floor,
                ignores_floor=wanted.ignores_floor,
            )
        )
        spec = ReleaseSpec(
            manifest=manifest,
            signature=self.key.sign(documents.manifest_payload(manifest)),
            files=entries,
            added_at_ns=now_ns,
            floor=wanted.floor,
            ignores_floor=wanted.ignores_floor,
            hello_seconds=wanted.hello_seconds,
            notes=wanted.notes,
            actor=wanted.actor,
        )

        def change(draft: Draft) -> Release:
            if draft.get(RELEASE, "", version) is not None:
                raise AlreadyExists(
                    f"there is a release {version} already",
                    hint="a release never changes: build one with another version, or delete this one",
                )
            return draft.put(RELEASE, "", version, spec=spec, status=Nothing())

        key = RELEASE.key("", version)
        done = await self._store.transact(change, actor=wanted.actor, action="releases.added", touches=[key])
        log.info("releases.added", version=version, files=len(entries), actor=wanted.actor)
        return done.value

    # Deleting.

    async def delete(self, version: str, *, actor: str) -> None:
        """Forget a release; refused while agents should run it."""
        files = self.get(version).spec.files
        keys = [RELEASE.key("", version)]

        def change(draft: Draft) -> None:
            if _is_wanted(draft, version):
                raise FailedPrecondition(
                    f"agents are to run version {version}",
                    hint="roll out another version first, or undo the rollout",
                )
            draft.delete(RELEASE, "", version)

        await self._store.transact(change, actor=actor, action="releases.deleted", touches=keys)
        log.info("releases.deleted", version=version, actor=actor)
        async with self._adding:
            await self._sweep(files)

    async def _sweep(self, files: Sequence[FileEntry]) -> None:
        """Remove files that no release has: any of ours, and these from where other servers find them."""
        # A release whose sender has left may still be on its way to the disk.
        await self._store.settled(RELEASE)
        wanted = {entry.sha256 for one in self._store.list(RELEASE) for entry in one.spec.files}
        await asyncio.to_thread(self.shelf.sweep, wanted)
        for sha256 in {entry.sha256 for entry in files} - wanted:
            await self.shelf.unshare(sha256)


def _is_wanted(draft: Draft, version: str) -> bool:
    wishes = (one.spec.version for one in draft.list(AGENT_VERSION, PREFIX))
    defaults = (one.spec.version for one in draft.list(AGENT_DEFAULT, PREFIX))
    return version in {*wishes, *defaults}


def _check_words(wanted: NewRelease) -> None:
    if wanted.floor:
        version_key(wanted.floor, field="floor")
    if wanted.hello_seconds and not 1.0 <= wanted.hello_seconds <= HELLO_LIMIT_SECONDS:
        raise InvalidArgument(
            f"must be between 1 and {HELLO_LIMIT_SECONDS:g}, not {wanted.hello_seconds:g}",
            field="hello_seconds",
        )
    if len(wanted.notes) > NOTES_LIMIT:
        raise InvalidArgument(f"has more than {NOTES_LIMIT} characters", field="notes")


def _check_next(name: str, files: Sequence[FileEntry]) -> None:
    parse_wheel(name)
    if any(entry.name == name for entry in files):
        raise InvalidArgument(f"{name} is there twice", field="file")
    if len(files) >= documents.FILES_LIMIT:
        raise ResourceExhausted(f"a release has at most {documents.FILES_LIMIT} files")
    if sum(entry.size for entry in files) > documents.RELEASE_LIMIT_BYTES:
        raise ResourceExhausted(f"the files have more than {documents.RELEASE_LIMIT_BYTES} bytes")


def _version_inside(path: Path, name: str, *, own: bool) -> str:
    """The version that a wheel of ours says of itself; empty for others, which must only be wheels."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if not any(one.endswith(".dist-info/RECORD") for one in names):
                raise InvalidArgument(f"{name} has no record of its files", field="file")
            if not own:
                return ""
            info = archive.getinfo("fleetplane/__init__.py")
            text = archive.read(info) if info.file_size <= SOURCE_LIMIT_BYTES else b""
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise InvalidArgument(f"{name} is not a wheel: {error}", field="file") from error
    found = _OWN_VERSION.search(text)
    return found[1].decode() if found is not None else ""
