"""Where gates get their measurements: from the subject, from Prometheus, from a webhook, from a probe.

    error_rate                        a measurement that the subject has
    prometheus EXPRESSION             an instant query; `$window` is the gate's window, such as `300s`
    webhook URL                       a POST; the answer is JSON with a number `value`, or with `passed`
    probe NAME                        a command of the settings, run on the targets that have moved: the
                                      share of them on which it ended with 0

What is asked outside is named by the settings, never by a policy alone: the address of Prometheus stands
there whole, with the scopes whose rollouts may query it, because it shows everything to whoever queries;
webhooks lie at origins that are listed, and commands of probes are listed by name. No redirect
is followed. Whatever goes wrong, there is no measurement, and a gate without one is not passed.

A dry run takes its waves by name and measures its gates over the last hour.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import httpx
import msgspec
import structlog

from fleetplane.fleet.rollouts.records import Period, VersionedSubject
from fleetplane.fleet.rollouts.rules.passes import matches, preview
from fleetplane.fleet.rollouts.rules.policy import Gate, Policy
from fleetplane.fleet.rollouts.rules.states import GateMeasurement, TargetFact, breach
from fleetplane.fleet.rollouts.settings import PrometheusSource, RolloutSettings, origin_of
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument
from fleetplane.kernel.http_answers import IDENTITY, bounded_body
from fleetplane.kernel.values.times import NS, spelled

log = structlog.get_logger(__name__)

PROMETHEUS, WEBHOOK, PROBE = "prometheus ", "webhook ", "probe "
ANSWER_LIMIT_BYTES = 64 * 1024
"""An answer is one number; Prometheus repeats the labels of its one series."""
QUERY_LIMIT = 4000
TARGETS_LIMIT = 1000
"""Names of targets in a webhook's request; the number of all is beside them."""
PROBE_SECONDS = 30.0
"""How long a probe may run on a target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateQuestion:
    """For what a gate is measured."""

    rollout: str
    subject: VersionedSubject
    scope: str
    to: str
    wave: int
    gate: str
    query: str
    targets: Collection[str]
    """Those that have moved."""
    period: Period


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What came of it: a number, or why there is none."""

    value: float | None = None
    problem: str = ""


@runtime_checkable
class Prober(Protocol):
    """A subject that can run a command on its targets."""

    async def probe(
        self, scope: str, targets: Collection[str], command: Sequence[str], *, seconds: float
    ) -> Mapping[str, int | None]:
        """The exit code on each target; None where it did not run to its end."""
        ...


