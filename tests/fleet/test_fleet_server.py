"""`explain` and `freeze` through a whole server: one verb and one route each, for every domain."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.shared.cli_runner import Outcome
from support.shared.server_process import ServerProcess, running_server

from fleetplane.cli.main import run

PASSWORD = "a very long password"
EMAIL = "boss@example.com"


def execute(*words: str) -> Outcome:
    """Run one command in this process: a hundred interpreters would take a minute to start."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = run(words)
    return Outcome(code=code, out=out.getvalue(), err=err.getvalue())


class Site:
    def __init__(self, folder: Path, server: ServerProcess) -> None:
        self.folder = folder
        self.server = server

    def run(self, *words: str) -> Outcome:
        return execute(*words, "--data-dir", str(self.folder))

    def token(self, name: str, role: str, tenant: str = "") -> str:
        where = ("--tenant", tenant) if tenant else ()
        made = self.run("tokens", "create", name, "--role", role, *where)
        assert made.code == 0, made.err
        return made.out.split()[-1]

    def ask(self, method: str, path: str, token: str = "", **more: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        url = f"{self.server.web}/v1/fleet{path}"
        return httpx.request(method, url, headers=headers, timeout=60, **more)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("f")
    settings = ("--set", f"proxies.admin_email={EMAIL}")
    with running_server(folder, *settings, admin_password=PASSWORD) as server:
        yield Site(folder, server)


def test_the_owner_asks_about_things_of_every_domain_with_one_verb(site: Site) -> None:
    kinds = json.loads(site.run("explain", "--kinds", "-o", "json").out)
    assert {(one["domain"], one["kind"]) for one in kinds} == {
        ("boards", "board"),
        ("boards", "pin"),
        ("edge", "daemon"),
        ("edge", "worker"),
        ("fleetwide", "rollout"),
        ("gpus", "gpu"),
        ("gpus", "provider"),
        ("instances", "group"),
        ("instances", "instance"),
        ("proxies", "agent"),
        ("proxies", "certificate"),
        ("proxies", "host"),
    }
    for one in kinds:
        assert site.run("explain", one["domain"], one["kind"], "nobody").code == 4
    assert site.run("explain", "edge", "daemom", "x").code == 4
    assert site.run("explain", "edge", "daemon").code == 4  # of a kind and a name
    assert site.run("explain", "default/workers").code == 4, "as before: a group of instances"


def test_a_gpu_is_explained_to_the_owner_and_to_whoever_may_read_it(site: Site) -> None:
    address = ("--address", site.server.socket)
    assert execute("gpus", "register", "gpu-7", "--uuid", "GPU-7", *address).code == 0
    done = execute("gpus", "set-condition", "gpu-7", "Ready=False", "--reason", "Fell", *address)
    assert done.code == 0, done.err

    found = site.run("explain", "gpus", "gpu", "gpu-7")
    assert found.code == 0
    assert "Ready is False" in found.out
    told = json.loads(site.run("explain", "gpus", "gpu", "gpu-7", "-o", "json").out)
    viewer = site.token("eye", "gpus.viewer")
    seen = site.ask("GET", "/explain/gpus/gpu/gpu-7", viewer).json()
    assert [one["reasons"] for one in seen["findings"]] == [one["reasons"] for one in told["findings"]]
    assert set(seen) == set(told)
    elsewhere = execute(
        "explain", "gpus", "gpu", "gpu-7", "--server", site.server.web, "--token-file", _kept(site, viewer)
    )
    assert "Ready is False" in elsewhere.out


def _kept(site: Site, token: str) -> str:
    path = site.folder / "token"
    path.write_text(token)
    return str(path)


def test_nobody_is_answered_without_the_readers_permission(site: Site) -> None:
    path = "/explain/gpus/gpu/gpu-7"
    assert site.ask("GET", path).status_code == 401
    assert site.ask("GET", path, "made up").status_code == 401
    assert site.ask("GET", path, site.token("e", "edge.admin")).status_code == 403
    assert site.ask("GET", path, site.token("o", "fleet.operator")).status_code == 403
    other = site.token("g", "gpus.viewer", tenant="other")
    assert site.ask("GET", path, other).status_code == 404
    assert site.ask("GET", path, other, params={"scope": "tenant/default"}).status_code == 403
    assert site.ask("GET", path, other, params={"tenant": "default"}).status_code == 422


def test_a_tenant_learns_nothing_of_anothers_daemon(site: Site) -> None:
    acme = site.token("a", "edge.admin", tenant="acme")
    for name in ("11111111-2222-3333-4444-555555555555", "x" * 1500, "..%2f..%2fetc", "%00", "é"):
        answer = site.ask("GET", f"/explain/edge/daemon/{name}", acme)
        assert answer.status_code in (404, 422), (name, answer.text)
    assert site.ask("GET", "/explain/edge/worker/w", acme).status_code == 404
    assert site.ask("GET", "/explain/nope/daemon/x", acme).status_code == 404
    assert site.ask("GET", "/explain/edge/nope/x", acme).status_code == 404


def test_members_ask_about_their_organisations_and_strangers_find_nothing(site: Site) -> None:
    web = site.server.web
    login = httpx.post(f"{web}/v1/auth/login", json={"email": EMAIL, "password": PASSWORD}).json()
    boss = {"authorization": f"Bearer {login['access_token']}"}
    org = httpx.post(f"{web}/v1/organizations", json={"name": "Acme", "slug": "acme"}, headers=boss).json()
    ws = httpx.post(
        f"{web}/v1/organizations/{org['id']}/workspaces", json={"name": "P", "slug": "p"}, headers=boss
    ).json()
    host = httpx.post(
        f"{web}/v1/workspaces/{ws['id']}/virtual-hosts",
        headers=boss,
        json={"name": "Site", "server_name": "example.com", "listen_port": 80},
    ).json()
    path = f"/explain/proxies/host/{host['id']}"

    told = site.ask("GET", path, login["access_token"]).json()
    assert [one["code"] for one in told["findings"][0]["reasons"]] == ["NO_AGENT"]
    assert told["scope"] == f"org/{org['id']}/ws/{ws['id']}"
    other = httpx.post(f"{web}/v1/organizations", json={"name": "O", "slug": "o"}, headers=boss).json()
    stranger = httpx.post(
        f"{web}/v1/api-tokens", headers=boss, json={"organization_id": other["id"], "name": "t"}
    ).json()["token"]
    missing = site.ask("GET", path, stranger)
    assert missing.status_code == 404
    nobodys = site.ask("GET", path[:-4] + "0000", stranger)
    assert (
        missing.json()["error"]["message"].replace(host["id"], host["id"][:-4] + "0000")
        == (nobodys.json()["error"]["message"])
    )
    assert site.ask("GET", path, site.token("p", "edge.admin")).status_code == 404, "known, and a stranger"

    frozen = site.run("freeze", "--domain", "proxies", "--scope", f"org/{org['id']}", "--reason", "audit")
    assert frozen.code == 0, frozen.err
    told = site.ask("GET", path, login["access_token"]).json()
    assert told["frozen"]["reason"] == "audit"
    assert told["findings"][0]["reasons"][0]["code"] == "FROZEN"


def test_freezes_are_set_listed_and_lifted_with_one_verb_each(site: Site) -> None:
    assert site.run("freeze", "--reason", "all", "--for", "1h").out.startswith(
        "every domain is frozen until 2"
    )
    done = site.run("freeze", "--domain", "edge", "--scope", "tenant/acme", "--reason", "works")
    assert done.out == "edge at tenant/acme is frozen until lifted\n"
    listed = json.loads(site.run("freezes", "-o", "json").out)
    assert (["edge"], "tenant/acme", "works") in [
        (one["domains"], one["scope"], one["reason"]) for one in listed
    ]
    assert site.run("instances", "unfreeze").code == 4, "the freeze of every domain is not one of instances"
    assert "all" in site.run("instances", "freezes").out, "and holds for instances too"
    assert "works" not in site.run("instances", "freezes").out

    assert site.run("unfreeze", "--domain", "edge", "--scope", "tenant/acme").code == 0
    assert site.run("unfreeze", "--domain", "edge", "--scope", "tenant/acme").code == 4
    assert site.run("unfreeze").code == 0
    assert site.run("freeze", "--domain", "cats", "--reason", "r").code == 2
    assert site.run("freeze", "--scope", "nowhere", "--reason", "r").code == 2


def test_freezes_over_rest_are_bounded_by_the_tokens_role_and_scope(site: Site) -> None:
    acme = site.token("fa", "fleet.operator", tenant="acme")
    body = {"scope": "tenant/acme", "domains": ["edge", "instances"], "reason": "works"}
    made = site.ask("POST", "/freezes", acme, json=body)
    assert made.status_code == 201, made.text
    assert [one["domains"] for one in made.json()["freezes"]] == [["edge"], ["instances"]]

    for scope in ("", "tenant/other", "boards"):
        assert site.ask("POST", "/freezes", acme, json={**body, "scope": scope}).status_code == 403
        refused = site.ask("DELETE", "/freezes", acme, params={"scope": scope, "domain": "edge"})
        assert refused.status_code == 403
    viewer = site.token("fv", "fleet.viewer", tenant="acme")
    assert site.ask("POST", "/freezes", viewer, json=body).status_code == 403
    assert len(site.ask("GET", "/freezes", viewer).json()["freezes"]) == 2
    assert site.ask("GET", "/freezes", site.token("fo", "fleet.viewer", tenant="other")).json() == {
        "freezes": []
    }
    assert site.ask("GET", "/freezes", site.token("fx", "edge.admin")).status_code == 403
    mistakes: Sequence[dict[str, object]] = (
        {"expires_at": "2001-01-01T00:00:00Z"},
        {"expires_at": "soon"},
        {"domains": []},
        {"more": 1},
        {"reason": ""},
        {"reason": "x" * 5000},
        {"scope": "tenant/acme/nothing/x"},
        {"domains": ["gpus"]},
    )
    for wrong in mistakes:
        assert site.ask("POST", "/freezes", acme, json={**body, **wrong}).status_code == 422, wrong

    done = site.ask(
        "DELETE",
        "/freezes",
        acme,
        params=[("scope", "tenant/acme"), ("domain", "edge"), ("domain", "instances")],
    )
    assert done.status_code == 204
    again = site.ask("DELETE", "/freezes", acme, params={"scope": "tenant/acme", "domain": "edge"})
    assert again.status_code == 404
    assert made.json()["freezes"][0]["actor"] == "token/fa"


def test_the_document_describes_all_of_them(site: Site) -> None:
    document = httpx.get(f"{site.server.web}/v1/fleet/openapi.json").json()
    rollouts = {path for path in document["paths"] if path.startswith("/rollout")}
    others = {"/explain", "/explain/{domain}/{kind}/{name}", "/freezes", "/audit/verify"}
    assert set(document["paths"]) == others | rollouts
    assert {"/rollouts", "/rollouts/{rollout_id}/undo", "/rollout-plans", "/rollout-policies"} <= rollouts
    assert set(document["paths"]["/freezes"]) == {"get", "post", "delete"}
