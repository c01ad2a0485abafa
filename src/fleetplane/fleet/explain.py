"""Why a thing is not as it should be: one question for every domain, by domain, kind, scope and name.

A domain's blueprint declares for each kind that has a controller or an agent who may ask (`ExplainedKind`)
and how the answer is found (`Explainer`): what reconcilers noted at their last pass, and what the record
and the open connection say. Nobody learns from an answer, or from its absence, what another tenant has.

What controllers found, as REST answers show it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from fleetplane.fleet import freeze as freezing
from fleetplane.fleet.freeze import FROZEN, Freezes
from fleetplane.kernel.access import AccessTable, Grant, Permission, Role, covers
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import NotFound, PermissionDenied
from fleetplane.kernel.freeze import Freeze
from fleetplane.kernel.reconcile import Explanation, Reason
from fleetplane.kernel.reconcile.explanation import Finding
from fleetplane.kernel.resources import NAME_LIMIT_BYTES, SCOPE_LIMIT_BYTES, check_text
from fleetplane.kernel.values.times import spelled, spelled_or_null
from fleetplane.web.rest.gate import OperatorCaller, PrincipalSource
from fleetplane.web.rest.routes import Headers


class ShownReason(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str
    subject: str


class ShownFinding(msgspec.Struct, frozen=True, kw_only=True):
    """What one controller found the last time it looked."""

    controller: str
    """Who noted it; `record` for what follows from the record and the open connection."""
    at: str
    next_due: str | None
    failures: int
    last_error: str
    reasons: Sequence[ShownReason]


def shown(found: Finding, *, about: str = "") -> ShownFinding:
    """With `about`, only the reasons that concern that subject or everyone."""
    explanation = found.explanation
    return ShownFinding(
        controller=found.controller,
        at=spelled(explanation.at_ns),
        next_due=spelled_or_null(explanation.next_due_ns),
        failures=explanation.failures,
        last_error=explanation.last_error,
        reasons=[
            ShownReason(code=reason.code, message=reason.message, subject=reason.subject)
            for reason in explanation.reasons
            if not about or reason.subject in ("", about)
        ],
    )


C = TypeVar("C")
RECORD = "record"
"""Who says what follows from the record and the open connection, not from a controller's pass."""
SHOWN_LIMIT = 80
"""Characters of a name that an error repeats."""


class Explainer(Protocol):
    """What is known about the things of one kind."""

    def locate(self, within: str, name: str) -> str:
        """The scope of the thing of this name, at or below `within`; raises `NotFound`.

        It is the scope at which freezes hold for the thing, so it may be deeper than that of its record.
        """
        ...

    def explain(self, scope: str, name: str) -> Sequence[Finding]:
        """What is in the way; nothing if nothing is. `scope` is what `locate` said."""
        ...


