"""The audit log of an organisation: notes of changes, their wording, and reading them.

The tamper-evident chain has who, when and what was touched. The request's details are written behind the
actor's name, so that they are inside the chain too. The old and new values are in a note, written in the
transaction of the change and sealed in a secret that the chain's entry names; a small resource announces
the note to subscribers of events. What agents and the server itself write is in the chain only.

Keys, passwords and tokens never appear. Only listed kinds are described at all, and within them a field that
is called, or looks like, a secret is masked: it can be seen that it changed, not its value.

Reading goes backwards in windows, newest first, and stops after a bounded number of entries: a cursor
continues.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import parse_qs, quote_plus, urlencode

import msgspec

from fleetplane.domains.proxies.access import organization_of
from fleetplane.domains.proxies.kinds.records import (
    ACCESS_LIST,
    AGENT,
    API_TOKEN,
    AUDIT_NOTE,
    CERTIFICATE,
    DNS_ZONE,
    MEMBERSHIP,
    ORGANIZATION,
    SETTINGS,
    STREAM,
    UPSTREAM,
    VIRTUAL_HOST,
    WORKSPACE,
    AuditNoteSpec,
    organization_scope,
)
from fleetplane.fleet.masking import masked
from fleetplane.kernel.access import covers
from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.resources import AnyResource, Key
from fleetplane.kernel.store import Draft, HookedChange, Store
from fleetplane.kernel.values.times import spelled

Changes = dict[str, tuple[Any, Any]]
"""From a field to what it was and what it is; null where there was, or is, nothing."""
Difference = tuple[AnyResource | None, AnyResource | None]
"""A resource before and after."""

FIELDS_LIMIT: Final = 100
"""Told of one change: a virtual host has ten. With the limit on values, 800 KB at most."""
VALUE_LIMIT_BYTES: Final = 4096
LEFT_OUT: Final = "..."
DESCRIBED: Final = frozenset(
    kind.name
    for kind in (
        ORGANIZATION,
        WORKSPACE,
        MEMBERSHIP,
        API_TOKEN,
        AGENT,
        VIRTUAL_HOST,
        UPSTREAM,
        ACCESS_LIST,
        DNS_ZONE,
        STREAM,
        CERTIFICATE,
        SETTINGS,
    )
)
_OF_STATUS: Final = {CERTIFICATE.name: ("state", "fingerprint", "names", "expires_at_ns", "error")}
"""Statuses are what agents and issuers report; these fields of them are changed by callers."""


def changes(differences: Iterable[Difference], subject: AnyResource | None) -> Changes:
    """The fields of the subject under their names, those of other resources under their places."""
    found = list(_fields(differences, subject))
    # Masking takes a while: an import changes thousands of fields, of which a hundred are told.
    told: Changes = {
        place + name: (_told(name, old), _told(name, new)) for place, name, old, new in found[:FIELDS_LIMIT]
    }
    if len(found) > FIELDS_LIMIT:
        told[LEFT_OUT] = (None, f"and {len(found) - FIELDS_LIMIT} more fields")
    return told


def _fields(
    differences: Iterable[Difference], subject: AnyResource | None
) -> Iterator[tuple[str, str, Any, Any]]:
    """Each field's place, its name, and its old and new value as they are."""
    for before, after in differences:
        one = after or before
        if one is None or one.kind not in DESCRIBED:
            continue
        place = "" if subject is not None and one.key == subject.key else f"{type_of(one.kind)}.{one.name}."
        old, new = _described(before), _described(after)
        for name in {**old, **new}:
            if old.get(name) != new.get(name):
                yield place, name, old.get(name), new.get(name)


def type_of(kind: str) -> str:
    return kind.removeprefix("proxy-").replace("-", "_")


def _described(resource: AnyResource | None) -> Mapping[str, Any]:
    if resource is None:
        return {}
    found: dict[str, Any] = msgspec.to_builtins(resource.spec)
    for name in _OF_STATUS.get(resource.kind, ()):
        if resource.status is not None:
            found[name] = msgspec.to_builtins(getattr(resource.status, name))
    return found


