"""Gates that ask outside of the server: a real process that answers as Prometheus and as a webhook."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.fleet import gate_server
from support.fleet.simulated_subject import SimulatedAgent, SimulatedSubject

from fleetplane.domains.proxies.rollout import percentile
from fleetplane.fleet.rollouts.gates import GateQuestion, GateSources, Measured, vector_value, webhook_value
from fleetplane.fleet.rollouts.records import Period
from fleetplane.fleet.rollouts.rollouts import check_policy
from fleetplane.fleet.rollouts.rules import amounts
from fleetplane.fleet.rollouts.rules.policy import Gate, Policy
from fleetplane.fleet.rollouts.rules.states import GateMeasurement, breach
from fleetplane.fleet.rollouts.settings import PrometheusSource, RolloutSettings
from fleetplane.kernel.errors import InvalidArgument, SettingsError
from fleetplane.kernel.values.times import NS
from fleetplane.sim.clock import VirtualClock

START_SECONDS = 60.0


class Probed(SimulatedSubject):
    """Agents that run probes."""

    def __init__(self, codes: Mapping[str, int | None]) -> None:
        super().__init__(VirtualClock(), {"a": SimulatedAgent(), "b": SimulatedAgent()})
        self.codes = codes
        self.ran: list[Sequence[str]] = []

    async def probe(
        self, _scope: str, _targets: Collection[str], command: Sequence[str], *, seconds: float
    ) -> Mapping[str, int | None]:
        assert seconds > 0
        self.ran.append(command)
        return self.codes


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the process listens."""
    told = tmp_path_factory.mktemp("gates") / "port"
    process = subprocess.Popen([sys.executable, gate_server.__file__, str(told)])
    try:
        end = time.monotonic() + START_SECONDS
        while not (told.exists() and told.read_text()):
            assert time.monotonic() < end
            assert process.poll() is None
            time.sleep(0.01)
        yield f"http://127.0.0.1:{told.read_text()}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def sources(origin: str, tmp_path: Path) -> GateSources:
    token = tmp_path / "token"
    token.write_text("secret\n")
    settings = RolloutSettings(
        prometheus_url=f"{origin}/base/",
        prometheus_token_file=str(token),
        prometheus_scopes=("tenant/a",),
        webhook_origins=(origin,),
        probes=("ready=/usr/bin/check --fast",),
        gate_timeout_seconds=30.0,
    )
    return GateSources(settings)


def asked(query: str, subject: SimulatedSubject | None = None, *, to_ns: int = 1000 * NS) -> GateQuestion:
    return GateQuestion(
        rollout="r1",
        subject=subject or Probed({}),
        scope="tenant/a",
        to="2",
        wave=2,
        gate="g",
        query=query,
        targets=["a", "b"],
        period=Period(from_ns=to_ns - 300 * NS, to_ns=to_ns),
    )


async def test_prometheus_is_asked_for_one_number_at_the_time_and_over_the_window(
    sources: GateSources,
) -> None:
    assert await sources.measure(asked("prometheus rate")) == Measured(value=0.25)
    assert await sources.measure(asked("prometheus scalar")) == Measured(value=7.0)
    expression = "prometheus increase[$window] 900"
    assert (await sources.measure(asked(expression))).value == 0.4
    assert (await sources.measure(asked(expression, to_ns=800 * NS))).value == 0.1
    for query, problem in (
        ("two", "2 series"),
        ("none", "0 series"),
        ("nan", "the answer is nan"),
        ("wrong(", "status 400"),
    ):
        found = await sources.measure(asked(f"prometheus {query}"))
        assert found.value is None
        assert problem in found.problem, found


async def test_webhooks_are_called_where_they_are_allowed_and_redirects_are_not_followed(
    sources: GateSources, origin: str
) -> None:
    assert await sources.measure(asked(f"webhook {origin}/passed")) == Measured(value=1.0)
    assert await sources.measure(asked(f"webhook {origin}/value")) == Measured(value=2.0)
    for path, problem in (
        ("large", "is longer than"),
        ("packed", "content encoding 'gzip', which was not asked for"),
        ("elsewhere", "status 307"),
        ("broken", "status 500"),
    ):
        found = await sources.measure(asked(f"webhook {origin}/{path}"))
        assert found.value is None
        assert problem in found.problem
    for address in (
        "http://127.0.0.1:1/passed",
        "http://169.254.169.254/latest/meta-data",
        f"{origin.replace('127.0.0.1', 'user:pass@127.0.0.1')}/passed",
        f"{origin}.example/passed",
        f"{origin.replace('http:', 'ftp:')}/passed",
        "file:///etc/passwd",
        "http://[broken",
    ):
        with pytest.raises(InvalidArgument):
            sources.check(Probed({}), f"webhook {address}", scope="tenant/a", field="query")
        found = await sources.measure(asked(f"webhook {address}"))
        assert found.value is None
        assert found.problem


async def test_what_cannot_be_reached_is_no_data(tmp_path: Path) -> None:
    settings = RolloutSettings(
        prometheus_url="http://127.0.0.1:1", prometheus_scopes=("*",), gate_timeout_seconds=30.0
    )
    found = await GateSources(settings).measure(asked("prometheus up"))
    assert found.value is None
    assert "ConnectError" in found.problem
    missing = RolloutSettings(
        prometheus_url="http://127.0.0.1:1",
        prometheus_token_file=str(tmp_path / "missing"),
        prometheus_scopes=("*",),
    )
    assert "FileNotFoundError" in (await GateSources(missing).measure(asked("prometheus up"))).problem


