"""Agents replace themselves by releases that their own server serves, and go back from bad ones.

Real agents under the launcher, in a network that has nothing but the server.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from support.fleet import stranger
from support.fleet.releases_kit import HANGS, MAIN, ROOT, build_wheel, tiny_wheel
from support.fleet.upgrade_site import LaunchedAgent, UpgradeSite, until, upgrade_site
from support.shared.cli_runner import COMMAND

import fleetplane
from fleetplane.cli.clients.rest_client import connect
from fleetplane.client.places import Place

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="making a network needs root")

INSTALLED = fleetplane.__version__
GOOD, HANGING = "99.1.0", "99.2.0"
PASSWORD = "a password of some length"
KEY_FILE = "release.key"
INSTANCES = ROOT / "docs/examples/instances/local.jsonc"
PATIENT = {
    '"size": 2': '"size": 1',
    '"health_check_interval": "2s"': '"health_check_interval": "10m"',
    '"registration_timeout": "1m"': '"registration_timeout": "1h"',
}
"""One instance, which is not replaced because it was slow to come or to come back."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpgradeSite]:
    folder = tmp_path_factory.mktemp("upgrades")
    good = build_wheel(folder, GOOD)
    hanging = tiny_wheel(folder, HANGING, {MAIN: HANGS, "fleetplane/cli/__init__.py": b""})
    settings = ("instances.advertise=listeners", f"instances.agent_command={_instance_program(folder)}")
    shard = folder / "data/objects/shard/local"
    shard.mkdir(parents=True)
    (folder / "data").chmod(0o700)
    document = INSTANCES.read_text()
    for printed, meant in PATIENT.items():
        assert printed in document
        document = document.replace(printed, meant)
    (shard / "config.jsonc").write_text(document)
    given = [word for one in settings for word in ("--set", one)]
    with upgrade_site(folder, *given, admin_password=PASSWORD) as made:
        made.owner("releases", "add", str(good))
        made.owner("releases", "add", str(hanging), "--hello", "1s")
        yield made


def _instance_program(folder: Path) -> Path:
    """What the provider `local` starts as an instance: the launcher, once there is a key to give it."""
    program = folder / "instance.sh"
    words = [*COMMAND, "agent", "launch", "--releases", str(folder / "releases-instances"), "--release-key"]
    program.write_text(
        f"#!/bin/sh\nwhile [ ! -s {folder / KEY_FILE} ]; do sleep 0.1; done\n"
        f'exec {" ".join(words)} "$(cat {folder / KEY_FILE})" instance\n'
    )
    program.chmod(0o755)
    return program


def edge(site: UpgradeSite) -> LaunchedAgent:
    token = site.owner("edge", "token", "--name", "build-7", "--tenant", "acme")
    state = str(site.folder / "edge-state")
    site.run("agent", "edge", "enroll", token, "--state-dir", state)
    return site.launch("edge", "edge", "run", "--state-dir", state)


def board(site: UpgradeSite) -> LaunchedAgent:
    token = site.owner("boards", "join-token", "create", "--name", "attic").splitlines()[0]
    state = ("--simulate", "--state-dir", str(site.folder / "board-state"))
    server = site.server.address("boards", "https").removeprefix("https://")
    site.run("agent", "board", "join", token, "--server", server, "--name", "attic", *state)
    return site.launch("boards", "board", "run", "--address", "127.0.0.1", "--port", "0", *state)


def gpu(site: UpgradeSite) -> LaunchedAgent:
    return site.launch("gpus", "gpu", "--simulate", "1", "--address", site.server.socket)


def instance(site: UpgradeSite) -> LaunchedAgent:
    """The server's own provider has started it, and it waits for the key."""
    (site.folder / KEY_FILE).write_text(site.key)
    log = site.folder / "data/instances"
    return LaunchedAgent(process=None, releases=site.folder / "releases-instances", log=log)


