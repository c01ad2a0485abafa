"""Configuration of daemons over REST, on a server of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.shared.server_process import ServerProcess, running_server

from fleetplane.cli.clients.owner_client import OperatorsClient
from fleetplane.gen.fleetplane.admin.v1 import operators_pb2 as pb

NOBODY = "11111111-2222-4333-8444-555555555555"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("edge"), "--only", "edge") as server:
        yield server


def client(server: ServerProcess, *roles: str, tenant: str) -> httpx.Client:
    with OperatorsClient(server.log.parent, call_seconds=60) as owner:
        opened = owner.call("OpenSession", pb.OpenSessionRequest(roles=roles, tenant=tenant))
    headers = {"authorization": f"Bearer {opened.token}", "x-tenant-id": tenant}
    return httpx.Client(base_url=f"{opened.web_addresses[0]}/v1/edge", headers=headers, timeout=60)


@pytest.fixture
def acme(server: ServerProcess) -> Iterator[httpx.Client]:
    with client(server, "edge.admin", tenant="acme") as acme:
        yield acme
        acme.delete("/config")


def shown(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_what_is_set_for_a_tenant_can_be_seen_replaced_and_unset(acme: httpx.Client) -> None:
    assert shown(acme.get("/config")) == {
        "layer": None,
        "set_by": None,
        "merged": None,
        "version": None,
        "applied_version": None,
        "acknowledged": False,
    }
    first = shown(acme.put("/config", json={"spec": {"a": 1, "b": 2}}))
    assert first["layer"] == first["merged"] == {"spec": {"a": 1, "b": 2}}
    second = shown(acme.put("/config", json={"spec": {"b": 3}}))
    assert second["merged"] == {"spec": {"b": 3}}, "a layer is replaced as a whole"
    assert second["version"] != first["version"]
    assert acme.delete("/config").status_code == 204
    assert acme.delete("/config").status_code == 404


def test_another_tenant_has_its_own_and_sees_no_other(server: ServerProcess, acme: httpx.Client) -> None:
    shown(acme.put("/config", json={"spec": {"secret": "ours"}}))
    with client(server, "edge.admin", tenant="other") as other:
        assert shown(other.get("/config"))["merged"] is None


def test_a_daemon_that_is_not_there_has_no_configuration(acme: httpx.Client) -> None:
    for method in ("GET", "PUT", "DELETE"):
        body: dict[str, str] | None = {} if method == "PUT" else None
        assert acme.request(method, f"/hosts/{NOBODY}/config", json=body).status_code == 404


@pytest.mark.parametrize("body", [b"[1]", b"{", b'"text"', b""])
def test_what_is_no_object_is_refused(acme: httpx.Client, body: bytes) -> None:
    answer = acme.put("/config", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert acme.get("/config").json()["layer"] is None


def test_a_layer_that_is_too_large_is_refused_and_changes_nothing(acme: httpx.Client) -> None:
    shown(acme.put("/config", json={"spec": {"a": 1}}))
    answer = acme.put("/config", json={"spec": {"x": "y" * (300 * 1024)}})
    assert answer.status_code == 400
    assert shown(acme.get("/config"))["layer"] == {"spec": {"a": 1}}


def test_who_may_only_look_changes_nothing(server: ServerProcess) -> None:
    with client(server, "aegis.edge.hosts.read", tenant="acme") as reader:
        assert reader.get("/config").status_code == 200
        assert reader.put("/config", json={}).status_code == 403
        assert reader.delete("/config").status_code == 403


def test_every_operation_of_the_document_has_a_name_of_its_own(acme: httpx.Client) -> None:
    document = acme.get("/openapi.json").json()
    names = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(names) == len(set(names))


def test_who_may_only_read_sees_no_secret_and_writers_and_daemons_have_them(
    server: ServerProcess, acme: httpx.Client
) -> None:
    document: dict[str, Any] = {
        "db": {"password": "hunter2", "pin": 4711, "api_key": 17, "port": 5432},
        "hooks": [{"name": "Authorization", "value": "Bearer abcdefgh"}],
        "environment": {"HOME": "/root"},
        "env": ["A=hunter2", {"name": "B", "value": "hunter2"}],
        "url": "https://u:hunter2@host/",
    }
    assert shown(acme.put("/config", json=document))["layer"] == document
    assert shown(acme.get("/config"))["merged"] == document
    with client(server, "aegis.edge.hosts.read", tenant="acme") as viewer:
        told = viewer.get("/config")
        assert (
            shown(told)["layer"]
            == shown(told)["merged"]
            == {
                "db": {"password": "***", "pin": 4711, "api_key": "***", "port": 5432},
                "hooks": [{"name": "Authorization", "value": "***"}],
                "environment": {"HOME": "***"},
                "env": ["A=***", {"name": "B", "value": "***"}],
                "url": "https://***@host/",
            }
        )
        masked = shown(told)["layer"]
    masked["db"]["port"] = document["db"]["port"] = 5433
    assert shown(acme.put("/config", json=masked))["layer"] == document
    refused = acme.put("/config", json={"db": {"password": "***", "token": "***"}})
    assert refused.status_code == 400, refused.text
    assert "db.token is masked" in refused.text
