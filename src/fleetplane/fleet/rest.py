"""`/v1/fleet`: why a thing is not as it should be, and freezes, over REST.

    GET    /v1/fleet/explain                                  by tokens with a role of `GRANTS`
    GET    /v1/fleet/explain/{domain}/{kind}/{name}?scope=    by the callers of that domain
    GET    /v1/fleet/freezes                                  by tokens with a role of `GRANTS`
    POST   /v1/fleet/freezes
    DELETE /v1/fleet/freezes?scope=&domain=
    POST   /v1/fleet/audit/verify                             by those who may read the audit log

Each domain recognises its own callers, so each has the same route with its own gate in front of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec

from fleetplane.fleet.api import ApiKernel
from fleetplane.fleet.audit import AUDIT, AuditRoutes, Verification
from fleetplane.fleet.explain import Explained, FleetExplanations, Readers, ShownFinding, shown
from fleetplane.fleet.freeze import FreezeSwitch
from fleetplane.fleet.resources.acting import FREEZE
from fleetplane.fleet.resources.common import MANAGE_PEOPLE, PEOPLE, VIEW
from fleetplane.fleet.rollouts.rollouts import Rollouts
from fleetplane.fleet.rollouts.routes import ROLL_OUT, RolloutRoutes
from fleetplane.kernel.access import Grant, Permission, Role, built_in_grants, covers
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.freeze import EVERY_DOMAIN, Freeze
from fleetplane.kernel.values.times import spelled, spelled_or_null
from fleetplane.rpc import Needs
from fleetplane.web.ops import App, Mount
from fleetplane.web.rest import bodies
from fleetplane.web.rest.family import FamilyErrors, FamilyText, LateApp, RestFamily
from fleetplane.web.rest.gate import OperatorCaller, operator_gate
from fleetplane.web.rest.routes import Answer, Call, Headers, Query, Route, RouteGroup, RouteTable

PREFIX = "/v1/fleet"

EXPLAIN = Permission("fleet.explain")
"""Stands for the permission that the kind's own domain asks of its readers; see `ExplainGate`."""
VIEWER, OPERATOR = Role("fleet.viewer"), Role("fleet.operator")
AUDITOR = Role("fleet.auditor")
"""Knows who has accounts and tokens, and what was done."""
GRANTS: Mapping[Role, Iterable[Grant]] = {
    VIEWER: (Grant(permission=VIEW),),
    AUDITOR: (Grant(permission=VIEW), Grant(permission=PEOPLE), Grant(permission=AUDIT)),
    **built_in_grants(viewer=(VIEW,), operator=(FREEZE, ROLL_OUT), admin=(PEOPLE, MANAGE_PEOPLE, AUDIT)),
    OPERATOR: (Grant(permission=VIEW), Grant(permission=FREEZE), Grant(permission=ROLL_OUT)),
}
_WHY = RouteGroup("Explain")
_FREEZES = RouteGroup("Freezes")


class FleetFreeze(msgspec.Struct, frozen=True, kw_only=True):
    scope: str
    """Everywhere when empty."""
    domains: Sequence[str]
    reason: str
    actor: str
    frozen_at: str
    expires_at: str | None


class FleetFreezes(msgspec.Struct, frozen=True, kw_only=True):
    freezes: Sequence[FleetFreeze]


class ShownExplanation(msgspec.Struct, frozen=True, kw_only=True):
    domain: str
    kind: str
    scope: str
    name: str
    frozen: FleetFreeze | None
    findings: Sequence[ShownFinding]
    """Empty if nothing is known to be in the way."""


class ExplainableKind(msgspec.Struct, frozen=True, kw_only=True):
    domain: str
    kind: str
    summary: str
    """What can be learnt of things of the kind."""


class ExplainableKinds(msgspec.Struct, frozen=True, kw_only=True):
    kinds: Sequence[ExplainableKind]


class FreezeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    domains: list[str]
    reason: str
    scope: str = ""
    expires_at: str | None = None


class ExplainGate:
    """Who calls, as the domain recognises them. What they may read is decided by kind, in the handler."""

    def __init__(self, readers: Readers[Any]) -> None:
        self._readers = readers

    def authenticate(self, headers: Headers) -> Any:
        return self._readers.authenticate(headers)

    def admit(self, _caller: Any, _permission: Permission | None, _path: Mapping[str, str]) -> str:
        return ""


