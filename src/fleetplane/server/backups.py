"""Backups of a data directory: a consistent copy while the server runs, checked; and the way back.

A backup is one tar file: the database as of one moment, the objects, the archives of the audit log and, if
wanted, measurements and the master key; and a manifest with the digest of each file, authenticated under
a key that is derived from the master key: nobody else can change a backup unnoticed. What is
restored begins a new lineage, so that everybody who watched the lost one is told to list again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import io
import os
import shutil
import sqlite3
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO

import msgspec

from fleetplane.kernel.audit import archive as audit_archive
from fleetplane.kernel.audit.archive import Means, verify_file
from fleetplane.kernel.audit.chain import ChainVerdict
from fleetplane.kernel.errors import (
    AlreadyExists,
    FleetplaneError,
    IntegrityError,
    InvalidArgument,
    NotFound,
    OutcomeUnknown,
    ResourceExhausted,
    Unavailable,
)
from fleetplane.kernel.objects import LocalObjects
from fleetplane.kernel.store.engines import postgres_copy
from fleetplane.kernel.store.engines.postgres_schema import check_alone
from fleetplane.kernel.store.lineage import MarkFile, Recorded, StoreStanding, standing
from fleetplane.kernel.store.schema import SCHEMA_REVISION
from fleetplane.kernel.telemetry.postgres import copying as telemetry_copying
from fleetplane.kernel.telemetry.values import DAY_SECONDS
from fleetplane.kernel.values.times import NS
from fleetplane.server.offline import DATABASE, DataDirectory, bring_up_to_date, opened, reading

MANIFEST = "manifest.json"
MAC = "manifest.mac"
"""HMAC-SHA-256 of the manifest's bytes, in hexadecimal."""
OBJECTS, AUDIT, TELEMETRY, KEY = "objects", audit_archive.DIRECTORY, "telemetry.db", "master.key"
FOLDERS = frozenset({OBJECTS, AUDIT})
FILES = frozenset({DATABASE, TELEMETRY, KEY})
"""With the folders all that a backup may hold."""
FORMAT = 2
UNAUTHENTICATED = 1
"""The format of before, which has no MAC."""
MANIFEST_LIMIT_BYTES = 64 * 1024 * 1024
SMALL_LIMIT_BYTES = 1024
"""Of the MAC, and of a master key: 64 and 45 bytes."""
FILES_LIMIT = 200_000
"""Of one backup: some 1 KB of memory each, and 100 bytes of the manifest."""
DIFFERENCES_SHOWN = 5
CHUNK_BYTES = 1024 * 1024
ASIDE = "before-restore"
BEFORE = "before.db"
"""A copy of what a restore replaces in PostgreSQL, until it is moved aside."""


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    schema: str
    lineage: str
    revision: int
    audit_seq: int
    audit_hash: str
    made_at_ns: int
    files: dict[str, str]
    """SHA-256 of each, by its path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupContents:
    """What goes into a backup besides the database."""

    telemetry: bool = False
    key: bool = False


# Making one.


def make(place: DataDirectory, target: Path, contents: BackupContents) -> BackupManifest:
    """Copy, check the copy, and put it under its name only then."""
    place.check_database()
    if target.exists():
        raise AlreadyExists(f"{target} exists already", hint="name another file")
    try:
        # All of it in a directory that is ours alone: others may write where the backup is to lie.
        with tempfile.TemporaryDirectory(prefix=".backup-", dir=_parent(target)) as folder:
            database, staging = Path(folder) / DATABASE, Path(folder) / "packed"
            _copy_store(place, database)
            # Objects after the database: what it refers to was stored before.
            files = {DATABASE: database, **_beside(place, Path(folder), contents)}
            check(database, means_of(place, place.path / AUDIT))
            key = place.keys.backups()
            manifest = _pack(staging, files, place.clock.now_ns(), key)
            _read_back(staging, key)
            _put(staging, target)
    except OSError as error:
        raise Unavailable(f"no backup could be made at {target}: {error.strerror or error}") from error
    return manifest


def _put(made: Path, target: Path) -> None:
    """Under its name, in the place of nobody's file: not of one that came meanwhile either."""
    try:
        os.link(made, target, follow_symlinks=False)
    except FileExistsError as error:
        raise AlreadyExists(f"{target} exists already", hint="name another file") from error
    except OSError:  # a file system without hard links
        made.replace(target)


def _copy_store(place: DataDirectory, target: Path) -> None:
    if place.url:
        asyncio.run(postgres_copy.export(place.url, target))
    else:
        copy_database(place.database, target)


