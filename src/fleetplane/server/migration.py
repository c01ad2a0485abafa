"""Moving an installation from its database file to PostgreSQL, with lineage, secrets and audit chain.

The server is stopped. The file is brought up to date and checked, then every table is copied in one
transaction of the other database, compared, and only then is the file set aside. Revisions, cursors of
watches and the chain of the audit log go on where they were.
"""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from fleetplane.kernel.errors import AlreadyExists, IntegrityError, NotFound, SettingsError
from fleetplane.kernel.store.engines.postgres_copy import put
from fleetplane.kernel.store.lineage import standing
from fleetplane.kernel.telemetry.postgres.copying import move_in
from fleetplane.server.backups import AUDIT, TELEMETRY, check, means_of, oldest_measured_ns
from fleetplane.server.offline import DataDirectory, bring_up_to_date, reading

SET_ASIDE = ".migrated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Migrated:
    lineage: str
    revision: int
    rows: int
    measured: int
    """Points and lines of telemetry."""
    aside: Path
    """Where the file is now."""


def migrate(place: DataDirectory, *, with_telemetry: bool = True) -> Migrated:
    """Copy the data directory's database to the address in the settings, and set the file aside.

    Interrupted, it can be done again: what was copied is compared, or passed over.
    """
    url = place.settings.store.url
    if not url:
        raise SettingsError("store.url: is required; it says where the data goes", field="store.url")
    if not place.database.is_file():
        raise NotFound(
            f"there is no database at {place.database}",
            hint="name the server's data directory with --data-dir",
        )
    with place.stopped():
        aside = place.database.with_name(place.database.name + SET_ASIDE)
        if aside.exists():
            raise AlreadyExists(f"{aside} exists already", hint="move it elsewhere")
        bring_up_to_date(place.database)
        check(place.database, means_of(place, place.path / AUDIT))
        if wrong := place.objects_that_differ(place.database):
            raise IntegrityError(
                "; ".join(wrong),
                hint="if they are right: start the server and run `fleetplane instances config refresh`",
            )
        with reading(place.database), closing(sqlite3.connect(place.database)) as source:
            stand = standing(source)
            if stand is None:
                raise IntegrityError(f"{place.database} has no revision")
            rows = asyncio.run(put(source, url))
        measured = _move_telemetry(place) if with_telemetry else 0
        place.database.rename(aside)  # last: until then all of it can be done again
    return Migrated(lineage=stand.lineage, revision=stand.revision, rows=rows, measured=measured, aside=aside)


def _move_telemetry(place: DataDirectory) -> int:
    """Measurements and log lines, in batches; the file is set aside, too."""
    file = place.path / TELEMETRY
    if not file.is_file():
        return 0
    aside = file.with_name(TELEMETRY + SET_ASIDE)
    if aside.exists():
        raise AlreadyExists(f"{aside} exists already", hint="move it elsewhere")
    measured = asyncio.run(move_in(file, place.url, oldest_ns=oldest_measured_ns(place)))
    file.rename(aside)
    return measured