async def test_a_probe_is_one_of_the_settings_and_counts_only_if_it_ended_everywhere(
    sources: GateSources,
) -> None:
    good = Probed({"a": 0, "b": 3})
    assert await sources.measure(asked("probe ready", good)) == Measured(value=0.5)
    assert good.ran == [("/usr/bin/check", "--fast")]
    found = await sources.measure(asked("probe ready", Probed({"a": 0, "b": None})))
    assert found == Measured(problem="the probe did not end on 1 of 2 targets")
    with pytest.raises(InvalidArgument, match="no probe"):
        sources.check(good, "probe rm -rf /", scope="tenant/a", field="query")
    with pytest.raises(InvalidArgument, match="no targets that run probes"):
        sources.check(SimulatedSubject(VirtualClock(), {}), "probe ready", scope="tenant/a", field="query")


def test_nothing_outside_is_asked_unless_the_settings_name_it() -> None:
    nothing = GateSources()
    for query in (
        "prometheus up",
        "webhook https://checks.example/",
        "probe ready",
        "prometheus ",
        "happiness",
    ):
        with pytest.raises(InvalidArgument) as caught:
            nothing.check(Probed({}), query, scope="tenant/a", field="gates[0].query")
        assert caught.value.field == "gates[0].query"
    nothing.check(Probed({}), "error_rate", scope="tenant/a", field="gates[0].query")


async def test_prometheus_is_queried_for_scopes_that_the_settings_list_and_with_their_own_token(
    sources: GateSources, origin: str, tmp_path: Path
) -> None:
    query = "prometheus rate"
    for scope in ("tenant/b", "tenant/ab", "tenant", ""):
        with pytest.raises(InvalidArgument, match="may query no Prometheus"):
            sources.check(Probed({}), query, scope=scope, field="query")
        found = await sources.measure(replace(asked(query), scope=scope))
        assert found.value is None
        assert "may query no Prometheus" in found.problem
    assert (await sources.measure(replace(asked(query), scope="tenant/a/group/web"))).value == 0.25
    own = tmp_path / "own"
    own.write_text("of tenant b")
    settings = RolloutSettings(
        prometheus_url="https://prometheus.example",
        prometheus_token_file="/shared",
        prometheus_scopes=("*",),
        prometheus_sources=(f"tenant/b={origin}/base {own}", "tenant/b/group/c=http://c.example"),
        gate_timeout_seconds=30.0,
    )
    assert settings.prometheus_for("tenant/a") == PrometheusSource(
        url="https://prometheus.example", token_file="/shared"
    )
    assert settings.prometheus_for("tenant/b/group/c") == PrometheusSource(url="http://c.example")
    assert settings.prometheus_for("tenant/b") == PrometheusSource(url=f"{origin}/base", token_file=str(own))
    refused = await GateSources(settings).measure(replace(asked(query), scope="tenant/b"))
    assert "status 404" in refused.problem, "the token of the shared server was sent"


@pytest.mark.parametrize(
    "wrong",
    [
        {"prometheus_url": "prometheus.example"},
        {"prometheus_url": "https://user:secret@prometheus.example"},
        {"prometheus_scopes": ("tenant/a",)},
        {"prometheus_sources": ("https://prometheus.example",)},
        {"prometheus_sources": ("tenant/a=",)},
        {"prometheus_sources": ("tenant/*=https://prometheus.example",)},
        {"prometheus_sources": ("tenant/a=https://a.example", "tenant/a=https://b.example")},
        {"prometheus_sources": ("tenant/a=ftp://a.example",)},
        {"webhook_origins": ("https://checks.example/path",)},
        {"webhook_origins": ("ftp://checks.example",)},
        {"probes": ("ready",)},
        {"probes": ("ready=",)},
        {"probes": ("a=b", "a=c")},
        {"gate_timeout_seconds": 0.0},
    ],
)
def test_settings_that_cannot_be_meant_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match=rf"rollouts\.{next(iter(wrong))}"):
        RolloutSettings(**wrong)  # type: ignore[arg-type]


def test_only_what_is_replaced_may_be_unavailable() -> None:
    policy, subject = Policy(max_unavailable="10%"), Probed({})
    with pytest.raises(InvalidArgument) as caught:
        check_policy(policy, subject, GateSources(), scope="tenant/a")
    assert caught.value.field == "max_unavailable"
    assert (amounts.at_most("10%", 19), amounts.at_most("10%", 20), amounts.at_most("3", 2)) == (1, 2, 3)


def test_answers_that_are_no_number_are_no_data() -> None:
    for body in (b"", b"[]", b"{}", b'{"status":"success","data":{"resultType":"matrix","result":[]}}'):
        assert vector_value(body).value is None
        assert vector_value(body).problem
    for body in (b"", b"[1]", b"{}", b'{"value":null}', b'{"value":"7"}'):
        assert webhook_value(body).value is None
        assert webhook_value(body).problem


def test_a_gate_without_data_is_not_passed_and_says_why() -> None:
    gate = Gate(name="up", query="prometheus up", min=1.0)
    assert breach(gate, GateMeasurement(value=1.0)) == ""
    assert breach(gate, GateMeasurement(problem="no answer within 5 s")) == (
        "gate up: there is no data for prometheus up (no answer within 5 s)"
    )


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(number) for number in range(1, 101)]
    assert percentile(values, 0.5) == 50.0
    assert percentile(values, 0.99) == 99.0
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([], 0.5) is None
