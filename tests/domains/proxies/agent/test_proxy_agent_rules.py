"""The agent's decisions, without an NGINX, a clock or a disk."""

from __future__ import annotations

import itertools
from pathlib import Path

import grpc
import grpc.aio
import pytest

from fleetplane.domains.proxies.agent.enrolment import TokenSuperseded, translated
from fleetplane.domains.proxies.agent.nginx import confirmation
from fleetplane.domains.proxies.agent.nginx.confirmation import (
    TABLE,
    ChangeJournal,
    ChangePhase,
    Confirmed,
    JournalEvent,
    NginxWorker,
    VersionState,
    VersionStatus,
    VersionTrial,
    WorkerLook,
)
from fleetplane.domains.proxies.agent.nginx.http_get import StubStatus, parse_stub_status
from fleetplane.domains.proxies.agent.observer import UsageAlerts, expiring
from fleetplane.domains.proxies.agent.outbox import ProxyOutbox, Updates, receipt_of
from fleetplane.domains.proxies.agent.prober import Verdicts, probes
from fleetplane.domains.proxies.nginx.paths import ANYWHERE
from fleetplane.domains.proxies.nginx.reading import foreign_fault, text_to_test
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.errors import IntegrityError
from fleetplane.node.link import LinkLost, ServerRefused

OLD = frozenset({NginxWorker(10, 1), NginxWorker(11, 1)})
NEW = frozenset({NginxWorker(20, 2), NginxWorker(21, 2)})
MASTER = 9


# The journal.


def journal_in(phase: ChangePhase) -> ChangeJournal:
    return ChangeJournal(phase=phase, live="1-1", target="" if phase is ChangePhase.LIVE else "2-2", serial=2)


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(ChangePhase, JournalEvent)))
def test_a_change_takes_the_steps_of_the_table_and_no_others(phase: ChangePhase, event: JournalEvent) -> None:
    journal = journal_in(phase)
    steps = {
        JournalEvent.BEGUN: lambda: journal.begin("2-2"),
        JournalEvent.CONFIRMED: lambda: journal.confirm(None),
        JournalEvent.FAILED: lambda: journal.fail("why"),
    }
    if (phase, event) in TABLE:
        assert steps[event]().phase is TABLE[phase, event]
    else:
        with pytest.raises(IntegrityError):
            steps[event]()


def test_only_a_confirmed_release_is_ever_trusted() -> None:
    tried = ChangeJournal(live="1-1").begin("2-2")
    assert tried.live == "1-1"
    assert tried.confirm(None).live == "2-2"

    failed = tried.fail("bind() failed")
    assert (failed.live, failed.error) == ("1-1", "bind() failed")
    assert failed.confirm(None).live == "1-1"
    assert failed.fail("again").live == "1-1"


# Confirmation.


def trial() -> VersionTrial:
    return VersionTrial(
        release="2-2", before=OLD, master=MASTER, started=0.0, steady_seconds=0.5, limit_seconds=10.0
    )


def look(
    now: float, *, answer: str | None = "2-2", workers: frozenset[NginxWorker] = NEW, log: str = ""
) -> WorkerLook:
    return WorkerLook(now=now, answer=answer, workers=workers, running=True, log=[log] if log else [])


def line(words: str, *, level: str = "emerg", pid: int = MASTER) -> str:
    return f"2026/11/15 22:00:00 [{level}] {pid}#{pid}: {words}"


def test_a_release_is_confirmed_once_it_has_answered_without_a_break() -> None:
    watching = trial()
    assert watching.observe(look(0.0, answer="1-1", workers=OLD)) is None
    assert watching.observe(look(0.1)) is None
    assert watching.observe(look(0.59)) is None
    assert watching.observe(look(0.6)) == Confirmed()


def test_an_old_worker_that_still_answers_starts_the_wait_anew() -> None:
    watching = trial()
    watching.observe(look(0.1))
    assert watching.observe(look(0.5, answer="1-1")) is None
    assert watching.observe(look(0.7)) is None
    assert watching.observe(look(1.1)) is None
    assert watching.observe(look(1.2)) == Confirmed()


def test_going_back_is_not_confirmed_by_workers_that_never_left() -> None:
    back = VersionTrial(release="1-1", before=OLD, master=MASTER, started=0.0, limit_seconds=3.0)
    for tenths in range(30):
        assert back.observe(look(tenths / 10, answer="1-1", workers=OLD)) is None
    assert isinstance(back.observe(look(3.1, answer="1-1", workers=OLD)), confirmation.RefusedVersion)


def test_time_in_which_nobody_looked_is_not_held_against_a_release() -> None:
    one = trial()
    assert one.observe(look(0.1, answer=None)) is None
    assert one.observe(look(60.0)) is None, "the machine stood still"
    assert one.observe(look(60.5)) == Confirmed()
    other = trial()
    looks = (other.observe(look(second, answer=None)) for second in range(12))
    assert [isinstance(found, confirmation.RefusedVersion) for found in looks] == [False] * 11 + [True]


