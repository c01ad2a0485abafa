"""Marked secrets, planted through every field that may hold one: nothing that is written shows them."""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.edge.shipped_daemon import ShippedDaemon
from support.shared.cli_runner import execute
from support.shared.server_process import ServerProcess, running_server

from fleetplane.cli.clients.owner_client import OperatorsClient
from fleetplane.gen.fleetplane.admin.v1 import operators_pb2 as pb

MARK = "Zq7planted"
ACME, PROD = "/tenants/acme", "/tenants/acme/workspaces/prod"


class Planted:
    """Each secret has its own number, so that what is found tells through which field it came."""

    def __init__(self) -> None:
        self.fields: list[str] = []

    def __call__(self, field: str) -> str:
        self.fields.append(field)
        return f"{MARK}{len(self.fields) - 1:03d}"

    def found(self, content: bytes) -> list[str]:
        return [
            field for number, field in enumerate(self.fields) if f"{MARK}{number:03d}".encode() in content
        ]


def _objects(secret: Planted) -> Iterator[dict[str, Any]]:
    def made(kind: str, name: str, scope: str, **spec: Any) -> dict[str, Any]:
        return {"kind": kind, "metadata": {"name": name, "scope": scope}, "spec": spec}

    yield made("organization", "acme", ACME, displayName="Acme")
    yield made("workspace", "prod", ACME, displayName="Prod")
    yield made("workspace-settings", "global", PROD, envVars={"DB_PASSWORD": secret("env_vars")})
    header = {"name": "Authorization", "value": f"Bearer {secret('custom header')}", "always": False}
    location = {
        "path": "/",
        "proxyPass": f"http://backend:80/?token={secret('proxy_pass')}",
        "customHeaders": [header],
        "customDirectives": {"proxy_set_header": f"X-Api-Key {secret('custom directive')}"},
    }
    yield made("virtual-host", "site", PROD, serverName="site.example", listenPort=80, locations=[location])
    yield made(
        "edge-config",
        "tenant",
        ACME,
        config={"db": {"password": secret("edge config"), "env": {"A": secret("edge config env")}}},
    )
    program = {
        "name": "blink",
        "command": "/usr/bin/blink",
        "args": ["--password", secret("board set argument")],
        "environment": {"TOKEN": secret("board set environment")},
    }
    yield made("board-set", "lamps", "/tenants/default", selector="role=none", programs=[program])


class Site:
    def __init__(self, server: ServerProcess, token: str) -> None:
        self.server = server
        self.headers = {"authorization": f"Bearer {token}", "x-tenant-id": "acme"}
        self.http = httpx.Client(base_url=server.web, headers=self.headers, timeout=60)

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        answer = self.http.request(method, path, json=body, headers=headers)
        assert answer.status_code < 300, answer.text
        return answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planted") / "data"


def _plant(site: Site, secret: Planted) -> None:
    plan = site.call("POST", "/apis/v1/plans", {"objects": list(_objects(secret))}).json()
    site.call("POST", f"/apis/v1/plans/{plan['id']}/apply")
    later = [thing for thing in _objects(secret) if thing["kind"] == "edge-config"]
    site.call("POST", "/apis/v1/plans", {"objects": later})
    site.call("PUT", "/v1/edge/config", {"password": secret("edge config over REST")})
    invitation = site.call("POST", "/v1/edge/enrollment-tokens", {}).json()
    address = site.server.address("edge", "http").removeprefix("http://")
    daemon = asyncio.run(ShippedDaemon.enroll(address, invitation["token"]))
    run = {
        "target": f"@{daemon.node_id}",
        "tool": "cmd.run",
        "args": {
            "command": "true",
            "args": [secret("run argument")],
            "env": {"A": secret("run environment")},
            "stdin": secret("run input"),
        },
        "durable": True,
    }
    site.call("POST", "/v1/edge/fleet/invoke", run, accept="application/json")


def _processes() -> Iterator[tuple[str, bytes]]:
    """What others may read of programs that run."""
    for one in Path("/proc").glob("[0-9]*"):
        try:
            yield f"cmdline of {one.name}", (one / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue


def _written(folder: Path) -> Iterator[tuple[str, bytes]]:
    for one in folder.rglob("*"):
        if one.is_file():
            yield str(one.relative_to(folder)), one.read_bytes()


def test_marked_secrets_are_found_nowhere(folder: Path, tmp_path: Path) -> None:
    secret = Planted()
    with running_server(folder) as server:
        with OperatorsClient(folder, call_seconds=60) as owner:
            opened = owner.call("OpenSession", pb.OpenSessionRequest(roles=["owner", "edge.admin"]))
        site = Site(server, opened.token)
        _plant(site, secret)
        shown = [("export", site.call("GET", "/apis/v1/export").content)]
        shown += [("metrics", site.call("GET", "/metrics").content)]
        shown += list(_processes())
        shown += list(_written(folder))
        site.http.close()
        done = execute("backup", str(tmp_path / "backup.tar"), "--data-dir", str(folder))
        assert done.code == 0, done.err
        assert server.stop() == 0
    shown += [(f"stopped: {name}", content) for name, content in _written(folder)]
    with tarfile.open(tmp_path / "backup.tar") as backup:
        for member in backup:
            if (file := backup.extractfile(member)) is not None:
                shown.append((f"backup: {member.name}", file.read()))
    found = {where: fields for where, content in shown if (fields := secret.found(content))}
    # Sealed where they are stored, but shown to whoever may read sets of boards; see docs/operations.md.
    assert found.pop("export", []) == ["board set argument", "board set environment"]
    assert found == {}
    assert len(secret.fields) >= 12