def _copy_telemetry(place: DataDirectory, target: Path) -> bool:
    if place.url:
        return asyncio.run(telemetry_copying.export(place.url, target))
    if not (place.path / TELEMETRY).is_file():
        return False
    copy_database(place.path / TELEMETRY, target)
    return True


def oldest_measured_ns(place: DataDirectory) -> int:
    """Measurements and log lines of before are not kept, and not copied."""
    wanted = place.settings.telemetry
    return place.clock.now_ns() - round(max(wanted.points_days, wanted.lines_days) * DAY_SECONDS * NS)


def copy_database(source: Path, target: Path) -> None:
    """As of one moment, whatever is written meanwhile."""
    with (
        reading(source),
        closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)) as found,
        closing(sqlite3.connect(target)) as copy,
    ):
        target.chmod(0o600)
        found.backup(copy)


def _beside(place: DataDirectory, folder: Path, contents: BackupContents) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for name, directory in ((OBJECTS, place.objects), (AUDIT, place.path / AUDIT)):
        if directory is not None and directory.is_dir():
            for path in sorted(directory.rglob("*")):
                relative = path.relative_to(directory)
                if path.is_file() and not path.is_symlink() and not path.name.endswith(".new"):
                    files[f"{name}/{relative.as_posix()}"] = path
    if contents.telemetry and _copy_telemetry(place, folder / TELEMETRY):
        files[TELEMETRY] = folder / TELEMETRY
    if contents.key:
        if not place.keys.file.is_file():
            raise NotFound(
                f"there is no master key at {place.keys.file}",
                hint="it comes from the environment: keep that",
            )
        files[KEY] = place.keys.file
    if len(files) > FILES_LIMIT:
        raise ResourceExhausted(f"a backup holds at most {FILES_LIMIT} files, not {len(files)}")
    return files


def _manifest(database: Path, digests: Mapping[str, str], now_ns: int) -> BackupManifest:
    with reading(database), closing(sqlite3.connect(database)) as found:
        stand = standing(found)
    if stand is None:
        raise IntegrityError(f"{database} has no revision")
    return BackupManifest(
        format=FORMAT,
        schema=SCHEMA_REVISION,
        lineage=stand.lineage,
        revision=stand.revision,
        audit_seq=stand.audit_seq,
        audit_hash=stand.audit_hash.hex(),
        made_at_ns=now_ns,
        files=dict(digests),
    )


