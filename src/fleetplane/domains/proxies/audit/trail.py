"""The audit log of an organisation, read from the tamper-evident chain.

Every write names its actor; what is known of the request it came with is written behind the
actor's name, so that it is inside the chain too. Reading goes backwards in windows, newest
first, and stops after a bounded number of entries: a cursor continues.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from urllib.parse import parse_qs, quote_plus, urlencode

import msgspec

from fleetplane.domains.proxies.access import organization_of
from fleetplane.domains.proxies.audit.changes import Changes, type_of
from fleetplane.domains.proxies.audit.notes import AuditNotes, Detail, subject_of, workspace_of
from fleetplane.kernel.access import covers
from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.times import spelled

WINDOW = 2_000
"""Entries read at a time: about 1 MB."""
SCAN_LIMIT = 50_000
"""Entries looked at for one page; beyond it the page is cut short and its cursor continues."""
LIMIT = 100
LIMIT_HIGH = 1000
USER_AGENT_LIMIT = 300
"""Characters, escaped: with a request id of 64 and a digest of 64 an actor stays well below its 1 KB."""


def actor(name: str, *, request_id: str, address: str, user_agent: str) -> str:
    """A caller's name with the request's circumstances."""
    about = urlencode({"request_id": request_id, "ip": address})
    return f"{name}?{about}&user_agent={_cut(quote_plus(user_agent), USER_AGENT_LIMIT)}"


def _cut(quoted: str, limit: int) -> str:
    """No longer than that, and not within an escape."""
    short = quoted[:limit]
    return short[: short.rindex("%")] if "%" in short[-2:] and len(quoted) > limit else short


class Actor(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    id: str
    email: str | None


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    id: str
    name: str | None
    """What it was called then; null if no caller did this."""


class AuditView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    timestamp: str
    request_id: str | None
    actor: Actor
    organization_id: str
    workspace_id: str | None
    action: str
    resource: Subject
    ip: str | None
    user_agent: str | None
    result: str
    changes: Changes | None
    """Fields with their old and new values, without secrets; null if no caller did this."""


class AuditMeta(msgspec.Struct, frozen=True, kw_only=True):
    limit: int
    cursor: str | None
    """Where older entries begin; null at the chain's start."""


class AuditPage(msgspec.Struct, frozen=True, kw_only=True):
    data: Sequence[AuditView]
    meta: AuditMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditQuery:
    scope: str
    limit: int = LIMIT
    before: int | None = None
    """Only entries with a smaller number."""
    from_ns: int = 0
    to_ns: int | None = None
    actor: str = ""
    action: str = ""
    resource_type: str = ""


class AuditTrail:
    def __init__(self, store: Store, notes: AuditNotes, email_of: Callable[[str], str | None]) -> None:
        self._store = store
        self._notes = notes
        self._email_of = email_of

    async def page(self, query: AuditQuery) -> AuditPage:
        found: list[AuditView] = []
        head = self._store.audit_head().seq
        end = head if query.before is None else min(head, query.before - 1)
        lowest = max(0, end - SCAN_LIMIT)
        older = await self._store.audit_row(lowest) if lowest else None  # none there, or archived
        cursor = str(lowest + 1) if older is not None else None
        async for entry in self._backwards(end, lowest):
            if len(found) == query.limit:
                cursor = str(entry.seq + 1)
                break
            if entry.at_ns < query.from_ns:
                cursor = None
                break
            if (subject := _subject_asked_for(entry, query)) is not None:
                found.append(self._view(entry, subject, await self._notes.detail(entry)))
        return AuditPage(data=found, meta=AuditMeta(limit=query.limit, cursor=cursor))

    async def _backwards(self, end: int, lowest: int) -> AsyncIterator[audit.ChainEntry]:
        """Entries from `end` down to, and without, `lowest`."""
        while end > lowest:
            start = max(lowest, end - WINDOW)
            for entry in reversed(await self._window(start, end)):
                yield entry
            end = start

    async def _window(self, start: int, end: int) -> list[audit.ChainEntry]:
        """Entries after `start`, up to and including `end`."""
        entries = []
        async with aclosing(self._store.audit(after=start)) as rows:
            async for row in rows:
                if row.seq > end:
                    break
                entries.append(audit.read(row))
        return entries

    def _view(
        self, entry: audit.ChainEntry, subject: audit.AuditedChange, detail: Detail | None
    ) -> AuditView:
        name, _, about = entry.actor.partition("?")
        kind, _, identity = name.partition("/")
        said = parse_qs(about)
        return AuditView(
            id=str(entry.seq),
            timestamp=spelled(entry.at_ns),
            request_id=said.get("request_id", [None])[0],
            actor=Actor(type=kind, id=identity, email=self._email_of(identity) if kind == "user" else None),
            organization_id=organization_of(subject.scope),
            workspace_id=workspace_of(subject.scope),
            action=entry.action,
            resource=Subject(
                type=type_of(subject.kind), id=subject.name, name=detail.name if detail is not None else None
            ),
            ip=said.get("ip", [None])[0],
            user_agent=said.get("user_agent", [None])[0],
            result="success",
            changes=detail.changes if detail is not None else None,
        )


def _subject_asked_for(entry: audit.ChainEntry, query: AuditQuery) -> audit.AuditedChange | None:
    """What an entry that is asked for was done to; None for all others."""
    if entry.at_ns < query.from_ns or (query.to_ns is not None and entry.at_ns >= query.to_ns):
        return None
    if query.action and entry.action != query.action:
        return None
    name = entry.actor.partition("?")[0]
    if query.actor and query.actor not in (name, name.partition("/")[2]):
        return None
    subject = subject_of(
        entry.action,
        (
            change
            for change in entry.changes
            if change.operation in ("put", "delete") and covers(query.scope, change.scope)
        ),
    )
    return subject if subject is not None and query.resource_type in ("", type_of(subject.kind)) else None
