"""Where the log of a PostgreSQL database stands, and the groups in it, as followers read them."""

# ruff: noqa: S608  # every part of a statement is a constant of this module
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetplane.kernel.errors import IntegrityError
from fleetplane.kernel.store.engine import (
    DatabaseMark,
    GroupAuthor,
    GroupOutcome,
    GroupPage,
    LoggedGroup,
    LogRow,
)

CHANGE = ", ".join(LogRow._fields)
_GROUP = "number, revision, compacted, audit_seq, audit_hash, term, server, boot, group_id, at_ns"
_HEAD = f"SELECT {_GROUP} FROM groups ORDER BY number DESC LIMIT 1"
_GROUP_WIDTH = len(_GROUP.split(", "))
# A look into the log's index for each group, whatever the planner makes of the number of groups.
_NEXT_GROUPS = (
    f"SELECT g.*, l.* FROM (SELECT {_GROUP} FROM groups WHERE number BETWEEN $1 AND $1 + $2) g"
    f" LEFT JOIN LATERAL (SELECT {CHANGE}, position FROM log WHERE log.number = g.number AND g.number > $1"
    f" ORDER BY position) AS l (log_{CHANGE}, position) ON true ORDER BY g.number, l.position LIMIT $2"
)


async def next_groups(reader: Any, after: int, limit: int) -> GroupPage | None:
    """All groups after a number, in one statement, which is of one moment; None if that is no page's worth.

    Nearly always these are few: whoever was overtaken by another server writes again after one question.
    """
    found = await reader.fetch(_NEXT_GROUPS, after, limit)
    if not 0 < len(found) < limit or found[0]["number"] != after:  # too many, or the first is not kept
        return None
    rows: dict[int, list[LogRow]] = {}
    groups: list[LoggedGroup] = []
    for row in found:
        number = row["number"]
        if number not in rows:
            groups.append(_logged(row, rows.setdefault(number, [])))
        if row["position"] is not None:
            rows[number].append(LogRow(*row[_GROUP_WIDTH:-1]))
    return GroupPage(head=groups[-1].mark, before=groups[0].mark, groups=groups[1:])


async def read_page(reader: Any, after: int, limit: int) -> GroupPage:
    """Of one moment: in a snapshot, or while nobody can write."""
    rows: dict[int, list[LogRow]] = {}
    query = f"SELECT number, {CHANGE} FROM log WHERE number > $1 AND number <= $2 ORDER BY number, position"
    head = await read_mark(reader)
    last = head.number
    found = await reader.fetch(f"{query} LIMIT $3", after, last, limit)
    if len(found) == limit:  # of the last there may be more
        last = max(found[0]["number"], found[-1]["number"] - 1)
        found = await reader.fetch(query, after, last)
    listed = await reader.fetch(
        f"SELECT {_GROUP} FROM groups WHERE number BETWEEN $1 AND $2 ORDER BY number LIMIT $3",
        after,
        last,
        limit + 1,
    )
    for number, *row in found:
        rows.setdefault(number, []).append(LogRow(*row))
    groups = [_logged(row, rows.get(row["number"], ())) for row in listed]
    before = groups.pop(0).mark if groups and groups[0].mark.number == after else None
    return GroupPage(head=head, before=before, groups=groups)


async def read_mark(reader: Any) -> DatabaseMark:
    row = await reader.fetchrow(_HEAD)
    if row is None:
        raise IntegrityError("the database has no revision")
    return _after(row)


def _after(row: Any) -> DatabaseMark:
    return DatabaseMark(
        number=row["number"],
        revision=row["revision"],
        compacted=row["compacted"],
        audit_seq=row["audit_seq"],
        audit_hash=row["audit_hash"],
    )


def _author(row: Any) -> GroupAuthor:
    return GroupAuthor(row["server"], row["boot"], row["term"])


def outcome_of(row: Any) -> GroupOutcome:
    return GroupOutcome(
        written=row["written"],
        mark=_after(row),
        author=_author(row),
        now_ns=row["now_ns"],
        alive=row["is_alive"],
    )


def _logged(row: Any, changes: Sequence[LogRow]) -> LoggedGroup:
    return LoggedGroup(
        id=row["group_id"], author=_author(row), mark=_after(row), log=changes, at_ns=row["at_ns"]
    )