def _pack(target: Path, files: Mapping[str, Path], now_ns: int, key: bytes) -> BackupManifest:
    """Each file as it is when it is read: those that are appended to meanwhile up to there."""
    digests: dict[str, str] = {}
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as packed:
            for name, path in files.items():
                with contextlib.suppress(FileNotFoundError), path.open("rb") as content:  # else it just went
                    hashed = _Hashed(content)
                    packed.addfile(_plain(packed.gettarinfo(arcname=name, fileobj=content)), hashed)
                    digests[name] = hashed.digest.hexdigest()
            manifest = _manifest(files[DATABASE], digests, now_ns)
            text = msgspec.json.format(msgspec.json.encode(manifest))
            for name, about in ((MANIFEST, text), (MAC, _mac(key, text).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(about)
                packed.addfile(_plain(member), io.BytesIO(about))
        file.flush()
        os.fsync(file.fileno())
    return manifest


def _mac(key: bytes, manifest: bytes) -> str:
    return hmac.new(key, manifest, hashlib.sha256).hexdigest()


class _Hashed(io.RawIOBase):
    """A file, and the digest of what was read of it."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file
        self.digest = hashlib.sha256()

    def read(self, size: int = -1, /) -> bytes:
        chunk = self._file.read(size)
        self.digest.update(chunk)
        return chunk


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Clear the owner and restrict the mode: who made the backup does not matter to a restore."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o600
    return member


def _read_back(packed: Path, key: bytes) -> None:
    """Read every byte back from the disk and compare it with what was written."""
    with packed.open("rb") as file:
        unpack(file, packed, None, authenticated(file, packed, lambda _own: key))


# Going back.


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    manifest: BackupManifest
    verdict: ChainVerdict
    aside: Path | None
    """Where what was there before is now."""
    note: str = ""
    """Why measurements were not restored, if they were not; or what was not proved."""


def restore(
    packed: Path, place: DataDirectory, *, replace: bool, actor: str, unauthenticated: bool = False
) -> Restored:
    """Check a backup, make it the beginning of a new lineage, and only then put it in its place.

    `unauthenticated` accepts one of the format of before, which anybody could have changed.
    """
    if not packed.is_file():
        raise NotFound(f"there is no backup at {packed}")
    place.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    note = ""
    with place.stopped():
        present = [path for path in _in_the_way(place) if path.exists()]
        if present and not replace:
            raise AlreadyExists(
                f"{present[0]} exists already",
                hint="restore into another data directory, or give --replace, which moves it aside",
            )
        shared = _shared(place, replace=replace) if place.url else None
        with tempfile.TemporaryDirectory(prefix=".restore-", dir=place.path) as folder:
            unpacked = Path(folder)
            fresh = place.at(unpacked)
            manifest = _unpacked(packed, place, fresh, accept_unauthenticated=unauthenticated)
            bring_up_to_date(fresh.database)
            verdict = check(fresh.database, means_of(fresh, unpacked / AUDIT))
            verdict = _with_objects(verdict, manifest, fresh)
            _begin_lineage(place, fresh, manifest, packed, actor, shared)
            moves = Moves()
            with_key = fresh.keys is not place.keys
            if with_key:
                note = f"{KEY} is the backup's own: whoever made the backup had it, whoever that was"
            if shared is None:
                aside = _move_aside(moves, place, present) if present else None
                _move_in(moves, unpacked, place, with_key=with_key)
                # Last: until then there is none, and a server refuses to start.
                moves.move(unpacked / DATABASE, place.database)
            else:
                aside = _replace_shared(moves, place, fresh, shared, present, with_key=with_key)
                note = _put_telemetry(place, unpacked / TELEMETRY) or note
    return Restored(manifest=manifest, verdict=verdict, aside=aside, note=note)


def _with_objects(verdict: ChainVerdict, manifest: BackupManifest, fresh: DataDirectory) -> ChainVerdict:
    """Compare objects with the records in the database; one may have been changed and not used yet."""
    if fresh.objects is None:
        return verdict
    wrong = fresh.objects_that_differ(fresh.database, LocalObjects(fresh.path / OBJECTS))
    if wrong and manifest.format == UNAUTHENTICATED:
        raise IntegrityError(f"the backup is not what was backed up: {'; '.join(wrong)}")
    return replace(verdict, notes=(*verdict.notes, *wrong))


def _put_telemetry(place: DataDirectory, file: Path) -> str:
    """Measurements of a backup in the place of those in PostgreSQL; why not, if it does not work."""
    if not file.is_file():
        return ""
    moving = telemetry_copying.move_in(file, place.url, oldest_ns=oldest_measured_ns(place), replace=True)
    try:
        asyncio.run(moving)
    except FleetplaneError as error:  # the rest is in its place, and does not need them
        return f"measurements and log lines are not restored: {error.message}"
    return ""


def _shared(place: DataDirectory, *, replace: bool) -> postgres_copy.DatabaseContents:
    """What is in PostgreSQL, if something may be put into its place."""
    found = asyncio.run(postgres_copy.look(place.url))
    check_alone(found.servers, "a backup can be restored only")
    if not replace:
        postgres_copy.check_empty(
            found, place.url, "; or give --replace, which keeps a copy of what is there"
        )
    return found


def _replace_shared(
    moves: Moves,
    place: DataDirectory,
    fresh: DataDirectory,
    shared: postgres_copy.DatabaseContents,
    present: list[Path],
    *,
    with_key: bool,
) -> Path | None:
    """Everything into the database, then the files into their places, then the commit.

    If the commit fails the files go back. If the process is killed, or whether it was committed cannot be
    told, the mark of the new lineage is in its place: a server refuses to start with any other database.
    """
    aside: Path | None = None

    def then() -> None:
        nonlocal aside
        if present or shared.used_table:
            aside = _move_aside(moves, place, present)
            if shared.used_table:
                moves.move(fresh.path / BEFORE, aside / DATABASE)
        _move_in(moves, fresh.path, place, with_key=with_key)

    with reading(fresh.database), opened(fresh.database) as source:
        (lineage,) = source.execute("SELECT lineage FROM meta").fetchone()
        if shared.used_table:
            asyncio.run(postgres_copy.export(place.url, fresh.path / BEFORE))
        try:
            asyncio.run(postgres_copy.put(source, place.url, replace=True, expected=shared.stand, then=then))
        except BaseException:
            if not _was_committed(place, lineage):
                moves.undo()
                if aside is not None:
                    aside.rmdir()
                raise
    return aside


def _was_committed(place: DataDirectory, lineage: str) -> bool:
    try:
        return asyncio.run(postgres_copy.look(place.url)).stand.lineage == lineage
    except FleetplaneError as error:
        raise OutcomeUnknown(
            f"whether the backup was restored is not known: {error.message}",
            hint="restore it once more with --replace, when the database can be used",
        ) from error


def authenticated(
    file: BinaryIO, packed: Path, key: Callable[[bytes], bytes], *, accept_unauthenticated: bool = False
) -> BackupManifest:
    """The manifest of a backup, once it is proved that an owner of the key wrote it.

    Nothing is taken out before. `key` gives the key of manifests, and is given the backup's own master key.
    """
    small: dict[str, bytes] = {}
    with _reading(file, packed) as archive:
        for member in _members(archive, packed):
            limit = MANIFEST_LIMIT_BYTES if member.name == MANIFEST else SMALL_LIMIT_BYTES
            if member.name in (MANIFEST, MAC, KEY):
                if member.size > limit:
                    raise IntegrityError(f"{packed} holds {member.name!r} of {member.size} bytes")
                small[member.name] = _content(archive, member).read()
        if MANIFEST not in small:
            raise IntegrityError(f"{packed} is cut, or no backup of this version: its manifest is missing")
        text = small[MANIFEST]
        if MAC in small:
            if not hmac.compare_digest(_mac(key(small.get(KEY, b"")), text).encode(), small[MAC]):
                raise IntegrityError(
                    f"the manifest of {packed} is not authentic under this server's master key",
                    hint="it was edited, or belongs to a server with another master key",
                )
        elif not accept_unauthenticated:
            raise IntegrityError(
                f"the manifest of {packed} is not authenticated: a release before this one made the backup,"
                " or somebody removed it, and edits cannot be told",
                hint="if nobody else could write to it, restore it with --unauthenticated",
            )
        manifest = msgspec.json.decode(text, type=BackupManifest)
    if manifest.format != (FORMAT if MAC in small else UNAUTHENTICATED):
        raise IntegrityError(f"{packed} is no backup of this version: its format is {manifest.format}")
    return manifest


def unpack(file: BinaryIO, packed: Path, folder: Path | None, manifest: BackupManifest) -> None:
    """Take out what the manifest names, and compare all of it; without a folder, only compare.

    What counts is what was written here: a file that is changed meanwhile differs from the manifest, too.
    """
    found: dict[str, str] = {}
    with _reading(file, packed) as archive:
        for member in _members(archive, packed):
            if member.name in (MANIFEST, MAC):
                continue
            name = _checked_name(packed, member.name)
            if name not in manifest.files:
                raise IntegrityError(f"{packed} holds {name!r}, which is not in its manifest")
            found[name] = _copy(_content(archive, member).read, None if folder is None else folder / name)
    wrong = [
        f"{name} is missing"
        if name not in found
        else f"{name} has the SHA-256 {found[name]}, and {expected} was expected"
        for name, expected in sorted(manifest.files.items())
        if found.get(name) != expected
    ]
    if wrong:
        more = f"; and {len(wrong) - DIFFERENCES_SHOWN} more" if len(wrong) > DIFFERENCES_SHOWN else ""
        raise IntegrityError(
            f"{packed} is not what was backed up: {'; '.join(wrong[:DIFFERENCES_SHOWN])}{more}"
        )


@contextlib.contextmanager
def _reading(file: BinaryIO, packed: Path) -> Iterator[tarfile.TarFile]:
    file.seek(0)
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            yield archive
    except (tarfile.TarError, EOFError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise IntegrityError(f"{packed} is damaged, or no backup: {error}") from error
    except OSError as error:
        raise Unavailable(f"{packed} cannot be unpacked: {error.strerror or error}") from error


def _members(archive: tarfile.TarFile, packed: Path) -> Iterator[tarfile.TarInfo]:
    """Each once; plain files only, which take no more room than they do in the backup."""
    names: set[str] = set()
    for member in archive:
        if not member.isreg() or member.issparse():
            raise IntegrityError(f"{packed} holds {member.name!r}, which is no plain file")
        if member.name in names:
            raise IntegrityError(f"{packed} holds {member.name!r} twice")
        names.add(member.name)
        if len(names) > FILES_LIMIT + 2:
            raise IntegrityError(f"{packed} holds more than {FILES_LIMIT} files")
        yield member


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    content = archive.extractfile(member)
    assert content is not None
    return content


def _checked_name(packed: Path, name: str) -> str:
    path = PurePosixPath(name)
    parts = path.parts
    allowed = name in FILES or (len(parts) > 1 and parts[0] in FOLDERS)
    if not allowed or path.is_absolute() or ".." in parts or str(path) != name:
        raise IntegrityError(f"{packed} holds {name!r}, which has no place in a backup")
    return name


def _copy(read: Callable[[int], bytes], target: Path | None) -> str:
    digest = hashlib.sha256()
    if target is None:
        while chunk := read(CHUNK_BYTES):
            digest.update(chunk)
        return digest.hexdigest()
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        while chunk := read(CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _unpacked(
    packed: Path, place: DataDirectory, fresh: DataDirectory, *, accept_unauthenticated: bool
) -> BackupManifest:
    """Take out a backup, checked with the server's key, or with the backup's own if there is no other."""

    def key(own: bytes) -> bytes:
        if own and not place.keys.is_given and not place.keys.file.exists():
            fresh.keys = place.keys.of_text(own.decode("ascii", "replace").strip())
        return fresh.keys.backups()

    with packed.open("rb") as file:
        manifest = authenticated(file, packed, key, accept_unauthenticated=accept_unauthenticated)
        unpack(file, packed, fresh.path, manifest)
    if manifest.format == UNAUTHENTICATED and KEY in manifest.files:
        key((fresh.path / KEY).read_bytes())
    return manifest


def _begin_lineage(
    place: DataDirectory,
    fresh: DataDirectory,
    manifest: BackupManifest,
    packed: Path,
    actor: str,
    shared: postgres_copy.DatabaseContents | None,
) -> None:
    """Above everything that is known to have been given out, and instead of it."""
    recorded = MarkFile(place.database).read()
    given_out: list[Recorded | StoreStanding] = [] if recorded is None else [recorded]
    if shared is not None:
        given_out.append(shared.stand)
    with reading(fresh.database), opened(fresh.database) as found:
        fresh.begin_lineage(
            found,
            above=max([manifest.revision, *(one.revision for one in given_out)]),
            actor=actor,
            action="store.restore",
            about=f"from {packed.name}, of {manifest.lineage} at revision {manifest.revision}"
            + (", unauthenticated" if manifest.format == UNAUTHENTICATED else ""),
            instead_of=[one.lineage for one in given_out],
        )


def _in_the_way(place: DataDirectory) -> Iterator[Path]:
    for suffix in ("", "-wal", "-shm", ".mark"):
        yield place.database.with_name(DATABASE + suffix)
    yield place.path / AUDIT
    yield place.path / TELEMETRY
    if place.objects is not None:
        yield place.objects


class Moves:
    """What was moved where, so that it can be taken back."""

    def __init__(self) -> None:
        self._made: list[tuple[Path, Path]] = []

    def __repr__(self) -> str:
        return f"<Moves {len(self._made)}>"

    def move(self, source: Path, target: Path) -> None:
        shutil.move(source, target)
        self._made.append((source, target))

    def undo(self) -> None:
        """In the order in which it was not done."""
        while self._made:
            source, target = self._made.pop()
            shutil.move(target, source)


def _move_aside(moves: Moves, place: DataDirectory, present: list[Path]) -> Path:
    aside = place.path / f"{ASIDE}-{place.clock.now_ns() // 1_000_000_000}"
    aside.mkdir(mode=0o700)
    for path in present:
        moves.move(path, aside / path.name)
    return aside


def _move_in(moves: Moves, unpacked: Path, place: DataDirectory, *, with_key: bool) -> None:
    """Everything but the database."""
    if with_key:
        place.keys.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        moves.move(unpacked / KEY, place.keys.file)
    if (unpacked / OBJECTS).exists() and place.objects is not None:
        place.objects.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        moves.move(unpacked / OBJECTS, place.objects)
    for name in (AUDIT,) if place.url else (AUDIT, TELEMETRY):
        if (unpacked / name).exists():
            moves.move(unpacked / name, place.path / name)
    mark = DATABASE + ".mark"
    moves.move(unpacked / mark, place.path / mark)


# Both.


def check(database: Path, means: Means) -> ChainVerdict:
    """Raise unless the database is whole and its audit log intact."""
    address = f"{database.absolute().as_uri()}?mode=ro"
    with reading(database), closing(sqlite3.connect(address, uri=True)) as found:
        (said,) = found.execute("PRAGMA integrity_check(1)").fetchone()
    if said != "ok":
        raise IntegrityError(f"{database.name} is damaged: {said}")
    verdict = asyncio.run(verify_file(database, means=means))
    if not verdict.intact:
        raise IntegrityError(f"the audit log of {database.name} is {verdict}")
    return verdict


def means_of(place: DataDirectory, archives: Path) -> Means:
    public = place.keys.checkpoints().public
    return Means(key=place.audit_key(), public=public, archives=archives, archives_are_elsewhere=True)


def _parent(target: Path) -> Path:
    if not target.parent.is_dir():
        raise InvalidArgument(f"{target.parent} is no directory", field="to")
    return target.parent