class GateSources:
    def __init__(self, settings: RolloutSettings | None = None) -> None:
        self._settings = settings or RolloutSettings()
        self._probes = self._settings.commands
        self._origins = {origin_of(one) for one in self._settings.webhook_origins}

    def __repr__(self) -> str:
        return f"<GateSources probes={len(self._probes)} webhooks={len(self._origins)}>"

    def check(self, subject: VersionedSubject, query: str, *, scope: str, field: str) -> None:
        """Refuse a query that could never be answered here, or that rollouts of a scope may not ask."""
        if len(query) > QUERY_LIMIT:
            raise InvalidArgument(f"has {len(query)} characters, more than {QUERY_LIMIT}", field=field)
        kind, _, rest = query.partition(" ")
        if rest.strip() and f"{kind} " == PROMETHEUS:
            self._prometheus_of(scope, field)
        elif rest.strip() and f"{kind} " == WEBHOOK:
            self._check_webhook(rest.strip(), field)
        elif rest.strip() and f"{kind} " == PROBE:
            if not isinstance(subject, Prober):
                raise InvalidArgument(f"{subject.name} has no targets that run probes", field=field)
            if rest.strip() not in self._probes:
                known = ", ".join(sorted(self._probes)) or "none"
                raise InvalidArgument(
                    f"there is no probe {rest.strip()[:60]!r}",
                    field=field,
                    hint=f"there are: {known}; rollouts.probes lists them",
                )
        elif query not in subject.measures:
            known = ", ".join(sorted(subject.measures)) or "none"
            raise InvalidArgument(
                f"{subject.name} does not measure {query[:60]!r}",
                field=field,
                hint=f"there are: {known}; and prometheus EXPRESSION, webhook URL, probe NAME",
            )

    def _prometheus_of(self, scope: str, field: str) -> PrometheusSource:
        found = self._settings.prometheus_for(scope)
        if found is None:
            raise InvalidArgument(
                f"rollouts at {scope or 'every scope'} may query no Prometheus server here",
                field=field,
                hint="whoever runs the server lists the scope in rollouts.prometheus_scopes, or gives it a "
                "server of its own in rollouts.prometheus_sources",
            )
        return found

    def _check_webhook(self, url: str, field: str) -> None:
        try:
            parts = httpx.URL(url)
            origin = origin_of(url)
        except (httpx.InvalidURL, ValueError):
            raise InvalidArgument(f"{url[:200]!r} is not an address", field=field) from None
        if parts.scheme not in ("http", "https") or parts.userinfo or origin not in self._origins:
            raise InvalidArgument(
                f"webhooks at {origin[:200]} are not allowed here",
                field=field,
                hint="list the origin in rollouts.webhook_origins",
            )

    async def measure(self, asked: GateQuestion) -> Measured:
        """A gate's measurement, or why there is none. Raises nothing."""
        try:
            self.check(asked.subject, asked.query, scope=asked.scope, field="query")
            async with asyncio.timeout(self._settings.gate_timeout_seconds + self._more(asked)):
                return await self._measure(asked)
        except FleetplaneError as error:
            problem = error.message
        except TimeoutError:
            problem = f"no answer within {self._settings.gate_timeout_seconds:g} s"
        except (httpx.HTTPError, OSError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"[:200]
        log.warning("rollouts.gate_failed", rollout=asked.rollout, gate=asked.gate, error=problem)
        return Measured(problem=problem)

    def _more(self, asked: GateQuestion) -> float:
        return PROBE_SECONDS if asked.query.startswith(PROBE) else 0.0

    async def _measure(self, asked: GateQuestion) -> Measured:
        query = asked.query
        if query.startswith(PROMETHEUS):
            source = self._prometheus_of(asked.scope, "query")
            return await self._prometheus(source, query.removeprefix(PROMETHEUS).strip(), asked.period)
        if query.startswith(WEBHOOK):
            return await self._webhook(query.removeprefix(WEBHOOK).strip(), asked)
        if query.startswith(PROBE):
            return await _probed(self._probes[query.removeprefix(PROBE).strip()], asked)
        return Measured(value=await asked.subject.measure(asked.scope, query, asked.targets, asked.period))

    # Prometheus.

    async def _prometheus(self, source: PrometheusSource, expression: str, period: Period) -> Measured:
        window = f"{max(1, round((period.to_ns - period.from_ns) / NS))}s"
        base = source.url.rstrip("/")
        parameters = {"query": expression.replace("$window", window), "time": f"{period.to_ns / NS:.3f}"}
        headers = {}
        if source.token_file:
            token = await asyncio.to_thread(Path(source.token_file).read_text)
            headers["authorization"] = f"Bearer {token.strip()}"
        body = await self._call("GET", f"{base}/api/v1/query", headers, params=parameters)
        return vector_value(body)

    # Webhooks.

    async def _webhook(self, url: str, asked: GateQuestion) -> Measured:
        content = {
            "rollout": asked.rollout,
            "subject": asked.subject.name,
            "scope": asked.scope,
            "to": asked.to,
            "wave": asked.wave,
            "gate": asked.gate,
            "from": spelled(asked.period.from_ns),
            "until": spelled(asked.period.to_ns),
            "moved": len(asked.targets),
            "targets": list(asked.targets)[:TARGETS_LIMIT],
        }
        headers = {"content-type": "application/json"}
        return webhook_value(await self._call("POST", url, headers, content=msgspec.json.encode(content)))

    async def _call(self, method: str, url: str, headers: Mapping[str, str], **more: object) -> bytes:
        """An answer of 200 within its bounds; anything else raises."""
        seconds = self._settings.gate_timeout_seconds
        async with (
            httpx.AsyncClient(timeout=seconds, trust_env=False, follow_redirects=False) as client,
            client.stream(method, url, headers={**headers, **IDENTITY}, **more) as answer,  # type: ignore[arg-type]
        ):
            if answer.status_code != httpx.codes.OK:
                raise ValueError(f"the answer has status {answer.status_code}")
            try:
                return await bounded_body(answer, limit_bytes=ANSWER_LIMIT_BYTES)
            except ValueError as error:
                raise ValueError(f"the answer {error}") from error


# Reading answers. Pure.


class _Sample(msgspec.Struct, frozen=True):
    value: tuple[float, str]


class _Data(msgspec.Struct, frozen=True, rename="camel"):
    result_type: str
    result: msgspec.Raw


class _GateAnswer(msgspec.Struct, frozen=True):
    status: str
    data: _Data


def vector_value(body: bytes) -> Measured:
    """The one number of an answer of Prometheus: a scalar, or a vector of exactly one series."""
    try:
        answer = msgspec.json.decode(body, type=_GateAnswer)
        if answer.data.result_type == "scalar":
            samples = [msgspec.json.decode(answer.data.result, type=tuple[float, str])]
        elif answer.data.result_type == "vector":
            samples = [one.value for one in msgspec.json.decode(answer.data.result, type=list[_Sample])]
        else:
            return Measured(problem=f"the answer is a {answer.data.result_type[:20]}, not a number")
        if len(samples) != 1:
            return Measured(problem=f"the answer has {len(samples)} series, and must have one")
        value = float(samples[0][1])
    except (msgspec.MsgspecError, ValueError):
        return Measured(problem="the answer is not one of Prometheus")
    return Measured(value=value) if math.isfinite(value) else Measured(problem=f"the answer is {value}")


class _Verdict(msgspec.Struct, frozen=True):
    value: float | None = None
    passed: bool | None = None
    reason: str = ""


def webhook_value(body: bytes) -> Measured:
    """The number that a webhook answered; 1 or 0 for `passed`."""
    try:
        found = msgspec.json.decode(body, type=_Verdict)
    except msgspec.MsgspecError:
        return Measured(problem="the answer is not JSON with value or passed")
    if found.value is not None and math.isfinite(found.value):
        return Measured(value=found.value)
    if found.passed is not None:
        return Measured(value=float(found.passed))
    return Measured(problem="the answer has neither value nor passed")


async def _probed(command: Sequence[str], asked: GateQuestion) -> Measured:
    assert isinstance(asked.subject, Prober)
    if not asked.targets:
        return Measured(problem="no target has moved")
    codes = await asked.subject.probe(asked.scope, asked.targets, command, seconds=PROBE_SECONDS)
    unknown = sum(codes.get(name) is None for name in asked.targets)
    if unknown:
        return Measured(problem=f"the probe did not end on {unknown} of {len(asked.targets)} targets")
    return Measured(value=sum(codes[name] == 0 for name in asked.targets) / len(asked.targets))


REHEARSED_NS = 3600 * NS
"""Over which time a dry run measures what gates ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWave:
    wave: str
    targets: Sequence[str]
    """By their names for people, in the order of their turns."""
    offline: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """A gate, on the facts of the last hour."""

    gate: Gate
    reading: GateMeasurement
    message: str
    """Why it is not passed, or was not rehearsed; empty if it is passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What a rollout would do if it started now."""

    to: str
    policy: Policy
    waves: Sequence[PlannedWave]
    already: int
    """Targets that have the version."""
    blockers: Sequence[str]
    """Why it would not begin at once."""
    gates: Sequence[Rehearsed] = ()


def planned_waves(policy: Policy, moving: Mapping[str, TargetFact]) -> Sequence[PlannedWave]:
    """Who would be in which wave, of those that have another version."""
    found = preview(policy.waves, {name: fact.labels for name, fact in moving.items()}, select=matches)
    return [
        PlannedWave(
            wave=wave,
            targets=[moving[name].title or name for name in names],
            offline=[moving[name].title or name for name in names if not moving[name].online],
        )
        for wave, names in zip(policy.waves, found, strict=True)
    ]


async def rehearsed(sources: GateSources, gate: Gate, asked: GateQuestion) -> Rehearsed:
    """A gate on the last hour, against the hour before it. What acts on others is left out."""
    if gate.query.startswith((WEBHOOK, PROBE)):
        message = f"gate {gate.name}: webhooks and probes are not rehearsed"
        return Rehearsed(gate=gate, reading=GateMeasurement(), message=message)
    now_ns = asked.period.to_ns
    current = Period(from_ns=now_ns - REHEARSED_NS, to_ns=now_ns)
    asked = replace(asked, gate=gate.name, query=gate.query, period=current)
    value, before = await sources.measure(asked), Measured()
    if gate.max_increase is not None:
        earlier = Period(from_ns=now_ns - 2 * REHEARSED_NS, to_ns=now_ns - REHEARSED_NS)
        before = await sources.measure(replace(asked, period=earlier))
    reading = GateMeasurement(
        value=value.value, baseline=before.value, problem=value.problem or before.problem
    )
    return Rehearsed(gate=gate, reading=reading, message=breach(gate, reading))
