from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetplane.domains.proxies import wire
from fleetplane.domains.proxies.kinds.records import Deployment, DeploymentSpec, DeploymentStatus
from fleetplane.domains.proxies.kinds.values import DeploymentState
from fleetplane.domains.proxies.rules import alerts, deployment
from fleetplane.domains.proxies.rules.alerts import AlertSpec, Severity
from fleetplane.domains.proxies.rules.deployment import (
    FINAL,
    DeploymentWait,
    GiveUpVersion,
    Send,
    ServedVersion,
    Settled,
    WantedVersion,
    advanced,
    decide,
)
from fleetplane.domains.proxies.wire import VersionProgress
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.resources import Resource

S = DeploymentState
NS = 10**9
WANTED = WantedVersion(version=7, config_id="c", checksum="sum")
SENT_NS = 100 * NS


def sent(state: S, *, heard_ns: int = 0, error: str = "", checksum: str = "sum") -> Deployment:
    return Resource(
        kind="",
        scope="",
        name="",
        uid="",
        labels={},
        conditions=(),
        revision=0,
        created_revision=0,
        generation=1,
        created_at_ns=0,
        updated_at_ns=0,
        spec=DeploymentSpec(version=7, config_id="c", checksum=checksum, sent_at_ns=SENT_NS),
        status=DeploymentStatus(state=state, error=error, changed_at_ns=heard_ns or SENT_NS),
    )


def serving(version: int, checksum: str = "", at: float = 101) -> ServedVersion:
    return ServedVersion(version=version, checksum=checksum, at_ns=round(at * NS))


@pytest.mark.parametrize(
    ("reported", "known", "session_since", "now", "expected"),
    [
        (serving(7), None, 0, 102, Settled(confirm=False)),
        (serving(7, "sum"), sent(S.APPLYING), 0, 102, Settled(confirm=True)),
        (serving(7, "sum"), sent(S.SUCCESS), 0, 102, Settled(confirm=False)),
        (serving(7, "other"), None, 0, 102, Send()),
        (serving(6), None, 0, 102, Send()),
        (None, None, 0, 102, Send()),
        (serving(6), sent(S.PENDING, checksum="older"), 0, 102, Send()),
        (serving(6), sent(S.PENDING), 101, 102, Send()),
        (serving(6), sent(S.PENDING), 99, 160, GiveUpVersion()),
        (serving(6), sent(S.APPLYING, heard_ns=120 * NS), 101, 181, GiveUpVersion()),
        (serving(6), sent(S.FAILED, error=deployment.TIMED_OUT), 0, 102, Send()),
        (serving(6), sent(S.SUCCESS, heard_ns=102 * NS), 0, 103, "UNCONFIRMED"),
        (serving(6, at=103), sent(S.SUCCESS, heard_ns=102 * NS), 0, 104, Send()),
        (serving(6), sent(S.FAILED, error="bad"), 101, 102, "REFUSED"),
        (serving(6), sent(S.ROLLED_BACK, error="bad"), 101, 1000, "REFUSED"),
        (serving(6), sent(S.PENDING), 99, 102, "APPLYING"),
        (serving(6), sent(S.VALIDATING, heard_ns=101 * NS), 110, 120, "APPLYING"),
    ],
)
def test_what_is_sent_follows_from_what_is_so(
    reported: ServedVersion | None,
    known: Deployment | None,
    session_since: int,
    now: int,
    expected: deployment.Decision | str,
) -> None:
    decision = decide(
        WANTED, reported, known, session_since_ns=session_since * NS, apply_seconds=60, now_ns=now * NS
    )
    assert (decision.code if isinstance(decision, DeploymentWait) else decision) == expected


@given(st.lists(st.sampled_from(list(S))))
def test_an_agents_words_never_undo_an_end(words: list[S]) -> None:
    status = DeploymentStatus(state=S.PENDING, changed_at_ns=SENT_NS)
    ended: S | None = None
    for moment, state in enumerate(words, start=1):
        said = VersionProgress(config_id="c", version=7, state=state, error="", applied_at_ns=None)
        status = advanced(status, said, sent_at_ns=SENT_NS, now_ns=SENT_NS + moment) or status
        assert ended is None or status.state is ended
        ended = status.state if status.state in FINAL else None
    first_end = next((state for state in words if state in FINAL), None)
    assert ended is first_end


def test_the_first_pending_is_a_receipt_although_it_says_nothing_new() -> None:
    status = DeploymentStatus(state=S.PENDING, changed_at_ns=SENT_NS)
    said = VersionProgress(config_id="c", version=7, state=S.PENDING, error="", applied_at_ns=None)
    heard = advanced(status, said, sent_at_ns=SENT_NS, now_ns=SENT_NS)
    assert heard is not None
    assert heard.changed_at_ns > SENT_NS
    assert advanced(heard, said, sent_at_ns=SENT_NS, now_ns=SENT_NS + 9) is None


