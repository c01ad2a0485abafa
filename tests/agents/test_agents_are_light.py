"""Agents run on small machines: each loads its own node side, nothing of the server or of another domain."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fleetplane.domains import discovery, own
from fleetplane.domains.declaration import Declaration

OURS = (
    "assembly",
    "endpoints",
    "fleet",
    "kernel.identity",
    "kernel.store",
    "rpc",
    "sections",
    "server",
    "settings",
    "web",
)
SERVER_LIBRARIES = (
    "acme",
    "aiosqlite",
    "alembic",
    "argon2",
    "asyncpg",
    "asyncssh",
    "boto3",
    "dns",
    "h2corn",
    "httpx",
    "josepy",
    "jwt",
    "litestar",
    "obstore",
    "prometheus_client",
    "requests",
    "sqlalchemy",
    "uvloop",
)
TERMINAL_LIBRARIES = ("pygments", "rich")
LARGE, LEAN = ("cryptography",), ("gpus", "instances", "proxies")
"""What these agents do with it, if anything, is done in processes that end at once."""
PLUG_INS = "importlib.metadata"
"""What reads installed packages; only the edge daemon takes tools from them."""
SERVER_ROOMS = ("build", "grpc", "kinds", "live", "rest", "server", "settings")
"""Of the agent's own domain."""
SERVES = {"boards": ("fleetplane.rpc", "h2corn", "prometheus_client")}
"""A board is called by its server, so its agent serves, and counts its calls."""
BOARD_HARDWARE = (
    "fleetplane.domains.boards.agent.buses.buses",
    "fleetplane.domains.boards.agent.buses.ports",
    "fleetplane.domains.boards.agent.buses.ports",
    "fleetplane.domains.boards.agent.gpio.gpiod_chip",
    "fleetplane.domains.boards.agent.gpio.drivers",
    "fleetplane.domains.boards.agent.gpio.sysfs_pwm",
    "fleetplane.domains.boards.agent.metrics.board",
    "fleetplane.domains.boards.agent.metrics.sampler",
    "fleetplane.domains.boards.agent.pins.pins",
    "fleetplane.node.host.psutil_host",
)

AS_IT_STARTS = """
import importlib, json, pkgutil, sys
import fleetplane.cli.main
package, verb = sys.argv[1:]
importlib.import_module(verb)
importlib.import_module(f"{package}.agent.root")
agent = importlib.import_module(f"{package}.agent")
for module in pkgutil.walk_packages(agent.__path__, f"{agent.__name__}."):
    importlib.import_module(module.name)
print(json.dumps(sorted(sys.modules)))
"""
"""The verb and the composition root as a process loads them, then every module that they load later."""
ONE_BY_ONE = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted(sys.modules)))
"""

AGENTS = [
    pytest.param(declaration, verb.target.partition(":")[0], id=verb.name)
    for declaration in discovery.installed().declarations
    if declaration.server.startswith("fleetplane.domains.")
    for verb in declaration.agents
]


def loaded(program: str, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True, timeout=60
    )
    found: list[str] = json.loads(done.stdout)
    return found


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_every_domain_of_ours_declares_an_agent() -> None:
    assert len(AGENTS) >= 5


@pytest.mark.parametrize(("domain", "verb"), AGENTS)
def test_an_agent_loads_only_what_it_needs(domain: Declaration, verb: str) -> None:
    package = domain.server.rpartition(".")[0]
    others = tuple(
        other.server.rpartition(".")[0]
        for other in discovery.installed().declarations
        if other.name != domain.name
    )
    forbidden = (
        *(f"fleetplane.{room}" for room in OURS),
        *(f"{package}.{room}" for room in SERVER_ROOMS),
        *SERVER_LIBRARIES,
        *TERMINAL_LIBRARIES,
        *(LARGE if domain.name in LEAN else ()),
        *(() if domain.name == "edge" else (PLUG_INS,)),
    )
    found = loaded(AS_IT_STARTS, package, verb)

    assert f"{package}.agent.root" in found
    declared = {f"{other}.domain" for other in others}  # the CLI may read declarations, and only them
    assert [name for name in found if within(name, others) and name not in declared.union(others)] == []
    heavy = [name for name in found if within(name, forbidden)]
    assert [name for name in heavy if not within(name, SERVES.get(domain.name, ()))] == []


@pytest.mark.parametrize("name", [name for parameter in AGENTS if (name := str(parameter.id))])
def test_an_agents_verb_is_found_without_reading_installed_packages(name: str) -> None:
    program = (
        "import json, sys\n"
        "from fleetplane.cli.main import run\n"
        f"code = run(['agent', {name!r}, '--help'])\n"
        "print(json.dumps([code, *sorted(sys.modules)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    code, *found = json.loads(done.stdout.splitlines()[-1])
    assert code == 0
    assert done.stdout.startswith(f"Usage: fleetplane agent {name}")
    assert PLUG_INS not in found


def test_domains_of_ours_are_the_same_in_our_folder_and_among_installed_packages() -> None:
    ours = [one for one in discovery.installed().declarations if one.server.startswith("fleetplane.domains.")]
    assert sorted(own.declarations(), key=lambda one: (one.order, one.name)) == ours


def test_hardware_of_boards_is_reached_without_grpc_or_the_server() -> None:
    found = loaded(ONE_BY_ONE, *BOARD_HARDWARE)
    ours = tuple(f"fleetplane.{room}" for room in OURS)
    assert [name for name in found if within(name, (*ours, *SERVER_LIBRARIES, "grpc"))] == []
