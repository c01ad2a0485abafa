"""The telemetry's file: its tables, how it is opened, and what its errors mean.

A file of its own, beside the store's: it is written far more often and matters far less. It is
synced when the write-ahead log is folded in, not at every commit: a crash of the machine may
cost the last seconds, never the file; a crash of the process costs what was still queued.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from fleetplane.kernel.errors import FleetplaneError, IntegrityError, StorageFull, Unavailable

SCHEMA_VERSION = 2
BUSY_SECONDS = 5.0
JOURNAL_LIMIT_BYTES = 16 * 1024 * 1024
FOLD_PAGES = JOURNAL_LIMIT_BYTES // 4096
"""Of the write-ahead log, after which it is folded into the file: pages that lines of the same minute touch
again and again are then copied once."""
WRITER_CACHE_KIB = 16 * 1024
"""So that the ends of the index that is written to stay in memory, also where many lines have one moment."""

# Points lie together by series and in order of time, so that the growth of a counter over any
# stretch is two look-ups. Lines have one index, which answers every filter and every count
# without reading a body; it also makes a line that is sent twice be kept once, since all its
# columns follow from the line.
_SCHEMA = """
CREATE TABLE series (
    id INTEGER PRIMARY KEY, scope TEXT NOT NULL, name TEXT NOT NULL, source TEXT NOT NULL,
    UNIQUE (scope, name, source)
);
CREATE TABLE points (
    series INTEGER NOT NULL, at_ns INTEGER NOT NULL, value REAL NOT NULL, base REAL NOT NULL,
    PRIMARY KEY (series, at_ns)
) WITHOUT ROWID;
CREATE TABLE channels (
    id INTEGER PRIMARY KEY, scope TEXT NOT NULL, stream TEXT NOT NULL, UNIQUE (scope, stream)
);
CREATE TABLE lines (
    id INTEGER PRIMARY KEY, channel INTEGER NOT NULL, at_ns INTEGER NOT NULL, mark INTEGER NOT NULL,
    code INTEGER NOT NULL, source TEXT NOT NULL, subject TEXT NOT NULL, action TEXT NOT NULL,
    body BLOB NOT NULL
);
CREATE UNIQUE INDEX lines_by_time ON lines (channel, at_ns, mark, code, source, subject, action);
"""
# How much each source has, so that room is made where most was taken. `channel` is 0 for points. What was
# sent twice is counted twice until it is deleted.
_SHARES = """
CREATE INDEX series_by_source ON series (scope, source);
CREATE TABLE shares (
    scope TEXT NOT NULL, channel INTEGER NOT NULL, source TEXT NOT NULL, rows INTEGER NOT NULL,
    bytes INTEGER NOT NULL, PRIMARY KEY (scope, channel, source)
) WITHOUT ROWID;
"""
# What lines came to, see `summaries`. A server from before leaves the table alone: the version stays.
_SUMMARIES = """
CREATE TABLE IF NOT EXISTS summaries (
    channel INTEGER NOT NULL, width INTEGER NOT NULL, at INTEGER NOT NULL, source TEXT NOT NULL,
    subject TEXT NOT NULL, body BLOB NOT NULL, PRIMARY KEY (channel, width, at, source, subject)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS folded (
    channel INTEGER NOT NULL, width INTEGER NOT NULL, until INTEGER NOT NULL, oldest INTEGER NOT NULL,
    PRIMARY KEY (channel, width)
) WITHOUT ROWID;
"""
COUNT_SHARES = """
INSERT INTO shares SELECT scope, 0, source, count(*), 0 FROM points JOIN series ON series.id = points.series
    GROUP BY scope, source;
INSERT INTO shares SELECT scope, channel, source, count(*), sum(length(body)) FROM lines
    JOIN channels ON channels.id = lines.channel GROUP BY scope, channel, source;
"""


def connect(path: Path, *, for_writing: bool = False) -> sqlite3.Connection:
    """One connection, to be used by one thread at a time."""
    with translated(path):
        connection = sqlite3.connect(
            path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA trusted_schema = OFF")
            if for_writing:
                connection.execute(f"PRAGMA journal_size_limit = {JOURNAL_LIMIT_BYTES}")
                connection.execute(f"PRAGMA wal_autocheckpoint = {FOLD_PAGES}")
                connection.execute(f"PRAGMA cache_size = -{WRITER_CACHE_KIB}")
            else:
                connection.execute("PRAGMA query_only = ON")
        except BaseException:
            connection.close()
            raise
        return connection


def prepare(path: Path) -> None:
    """Make the file, or see that it is ours."""
    with translated(path):  # SQLite gives its log the mode of the database
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        with closing(connect(path, for_writing=True)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version == SCHEMA_VERSION:
                connection.executescript(_SUMMARIES)
                return
            if version == 1:
                connection.executescript(
                    f"BEGIN IMMEDIATE; {_SHARES} {COUNT_SHARES} {_SUMMARIES} PRAGMA user_version = 2; COMMIT;"
                )
                return
            if version or connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                raise IntegrityError(f"{path} is a database of something else, or of a later version")
            connection.executescript(
                f"BEGIN IMMEDIATE; {_SCHEMA} {_SHARES} {_SUMMARIES}"
                f" PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
            )


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite may have rolled back by itself
            connection.execute("ROLLBACK")
        raise


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Translate a database error into one of the error tree."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise _meaning(error, path) from error


def _meaning(error: Exception, path: Path) -> FleetplaneError:
    name = getattr(error, "sqlite_errorname", "")
    if name == "SQLITE_FULL":
        return StorageFull(f"no space left for {path}")
    if name in {"SQLITE_CORRUPT", "SQLITE_NOTADB"}:
        return IntegrityError(
            f"{path} is damaged: {error}", hint="move it away: it holds no state, only the past"
        )
    if name == "SQLITE_INTERRUPT":
        return Unavailable("the telemetry query took too long", hint="query a shorter range of time")
    return Unavailable(f"{path} cannot be used: {error}")