def report(cpu: float = 0, *, memory: int = 0, disk: int = 0, down: bool = False) -> pb.HealthReport:
    return pb.HealthReport(
        nginx=pb.NginxStatus(is_running=not down),
        system=pb.SystemMetrics(
            cpu_percent=cpu,
            memory_used_bytes=memory,
            memory_total_bytes=100,
            disk_used_bytes=disk,
            disk_total_bytes=100,
        ),
    )


def test_the_documented_alert_is_worded_as_documented() -> None:
    (found,) = alerts.current(report(85.0), {}).values()
    assert found == AlertSpec(
        severity=Severity.WARNING, message="High CPU usage: 85%", metric="cpu_percent", value=85.0
    )


@pytest.mark.parametrize(
    ("cpu", "before", "after"),
    [
        (79.9, None, None),
        (80, None, "warning"),
        (94.9, None, "warning"),
        (95, None, "warning"),
        (75, "warning", "warning"),
        (74.9, "warning", None),
        (90, "critical", "critical"),
        (89.9, "critical", "warning"),
        (74, "critical", None),
        (95, "warning", "warning"),
    ],
)
def test_thresholds_have_hysteresis(cpu: float, before: str | None, after: str | None) -> None:
    open_ = {"cpu_high": AlertSpec(severity=Severity(before), message="")} if before else {}
    found = alerts.current(report(cpu), open_).get("cpu_high")
    assert (found.severity if found else None) == after


def test_a_figure_is_critical_once_it_has_been_so_for_a_while() -> None:
    heights = alerts.Heights()
    open_: dict[str, AlertSpec] = {}
    seen = []
    for second, cpu in ((0, 99), (30, 99), (60, 50), (90, 99), (120, 99), (209, 99), (210, 99), (240, 99)):
        open_ = alerts.current(report(cpu), open_, heights=heights, now_ns=second * NS)
        seen.append(open_["cpu_high"].severity if open_ else None)
    assert seen == ["warning", "warning", None, "warning", "warning", "warning", "critical", "critical"]


def test_thresholds_are_the_operators_and_an_agents_own_opinion_of_a_figure_does_not_count() -> None:
    said = report(97)
    said.alerts.append(pb.Alert(id="cpu_high", severity="critical", message="High CPU usage: 97%"))
    assert alerts.current(said, {})["cpu_high"].severity == "warning"
    relaxed = alerts.AlertPolicy(cpu_warning=98, cpu_critical=99)
    assert alerts.current(said, {}, policy=relaxed) == {}
    unmeasured = pb.HealthReport(alerts=said.alerts)
    assert alerts.current(unmeasured, {})["cpu_high"].severity == "critical", "nobody else can tell"


def test_memory_disk_and_a_dead_nginx_raise_alerts_of_their_own() -> None:
    found = alerts.current(report(memory=86, disk=97, down=True), {})
    assert {name: spec.severity for name, spec in found.items()} == {
        "memory_high": "warning",
        "disk_high": "warning",
        "nginx_down": "critical",
    }


def test_an_agents_own_alert_has_no_metric_and_a_repeated_one_changes_nothing() -> None:
    said = pb.HealthReport(
        alerts=[pb.Alert(id="x", severity="ERROR", message="m"), pb.Alert(severity="info")]
    )
    found = alerts.current(said, {})
    assert found == {"x": AlertSpec(severity=Severity.ERROR, message="m")}
    assert alerts.differences(found, alerts.current(said, found)) == {}
    assert alerts.differences(found, {}) == {"x": None}


def test_moments_are_milliseconds_and_small_ones_are_seconds() -> None:
    assert wire.moment_ns(0) is None
    assert wire.moment_ns(1_700_000_000) == 1_700_000_000 * NS
    assert wire.moment_ns(1_700_000_000_123) == 1_700_000_000_123 * 10**6
    assert wire.moment(wire.moment_ns(1_700_000_000_123) or 0) == 1_700_000_000_123
    assert wire.moment_ns(2**63 - 1) is None, "no date"


@given(st.binary(max_size=200))
def test_whatever_an_agent_sends_is_read_or_refused(body: bytes) -> None:
    try:
        message = pb.AgentMessage.FromString(body)
    except Exception:
        return
    wire.receipt(message)
    wire.health(message.health)
    alerts.current(message.health, {})
    for read in (
        lambda: wire.introduction(message.registration, address="x"),
        lambda: wire.progress(message.config_status),
        lambda: wire.answer(message.event),
    ):
        with contextlib.suppress(InvalidArgument):
            read()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e38])
def test_numbers_that_are_none_do_not_reach_json(value: float) -> None:
    said = pb.HealthReport(nginx=pb.NginxStatus(requests_per_second=value))
    assert wire.health(said).requests_per_second == 0.0
