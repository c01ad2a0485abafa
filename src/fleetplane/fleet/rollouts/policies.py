"""Rollout policies as objects that people write through the resource API.

A policy is called by where it holds and for what, such as `tenant.acme:edge.config`, and lies at that tenant:
who may roll out there writes it, and nobody writes one that holds elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from fleetplane.fleet.resources import scopes
from fleetplane.fleet.resources.common import VIEW
from fleetplane.fleet.resources.declaration import (
    READING,
    Column,
    PublicResource,
    ResourceShape,
    ResourceView,
    ViewReader,
    Writable,
    WriteCall,
)
from fleetplane.fleet.resources.mirrors import Mirror
from fleetplane.fleet.rollouts.records import ROLLOUT_POLICY, PolicySpec, RolloutPolicy
from fleetplane.fleet.rollouts.rollouts import Rollouts
from fleetplane.fleet.rollouts.routes import ROLL_OUT
from fleetplane.fleet.rollouts.rules.policy import Policy
from fleetplane.kernel.access import who
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument
from fleetplane.kernel.resources import AnyResource
from fleetplane.kernel.store import Draft

_SCOPE = re.compile(r"[a-z]{1,32}/[^/\s]{1,128}(?:/[a-z]{1,32}/[^/\s]{1,128}){0,5}")
_MIRROR = Mirror("Rollouts")
RolloutCare = _MIRROR.shape(Policy)


class PolicyParts(Protocol):
    """What of the running domain checks policies."""

    @property
    def rollouts(self) -> Rollouts: ...


class RolloutPolicySpecView(ResourceShape, frozen=True, forbid_unknown_fields=True):
    subject: str
    """What is rolled out, such as `edge.config`."""
    at: str = ""
    """The scope at and below which it holds, as it is stored, such as `tenant/acme`; empty for everywhere."""
    policy: RolloutCare = RolloutCare()  # type: ignore[valid-type]
    """Waves, budgets, gates and windows."""
    manual: bool = False
    """Whether a new version waits until somebody starts its rollout."""
    supersedes: bool = False
    """Whether a new version ends a rollout that is under way, instead of waiting for its end."""
    once: bool = False
    """Whether it is for the change that it is written with, and goes once the rollout of that has started."""


class RolloutPolicyStatusView(ResourceShape, frozen=True):
    set_by: str
    at: str
    """The scope at and below which it holds, as it is stored."""


def policy_view(
    policy: RolloutPolicy, _reading: ViewReader
) -> ResourceView[RolloutPolicySpecView, RolloutPolicyStatusView]:
    """What is shown of a policy."""
    spec = policy.spec
    return ResourceView(
        spec=RolloutPolicySpecView(
            subject=policy.name,
            at=policy.scope,
            policy=_MIRROR.shown(spec.policy),
            manual=not spec.automatic,
            supersedes=spec.supersedes,
            once=spec.once,
        ),
        status=RolloutPolicyStatusView(set_by=who(spec.actor), at=policy.scope),
    )


def policy_place(policy: AnyResource, _reading: ViewReader) -> str:
    """The tenant that it is in, or the installation: its own scope may be any domain's."""
    parts = policy.scope.split("/")
    return scopes.tenant_path(parts[1]) if parts[0] == "tenant" and len(parts) > 1 else scopes.ROOT


def policy_name(policy: AnyResource, _reading: ViewReader) -> str:
    """Where it holds and for what, such as `tenant.acme:edge.config`."""
    return f"{policy.scope.replace('/', '.') or 'everywhere'}:{policy.name}"


def find_policy(_domain: object, draft: Draft, scope: str, name: str) -> RolloutPolicy | None:
    """By where it holds and for what."""
    for found in draft.list(ROLLOUT_POLICY):
        if policy_place(found, draft) == scope and policy_name(found, draft) == name:
            return found
    return None


def put_policy(call: WriteCall) -> RolloutPolicy:
    """Make every new version at and below a scope a rollout, or change with which care."""
    domain: PolicyParts = call.domain
    given: RolloutPolicySpecView = call.spec
    if given.at and _SCOPE.fullmatch(given.at) is None:
        raise InvalidArgument(
            f"{given.at[:100]!r} is not a scope as it is stored", field="at", hint="write tenant/acme"
        )
    policy: Policy = _MIRROR.stored(given.policy)
    domain.rollouts.check_policy(given.subject, policy, scope=given.at)
    spec = PolicySpec(
        policy=policy,
        automatic=not given.manual,
        supersedes=given.supersedes,
        once=given.once,
        actor=call.actor,
    )
    if given.once and given.manual:
        raise InvalidArgument("a policy for one change starts its rollout by itself", field="manual")
    stored: RolloutPolicy | None = call.stored
    if given.once and stored is not None and not stored.spec.once:
        raise FailedPrecondition(
            f"a lasting policy of {given.subject} lies at {given.at or 'every scope'} already",
            hint="apply the change without a policy of its own, or delete that one first",
        )
    if stored is not None and msgspec.structs.replace(stored.spec, actor=call.actor) == spec:
        return stored  # who says the same again has not set it
    return call.draft.put(ROLLOUT_POLICY, given.at, given.subject, spec=spec)


def delete_policy(call: WriteCall) -> None:
    """Let new versions go to everyone at once again; those that wait go out with the next."""
    assert call.stored is not None
    call.draft.delete(ROLLOUT_POLICY, call.stored.scope, call.stored.name)


def disturbs(before: AnyResource | None, after: AnyResource | None, _reading: ViewReader) -> Sequence[str]:
    """What becomes of changes."""
    found = after or before
    assert found is not None
    at = found.scope or "every scope"
    if after is None:
        return (f"new versions of {found.name} at {at} go to everyone at once",)
    return (f"new versions of {found.name} at {at} wait for a rollout",) if before is None else ()


ROLLOUT_POLICIES = PublicResource(
    name="rollout-policy",
    plural="rollout-policies",
    summary="Makes every new version at and below a scope a rollout",
    kind=ROLLOUT_POLICY,
    spec=RolloutPolicySpecView,
    status=RolloutPolicyStatusView,
    view=policy_view,
    place=policy_place,
    named=policy_name,
    permission=VIEW,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="SUBJECT", value=".spec.subject"),
        Column(title="AT", value=".status.at"),
        Column(title="WAVES", value=".spec.policy.waves"),
        Column(title="MANUAL", value=".spec.manual"),
        Column(title="BY", value=".status.setBy", wide=True),
    ),
    verbs=READING,
)
WRITERS: Mapping[str, Writable] = {
    "rollout-policy": Writable(
        anywhere=True,
        permission=ROLL_OUT,
        find=find_policy,
        put=put_policy,
        delete=delete_policy,
        exported=lambda stored: not stored.spec.once,
        rank=6,  # before the changes that are to wait for it
        disturbs=disturbs,
    )
}