def test_a_port_that_cannot_be_bound_is_final_only_when_nginx_gives_up() -> None:
    watching = trial()
    failed = line("bind() to 0.0.0.0:80 failed (98: Address already in use)")
    assert watching.observe(look(0.1, answer="1-1", workers=OLD, log=failed)) is None
    verdict = watching.observe(look(2.5, answer="1-1", workers=OLD, log=line("still could not bind()")))
    assert verdict == confirmation.RefusedVersion(
        "[emerg] bind() to 0.0.0.0:80 failed (98: Address already in use); [emerg] still could not bind()"
    )


@pytest.mark.parametrize(
    ("words", "fatal"),
    [
        (line("cannot load certificate"), True),
        (line("open() failed", level="crit"), True),
        (line("upstream timed out", level="error"), False),
        (line("of another process", pid=77), False),
        (line("worker process 10 exited on signal 9", level="alert"), False),
        ("not a line of the log", False),
    ],
)
def test_what_in_the_log_ends_a_trial(words: str, fatal: bool) -> None:
    assert isinstance(trial().observe(look(0.0, log=words)), confirmation.RefusedVersion) is fatal


def test_an_nginx_that_died_confirms_nothing() -> None:
    gone = WorkerLook(now=0.0, answer=None, workers=frozenset(), running=False)
    assert trial().observe(gone) == confirmation.RefusedVersion("NGINX is gone")


# Health of upstream servers.


def checked(*addresses: str, **options: int) -> pb.ConfigUpdate:
    check = pb.HealthCheckConfig(
        enabled=True, path="/health", interval_seconds=1, timeout_seconds=1, **options
    )
    servers = [pb.UpstreamServer(address=address) for address in addresses]
    return pb.ConfigUpdate(upstreams=[pb.Upstream(id="u", servers=servers, health_check=check)])


def test_a_server_goes_after_three_failures_and_returns_after_two_successes() -> None:
    first, second = probes(checked("a:1", "b:1"))
    verdicts = Verdicts()
    verdicts.watch([first, second], {})

    assert [verdicts.record(first, passed=False) is not None for _ in range(3)] == [False, False, True]
    assert verdicts.down() == {"u": frozenset({"a:1"})}
    assert [verdicts.record(first, passed=True) is not None for _ in range(2)] == [False, True]
    assert verdicts.down() == {}


def test_one_success_between_failures_starts_the_count_anew() -> None:
    (probe, _) = probes(checked("a:1", "b:1"))
    verdicts = Verdicts()
    verdicts.watch([probe], {})
    for passed in (False, False, True, False, False):
        assert verdicts.record(probe, passed=passed) is None


def test_a_group_never_loses_its_last_server() -> None:
    both = probes(checked("a:1", "b:1", unhealthy_threshold=1))
    verdicts = Verdicts()
    verdicts.watch(both, {})
    verdicts.record(both[0], passed=False)
    assert verdicts.down() == {"u": frozenset({"a:1"})}
    verdicts.record(both[1], passed=False)
    assert verdicts.down() == {}
    assert verdicts.all_dead() == {"u"}


def test_what_was_known_survives_a_new_configuration_and_a_new_agent() -> None:
    old = probes(checked("a:1", "b:1", unhealthy_threshold=1))
    verdicts = Verdicts()
    verdicts.watch(old, {"u": frozenset({"b:1"})})  # a release of the agent before us says so
    verdicts.watch(probes(checked("b:1", "c:1")), {})
    assert verdicts.states() == {("u", "b:1"): False, ("u", "c:1"): True}


def test_servers_that_an_operator_took_out_are_not_probed() -> None:
    update = checked("a:1", "b:1")
    update.upstreams[0].servers[1].down = True
    assert [probe.address for probe in probes(update)] == ["a:1"]


def test_a_probe_cannot_be_made_to_send_a_second_request() -> None:
    update = checked("a:1")
    update.upstreams[0].health_check.path = "/x HTTP/1.1\r\nHost: evil\r\n\r\n"
    assert not set(probes(update)[0].target) & set(" \r\n")


# Alerts.


def test_an_alert_stays_until_the_figure_is_clearly_lower() -> None:
    figures = UsageAlerts()
    assert figures.judge({"cpu_high": 79.0}) == []
    assert [alert.severity for alert in figures.judge({"cpu_high": 85.0})] == ["warning"]
    assert [alert.severity for alert in figures.judge({"cpu_high": 76.0})] == ["warning"]
    assert figures.judge({"cpu_high": 74.0}) == []
    assert [alert.severity for alert in figures.judge({"cpu_high": 96.0})] == ["critical"]
    assert [alert.severity for alert in figures.judge({"cpu_high": 91.0})] == ["critical"]
    assert [alert.severity for alert in figures.judge({"cpu_high": 89.0})] == ["warning"]


def test_certificates_that_end_soon_are_told_of_once_each() -> None:
    day = 86_400_000
    found = expiring(
        [("a", "a.test", 20 * day), ("b", "b.test", 13 * day), ("c", "c.test", day), ("d", "d.test", 0)],
        now_ms=0,
    )
    assert [(alert.id, alert.severity) for alert in found] == [
        ("certificate_expiring:b", "warning"),
        ("certificate_expiring:c", "critical"),
    ]


