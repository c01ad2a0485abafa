"""The whole agent on a real NGINX, talking to a double of the server over TLS."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import structlog
from support.proxies.nginx_rig import STEADY_SECONDS, Backend, Rig, backend, host, saying, upstream
from support.proxies.proxy_server_double import AGENT_ID, TOKEN, ProxyServerDouble, until
from support.shared.free_ports import free_port

from fleetplane.domains.proxies.agent.agent import ProxyAgent, ProxyAgentPolicy
from fleetplane.domains.proxies.agent.enrolment import CredentialFile, ServerAddress
from fleetplane.domains.proxies.agent.log_shipping import ShippingPolicy
from fleetplane.domains.proxies.agent.nginx import confirmation as journals
from fleetplane.domains.proxies.agent.nginx.confinement import Confinement
from fleetplane.domains.proxies.agent.nginx.confirmation import ChangePhase
from fleetplane.domains.proxies.agent.nginx.staging import StagingStep
from fleetplane.domains.proxies.agent.prober import ProberPolicy
from fleetplane.domains.proxies.agent.root import Tuning, assemble
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import Backoff, SystemClock
from fleetplane.kernel.errors import SettingsError

QUICK = Backoff(first_seconds=0.05, ceiling_seconds=0.2)
TUNING = Tuning(
    agent=ProxyAgentPolicy(
        backoff=QUICK,
        spread_seconds=0.0,
        refused_seconds=0.2,
        supervise_seconds=0.1,
        drift_seconds=0.2,
        rotate_seconds=0.1,
    ),
    prober=ProberPolicy(gather_seconds=0.05, least_gap_seconds=0.1, interval_scale=0.1),
    shipping=ShippingPolicy(pause_seconds=0.05, backoff=QUICK),
    steady_seconds=STEADY_SECONDS,
    least_gap_seconds=0.0,
    metrics_seconds=0.2,
    say_again_seconds=0.05,
)


def make(
    rig: Rig,
    server: ProxyServerDouble,
    *,
    token: str = TOKEN,
    tuning: Tuning = TUNING,
    witness: Callable[[StagingStep], None] = lambda _: None,
    confinement: Confinement | None = None,
) -> ProxyAgent:
    return assemble(
        site=rig.site,
        managed=True,
        token=token,
        server=ServerAddress(address=server.address, authority=server.authority),
        introduction=pb.RegistrationRequest(hostname="web-01", labels={"env": "test"}),
        clock=SystemClock(),
        log=structlog.get_logger(),
        tuning=tuning,
        witness=witness,
        confinement=confinement,
    )


@asynccontextmanager
async def running(rig: Rig, server: ProxyServerDouble, **options: Any) -> AsyncIterator[ProxyAgent]:
    agent = make(rig, server, **options)
    task = asyncio.ensure_future(agent.run())
    try:
        yield agent
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


async def deploy(server: ProxyServerDouble, update: pb.ConfigUpdate) -> None:
    await until(lambda: server.health)
    server.send(config_update=update)
    await until(lambda: "SUCCESS" in server.states(update.version))


async def get(port: int, path: str = "/") -> str:
    async with httpx.AsyncClient() as client:
        return (await client.get(f"http://127.0.0.1:{port}{path}", headers={"host": "a.test"})).text


# Registration.


async def test_it_registers_and_keeps_its_credential_to_itself(rig: Rig, server: ProxyServerDouble) -> None:
    async with running(rig, server):
        await until(lambda: server.health)
    (said,) = server.registrations
    assert (said.token, said.hostname, said.labels["env"]) == (TOKEN, "web-01", "test")
    assert server.bearers == [f"Bearer {TOKEN}"]
    assert rig.paths.credential.stat().st_mode & 0o777 == 0o600
    assert json.loads(rig.paths.credential.read_bytes()) == {"token": TOKEN, "agent_id": AGENT_ID}
    assert {message.agent_id for message in server.messages} == {AGENT_ID}

    async with running(rig, server, token=""):
        await until(lambda: len(server.registrations) == 2)
    assert server.registrations[1].token == TOKEN


def test_an_agent_without_any_token_says_so(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no registration token"):
        CredentialFile(tmp_path / "credential").load("")


async def test_a_refused_agent_keeps_nginx_serving_and_asks_again(
    rig: Rig, server: ProxyServerDouble
) -> None:
    server.known_token = "another"
    async with running(rig, server):
        await until(lambda: len(server.registrations) >= 2)
        assert rig.nginx.master() is not None
        assert b"agent_id" not in rig.paths.credential.read_bytes()
        server.known_token = TOKEN
        await until(lambda: server.health)


async def test_a_server_that_restarts_is_found_again_and_nginx_does_not_notice(
    rig: Rig, server: ProxyServerDouble
) -> None:
    port = free_port()
    async with running(rig, server) as agent:
        await deploy(server, saying(1, port))
        workers = await rig.workers()
        await server.stop()
        assert await get(port) == "1"
        before = len(server.health)
        await server.start()
        await until(lambda: len(server.health) > before)
        assert agent.sessions == 2
        assert server.health[-1].config_version == 1
        assert rig.nginx.workers() == workers


async def test_the_outcome_of_a_change_arrives_though_the_server_left_in_the_middle(
    rig: Rig, server: ProxyServerDouble
) -> None:
    port = free_port()
    async with running(rig, server):
        await deploy(server, saying(1, port))
        server.acknowledges = False  # nothing that it hears from now on is known when it comes back
        server.send(config_update=saying(2, port))
        await until(lambda: "APPLYING" in server.states(2))
        await server.stop()
        server.statuses.clear()
        server.acknowledges = True
        await until(lambda: rig.releases.current().startswith("2-"))
        await server.start()
        await until(lambda: "SUCCESS" in server.states(2))
        workers = await rig.workers()
        server.send(config_update=saying(2, port))  # the server cannot know, and asks again
        await until(lambda: server.states(2).count("SUCCESS") == 2)
        assert rig.nginx.workers() == workers


async def test_a_last_word_that_the_server_could_not_take_is_said_again(
    rig: Rig, server: ProxyServerDouble
) -> None:
    server.refused_statuses = 2
    async with running(rig, server):
        await deploy(server, saying(1, free_port()))
        await until(lambda: server.states(1).count("SUCCESS") == 3)
        await until(lambda: journals.read(rig.paths.journal).status is None)


# Service.


async def test_health_and_figures_are_reported(rig: Rig, server: ProxyServerDouble) -> None:
    port = free_port()
    async with running(rig, server):
        await deploy(server, saying(7, port))
        await until(lambda: server.health[-1].config_version == 7)
        for _ in range(5):
            await get(port)

        def latest() -> dict[tuple[str, str], float]:
            return {
                (metric.name, metric.labels.get("code_class", metric.labels.get("le", ""))): metric.value
                for metric in server.metrics[-1].metrics
            }

        def counted() -> bool:
            names = ("nginx_http_responses_total", "2xx"), ("nginx_http_requests_total", "")
            return bool(server.metrics) and [latest().get(name) for name in names] == [5, 5]

        await until(counted)  # a question of the agent's own may be under way, and is counted for a moment
        found = latest()
        assert found["nginx_http_request_duration_seconds_count", ""] == 5
        assert found["nginx_http_request_duration_seconds_bucket", "+Inf"] == 5
        assert found["nginx_http_response_bytes_total", ""] > 0
        assert found["system_memory_total_bytes", ""] > 0
    report = server.health[-1]
    assert report.nginx.is_running
    assert report.nginx.requests_per_second < 100
    assert report.nginx.pid > 0
    assert len(report.config_checksum) == 64


async def test_an_nginx_that_dies_is_started_again_and_the_server_hears_of_it(
    rig: Rig, server: ProxyServerDouble
) -> None:
    port = free_port()
    async with running(rig, server):
        await deploy(server, saying(1, port))
        master = rig.nginx.master()
        assert master is not None
        os.kill(master.pid, signal.SIGKILL)
        await until(lambda: "nginx.started" in [event.event_type for event in server.events])
        assert await get(port) == "1"


async def test_a_crash_is_told_once_however_often_nginx_cannot_be_started(
    rig: Rig, server: ProxyServerDouble
) -> None:
    def told(kind: str) -> int:
        return [event.event_type for event in server.events].count(kind)

    port = free_port()
    async with running(rig, server):
        await deploy(server, saying(1, port))
        text = rig.paths.config.read_text()
        rig.paths.config.write_text("nonsense;")
        master = rig.nginx.master()
        assert master is not None
        os.kill(master.pid, signal.SIGTERM)
        await until(lambda: told("nginx.stopped"))
        tries = len(server.health)
        await until(lambda: len(server.health) > tries + 2)  # each try is followed by a report
        assert (told("nginx.crashed"), told("nginx.stopped"), told("nginx.started")) == (1, 1, 0)
        rig.paths.config.write_text(text)
        await until(lambda: told("nginx.started"))
        assert (told("nginx.crashed"), told("nginx.stopped"), told("nginx.started")) == (1, 1, 1)
        assert await get(port) == "1"


async def test_a_configuration_changed_by_hand_is_told(rig: Rig, server: ProxyServerDouble) -> None:
    async with running(rig, server):
        await deploy(server, saying(1, free_port()))
        with rig.paths.config.open("a") as file:
            file.write("# mine\n")
        await until(lambda: "config.drift" in [event.event_type for event in server.events])
        await until(lambda: "config_drift" in [alert.id for alert in server.health[-1].alerts])


async def test_a_configuration_changed_by_hand_is_repaired_where_that_is_allowed(
    rig: Rig, server: ProxyServerDouble
) -> None:
    port = free_port()
    repairing = replace(TUNING, agent=replace(TUNING.agent, repair_drift=True))
    async with running(rig, server, tuning=repairing):
        await deploy(server, saying(1, port))
        changed = rig.paths.current / "conf.d" / "host-h1.conf"
        changed.write_text(changed.read_text().replace("200 1", "200 mine"))
        await until(lambda: "config.repaired" in [event.event_type for event in server.events])
        told = [event.event_type for event in server.events]
        assert told.index("config.drift") < told.index("config.repaired")
        assert "200 1" in (rig.paths.current / "conf.d" / "host-h1.conf").read_text()
        await until(lambda: "config_drift" not in [alert.id for alert in server.health[-1].alerts])
        assert await get(port) == "1"
        assert server.states(1).count("SUCCESS") == 1, "the version is what it was"


async def test_what_was_set_aside_is_told_with_the_version_and_as_an_alert(
    rig: Rig, server: ProxyServerDouble
) -> None:
    port = free_port()
    async with running(rig, server):
        update = saying(1, port)
        unclosed = pb.Location(path="~ ^/(unclosed", root="/srv/www/nowhere")
        update.virtual_hosts.append(host(port, unclosed, identity="h2", name="b.test"))
        await deploy(server, update)
        (last,) = [status for status in server.statuses if status.status == pb.SUCCESS]
        assert "conf.d/host-h2.conf:" in last.set_aside["virtual_host/h2"]
        assert "virtual host h2" in last.error_message
        await until(lambda: server.health[-1].config_version == 1)
        (alert,) = [one for one in server.health[-1].alerts if one.id.startswith("set_aside:")]
        assert (alert.id, alert.severity) == ("set_aside:virtual_host/h2", "error")
        await deploy(server, saying(2, port))
        await until(lambda: "set_aside:" not in str(server.health[-1].alerts))


async def test_a_server_with_another_store_may_begin_its_versions_anew(
    rig: Rig, server: ProxyServerDouble
) -> None:
    port = free_port()
    server.lineage = "first"
    async with running(rig, server):
        await deploy(server, saying(7, port))
        server.send(config_update=saying(2, port))
        await until(lambda: "FAILED" in server.states(2))
    server.lineage = "second"
    async with running(rig, server):
        await until(lambda: len(server.registrations) == 2)
        await deploy(server, saying(2, port))
        assert await get(port) == "2"


async def test_typed_hosts_are_tried_beside_what_is_served_and_nothing_changes(
    rig: Rig, server: ProxyServerDouble
) -> None:
    port, secure_port = free_port(), free_port()
    async with running(rig, server):
        await deploy(server, saying(1, port))
        released = rig.releases.current()

        async def tried(command_id: str, **candidate: Any) -> dict[str, str]:
            order = pb.ValidateConfigCommand(candidate=pb.ConfigUpdate(**candidate))
            server.send(command=pb.Command(command_id=command_id, validate_config=order))
            await until(lambda: command_id in server.results())
            return server.results()[command_id]

        good = host(port, pb.Location(path="/", upstream_id="u2"), identity="new", name="b.test")
        fine = await tried("a", virtual_hosts=[good], upstreams=[upstream("127.0.0.1:9", identity="u2")])
        assert (fine["success"], fine["message"]) == ("true", "The configuration is valid")
        nowhere = upstream("fleetplane-test.invalid:80", identity="u2")
        unresolved = await tried("b", virtual_hosts=[good], upstreams=[nowhere])
        assert (unresolved["success"], "host not found" in unresolved["message"]) == ("false", True)
        assert "conf.d/upstream-u2.conf:" in unresolved["message"]
        clash = await tried("c", virtual_hosts=[host(port, identity="new")])
        assert "conflicting server name" in clash["message"]
        own = await tried("d", virtual_hosts=[host(port, identity="h1")])
        assert own["success"] == "true", "it takes the place of the host that it is"
        secured = host(secure_port, identity="tls", name="c.test")
        secured.ssl_enabled, secured.ssl_certificate_id = True, "cert-1"
        sent = {"cert-1": pb.Certificate(id="cert-1", domain="c.test", certificate_pem="withheld")}
        assert (await tried("e", virtual_hosts=[secured], certificates=sent))["success"] == "true"
        served = await tried("f")
        assert served["success"] == "true", "what is served is tested alone"
        assert (rig.releases.current(), await get(port)) == (released, "1")
        assert [path.name for path in rig.paths.releases.glob("*-*")].count(released) == 1


async def test_a_dead_upstream_server_is_left_out_and_taken_back(rig: Rig, server: ProxyServerDouble) -> None:
    port = free_port()
    check = pb.HealthCheckConfig(
        enabled=True,
        path="/health",
        interval_seconds=1,
        timeout_seconds=10,
        healthy_threshold=2,
        unhealthy_threshold=2,
    )
    async with backend("one") as one, backend("two") as two, running(rig, server):
        group = upstream(one.address, two.address, health_check=check)
        update = pb.ConfigUpdate(
            version=1, upstreams=[group], virtual_hosts=[host(port, pb.Location(path="/", upstream_id="u1"))]
        )
        await deploy(server, update)
        await _until_answered_by(port, {"one", "two"})

        await two.stop()
        await until(_told(server, "upstream.server_down", two))
        await until(lambda: _settled(rig) and "down;" in _upstreams(rig))
        await _until_answered_by(port, {"one"})
        assert server.health[-1].config_version == 1

        await two.start()
        await until(_told(server, "upstream.server_up", two))
        await until(lambda: _settled(rig) and "down;" not in _upstreams(rig))
        await _until_answered_by(port, {"one", "two"})

        one.status = two.status = 503
        await until(lambda: any(alert.id == "upstream_dead:u1" for alert in server.health[-1].alerts))
        await until(lambda: _settled(rig) and "down;" not in _upstreams(rig))
    assert server.states(1).count("SUCCESS") == 1, "what health checks change is no affair of the server's"


async def _until_answered_by(port: int, names: set[str]) -> None:
    """By all of these and no other, once workers of the configuration before are gone."""
    async with asyncio.timeout(60):
        while {await get(port) for _ in range(10)} != names:
            pass


def _settled(rig: Rig) -> bool:
    journal = journals.read(rig.paths.journal)
    return journal.phase is ChangePhase.LIVE and journal.live == rig.releases.current()


def _upstreams(rig: Rig) -> str:
    return "".join(path.read_text() for path in (rig.paths.current / "conf.d").glob("upstream-*.conf"))


def _told(server: ProxyServerDouble, event_type: str, one: Backend) -> Callable[[], bool]:
    return lambda: any(
        event.event_type == event_type and event.data["server"] == one.address for event in server.events
    )


async def test_a_disk_that_is_full_in_the_middle_of_a_change_costs_neither_agent_nor_service(
    rig: Rig, server: ProxyServerDouble
) -> None:
    port = free_port()
    faults = [StagingStep.RELOADED]

    def witness(step: StagingStep) -> None:
        if step in faults and rig.releases.current().startswith("2-"):
            faults.remove(step)
            raise OSError(28, "No space left on device")

    async with running(rig, server, witness=witness):
        await deploy(server, saying(1, port))
        server.send(config_update=saying(2, port))
        await until(lambda: "SUCCESS" in server.states(2))
        assert server.states(2)[-2:] == ["FAILED", "SUCCESS"]
        assert await get(port) == "2"
        await deploy(server, saying(3, port))


# Logs.


async def test_every_request_is_shipped_once_across_rotation_and_restarts(
    rig: Rig, server: ProxyServerDouble
) -> None:
    import dataclasses

    port = free_port()
    tuning = dataclasses.replace(TUNING, rotate_bytes=4000)
    sent: list[str] = []

    async def visit(count: int) -> None:
        for _ in range(count):
            sent.append(f"/{len(sent)}")
            await get(port, sent[-1])

    async def visit_and_be_read(count: int) -> None:
        """Not so fast that files are too many before they are read: then the oldest goes, by design."""
        for _ in range(count // 10):
            await visit(10)
            await until(lambda: len(server.lines()) == len(sent))

    async with running(rig, server, tuning=tuning):
        await deploy(server, saying(1, port))
        await visit_and_be_read(40)
        await until(lambda: list(rig.paths.logs.glob("access.log.*")))
        await visit_and_be_read(20)
        logs = [path.stat().st_mode & 0o777 for path in rig.paths.logs.iterdir()]
        assert set(logs) == {0o640}, "nobody else on the machine reads who asked for what"
    await visit(20)  # nobody is there to read
    server.acknowledges = False
    async with running(rig, server, tuning=tuning):
        await until(lambda: len(server.lines()) == 80)
    server.acknowledges = True  # what was never acknowledged comes again, under the same ids
    async with running(rig, server, tuning=tuning):
        await visit(10)
        await until(lambda: len(server.lines()) >= 90)
        await until(lambda: _responses(server) == 90)
    assert sorted(entry.fields["uri"] for entry in server.lines()) == sorted(sent)


def _responses(server: ProxyServerDouble) -> float:
    return sum(
        metric.value for metric in server.metrics[-1].metrics if metric.name == "nginx_http_responses_total"
    )


async def test_a_batch_that_is_refused_is_sent_again_by_column_where_the_server_takes_it_so(
    rig: Rig, server: ProxyServerDouble
) -> None:
    def uris() -> list[str]:
        packed = [msgspec.msgpack.decode(one.columns) for one in server.log_batches if one.columns]
        return [uri for one in packed for uri in one["fields"]["uri"]]

    port = free_port()
    server.log_columns = True
    async with running(rig, server):
        await deploy(server, saying(1, port))
        server.refused_logs = 2
        await get(port, "/x")
        await until(lambda: uris() == ["/x"])
        assert server.refused_logs == 0
        assert server.lines() == [], "nothing came twice"


# Commands.


async def test_commands_are_done_and_what_came_of_them_is_told(rig: Rig, server: ProxyServerDouble) -> None:
    port = free_port()

    async def order(identity: str, **command: Any) -> dict[str, str]:
        server.send(command=pb.Command(command_id=identity, **command))
        await until(lambda: identity in server.results())
        return server.results()[identity]

    async with running(rig, server, confinement=await Confinement.probe()):
        await deploy(server, saying(1, port))
        workers = await rig.workers()
        reloaded = await order("r", reload=pb.ReloadCommand(graceful=True))
        assert (reloaded["success"], reloaded["message"]) == ("true", "Nginx reloaded successfully")
        assert not rig.nginx.workers() & workers

        master = rig.nginx.master()
        assert (await order("s", restart=pb.RestartCommand()))["success"] == "true"
        assert rig.nginx.master() != master
        assert await get(port) == "1"

        status = json.loads((await order("q", get_status=pb.GetStatusCommand()))["output"])
        assert (status["running"], status["config_version"]) == (True, 1)

        text = "events {} http { nonsense; }"
        bad = await order("v", validate_config=pb.ValidateConfigCommand(config_content=text))
        assert (bad["success"], "line 1: the directive 'nonsense'" in bad["message"]) == ("false", True)
        text = "events {}\nhttp { server { listen 80; } server {\n listen 80 bad; } }"
        wrong = await order("v2", validate_config=pb.ValidateConfigCommand(config_content=text))
        assert (wrong["success"], 'invalid parameter "bad" in /nginx.conf:3' in wrong["message"]) == (
            "false",
            True,
        ), wrong
        good = await order("w", validate_config=pb.ValidateConfigCommand(config_content="events {}"))
        assert good["success"] == "true"
        evil = await order("x", validate_config=pb.ValidateConfigCommand(config_content="load_module x.so;"))
        assert evil["success"] == "false"
        assert await get(port) == "1"

        workers, answers = await rig.workers(), len(server.events)
        server.send(command=pb.Command(command_id="r", reload=pb.ReloadCommand(graceful=True)))
        await until(lambda: len(server.events) > answers)
        assert rig.nginx.workers() == workers, "a command that comes twice is done once"

        assert (await order("t", stop=pb.StopCommand(graceful=True)))["success"] == "true"
        assert rig.nginx.master() is None
        await until(lambda: "nginx_down" in [alert.id for alert in server.health[-1].alerts])
        assert not server.health[-1].nginx.is_running


async def test_a_rolled_back_version_is_told_with_nginxs_words(rig: Rig, server: ProxyServerDouble) -> None:
    import socket

    port = free_port()
    async with running(rig, server):
        await deploy(server, saying(1, port))
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            holder.listen()
            update = saying(2, port, "1")  # nothing else is new
            update.virtual_hosts.append(host(holder.getsockname()[1], identity="h2"))
            server.send(config_update=update)
            await until(lambda: "ROLLED_BACK" in server.states(2))
        assert "still could not bind()" in server.statuses[-1].error_message
        await until(lambda: server.health[-1].config_version == 1)
        assert await get(port) == "1"
