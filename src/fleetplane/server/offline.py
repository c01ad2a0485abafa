"""A data directory and its master key: what its owner does to it by hand, its server stopped or not."""

from __future__ import annotations

import asyncio
import getpass
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fleetplane import settings as configuration
from fleetplane.kernel.audit.archive import Means, verify_file
from fleetplane.kernel.audit.chain import ChainVerdict
from fleetplane.kernel.audit.checkpoints import CheckpointSigner, read_all
from fleetplane.kernel.clock import Clock, SystemClock
from fleetplane.kernel.errors import IntegrityError, NotFound, Unavailable
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.objects import Objects
from fleetplane.kernel.objects.port import OBJECT, differing
from fleetplane.kernel.store import StoreSettings
from fleetplane.kernel.store.disk import exclusive
from fleetplane.kernel.store.engines.sqlite import SqliteEngine
from fleetplane.kernel.store.lineage import MarkFile, Recorded, StoreStanding, begin, check_kept, standing
from fleetplane.kernel.store.settings import place
from fleetplane.sections.process import ObjectStorageSettings
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


DATABASE = "fleetplane.db"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What a new lineage begins without."""

    lineage: str
    revision: int
    """Where the database stands."""
    acknowledged: int
    """Where it had been, by its mark."""


class DataDirectory:
    def __init__(self, settings: Settings, clock: Clock) -> None:
        self.settings = settings
        self.path = Path(settings.data_dir)
        self.database = self.path / DATABASE
        self.clock = clock
        self.keys = MasterKeys(settings, clock)

    @classmethod
    def of(cls, data_dir: Path | None, config: Path | None) -> DataDirectory:
        flags = {} if data_dir is None else {"data_dir": str(data_dir)}
        return cls(configuration.load(config=config, flags=flags), SystemClock())

    def __repr__(self) -> str:
        return f"<DataDirectory {self.path}>"

    def at(self, path: Path) -> DataDirectory:
        """This data directory with its database at another path."""
        other = DataDirectory(self.settings, self.clock)
        other.path, other.database, other.keys = path, path / DATABASE, self.keys
        return other

    @property
    def objects(self) -> Path | None:
        """Where objects lie, if they lie in files."""
        return self.settings.of(ObjectStorageSettings).folder(self.path)

    @property
    def url(self) -> str:
        """Of the PostgreSQL database that the store is in; empty if it is in a file."""
        return self.settings.store.url

    def check_database(self) -> None:
        if not self.url and not self.database.is_file():
            raise NotFound(
                f"there is no database at {self.database}",
                hint="name the server's data directory with --data-dir",
            )

    def audit_key(self) -> bytes:
        return self.keys.audit(may_create=False)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Hold the lock of the database: no other process uses it meanwhile."""
        with exclusive(self.database.with_name(self.database.name + ".lock")):
            yield

    @contextmanager
    def copied(self) -> Iterator[Path]:
        """The database as a file: itself, or a copy of what is in PostgreSQL, as of one moment."""
        self.check_database()
        if not self.url:
            yield self.database
            return
        from fleetplane.kernel.store.engines.postgres_copy import export

        beside = self.path if self.path.is_dir() else None
        with tempfile.TemporaryDirectory(prefix=".copy-", dir=beside) as folder:
            asyncio.run(export(self.url, copy := Path(folder) / DATABASE))
            yield copy

    def verified(
        self,
        anchors: Iterable[bytes] = (),
        *,
        archives: Path | None = None,
        archives_are_elsewhere: bool = False,
    ) -> ChainVerdict:
        """Check the audit log, and what the database holds, whether or not the server runs; blocks.

        `anchors` are checkpoints that were kept elsewhere, a line each; `archives` is where archived entries
        are, if not in the data directory.
        """
        self.check_database()
        public = self.keys.checkpoints().public
        means = Means(
            key=self.audit_key(),
            public=public,
            archives=archives or self.path / "audit",
            archives_are_elsewhere=archives_are_elsewhere,
            anchors=list(read_all(anchors, public)),
        )
        with self.copied() as database:
            verdict = asyncio.run(verify_file(database, means=means))
            if verdict.intact and (wrong := self.objects_that_differ(database)):
                return replace(verdict, intact=False, problem="; ".join(wrong))
            return verdict

    def objects_that_differ(self, database: Path, storage: Objects | None = None) -> list[str]:
        """Which recorded objects are not in the storage as they were last used, a sentence each."""
        with reading(database), opened(database) as found:
            rows = found.execute("SELECT name, body FROM resources WHERE kind = ?", (OBJECT.name,)).fetchall()
        records = [(str(name), OBJECT.decode(body).spec) for name, body in rows]
        if not records:
            return []
        return asyncio.run(
            differing(storage or self.settings.of(ObjectStorageSettings).open(self.path), records)
        )

    def accept_loss(self, *, actor: str) -> Loss:
        """Begin a new lineage with what is there. Refused where nothing is missing."""
        self.check_database()
        self.audit_key()  # first: without it nothing can be begun
        with self.stopped(), self.copied() as database:
            recorded = MarkFile(self.database).read()
            with reading(database), opened(database) as found:
                stand = _standing(found, database)
                if recorded is None or _is_whole(found, recorded, stand):
                    where = place(self.url) if self.url else database
                    raise NotFound(
                        f"{where} has lost nothing that its mark knows of",
                        hint="start the server: there is nothing to accept",
                    )
                self.at(database.parent).begin_lineage(
                    found,
                    above=recorded.revision,
                    actor=actor,
                    action="store.accept-loss",
                    about=f"instead of {recorded.lineage} at revision {recorded.revision},"
                    f" with what was left at revision {stand.revision}",
                    instead_of=[recorded.lineage],
                )
                if self.url:
                    self._put(found, database, stand)
            return Loss(lineage=stand.lineage, revision=stand.revision, acknowledged=recorded.revision)

    def _put(self, found: sqlite3.Connection, database: Path, before: StoreStanding) -> None:
        """Put a copy back in the place of what it was made of, and its mark beside it."""
        from fleetplane.kernel.store.engines.postgres_copy import put

        asyncio.run(put(found, self.url, replace=True, expected=before))
        recorded = MarkFile(database).read()
        assert recorded is not None
        MarkFile(self.database).write(recorded)

    def begin_lineage(
        self,
        found: sqlite3.Connection,
        *,
        above: int,
        actor: str,
        action: str,
        about: str,
        instead_of: Sequence[str] = (),
    ) -> None:
        """Let what is there be the beginning of a new lineage, with its mark beside it."""
        begin(
            found,
            above=above,
            now_ns=self.clock.now_ns(),
            actor=actor,
            action=action,
            about=about,
            key=self.audit_key(),
            instead_of=instead_of,
        )
        stand = _standing(found, self.database)
        MarkFile(self.database).write(
            Recorded(
                lineage=stand.lineage,
                revision=stand.revision,
                audit_seq=stand.audit_seq,
                audit_hash=stand.audit_hash.hex(),
            )
        )


