"""The connection that writes to a SQLite database, on a thread of its own that is entered once per group.

The thread is our own because `ThreadPoolExecutor` (several threads, a future with locks for waiting in
any thread) costs the event loop 60 microseconds a call more than a queue and a callback.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self, TypeVar

from sqlalchemy import bindparam, delete, func, select, update
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.sql import ClauseElement
from sqlalchemy.sql.schema import Table

from fleetplane.kernel.errors import IntegrityError, OutcomeUnknown
from fleetplane.kernel.store import schema
from fleetplane.kernel.store.disk import is_full
from fleetplane.kernel.store.engine import DatabaseMark, GroupAuthor, GroupOutcome, WriteGroup

R = TypeVar("R")


class EngineThread:
    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_EngineCall | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Worker {self._thread.name} waiting={self._calls.qsize()}>"

    def call(self, work: Callable[..., R], *arguments: Any) -> asyncio.Future[R]:
        """Have something done in the thread, after everything that was asked for before.

        Whoever is cancelled meanwhile does not learn what came of it; it is done all the same.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[R] = loop.create_future()
        self._calls.put(_EngineCall(loop, answer, work, arguments))
        return answer

    def stop(self, *, wait_seconds: float = 0.0) -> None:
        """End the thread once it has done what was asked for, and wait for that if asked to."""
        self._calls.put(None)
        if wait_seconds:
            self._thread.join(wait_seconds)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call.do()
            del call  # nothing of it is held while the thread waits for the next


class _EngineCall:
    __slots__ = ("_answer", "_arguments", "_loop", "_work")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        answer: asyncio.Future[Any],
        work: Callable[..., Any],
        arguments: tuple[Any, ...],
    ) -> None:
        self._loop = loop
        self._answer = answer
        self._work = work
        self._arguments = arguments

    def do(self) -> None:
        """In the thread."""
        told: tuple[Callable[..., None], Any]
        try:
            told = self._done, self._work(*self._arguments)
        except BaseException as error:
            told = self._failed, error
        with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            self._loop.call_soon_threadsafe(*told)

    def _done(self, result: Any) -> None:
        if not self._answer.done():
            self._answer.set_result(result)

    def _failed(self, error: BaseException) -> None:
        if not self._answer.done():
            self._answer.set_exception(error)


INSERTED_ROWS = 64
"""In one statement, at most; of eight columns, 512 parameters of the 32,766 that SQLite takes."""
KEPT_STATEMENTS = 512
"""Prepared: 64 of each of six tables, and the rest; about 5 KB each when all are in use."""

STOP_SECONDS = 5.0
"""For the thread to end that has closed its connection: microseconds, unless the machine stands still."""

JOURNAL_LIMIT_BYTES = 16 * 1024 * 1024
"""What a log that had to grow shrinks back to; four times the 1,000 pages after which it is folded in."""


def _render(statement: ClauseElement) -> str:
    return str(statement.compile(dialect=sqlite.dialect(paramstyle="qmark")))


class Insertion:
    """A statement that inserts some rows, its parameters in the order of the table's columns."""

    def __init__(self, table: Table, *, replaces: bool = False) -> None:
        insert = sqlite.insert(table)
        if replaces:
            others = {
                column.name: insert.excluded[column.name]
                for column in table.columns
                if not column.primary_key
            }
            insert = insert.on_conflict_do_update(index_elements=list(table.primary_key), set_=others)
        self._head, found, rest = _render(insert).partition(" VALUES (")
        self._row, closed, self._tail = rest.partition(")")
        if not (found and closed):
            raise AssertionError("an insertion without values")
        self._texts: dict[int, str] = {}

    def of(self, rows: int) -> str:
        text = self._texts.get(rows)
        if text is None:
            values = ", ".join([f"({self._row})"] * rows)
            text = self._texts[rows] = f"{self._head} VALUES {values}{self._tail}"
        return text


def _delete(table: Table) -> str:
    """Parameters in the order of the table's primary key."""
    return _render(delete(table).where(*(column == bindparam(column.name) for column in table.primary_key)))


class _Statements:
    """What a commit says, rendered once; the driver keeps each of them prepared by its text."""

    def __init__(self) -> None:
        newest = select(func.max(schema.GROUPS.c.number)).scalar_subquery()
        self.head = _render(select(schema.GROUPS).where(schema.GROUPS.c.number == newest))
        self.group = Insertion(schema.GROUPS).of(1)
        self.put = Insertion(schema.RESOURCES, replaces=True)
        self.delete = _delete(schema.RESOURCES)
        self.log = Insertion(schema.LOG)
        self.kind = Insertion(schema.KINDS, replaces=True)
        self.release = _delete(schema.CLAIMS)
        self.claim = Insertion(schema.CLAIMS)
        self.put_secret = Insertion(schema.SECRETS, replaces=True)
        self.delete_secret = _delete(schema.SECRETS)
        self.audit = Insertion(schema.AUDIT)
        self.cut = _render(delete(schema.AUDIT).where(schema.AUDIT.c.seq <= bindparam("cut")))
        self.note_cut = _render(update(schema.META).values(audit_cut=bindparam("cut")))


@cache
def _statements() -> _Statements:
    """The same for every database, and a hundredth of a second to render."""
    return _Statements()


_FIRST_KEPT = "SELECT number FROM groups WHERE revision >= ? ORDER BY number LIMIT 1"
"""Looks at the groups behind the horizon only: revisions never fall from one group to the next."""
_TRIM_LOG = (
    "DELETE FROM log WHERE (number, position) IN"
    " (SELECT number, position FROM log WHERE number < ? ORDER BY number, position LIMIT ?)"
)
_TRIM_GROUPS = "DELETE FROM groups WHERE number < min(?, coalesce((SELECT min(number) FROM log), ?))"


