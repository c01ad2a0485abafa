"""A note of everything that callers do to an organisation, in the transaction that does it.

The tamper-evident chain has who, when and what was touched. Here is the rest: the old and new
values, sealed in a secret that the chain's entry names, and a small resource from which those who
follow events learn that something was done. What agents and the server itself write is in
the chain only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import count
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qs

import msgspec

from fleetplane.domains.proxies.access import organization_of
from fleetplane.domains.proxies.audit.changes import Changes, changes, type_of
from fleetplane.domains.proxies.kinds.records import (
    AUDIT_NOTE,
    ORGANIZATION,
    AuditNoteSpec,
    organization_scope,
)
from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import Draft, HookedChange, Store

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