class FleetRest:
    def __init__(
        self,
        kernel: ApiKernel,
        explanations: FleetExplanations,
        switch: FreezeSwitch,
        rollouts: Rollouts,
        *,
        version: str,
        verify_audit: Verification | None = None,
    ) -> None:
        self._explanations = explanations
        self._switch = switch
        self._gate = operator_gate(kernel.door, GRANTS)
        table = RouteTable(
            PREFIX,
            (
                _WHY.get("/explain", self.kinds, VIEW),
                *self._freeze_routes(),
                *RolloutRoutes(rollouts, self._gate).routes(),
                *(AuditRoutes(self._gate, verify_audit).routes() if verify_audit is not None else ()),
            ),
            strict_queries=True,
        )
        self._gate.require_complete(table.permissions)
        self._family = RestFamily(
            kernel,
            table,
            self._gate,
            domain="fleet",
            errors=FamilyErrors(conditional=False),
            text=FamilyText(
                title="Fleetplane fleet",
                version=version,
                description="What every domain has: why a thing is as it is, freezes and rollouts.",
                summary="REST: explain, freeze and rollouts, for every domain",
            ),
            described=RouteTable(
                PREFIX, (_explain_route("/explain/{domain}/{kind}/{name}", explain_anywhere), *table.routes)
            ),
        )

    async def take_over(self) -> None:
        await self._family.take_over()

    async def run_active(self) -> None:
        await self._family.run_active()

    # Where things are.

    @cached_property
    def routes(self) -> Sequence[Mount]:
        return (
            *(
                Mount(
                    path=f"{PREFIX}/explain/{name}",
                    app=self._explaining(name, domain.readers),
                    needs=Needs.STORE,
                )
                for name, domain in self._explanations.domains.items()
                if domain.readers is not None
            ),
            *self._family.mounts,
        )

    def _explaining(self, domain: str, readers: Readers[Any]) -> App:
        async def explain(call: Call[Any]) -> Answer[ShownExplanation]:
            found = self._explanations.for_caller(
                domain, call.caller, call.path["kind"], call.path["name"], scope=call.query.get("scope", "")
            )
            return Answer(content=_explained(found))

        table = RouteTable(
            f"{PREFIX}/explain/{domain}", (_explain_route("/{kind}/{name}", explain),), strict_queries=True
        )
        return LateApp(lambda: self._family.application(table, ExplainGate(readers)))

    async def kinds(self, _call: Call[OperatorCaller]) -> Answer[ExplainableKinds]:
        """List the kinds of things that can be asked about."""
        return Answer(
            content=ExplainableKinds(
                kinds=[
                    ExplainableKind(domain=name, kind=word, summary=kind.summary)
                    for name, domain in sorted(self._explanations.domains.items())
                    for word, (kind, _) in sorted(domain.kinds.items())
                ]
            )
        )

    # Freezes.

    def _freeze_routes(self) -> Sequence[Route]:
        return (
            _FREEZES.get("/freezes", self.freezes, VIEW),
            _FREEZES.post(
                "/freezes",
                self.freeze,
                FREEZE,
                body=FreezeBody,
                status=201,
                recheck=self._check_scope,
                needs=Needs.ACTIVE,
            ),
            _FREEZES.delete(
                "/freezes",
                self.lift,
                FREEZE,
                status=204,
                query=(
                    Query(name="scope", summary="The freeze's own scope; everywhere when not given"),
                    Query(name="domain", summary="Whose; `*`, the one of all, when not given", many=True),
                ),
                needs=Needs.ACTIVE,
            ),
        )

    async def freezes(self, call: Call[OperatorCaller]) -> Answer[FleetFreezes]:
        """List freezes, with who set them and why."""
        held = self._gate.scopes(call.caller, VIEW)
        found = self._switch.freezes.listed(call.scope)
        return Answer(content=_freezes(one for one in found if any(covers(at, one.scope) for at in held)))

    async def freeze(self, call: Call[OperatorCaller]) -> Answer[FleetFreezes]:
        """Stop the controllers of some domains at and below a scope."""
        body: FreezeBody = call.body
        self._check_scope(call)
        expires_at_ns = None
        if body.expires_at is not None:
            expires_at_ns = bodies.parsed(body.expires_at, field="expires_at")
        view = call.answering(lambda made: Answer(content=_freezes(made)))
        made = await self._switch.freeze(
            body.scope,
            domains=body.domains,
            reason=body.reason,
            expires_at_ns=expires_at_ns,
            actor=call.signed(call.caller.name),
        )
        return view(made)

    def _check_scope(self, call: Call[OperatorCaller]) -> None:
        self._gate.check(call.caller, FREEZE, call.body.scope)

    async def lift(self, call: Call[OperatorCaller]) -> Answer[None]:
        """Let controllers go on, unless a wider freeze holds."""
        scope, domains = call.query.get("scope", ""), call.many["domain"] or [EVERY_DOMAIN]
        self._gate.check(call.caller, FREEZE, scope)
        if not await self._switch.lift(scope, domains=domains, actor=call.caller.name):
            raise NotFound("there is no such freeze at this very scope")
        return Answer(content=None)


async def explain_anywhere(_call: Call[Any]) -> Answer[ShownExplanation]:
    """Stands in the document for the routes of all domains."""
    raise NotFound("no such domain can be asked here")


def _explain_route(path: str, handler: Callable[[Call[Any]], Any]) -> Route:
    return _WHY.get(
        path,
        handler,
        EXPLAIN,
        summary="Why a thing is not as it should be",
        answer=ShownExplanation,
        query=(Query(name="scope", summary="Where to look for the name; anywhere that the caller may see"),),
    )


def _explained(found: Explained) -> ShownExplanation:
    return ShownExplanation(
        domain=found.domain,
        kind=found.kind,
        scope=found.scope,
        name=found.name,
        frozen=None if found.frozen is None else _freeze(found.frozen),
        findings=[shown(one) for one in found.findings],
    )


def _freezes(found: Iterable[Freeze]) -> FleetFreezes:
    return FleetFreezes(freezes=[_freeze(one) for one in found])


def _freeze(found: Freeze) -> FleetFreeze:
    spec = found.spec
    return FleetFreeze(
        scope=found.scope,
        domains=spec.domains,
        reason=spec.reason,
        actor=spec.actor,
        frozen_at=spelled(spec.frozen_at_ns),
        expires_at=spelled_or_null(spec.expires_at_ns),
    )