def proxy(site: UpgradeSite) -> LaunchedAgent:
    place = Place(data_dir=site.data)
    with connect(place) as rest:
        account = {"email": "admin@fleetplane.local", "password": PASSWORD}
        token = rest.call("POST", "/v1/auth/login", body=account)["access_token"]
    with connect(place, headers={"authorization": f"Bearer {token}"}) as rest:
        made = rest.call("POST", "/v1/organizations", body={"name": "Acme", "slug": "acme"})["id"]
        body = {"name": "Production", "slug": "production"}
        workspace = rest.call("POST", f"/v1/organizations/{made}/workspaces", body=body)["id"]
        enrolled = rest.call("POST", f"/v1/workspaces/{workspace}/agents/tokens", body={"name": "web-1"})
    (site.folder / "agent.token").write_text(enrolled["token"])
    ca = subprocess.run(
        site.inside("curl", "-fsS", f"{site.server.web}/.well-known/ca.pem"), capture_output=True, check=True
    )
    (site.folder / "ca.pem").write_bytes(ca.stdout)
    address = site.server.address("proxy-agents", "https").removeprefix("https://")
    trust = ("--ca-file", str(site.folder / "ca.pem"), "--token-file", str(site.folder / "agent.token"))
    state = ("--managed", "--stop-nginx-on-exit", "--state-dir", str(site.folder / "proxy-state"))
    return site.launch("proxies", "proxy", "--server", address, *trust, *state)


LISTENERS = {
    "boards": "boards",
    "edge": "edge",
    "gpus": "device-api",
    "instances": "agent",
    "proxies": "proxy-agents",
}
REFUSALS = {
    "boards": "UNAUTHENTICATED",
    "edge": "UNAUTHENTICATED",
    "gpus": "PERMISSION_DENIED",  # at its port on loopback, which every user of the machine reaches
    "instances": "UNAVAILABLE",  # there is no connection without a certificate
    "proxies": "UNAUTHENTICATED",
}
START: Mapping[str, Callable[[UpgradeSite], LaunchedAgent]] = {
    "boards": board,
    "edge": edge,
    "gpus": gpu,
    "instances": instance,
    "proxies": proxy,
}


@pytest.mark.timeout(900)
def test_each_of_the_five_agents_is_upgraded_and_goes_back_from_what_never_says_hello(
    site: UpgradeSite,
) -> None:
    agents = {domain: start(site) for domain, start in START.items()}
    for domain in agents:
        until(lambda: site.runs(domain, INSTALLED), f"the installed agent of {domain} checks in")  # noqa: B023
    assert refusals(site) == REFUSALS

    # A release that is good.
    rollouts = {domain: site.roll_out(domain, GOOD) for domain in agents}
    for domain, agent in agents.items():
        assert site.ended(rollouts[domain], "done")["counts"]["confirmed"] == 1
        until(lambda: agent.current() == GOOD, f"the release is in force at {domain}")  # noqa: B023
        assert site.runs(domain, GOOD)

    # One that never says hello: each goes back by itself, and says why.
    rollouts = {domain: site.roll_out(domain, HANGING, on_halt="roll_back") for domain in agents}
    for domain, agent in agents.items():
        ended = site.ended(rollouts[domain], "rolled_back")
        assert "did not say hello" in str(ended["history"]), ended
        until(lambda: site.runs(domain, GOOD), f"{domain} runs the good one again")  # noqa: B023
        (said,) = site.said(domain).values()
        assert (said["failedVersion"], said["failedReason"]) == (HANGING, "it did not say hello within 1 s")
        assert agent.current() == GOOD
        assert agent.process is None or agent.process.poll() is None

    # The way back to the installed version, of which there is no release; and an end as any agent's.
    daemon = agents["edge"]
    site.ended(site.roll_out("edge", INSTALLED), "done")
    until(lambda: daemon.current() == "", "the installed version is in force")
    assert site.runs("edge", INSTALLED)
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(60) == 0


def refusals(site: UpgradeSite) -> Mapping[str, str]:
    """How each listener answers somebody who is no agent of its domain."""
    addresses = {
        domain: next(one for one in site.server.listeners[name] if one.startswith("http"))
        for domain, name in LISTENERS.items()
    }
    program = site.inside(sys.executable, str(stranger.__file__), json.dumps(addresses))
    done = subprocess.run(
        [*program, str(site.folder / "ca.pem")], capture_output=True, check=True, timeout=120
    )
    answers: Mapping[str, str] = json.loads(done.stdout)
    return answers