class Readers(Protocol[C]):
    """Who may ask about the things of one domain: its own callers, with its own permissions."""

    def authenticate(self, headers: Headers) -> C:
        """The caller; raises `Unauthenticated`."""
        ...

    def within(self, caller: C, permission: Permission, asked: str) -> str:
        """Where to look for a caller who asks about a scope (empty: none was named).

        Raises `PermissionDenied`, without having looked at anything.
        """
        ...

    def may(self, caller: C, permission: Permission, scope: str) -> bool:
        """Whether the thing that was found is one that the caller may read about."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedKind:
    """What a blueprint declares of a kind that can be asked about."""

    summary: str
    """What can be learnt, for people."""
    permission: Permission
    """Of those who read things of this kind."""
    explainer: Callable[[Any], Explainer]
    """Made from the running domain."""


class TokenReaders:
    """Readers of a domain whose callers are operators: whoever the door recognises."""

    def __init__(self, door: PrincipalSource, grants: Mapping[Role, Iterable[Grant]]) -> None:
        self._door = door
        self._table = AccessTable(grants)

    def authenticate(self, headers: Headers) -> OperatorCaller:
        return OperatorCaller(principal=self._door.of_header(headers.credential))

    def within(self, caller: OperatorCaller, permission: Permission, asked: str) -> str:
        held = self._table.scopes(caller.principal, permission)
        scope = asked or (next(iter(held)) if len(held) == 1 else caller.principal.scope)
        if any(covers(one, scope) for one in held) or (held and not scope):
            return scope  # of what is found below several scopes, only what the caller may read is shown
        if not covers(caller.principal.scope, scope):  # says nothing about what there is
            raise PermissionDenied("this token acts in another scope than the one asked about")
        self._table.check(caller.principal, permission, scope)
        return scope

    def may(self, caller: OperatorCaller, permission: Permission, scope: str) -> bool:
        return self._table.allows(caller.principal, permission, scope)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """The whole answer about one thing."""

    domain: str
    kind: str
    scope: str
    name: str
    frozen: Freeze | None
    findings: Sequence[Finding]


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainExplainers(Generic[C]):
    """What one running domain can be asked."""

    readers: Readers[C] | None
    """None where nobody asks at `/v1/fleet`."""
    kinds: Mapping[str, tuple[ExplainedKind, Explainer]]


class FleetExplanations:
    """Explains things of all running domains."""

    def __init__(self, freezes: Freezes, domains: Mapping[str, DomainExplainers[Any]]) -> None:
        self._freezes = freezes
        self.domains = dict(domains)

    def __repr__(self) -> str:
        return f"<FleetExplanations {' '.join(sorted(self.domains))}>"

    def for_owner(self, domain: str, kind: str, name: str, *, scope: str = "") -> Explained:
        """Explain without asking for rights: the caller has checked them, or is the server itself."""
        _, explainer = self._kind(domain, kind)
        _check(name, scope)
        return self._explained(domain, kind, explainer, explainer.locate(scope, name), name)

    def for_caller(self, domain: str, caller: object, kind: str, name: str, *, scope: str = "") -> Explained:
        """For a caller whom the domain's `Readers` recognised."""
        declared, explainer = self._kind(domain, kind)
        _check(name, scope)
        readers = self.domains[domain].readers
        assert readers is not None, "nobody is let in where nobody may ask"
        within = readers.within(caller, declared.permission, scope)
        found = explainer.locate(within, name)
        if not readers.may(caller, declared.permission, found):
            raise missing(kind, name)
        return self._explained(domain, kind, explainer, found, name)

    def _kind(self, domain: str, kind: str) -> tuple[ExplainedKind, Explainer]:
        known = self.domains.get(domain)
        if known is None:
            raise NotFound(
                f"no domain {domain[:SHOWN_LIMIT]!r} can be asked here",
                hint=f"there are: {', '.join(sorted(self.domains)) or 'none'}",
            )
        found = known.kinds.get(kind)
        if found is None:
            raise NotFound(
                f"{domain} has no kind {kind[:SHOWN_LIMIT]!r} that can be asked about",
                hint=f"there are: {', '.join(sorted(known.kinds))}",
            )
        return found

    def _explained(self, domain: str, kind: str, explainer: Explainer, scope: str, name: str) -> Explained:
        findings = list(explainer.explain(scope, name))
        held = self._freezes.holding(domain, scope)
        told = any(one.code == FROZEN for found in findings for one in found.explanation.reasons)
        if held is not None and not told:
            findings.insert(0, _frozen(held, name))
        return Explained(domain=domain, kind=kind, scope=scope, name=name, frozen=held, findings=findings)


def missing(kind: str, name: str) -> NotFound:
    """The error for a thing that does not exist, or that the caller may not know of."""
    return NotFound(f"there is no {kind} {name[:SHOWN_LIMIT]!r}")


def placed(kind: str, name: str, scope: str | None, within: str) -> str:
    """The scope of a thing that was found, if a caller who looks at and below `within` may find it."""
    if scope is None or not covers(within, scope):
        raise missing(kind, name)
    return scope


def from_record(clock: Clock, name: str, reasons: Sequence[Reason], *, by: str = RECORD) -> Sequence[Finding]:
    """A finding that is so now, as the record and the open connection say; none without reasons."""
    if not reasons:
        return ()
    explanation = Explanation(key=name, at_ns=clock.now_ns(), reasons=tuple(reasons))
    return (Finding(controller=by, explanation=explanation),)


def from_pass(controller: str, explanation: Explanation | None) -> Sequence[Finding]:
    """What a controller noted at its last pass; none if there was nothing in its way."""
    if explanation is None or not (explanation.reasons or explanation.last_error):
        return ()
    return (Finding(controller=controller, explanation=explanation),)


def _check(name: str, scope: str) -> None:
    check_text("name", name, NAME_LIMIT_BYTES)
    check_text("scope", scope, SCOPE_LIMIT_BYTES, may_be_empty=True)


def _frozen(held: Freeze, name: str) -> Finding:
    explanation = Explanation(
        key=name,
        at_ns=held.spec.frozen_at_ns,
        reasons=(freezing.reason(held),),
        next_due_ns=held.spec.expires_at_ns,
    )
    return Finding(controller="freeze", explanation=explanation)
