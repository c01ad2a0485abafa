"""When an agent is sent its configuration, and how far it is with it. Pure.

Level-triggered: what the agent reports is compared with what is wanted, whatever happened in
between. A version on its way is left alone until the agent speaks or a minute has passed; one
that the agent refused is not sent again, because it would refuse it again; one that a broken
connection may have swallowed is.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleetplane.domains.proxies.kinds import Deployment, DeploymentStatus
from fleetplane.domains.proxies.values import DeploymentState
from fleetplane.domains.proxies.wire import Progress

NS = 1_000_000_000
TIMED_OUT = "timeout"
"""The error of a deployment about which its agent said nothing for too long."""

S = DeploymentState
_RANKS = {S.PENDING: 0, S.VALIDATING: 1, S.APPLYING: 2, S.SUCCESS: 3, S.FAILED: 3, S.ROLLED_BACK: 3}
FINAL = frozenset({S.SUCCESS, S.FAILED, S.ROLLED_BACK})


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    version: int
    config_id: str
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What a health report says that the agent serves."""

    version: int
    checksum: str
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send it now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The agent serves it; `confirm` if nobody wrote that down yet."""

    confirm: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """The agent has been silent about it for too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    code: str
    message: str
    seconds: float | None = None
    """When to look again even if nothing happens."""


Decision = Send | Settled | GiveUp | Wait


def decide(
    wanted: Wanted,
    serving: Serving | None,
    deployment: Deployment | None,
    *,
    session_since_ns: int,
    apply_seconds: float,
    now_ns: int,
) -> Decision:
    status = deployment.status if deployment is not None else None
    if serving is not None and _is_served(wanted, serving):
        return Settled(confirm=status is not None and status.state not in FINAL)
    if deployment is None or status is None or deployment.spec.checksum != wanted.checksum:
        return Send()
    if status.state in FINAL:
        return _after_the_end(status, serving)
    unheard = status.changed_at_ns <= deployment.spec.sent_at_ns
    if unheard and session_since_ns > deployment.spec.sent_at_ns:
        return Send()
    left_ns = status.changed_at_ns + round(apply_seconds * NS) - now_ns
    if left_ns <= 0:
        return GiveUp()
    return Wait(
        code="APPLYING",
        message=f"version {wanted.version} is {status.state} at the agent",
        seconds=left_ns / NS,
    )


def _is_served(wanted: Wanted, serving: Serving) -> bool:
    """An agent that reports no checksum is taken by its version."""
    return serving.version == wanted.version and serving.checksum in ("", wanted.checksum)


def _after_the_end(status: DeploymentStatus, serving: Serving | None) -> Decision:
    if status.state is S.SUCCESS:
        if serving is None or serving.at_ns <= status.changed_at_ns:
            return Wait(code="UNCONFIRMED", message="the agent has not reported since it applied this")
        return Send()  # it has lost what it once had
    if status.error == TIMED_OUT:
        return Send()
    return Wait(code="REFUSED", message=f"the agent refused this version: {status.error}")


def advanced(
    status: DeploymentStatus, said: Progress, *, sent_at_ns: int, now_ns: int
) -> DeploymentStatus | None:
    """What an agent's word changes; None if nothing: it is late, repeated, or after the end.

    One exception: where the end was only our impatience, the agent's own end replaces it.
    """
    overruled = status.state is S.FAILED and status.error == TIMED_OUT and said.state in FINAL
    first_word = said.state is status.state is S.PENDING and status.changed_at_ns <= sent_at_ns
    if not (overruled or first_word or _RANKS[said.state] > _RANKS[status.state]):
        return None
    final = said.state in FINAL
    return DeploymentStatus(
        state=said.state,
        error=said.error,
        changed_at_ns=max(now_ns, sent_at_ns + 1),
        applied_at_ns=(said.applied_at_ns or now_ns) if said.state is S.SUCCESS else None,
        duration_ms=max(0, now_ns - sent_at_ns) // 1_000_000 if final else None,
    )


def superseded(version: int) -> str:
    return f"superseded by version {version}"
