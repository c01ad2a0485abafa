"""`fleetplane instances open` and tokens for viewers, on a real server."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from support.instances.instances_lab import CONFIG_PATH, document
from support.shared.cli_runner import execute
from support.shared.server_process import ServerProcess, running_server

from fleetplane.cli.contexts import reachable

TENANT = "acme"


def groups(server: ServerProcess, token: str, **headers: str) -> httpx.Response:
    given = {"authorization": f"Bearer {token}", **headers}
    return httpx.get(f"{server.web}/v1/instances/groups", headers=given, trust_env=False)


def test_the_owner_gets_a_link_that_only_looks_and_others_get_tokens(tmp_path: Path) -> None:
    path = tmp_path / "objects" / CONFIG_PATH
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(document(0)))
    here = ("--data-dir", str(tmp_path))
    with running_server(tmp_path, "--only", "instances") as server:
        opened = execute("instances", "open", *here, "--tenant", TENANT)
        assert opened.code == 0, opened.err
        where = urlsplit(opened.out.strip())
        assert (f"{where.scheme}://{where.netloc}", where.path, where.query) == (server.web, "/ui/", "")
        (code,) = parse_qs(where.fragment)["link"]
        with httpx.Client(base_url=server.web, trust_env=False) as browser:
            redeemed = browser.post("/apis/v1/people/console/link", json={"code": code})
            assert redeemed.status_code == 200, redeemed.text
            csrf = {"x-csrf-token": redeemed.json()["csrfToken"]}
            shown = browser.get("/v1/instances/groups")
            assert [group["name"] for group in shown.json()["items"]] == ["workers"]
            seen = browser.get("/apis/v1/groups").json()["items"]
            assert [group["metadata"]["name"] for group in seen] == ["workers"]
            other = browser.get("/v1/instances/groups", headers={"x-tenant-id": "umbrella"})
            assert other.status_code == 403
            scaled = browser.post("/apis/v1/groups/workers/actions/scale", json={"size": 2}, headers=csrf)
            assert scaled.status_code == 403
            old = browser.get("/ui/instances", follow_redirects=True)
        assert (old.url.path, old.headers["content-type"]) == ("/ui/", "text/html; charset=utf-8")
        index = httpx.get(f"{server.web}/", trust_env=False).json()
        assert index["pages"] == []  # not /docs, which this server does not have

        made = execute("tokens", "create", "screen", "--role", "instances.viewer", *here)
        assert made.code == 0, made.err
        kept = groups(server, made.out.strip(), **{"x-tenant-id": TENANT})
        assert kept.json() == shown.json()
        assert execute("tokens", "revoke", "screen", *here).code == 0
        assert groups(server, made.out.strip()).status_code == 401

        refused = execute("instances", "open", *here, "--for", "13h")
        assert refused.code != 0
        assert "session" in refused.err


def test_a_server_of_gpus_alone_has_no_page_of_instances(tmp_path: Path) -> None:
    with running_server(tmp_path, "--only", "gpus") as server:
        assert httpx.get(f"{server.web}/ui/instances", trust_env=False).status_code == 404
        assert httpx.get(f"{server.web}/", trust_env=False).json()["pages"] == []
        assert "Fleetplane" in httpx.get(f"{server.web}/ui/", trust_env=False).text


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("https://0.0.0.0:8443", "https://localhost:8443"),
        ("https://[::]:8443", "https://localhost:8443"),
        ("https://[::1]:8443", "https://[::1]:8443"),
    ],
)
def test_the_link_leads_to_where_a_browser_can_go(address: str, place: str) -> None:
    assert reachable(address) == place
