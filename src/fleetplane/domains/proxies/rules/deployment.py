"""When an agent is sent its configuration, and how far it is with it. Pure.

Level-triggered: what the agent reports is compared with what is wanted, whatever happened in
between. A version on its way is left alone until the agent speaks or a minute has passed; one
that a broken connection may have swallowed is sent again. What failed for a reason that passes
by itself (a full disk, a busy port, a name that is not resolved) is tried again, later each time,
and at once when something changes at the agent; what NGINX refuses is tried again only when
somebody asks for it, because it would be refused again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from fleetplane.domains.proxies.kinds.records import Deployment, DeploymentSpec, DeploymentStatus
from fleetplane.domains.proxies.kinds.values import DeploymentState
from fleetplane.domains.proxies.wire import VersionProgress
from fleetplane.kernel.values.times import NS

TIMED_OUT = "timeout"
"""The error of a deployment about which its agent said nothing for too long."""

S = DeploymentState
_RANKS = {
    S.PENDING: 0,
    S.VALIDATING: 1,
    S.APPLYING: 2,
    S.SUCCESS: 3,
    S.FAILED: 3,
    S.ROLLED_BACK: 3,
    S.SUPERSEDED: 3,
}
FINAL = frozenset({S.SUCCESS, S.FAILED, S.ROLLED_BACK, S.SUPERSEDED})
_PASSING = re.compile(
    r"No space left on device|Disk quota exceeded|Address already in use|Cannot assign requested address"
    r"|host not found in|Temporary failure in name resolution|Cannot allocate memory|Too many open files"
    r"|Resource temporarily unavailable|was not confirmed in|did not end within|NGINX is gone"
    r"|NGINX is not running|NGINX was stopped by a command"
)
"""What the system, NGINX and agents say of causes that pass without another configuration."""
_SUPERSEDED = re.compile(r"superseded by version \d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Tries of a version that failed for a passing reason: after 5 s, 10 s, 20 s, … up to 5 minutes."""

    first_seconds: float = 5.0
    ceiling_seconds: float = 300.0
    gap_seconds: float = 2.0
    """Before a change at the agent makes for another try."""

    def delay_seconds(self, attempt: int) -> float:
        """After the `attempt`-th try, counted from 1."""
        return min(self.ceiling_seconds, self.first_seconds * 2.0 ** min(attempt - 1, 62))


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedVersion:
    version: int
    config_id: str
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedVersion:
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
class GiveUpVersion:
    """The agent has been silent about it for too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentWait:
    code: str
    message: str
    seconds: float | None = None
    """When to look again even if nothing happens."""


Decision = Send | Settled | GiveUpVersion | DeploymentWait


def decide(
    wanted: WantedVersion,
    serving: ServedVersion | None,
    deployment: Deployment | None,
    *,
    session_since_ns: int,
    apply_seconds: float,
    now_ns: int,
    retry: RetryPolicy | None = None,
    stirred_ns: int = 0,
    asked: bool = False,
    known: bool = False,
) -> Decision:
    """`stirred_ns` is when something last changed at the agent that may let a failed version pass.

    With `asked`, somebody wants what failed to be tried again now. With `known`, the agent was sent
    versions before: then one that it was never sent is not taken by its number alone, which may be
    that of another version from before a backup was restored.
    """
    status = deployment.status if deployment is not None else None
    again = _Again(retry or RetryPolicy(), stirred_ns, now_ns, asked=asked)
    left_ns = status.changed_at_ns + round(apply_seconds * NS) - now_ns if status is not None else 0
    if serving is not None and _is_served(wanted, serving):
        if deployment is None or status is None:
            return Send() if known and not serving.checksum else Settled(confirm=False)
        if status.state is S.SUCCESS:
            return (
                again.after_setting_aside(deployment, status) if status.set_aside else Settled(confirm=False)
            )
        if status.state in FINAL or not is_tried_again(status) or left_ns <= 0:
            return Settled(confirm=True)
        return _applying(wanted, status, left_ns)
    if deployment is None or status is None or deployment.spec.checksum != wanted.checksum:
        return Send()
    if status.state in FINAL:
        return again.after_the_end(deployment, status, serving)
    unheard = status.changed_at_ns <= deployment.spec.sent_at_ns
    if unheard and session_since_ns > deployment.spec.sent_at_ns:
        return Send()
    return GiveUpVersion() if left_ns <= 0 else _applying(wanted, status, left_ns)


def is_tried_again(status: DeploymentStatus) -> bool:
    """Whether it was in service before it was last sent: a report of it says nothing of this try."""
    return status.applied_at_ns is not None and status.state not in FINAL


def _applying(wanted: WantedVersion, status: DeploymentStatus, left_ns: int) -> DeploymentWait:
    return DeploymentWait(
        code="APPLYING",
        message=f"version {wanted.version} is {status.state} at the agent",
        seconds=left_ns / NS,
    )


def _is_served(wanted: WantedVersion, serving: ServedVersion) -> bool:
    """An agent that reports no checksum is taken by its version."""
    return serving.version == wanted.version and serving.checksum in ("", wanted.checksum)


@dataclass(frozen=True, slots=True)
class _Again:
    """Whether what has ended is tried again."""

    policy: RetryPolicy
    stirred_ns: int
    now_ns: int
    asked: bool

    def after_the_end(
        self, deployment: Deployment, status: DeploymentStatus, serving: ServedVersion | None
    ) -> Decision:
        if status.state is S.SUCCESS:
            if serving is None or serving.at_ns <= status.changed_at_ns:
                return DeploymentWait(
                    code="UNCONFIRMED", message="the agent has not reported since it applied this"
                )
            return Send()  # it has lost what it once had
        if self.asked or status.error == TIMED_OUT or status.state is S.SUPERSEDED:
            return Send()
        if is_passing(status.error):
            return self._later(
                deployment, status, "RETRYING", f"the agent could not apply this version: {status.error}"
            )
        return DeploymentWait(code="REFUSED", message=f"the agent refused this version: {status.error}")

    def after_setting_aside(self, deployment: Deployment, status: DeploymentStatus) -> Decision:
        """The version is in service, but for some parts of it."""
        if self.asked:
            return Send()
        message = f"version {deployment.spec.version} is in service without {told(status.set_aside)}"
        if any(is_passing(error) for error in status.set_aside.values()):
            return self._later(deployment, status, "SET_ASIDE", message)
        return DeploymentWait(code="SET_ASIDE", message=message)

    def _later(self, deployment: Deployment, status: DeploymentStatus, code: str, message: str) -> Decision:
        since_ns = status.changed_at_ns
        stirred = self.stirred_ns > since_ns
        pause = self.policy.gap_seconds if stirred else self.policy.delay_seconds(deployment.spec.attempt)
        left_ns = since_ns + round(pause * NS) - self.now_ns
        return Send() if left_ns <= 0 else DeploymentWait(code=code, message=message, seconds=left_ns / NS)


def is_passing(error: str) -> bool:
    """Whether an error may be over without another configuration."""
    return _PASSING.search(error) is not None


def host_error(status: DeploymentStatus, host: str) -> str:
    """What an agent has against a virtual host; empty if nothing."""
    if status.state in (S.FAILED, S.ROLLED_BACK) and f"/host-{host}.conf" in status.error:
        return status.error  # nothing else of the version was new
    return status.set_aside.get(f"virtual_host/{host}", "")


def told(set_aside: Iterable[str]) -> str:
    """Parts that were set aside, by their names such as `virtual_host/{id}`, for people."""
    return ", ".join(name.replace("_", " ").replace("/", " ") for name in sorted(set_aside))


def hold_seconds(
    unsent_at_ns: Sequence[int], *, quiet_seconds: float, longest_seconds: float, now_ns: int
) -> float:
    """How long to wait for more changes before the newest of these versions is sent; 0 for not at all.

    Changes that follow each other quickly go out as one; however steady their stream is, the
    first of them waits no longer than `longest_seconds`.
    """
    if not unsent_at_ns:
        return 0.0
    due_ns = min(unsent_at_ns[-1] + quiet_seconds * NS, unsent_at_ns[0] + longest_seconds * NS)
    return max(0.0, (due_ns - now_ns) / NS)


def sent(
    wanted: WantedVersion, before: Deployment | None, *, now_ns: int
) -> tuple[DeploymentSpec, DeploymentStatus]:
    """What is written of a version that goes out. A try after a failure counts on from those before."""
    spec = DeploymentSpec(
        version=wanted.version, config_id=wanted.config_id, checksum=wanted.checksum, sent_at_ns=now_ns
    )
    status = DeploymentStatus(state=S.PENDING, changed_at_ns=now_ns)
    if before is None or before.status is None or before.spec.checksum != wanted.checksum:
        return spec, status
    last = before.status
    failed = last.state is not S.SUCCESS or bool(last.set_aside)
    return (
        msgspec.structs.replace(spec, attempt=before.spec.attempt + 1 if failed else 1),
        msgspec.structs.replace(status, applied_at_ns=last.applied_at_ns, set_aside=last.set_aside),
    )


def advanced(
    status: DeploymentStatus, said: VersionProgress, *, sent_at_ns: int, now_ns: int
) -> DeploymentStatus | None:
    """What an agent's word changes; None if nothing: it is late, repeated, or after the end.

    Three exceptions: where the end was only our impatience, the agent's own end replaces it; a report
    that shows the version in service is true whatever was said before; and of a version in service,
    other parts than before may be set aside.
    """
    said = _named_truly(status, said)
    overruled = status.state is S.FAILED and status.error == TIMED_OUT and said.state in FINAL
    shown = said.observed and status.state is not S.SUCCESS
    partly = said.state is status.state is S.SUCCESS and not said.observed
    regrouped = partly and said.set_aside != status.set_aside
    first_word = said.state is status.state is S.PENDING and status.changed_at_ns <= sent_at_ns
    if not (overruled or shown or regrouped or first_word or _RANKS[said.state] > _RANKS[status.state]):
        return None
    final = said.state in FINAL
    served = said.state is S.SUCCESS
    return DeploymentStatus(
        state=said.state,
        error=said.error,
        changed_at_ns=max(now_ns, sent_at_ns + 1),
        applied_at_ns=(said.applied_at_ns or now_ns) if served else status.applied_at_ns,
        duration_ms=max(0, now_ns - sent_at_ns) // 1_000_000 if final else None,
        set_aside=said.set_aside if served and not said.observed else status.set_aside,
    )


def _named_truly(status: DeploymentStatus, said: VersionProgress) -> VersionProgress:
    """What was overtaken has not failed; and if it was in service before, it was not even passed over."""
    if said.state is not S.FAILED or not _SUPERSEDED.fullmatch(said.error):
        return said
    if status.applied_at_ns is not None:
        return msgspec.structs.replace(
            said, state=S.SUCCESS, error="", applied_at_ns=status.applied_at_ns, set_aside=status.set_aside
        )
    return msgspec.structs.replace(said, state=S.SUPERSEDED)


def overtaken(status: DeploymentStatus, by: int, *, sent_at_ns: int, now_ns: int) -> DeploymentStatus:
    """The end of a deployment that its agent never ended, because of a newer version."""
    said = VersionProgress(config_id="", version=0, state=S.FAILED, error=superseded(by), applied_at_ns=None)
    ended = advanced(status, said, sent_at_ns=sent_at_ns, now_ns=now_ns)
    assert ended is not None, "only what has not ended is overtaken"
    return ended


def superseded(version: int) -> str:
    return f"superseded by version {version}"
