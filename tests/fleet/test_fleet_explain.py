"""Explanations of every domain: who is answered, about what, and what nobody learns."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fleetplane.fleet.explain import (
    DomainExplainers,
    ExplainedKind,
    FleetExplanations,
    TokenReaders,
    from_pass,
    from_record,
    placed,
)
from fleetplane.fleet.freeze import Freezes
from fleetplane.kernel.access import Grant, Permission, Principal, Role
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument, NotFound, PermissionDenied
from fleetplane.kernel.freeze import FREEZE, freeze
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.reconcile import Explanation, Reason
from fleetplane.kernel.reconcile.explanation import Finding
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.sim.clock import VirtualClock
from fleetplane.web.rest.gate import OperatorCaller

READ = Permission("lamps.read")
VIEWER = Role("lamps.viewer")
LAMPS = {"porch": "tenant/acme", "cellar": "tenant/other"}


class LampExplainer:
    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.looked: list[str] = []

    def locate(self, within: str, name: str) -> str:
        self.looked.append(name)
        return placed("lamp", name, LAMPS.get(name), within)

    def explain(self, scope: str, name: str) -> Sequence[Finding]:
        return from_record(self._clock, name, [Reason(code="DARK", message=f"{name} of {scope} is dark")])


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
async def store(tmp_path: Path, clock: VirtualClock) -> AsyncIterator[Store]:
    async with Store.open(StoreSettings(path=tmp_path / "s.db"), kinds=(FREEZE,), clock=clock) as opened:
        yield opened


@pytest.fixture
def explainer(clock: VirtualClock) -> LampExplainer:
    return LampExplainer(clock)


@pytest.fixture
async def why(store: Store, clock: VirtualClock, explainer: LampExplainer) -> FleetExplanations:
    operators = await Operators.load(store, MasterKey(bytes(32), clock), clock)
    readers = TokenReaders(operators, {VIEWER: (Grant(permission=READ),)})
    kind = ExplainedKind(summary="why it is dark", permission=READ, explainer=lambda _domain: explainer)
    lamps: DomainExplainers[Any] = DomainExplainers(readers=readers, kinds={"lamp": (kind, explainer)})
    return FleetExplanations(Freezes(store, clock), {"lamps": lamps})


def caller(scope: str, role: Role = VIEWER) -> OperatorCaller:
    return OperatorCaller(principal=Principal(name="token/eye", roles=frozenset({role}), scope=scope))


def refusal(why: FleetExplanations, who: OperatorCaller, name: str, **about: str) -> FleetplaneError:
    with pytest.raises(FleetplaneError) as refused:
        why.for_caller("lamps", who, about.pop("kind", "lamp"), name, **about)
    return refused.value


async def test_a_tenant_is_told_about_its_own_and_nothing_about_anothers(why: FleetExplanations) -> None:
    acme = caller("tenant/acme")
    found = why.for_caller("lamps", acme, "lamp", "porch")

    assert (found.scope, found.frozen) == ("tenant/acme", None)
    assert [reason.code for one in found.findings for reason in one.explanation.reasons] == ["DARK"]
    anothers, nobodys = refusal(why, acme, "cellar"), refusal(why, acme, "xellar")
    assert isinstance(anothers, NotFound)
    assert anothers.message.replace("cellar", "xellar") == nobodys.message


async def test_a_scope_that_is_not_the_callers_is_refused_before_anything_is_looked_at(
    why: FleetExplanations, explainer: LampExplainer
) -> None:
    for scope in ("tenant/other", "tenant/acme2", "tenant", "boards", "tenant/acme/../other"):
        refused = refusal(why, caller("tenant/acme"), "cellar", scope=scope)
        assert isinstance(refused, PermissionDenied | NotFound), scope
    assert isinstance(refusal(why, caller("", Role("edge.admin")), "porch"), PermissionDenied)
    assert "porch" not in explainer.looked


async def test_a_caller_of_all_tenants_and_the_owner_find_a_name_anywhere_or_where_they_say(
    why: FleetExplanations,
) -> None:
    everyone = caller("")
    assert why.for_caller("lamps", everyone, "lamp", "cellar").scope == "tenant/other"
    assert why.for_owner("lamps", "lamp", "cellar").scope == "tenant/other"
    assert isinstance(refusal(why, everyone, "cellar", scope="tenant/acme"), NotFound)
    with pytest.raises(NotFound):
        why.for_owner("lamps", "lamp", "cellar", scope="tenant/acme")


@pytest.mark.parametrize(("domain", "kind"), [("lamp", "lamp"), ("lamps", "lantern"), ("x" * 9000, "lamp")])
async def test_unknown_domains_and_kinds_are_named_with_those_that_there_are(
    why: FleetExplanations, domain: str, kind: str
) -> None:
    with pytest.raises(NotFound) as refused:
        why.for_owner(domain, kind, "porch")

    assert "there are: lamp" in refused.value.advice
    assert len(refused.value.message) < 200


@pytest.mark.parametrize("name", ["", "x" * 5000, "é" * 600, "a\0b", "\ud800"])
async def test_names_that_nothing_can_have_are_refused_by_field(why: FleetExplanations, name: str) -> None:
    refused = refusal(why, caller(""), name)
    assert isinstance(refused, InvalidArgument)
    assert refused.field == "name"
    assert isinstance(refusal(why, caller(""), "porch", scope="s" * 5000), InvalidArgument)


async def test_what_is_frozen_says_so_first(
    why: FleetExplanations, store: Store, clock: VirtualClock
) -> None:
    await freeze(
        store,
        "tenant/acme",
        reason="audit",
        actor="ada",
        domains=("lamps",),
        expires_at_ns=clock.now_ns() + 5,
    )

    found = why.for_owner("lamps", "lamp", "porch")
    assert found.frozen is not None
    assert [one.controller for one in found.findings] == ["freeze", "record"]
    reason = found.findings[0].explanation.reasons[0]
    assert (reason.code, reason.message) == ("FROZEN", "frozen at tenant/acme by ada: audit")
    assert why.for_owner("lamps", "lamp", "cellar").frozen is None
    await clock.advance(1)
    assert why.for_owner("lamps", "lamp", "porch").frozen is None


def test_a_pass_that_found_nothing_in_the_way_is_no_finding(clock: VirtualClock) -> None:
    assert list(from_pass("c", None)) == []
    assert list(from_pass("c", Explanation(key="k", at_ns=1, reasons=()))) == []
    failing = Explanation(key="k", at_ns=1, reasons=(), failures=1, last_error="the disk is full")
    assert [one.controller for one in from_pass("c", failing)] == ["c"]
    assert list(from_record(clock, "k", ())) == []