def configure(connection: DBAPIConnection | sqlite3.Connection, busy_timeout_seconds: float) -> None:
    """For every connection, whoever opens it."""
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {round(busy_timeout_seconds * 1000)}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")  # in WAL mode: the log is synced at every commit
    cursor.execute(f"PRAGMA journal_size_limit = {JOURNAL_LIMIT_BYTES}")
    cursor.execute("PRAGMA trusted_schema = OFF")
    cursor.execute("PRAGMA temp_store = MEMORY")  # what undoes one statement, 64 KB and more, is no file
    cursor.close()


class SqliteWriter:
    def __init__(self, path: Path, thread: EngineThread, connection: sqlite3.Connection) -> None:
        self._path = path
        self._thread = thread
        self._connection = connection
        self._sql = _statements()

    def __repr__(self) -> str:
        return f"<SqliteWriter {self._path}>"

    @classmethod
    async def open(cls, path: Path, busy_timeout_seconds: float) -> Self:
        thread = EngineThread("store-writer")

        def connect() -> sqlite3.Connection:
            # Transactions are begun and ended in so many words.
            connection = sqlite3.connect(path, isolation_level=None, cached_statements=KEPT_STATEMENTS)
            try:
                configure(connection, busy_timeout_seconds)
            except BaseException:
                connection.close()
                raise
            return connection

        try:
            connection = await thread.call(connect)
        except BaseException:
            thread.stop()
            raise
        return cls(path, thread, connection)

    async def close(self) -> None:
        try:
            await self.run(lambda connection: connection.close())
        finally:
            self._thread.stop(wait_seconds=STOP_SECONDS)

    async def run(self, work: Callable[[sqlite3.Connection], R]) -> R:
        """Do something in the thread; nothing else is done there meanwhile."""
        return await self._thread.call(work, self._connection)

    async def commit(self, group: WriteGroup) -> GroupOutcome:
        return await self._thread.call(self._commit, group)

    # In the thread.

    def _commit(self, group: WriteGroup) -> GroupOutcome:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            found = self._head()
            if found.mark.number != group.before.number:
                self._connection.execute("ROLLBACK")
                return found
            now_ns = time.time_ns()
            self._write(group, now_ns)
            self._end()
        except BaseException:
            with suppress(sqlite3.Error):  # SQLite may have rolled back by itself
                self._connection.execute("ROLLBACK")
            raise
        return GroupOutcome(written=True, mark=group.after, author=group.author, now_ns=now_ns)

    def _head(self) -> GroupOutcome:
        row = self._connection.execute(self._sql.head).fetchone()
        if row is None:
            raise IntegrityError(f"{self._path} has no revision")
        number, revision, compacted, seq, link, term, server, boot, _, _ = row
        mark = DatabaseMark(
            number=number, revision=revision, compacted=compacted, audit_seq=seq, audit_hash=link
        )
        return GroupOutcome(
            written=False, mark=mark, author=GroupAuthor(server, boot, term), now_ns=time.time_ns()
        )

    def _write(self, group: WriteGroup, now_ns: int) -> None:
        sql, after, author = self._sql, group.after, group.author
        self._connection.execute(
            sql.group,
            (
                after.number,
                after.revision,
                after.compacted,
                after.audit_seq,
                after.audit_hash,
                author.term,
                author.server,
                author.boot,
                group.id,
                now_ns,
            ),
        )
        self._insert(sql.put, group.puts)
        self._delete(sql.delete, group.deletes)
        self._insert(sql.log, [(after.number, position, *row) for position, row in enumerate(group.log)])
        self._insert(sql.kind, group.kinds)
        self._delete(sql.release, group.releases)
        self._insert(sql.claim, group.claims)
        self._insert(sql.put_secret, group.secrets)
        self._delete(sql.delete_secret, group.secret_deletes)
        self._insert(sql.audit, [(row.seq, row.hash, row.entry) for row in group.audit])
        if group.cut is not None:
            self._connection.execute(sql.cut, (group.cut.seq,))
            self._connection.execute(sql.note_cut, (group.cut.checkpoint,))

    def _insert(self, statement: Insertion, rows: Sequence[tuple[object, ...]]) -> None:
        """Many rows in a statement: it takes the interpreter from the event loop once, and not once a row."""
        for begin in range(0, len(rows), INSERTED_ROWS):
            part = rows[begin : begin + INSERTED_ROWS]
            self._connection.execute(statement.of(len(part)), list(chain.from_iterable(part)))

    def _delete(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        if rows:
            self._connection.executemany(statement, rows)

    def _end(self) -> None:
        """Commit. The log with the commit may be on its way to the disk although its sync failed.

        Then nothing is known: what readers do not see now may be there after a crash.
        """
        try:
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", "")
            if name.startswith("SQLITE_IOERR") and (name.endswith("FSYNC") or not is_full(self._path)):
                raise OutcomeUnknown(f"{self._path} could not be synced to disk: {error}") from error
            raise

    async def trim(self, limit: int) -> int:
        return await self.run(lambda connection: self._trim(connection, limit))

    def _trim(self, connection: sqlite3.Connection, limit: int) -> int:
        connection.execute("BEGIN IMMEDIATE")
        try:
            found = self._head().mark
            (first,) = connection.execute(_FIRST_KEPT, (found.compacted,)).fetchone()
            gone = connection.execute(_TRIM_LOG, (first, limit)).rowcount
            connection.execute(_TRIM_GROUPS, (first, first))
            connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise
        return gone
