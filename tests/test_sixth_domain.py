"""A domain that is a package of somebody else's: installed, it is there; the house names none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from support.shared.server_process import running_server

from fleetplane.domains import discovery

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tests" / "support" / "sixth_domain"
PAGE = ROOT / "docs" / "adding-a-domain.md"
WAIT_SECONDS = 60.0
HOUSE = (
    "settings.py",
    "server/endpoints.py",
    "server/assembly.py",
    "cli/main.py",
    "cli/lazy.py",
    "agents/running.py",
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One in which the package is installed."""
    site = tmp_path_factory.mktemp("site")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--no-build-isolation",
            "--disable-pip-version-check",
            "--target",
            site,
            PACKAGE,
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    return {"PYTHONPATH": str(site)}


def fleetplane(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fleetplane.cli.main", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )


@contextmanager
def agent(environment: dict[str, str], *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    running = subprocess.Popen(
        [sys.executable, "-m", "fleetplane.cli.main", "agent", "lamp", *arguments],
        env={**os.environ, **environment},
    )
    try:
        yield running
    finally:
        running.terminate()
        running.wait(WAIT_SECONDS)


def test_it_brings_a_kind_a_service_a_route_a_verb_an_agent_and_settings(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    settings = ("--only", "lamps", "--set", "listeners.lamps.addresses=127.0.0.1:0", "--set", "lamps.limit=1")
    with running_server(tmp_path, *settings, environment=environment) as server:
        address = server.address("lamps", "http://").removeprefix("http://")
        with agent(environment, "--address", address, "--name", "porch"):
            deadline = time.monotonic() + WAIT_SECONDS
            while (
                told := fleetplane(environment, "lamps", "list", "--data-dir", str(tmp_path))
            ).stdout == "":
                assert told.returncode == 0, told.stderr
                assert time.monotonic() < deadline
        assert told.stdout == "porch  lit\n"

        made = fleetplane(
            environment, "tokens", "create", "eye", "--role", "lamps.viewer", "--data-dir", str(tmp_path)
        )
        token = made.stdout.split()[-1]
        seen = httpx.get(f"{server.web}/v1/lamps", headers={"authorization": f"Bearer {token}"})
        assert seen.content == b'{"items":[{"name":"porch","lit":true}]}'
        assert httpx.get(f"{server.web}/v1/lamps").status_code == 401
        why = fleetplane(environment, "explain", "lamps", "lamp", "porch", "--data-dir", str(tmp_path))
        assert (why.returncode, why.stdout) == (0, ""), "it is lit"
        seen = httpx.get(
            f"{server.web}/v1/fleet/explain/lamps/lamp/porch", headers={"authorization": f"Bearer {token}"}
        )
        assert (seen.status_code, seen.json()["findings"]) == (200, [])

        with agent(environment, "--address", address, "--name", "cellar") as refused:
            assert refused.wait(WAIT_SECONDS) != 0  # lamps.limit=1
        assert server.stop() == 0


def test_its_verbs_are_offered_only_where_it_is_installed(environment: dict[str, str]) -> None:
    assert "Lamps, and whether they are lit." in fleetplane(environment, "--help").stdout
    assert "Report a lamp" in fleetplane(environment, "agent", "--help").stdout
    assert "lamps" not in fleetplane({}, "--help").stdout
    unknown = fleetplane({}, "server", "--only", "lamps")
    assert (unknown.returncode, "'lamps' is not one of" in unknown.stderr) == (2, True)


def test_its_agent_loads_nothing_of_the_server(environment: dict[str, str]) -> None:
    code = "import json, sys, fleetplane_lamps.agent; print(json.dumps(sorted(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, check=True
    ).stdout
    heavy = ("fleetplane.kernel.store", "fleetplane.web", "fleetplane.settings", "litestar", "sqlalchemy")
    assert [name for name in json.loads(loaded) if name.startswith(heavy)] == []


@pytest.mark.parametrize("name", HOUSE)
def test_the_house_names_no_domain(name: str) -> None:
    text = (ROOT / "src" / "fleetplane" / name).read_text()
    named = [one.name for one in discovery.installed().declarations if f"domains.{one.name}" in text]
    assert named == []


def printed(page: Path) -> Sequence[tuple[str, str]]:
    """Every file that the page prints, by the name it prints it under."""
    return re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', page.read_text(), re.MULTILINE | re.DOTALL)


def test_the_page_prints_the_package_that_is_tested() -> None:
    files = dict(printed(PAGE))
    assert set(files) >= {
        "pyproject.toml",
        "src/fleetplane_lamps/domain.py",
        "src/fleetplane_lamps/server.py",
    }
    for name, text in files.items():
        assert text == (PACKAGE / name).read_text(), name


def test_a_declaration_that_cannot_be_read_is_named_with_its_package() -> None:
    from importlib.metadata import EntryPoint

    broken = EntryPoint(name="torn", value="no_such_package.domain:DOMAIN", group=discovery.GROUP)
    found = discovery.read([broken])

    assert found.declarations == ()
    assert found.broken[0].package == "no_such_package"
    with pytest.raises(Exception, match="'torn' of the package no_such_package cannot be loaded"):
        found.named("torn")
