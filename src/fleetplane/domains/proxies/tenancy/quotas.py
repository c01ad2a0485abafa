"""How much one tenant may have, told before and when it is reached.

Accompanies every transaction of the store, so that no way of making things gets past it and no two of
them slip through together. When four fifths of a quota are used, a note in the organisation's scope says
so until it is less again; the note is what the event feed tells. Decides nothing about rates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import structlog

from fleetplane.domains.proxies.kinds.records import (
    AGENT,
    API_TOKEN,
    CERTIFICATE,
    MEMBERSHIP,
    ORGANIZATION,
    QUOTA_NOTE,
    UPSTREAM,
    USER,
    VIRTUAL_HOST,
    WORKSPACE,
    QuotaNoteSpec,
    organization_of,
    organization_scope,
    workspace_of,
    workspace_scope,
)
from fleetplane.domains.proxies.rules import validation as rules
from fleetplane.kernel.resources import AnyKind, Key
from fleetplane.kernel.store import Draft, HookedChange, Store
from fleetplane.web.rest.problems import Code, Problem, Rejected

log = structlog.get_logger(__name__)

WARN_SHARE = 0.8
"""Of a quota, when its organisation is warned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaOptions:
    """The most there may be; each is a setting of `[proxies]` by the same name."""

    organizations: int = 1000
    """On the whole server. Each costs an ACME account, and its members' views of it."""
    users: int = 10_000
    workspaces_per_organization: int = 100
    members_per_organization: int = 1000
    api_tokens_per_organization: int = 200
    agents_per_organization: int = 10_000
    certificates_per_workspace: int = 500
    """As many as there may be virtual hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """One bound: how many of a kind, in what."""

    name: str
    """Of the setting, without its table; of those without a setting, in the same manner."""
    kind: AnyKind
    holder: str
    """`server`, `organization` or `workspace`."""
    limit: int
    fixed: bool = False
    """Not a setting: what NGINX and the agents were measured with."""

    def place(self, scope: str) -> str:
        """The scope in which things are counted that lie at or below another one."""
        if self.holder == "server":
            return ""
        organization = organization_of(scope)
        if self.holder == "organization":
            return organization_scope(organization)
        return workspace_scope(organization, workspace_of(scope))

    @property
    def warn_at(self) -> int:
        return max(1, round(self.limit * WARN_SHARE))

    @property
    def setting(self) -> str:
        return "" if self.fixed else f"proxies.{self.name}"


def quotas(options: QuotaOptions) -> tuple[Quota, ...]:
    def bounded(name: str, kind: AnyKind, holder: str) -> Quota:
        return Quota(name=name, kind=kind, holder=holder, limit=getattr(options, name))

    return (
        bounded("organizations", ORGANIZATION, "server"),
        bounded("users", USER, "server"),
        bounded("workspaces_per_organization", WORKSPACE, "organization"),
        bounded("members_per_organization", MEMBERSHIP, "organization"),
        bounded("api_tokens_per_organization", API_TOKEN, "organization"),
        bounded("agents_per_organization", AGENT, "organization"),
        bounded("certificates_per_workspace", CERTIFICATE, "workspace"),
        Quota(
            name="virtual_hosts_per_workspace",
            kind=VIRTUAL_HOST,
            holder="workspace",
            limit=rules.HOSTS_PER_WORKSPACE,
            fixed=True,
        ),
        Quota(
            name="upstreams_per_workspace",
            kind=UPSTREAM,
            holder="workspace",
            limit=rules.UPSTREAMS_PER_WORKSPACE,
            fixed=True,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaUsage:
    quota: Quota
    used: int
    workspace: str
    """Empty for what is counted for the whole organisation."""


class Quotas:
    def __init__(self, store: Store, options: QuotaOptions) -> None:
        self._store = store
        self._quotas = {quota.kind.name: quota for quota in quotas(options)}
        self.refused: Counter[str] = Counter()
        """By quota, since the start."""
        store.add_hook(self._commit_hook, *(quota.kind for quota in self._quotas.values()))

    def __repr__(self) -> str:
        return f"<Quotas refused={self.refused.total()}>"

    def usage(self, organization: str) -> Iterator[QuotaUsage]:
        """What an organisation has of everything that is bounded for it."""
        scope = organization_scope(organization)
        for quota in self._quotas.values():
            if quota.holder == "organization":
                yield QuotaUsage(quota=quota, used=self._store.count(quota.kind, scope), workspace="")
            elif quota.holder == "workspace":
                for workspace in self._store.list(WORKSPACE, scope):
                    used = self._store.count(quota.kind, workspace.scope)
                    yield QuotaUsage(quota=quota, used=used, workspace=workspace.name)

    def _commit_hook(self, _actor: str, _action: str, touches: Collection[Key]) -> HookedChange | None:
        """Part in transactions that may add or remove something bounded."""
        concerned = {
            (quota, quota.place(key.scope))
            for key in touches
            if (quota := self._quotas.get(key.kind)) is not None and self._matters(quota, key)
        }
        if not concerned:
            return None
        notes = frozenset(_note_key(quota, place) for quota, place in concerned if place)

        def change(draft: Draft, _value: Any) -> None:
            added = {
                (after.kind, self._quotas[after.kind].place(after.scope))
                for before, after in draft.differences()
                if before is None and after is not None and after.kind in self._quotas
            }
            for quota, place in concerned:
                used = draft.count(quota.kind, place)
                if used > quota.limit and (quota.kind.name, place) in added:
                    self._refuse(quota)
                if place:
                    _note(draft, quota, place, used)

        return HookedChange(change=change, touches=notes)

    def _matters(self, quota: Quota, key: Key) -> bool:
        """Whether a write of this key adds to a count, or may end a warning.

        What another server has just deleted, this one may still take to be there.
        """
        if self._store.shared or self._store.get(quota.kind, key.scope, key.name) is None:
            return True
        place = quota.place(key.scope)
        return bool(place) and self._store.get(QUOTA_NOTE, *_note_place(quota, place)) is not None

    def _refuse(self, quota: Quota) -> None:
        self.refused[quota.name] += 1
        log.warning("proxies.quota_reached", quota=quota.name, limit=quota.limit)
        what = quota.kind.name.removeprefix("proxy-").replace("-", " ")
        advice = f"; see the setting {quota.setting}" if quota.setting else ""
        message = f"The {quota.holder} has {quota.limit} of kind {what}, the most there may be{advice}"
        raise Rejected(Problem(field="", message=message, code=Code.TOO_MANY))


def _note_place(quota: Quota, place: str) -> tuple[str, str]:
    """Scope and name of the note about a quota's use."""
    scope = organization_scope(organization_of(place))
    workspace = workspace_of(place)
    return scope, f"{quota.name}/{workspace}" if workspace else quota.name


def _note_key(quota: Quota, place: str) -> Key:
    return QUOTA_NOTE.key(*_note_place(quota, place))


def _note(draft: Draft, quota: Quota, place: str, used: int) -> None:
    scope, name = _note_place(quota, place)
    known = draft.get(QUOTA_NOTE, scope, name)
    if used < quota.warn_at:
        if known is not None:
            draft.delete(QUOTA_NOTE, scope, name)
        return
    reached = used >= quota.limit
    if known is None or known.spec.reached != reached:
        spec = QuotaNoteSpec(
            quota=quota.name,
            used=used,
            limit=quota.limit,
            setting=quota.setting,
            workspace_id=workspace_of(place) or None,
            reached=reached,
        )
        draft.put(QUOTA_NOTE, scope, name, spec=spec)
