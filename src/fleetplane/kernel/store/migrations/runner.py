"""Running the migrations that a database lacks. Imported only when there are some."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from fleetplane.kernel.errors import IntegrityError


def configuration(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def is_known(found: str) -> bool:
    """Whether this version made the schema, or an older one did."""
    scripts = ScriptDirectory.from_config(configuration())
    return found in {script.revision for script in scripts.walk_revisions()}


def oldest_levels(found: str | None) -> list[int | None]:
    """Of each step that is missing: which level programs must support to use what it leaves behind.

    None of one that does not say: no server may run meanwhile.
    """
    missing = ScriptDirectory.from_config(configuration()).iterate_revisions("head", found or "base")
    return [getattr(script.module, "oldest_level", None) for script in missing]


def check_known(found: str | None) -> None:
    """Refuse a schema that a newer version made."""
    if found is not None and not is_known(found):
        raise IntegrityError(
            f"the database has schema {found}, which this version does not know",
            hint="run the version that wrote it, or a newer one",
        )


def steps(connection: Connection) -> None:
    """Bring the database to the newest revision, in the transaction that the caller has begun."""
    command.upgrade(configuration(connection), "head")


def upgrade(connection: Connection, found: str | None) -> None:
    """Bring a database file from revision `found` to the newest, all steps or none."""
    check_known(found)
    connection.exec_driver_sql("BEGIN IMMEDIATE")
    try:
        steps(connection)
        connection.exec_driver_sql("COMMIT")
    except BaseException:
        connection.exec_driver_sql("ROLLBACK")
        raise