def _told(name: str, value: Any) -> Any:
    shown = masked(value, name)
    size = len(msgspec.json.encode(shown))
    return shown if size <= VALUE_LIMIT_BYTES else f"{size} bytes"


CALLERS = ("user/", "api-token/")
SLOTS = 16
"""Notes that an organisation has at a time. Whoever watches from further behind than the store's
ring would see only the last of each, so several keep a burst from being taken for one event."""
_PREFIX = "proxies/audit/"


class Detail(msgspec.Struct, frozen=True, kw_only=True):
    """The sealed detail of one audit entry."""

    name: str
    """What the thing was called then."""
    changes: Changes


class AuditNotes:
    def __init__(self, store: Store, master: MasterKey) -> None:
        self._store = store
        self._master = master
        self._turns = count()
        store.add_hook(self._commit_hook)

    # Writing.

    def _commit_hook(self, actor: str, action: str, touches: Collection[Key]) -> HookedChange | None:
        name, circumstances, about = actor.partition("?")
        if not circumstances or not name.startswith(CALLERS):
            return None
        organization = next((found for key in touches if (found := organization_of(key.scope))), "")
        if not organization:
            return None
        scope, slot = organization_scope(organization), f"{next(self._turns) % SLOTS:02d}"
        said = parse_qs(about).get("request_id", [""])[0]

        def change(draft: Draft, _value: Any) -> None:
            self._note(draft, scope, slot, name=name, action=action, request_id=said)

        return HookedChange(change=change, touches=frozenset({AUDIT_NOTE.key(scope, slot)}))

    def _note(self, draft: Draft, scope: str, slot: str, *, name: str, action: str, request_id: str) -> None:
        differences = [(before, after) for before, after in draft.differences() if before is not after]
        touched = [one for before, after in differences if (one := after or before) is not None]
        subject = subject_of(action, touched)
        if subject is None:
            return
        called = str(getattr(subject.spec, "name", "") or getattr(subject.spec, "domain", ""))
        detail = Detail(name=called, changes=changes(differences, subject))
        secret = f"{_PREFIX}{draft.revision:016d}"
        draft.put_secret(secret, self._master.seal(msgspec.msgpack.encode(detail), purpose=secret))
        if draft.get(ORGANIZATION, scope, scope.rpartition("/")[2]) is None:
            return  # it was just deleted: nobody is left to be told
        spec = AuditNoteSpec(
            action=action,
            actor=name,
            request_id=request_id,
            resource_type=type_of(subject.kind),
            resource_id=subject.name,
            resource_name=called,
            workspace_id=workspace_of(subject.scope),
        )
        draft.put(AUDIT_NOTE, scope, slot, spec=spec, renew=True)

    # Reading.

    async def detail(self, entry: audit.ChainEntry) -> Detail | None:
        """None for what no caller did."""
        for change in entry.changes:
            if change.operation == "secret.put" and change.name.startswith(_PREFIX):
                sealed = await self._store.get_secret(change.name)
                if sealed is not None:
                    return msgspec.msgpack.decode(self._master.open(sealed, purpose=change.name), type=Detail)
        return None


def notes_of(organization: str) -> list[Key]:
    """All that there may be."""
    scope = organization_scope(organization)
    return [AUDIT_NOTE.key(scope, f"{slot:02d}") for slot in range(SLOTS)]


class Placed(Protocol):
    """A resource, or its mention in an audit entry."""

    @property
    def kind(self) -> str: ...

    @property
    def scope(self) -> str: ...


P = TypeVar("P", bound=Placed)


def subject_of(action: str, touched: Iterable[P]) -> P | None:
    """What was done to, of all that was touched: not the version and the note that come along."""
    changed = [one for one in touched if one.kind != AUDIT_NOTE.name and organization_of(one.scope)]
    plain = [one for one in changed if not one.kind.startswith("proxy-config-")]
    family = action.partition(".")[0]
    named = [one for one in plain if type_of(one.kind) == family]
    return next(iter(named or plain or changed), None)


def workspace_of(scope: str) -> str | None:
    parts = scope.split("/")
    return parts[3] if len(parts) > 3 and parts[2] == "ws" else None


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