# Updates.


def version(number: int) -> pb.ConfigUpdate:
    return pb.ConfigUpdate(config_id=f"c{number}", version=number)


async def test_of_several_updates_the_newest_is_next_and_the_others_are_told() -> None:
    told: list[VersionStatus] = []
    updates = Updates(told.append)
    for number in (1, 3, 2):
        updates.offer(version(number))

    assert (await updates.next()).version == 3
    assert [(status.version, status.state, status.error) for status in told] == [
        (1, VersionState.FAILED, "superseded by version 3"),
        (2, VersionState.FAILED, "superseded by version 3"),
    ]


async def test_an_update_that_comes_again_while_it_is_applied_is_not_applied_twice() -> None:
    updates = Updates(lambda _: None)
    updates.offer(version(1))
    current = await updates.next()
    updates.offer(version(1))
    updates.offer(version(2))
    assert (await updates.next()).version == 2
    assert current.version == 1


# Small things.


def test_the_outbox_keeps_what_was_not_acknowledged_and_tells_of_receipts() -> None:
    outbox = ProxyOutbox(limit=2)
    for number in range(3):
        outbox.add(pb.Event(event_id=str(number)))
    outbox.add(status := pb.ConfigStatus(config_id="c", version=1, status=pb.SUCCESS))
    assert outbox.dropped == 2
    assert outbox.acknowledged("2")
    assert not outbox.acknowledged("2")
    assert outbox.unsent() == [(receipt_of(status), status)]
    assert outbox.receipts.get_nowait() == pb.Event(event_id="2")
    assert outbox.receipts.empty()


def test_the_receipt_of_an_outcome_is_not_taken_for_that_of_the_one_which_replaced_it() -> None:
    outbox = ProxyOutbox()
    first, second = (
        pb.ConfigStatus(config_id="c", version=1, status=pb.FAILED, error_message=words)
        for words in ("the disk is full", "rolled back")
    )
    receipt = receipt_of(first)
    outbox.add(first)
    outbox.sent(receipt, first)
    outbox.add(second)
    assert not outbox.acknowledged(receipt)
    assert outbox.unsent() == [(receipt, second)]
    outbox.sent(receipt, second)
    assert outbox.acknowledged(receipt)
    assert outbox.receipts.get_nowait() == second

    outbox.add(first)
    outbox.sent(receipt, first)
    outbox.add(second)
    outbox.new_stream()  # on which the first one never was
    outbox.sent(receipt, second)
    assert outbox.acknowledged(receipt)


def test_nginxs_own_figures_are_read() -> None:
    text = (
        b"Active connections: 3 \nserver accepts handled requests\n 10 9 40 \n"
        b"Reading: 1 Writing: 2 Waiting: 0 \n"
    )
    assert parse_stub_status(text) == StubStatus(3, 10, 9, 40, 1, 2, 0)
    assert parse_stub_status(b"<html>") is None


@pytest.mark.parametrize(
    "content",
    [
        "load_module /tmp/x.so;",
        'events {} "load_module" x;',
        "lo\\ad_module x;",
        "events { } http { include /etc/passwd; }",
        "error_log /etc/cron.d/x;",
        "pid ../x;",
        "http { access_log '/root/x' ; }",
        "http { proxy_cache_path /var/x; }",
        "http { server { location / { content_by_lua_block { os.execute() } } } }",
        "http { js_import x.js; }",
        "http { server { listen unix:/run/x.sock; } }",
        "#\nuser root;",
    ],
)
def test_a_foreign_configuration_that_could_do_harm_is_not_even_tested(content: str) -> None:
    assert foreign_fault(content, ANYWHERE)


def test_a_foreign_configuration_opens_nothing_of_the_machines_by_default() -> None:
    content = "events {}\nhttp {\n  proxy_temp_path mine; server { }\n}"
    made = text_to_test(content, Path("/t"))
    assert made.splitlines()[0].endswith("events { }")
    assert [line.split()[0] for line in made.splitlines()[1:]] == ["http", "server"], "each on its line"
    assert "client_body_temp_path /t/client_body;" in made
    assert "access_log off;" in made
    assert made.count("proxy_temp_path") == 1
    assert "proxy_temp_path /t/proxy;" in made


def test_an_agent_whose_stream_was_taken_over_does_not_hurry() -> None:
    def ended(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
        return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "so")

    assert isinstance(translated(ended(grpc.StatusCode.ABORTED)), TokenSuperseded)
    assert isinstance(translated(ended(grpc.StatusCode.UNAUTHENTICATED)), ServerRefused)
    assert type(translated(ended(grpc.StatusCode.UNAVAILABLE))) is LinkLost


def test_a_harmless_foreign_configuration_is_tested() -> None:
    content = "pid nginx.pid; events {} http { access_log off; server { return 200 '${host} # {'; } }"
    assert foreign_fault(content, ANYWHERE) == ""
    assert "pid nginx.pid" not in text_to_test(content, Path("/t"))