def bring_up_to_date(database: Path) -> None:
    """Migrate what an older version left."""

    async def migrate() -> None:
        engine = await SqliteEngine.open(StoreSettings(path=database))
        await engine.close()

    asyncio.run(migrate())


@contextmanager
def opened(database: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(database, isolation_level=None)) as found:
        found.execute("PRAGMA synchronous = FULL")
        yield found


def _standing(database: sqlite3.Connection, path: Path) -> StoreStanding:
    stand = standing(database)
    if stand is None:
        raise IntegrityError(f"{path} has no revision")
    return stand


def _is_whole(database: sqlite3.Connection, recorded: Recorded, stand: StoreStanding) -> bool:
    row = database.execute("SELECT hash FROM audit WHERE seq = ?", (recorded.audit_seq,)).fetchone()
    link = None if row is None else row[0]
    try:
        check_kept(Path(), recorded, stand.lineage, stand.revision, stand.audit_seq, link)
    except IntegrityError:
        return False
    return True


def owner() -> str:
    """Who works on the machine, for the audit log."""
    try:
        return f"owner/{getpass.getuser()}"
    except (KeyError, OSError):
        return "owner/unknown"


@contextmanager
def reading(database: Path) -> Iterator[None]:
    """Translate a database error into a message."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise Unavailable(f"{database} cannot be used: {error}") from error
    except (sqlite3.DatabaseError, TypeError) as error:
        raise IntegrityError(f"{database} is damaged: {error}") from error
