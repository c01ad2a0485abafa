"""What callers did, with the old and new values and without secrets, in the log and as events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from support.instances.agents_rig import BOSS
from support.proxies.events_rig import events_rig
from support.proxies.proxy_api import ADMIN_EMAIL, ADMIN_PASSWORD, HOST, UPSTREAM, Api, rest_api

from fleetplane.domains.proxies.audit import FIELDS_LIMIT, SLOTS, VALUE_LIMIT_BYTES, AuditNotes, changes
from fleetplane.domains.proxies.kinds.records import (
    AGENT_TOKEN,
    AUDIT_NOTE,
    SETTINGS,
    AgentTokenSpec,
    SettingsSpec,
    VirtualHostSpec,
)
from fleetplane.fleet.masking import MASK, masked
from fleetplane.kernel.audit.archive import verify_file
from fleetplane.kernel.audit.chain import read
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.resources import AnyKind, AnyResource, Resource

CALLER = f"{BOSS}?request_id=req-7&ip=192.0.2.1&user_agent=curl"


async def log(api: Api, organization: str, query: str = "") -> list[dict[str, Any]]:
    return list((await api.admin.get(f"/organizations/{organization}/audit-log{query}"))["data"])


async def test_the_log_tells_what_a_thing_was_and_what_it_became(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        organization, workspace = await api.workspace()
        made = await api.admin.post(f"/workspaces/{workspace}/virtual-hosts", HOST)
        path = f"/virtual-hosts/{made['id']}"
        await api.admin.patch(path, {"server_name": "b.example", "listen_port": 8080})
        await api.admin.patch(path, {"server_name": "b.example"})
        await api.admin.delete(path)
        deleted, updated, created, *_ = await log(api, organization)

    assert created["action"] == "virtual_host.create"
    assert created["changes"]["server_name"] == [None, "example.com"]
    assert created["resource"] == {"type": "virtual_host", "id": made["id"], "name": "Site"}
    assert updated["action"] == "virtual_host.update", "what changed nothing is no entry"
    assert updated["changes"] == {"server_name": ["example.com", "b.example"], "listen_port": [80, 8080]}
    assert deleted["action"] == "virtual_host.delete"
    assert deleted["changes"]["listen_port"] == [8080, None]
    assert deleted["resource"]["name"] == "Site"


async def test_values_outlive_the_server_and_belong_to_the_chain(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        organization, _ = await api.workspace()
        await api.admin.patch(f"/organizations/{organization}", {"name": "New name"})
        (*_, last) = sorted(await api.store.secret_names("proxies/audit/"))
        blob = await api.store.get_secret(last)
    assert blob is not None
    assert b"New name" not in blob, "it is sealed"
    verdict = await verify_file(tmp_path / "p.db")
    assert verdict.intact, verdict
    async with rest_api(tmp_path) as api:
        (entry,) = await log(api, organization, "?action=organization.update")
    assert entry["changes"] == {"name": ["Org", "New name"]}


async def test_a_change_to_many_things_tells_of_each_where_it_is(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        organization, workspace = await api.workspace()
        below = f"/workspaces/{workspace}"
        upstream = await api.admin.post(f"{below}/upstreams", UPSTREAM)
        host = await api.admin.post(f"{below}/virtual-hosts", HOST)
        await api.admin.post(f"{below}/rollback", {"version": 1}, 200)
        (entry,) = await log(api, organization, "?action=config.rollback")
    told = entry["changes"]
    subject = entry["resource"]["type"]
    other = {"virtual_host": f"upstream.{upstream['id']}.", "upstream": f"virtual_host.{host['id']}."}[
        subject
    ]
    assert told["name"][1] is None
    assert told[f"{other}name"][1] is None


SECRET = "hunter2hunter2"


async def test_no_secret_that_anyone_gave_or_got_is_in_the_log(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        organization, workspace = await api.workspace()
        below = f"/workspaces/{workspace}"
        agent = await api.admin.post(f"{below}/agents/tokens", {"name": "a"})
        token = await api.admin.post("/api-tokens", {"organization_id": organization, "name": "t"})
        header = {"name": "Authorization", "value": f"Bearer {SECRET}", "always": False}
        location = {
            "path": "/",
            "proxy_pass": f"http://backend:80/?token={SECRET}",
            "custom_headers": [header, {"name": "X-Plain", "value": "seen", "always": False}],
            "custom_directives": {"proxy_set_header": f"X-Api-Key {SECRET}"},
        }
        host = {**HOST, "locations": [location]}
        await api.admin.post(f"{below}/virtual-hosts", host)
        settings = await api.admin.call("PUT", f"{below}/settings", {"env_vars": {"DB_PASS": SECRET}})
        await api.admin.post("/users", {"email": "x@example.com", "password": SECRET})
        page = await log(api, organization, "?limit=1000")

    assert settings.status_code == 200, settings.text
    text = json.dumps(page)
    for secret in (SECRET, agent["token"], token["token"]):
        assert secret not in text
    actions = {entry["action"]: entry["changes"] for entry in page}
    assert actions["settings.update"]["env_vars"] == [None, {"DB_PASS": MASK}]
    assert actions["api_token.create"]["name"] == [None, "t"]
    assert "digest" not in json.dumps(actions["agent.enrol"])
    (shown,) = actions["virtual_host.create"]["locations"][1]
    assert [one["value"] for one in shown["custom_headers"]] == [MASK, "seen"]
    assert shown["proxy_pass"] == "http://backend:80/?token=***"
    assert shown["custom_directives"] == {"proxy_set_header": MASK}


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("name", "Site", "Site"),
        ("proxy_pass", "http://10.0.0.1:80", "http://10.0.0.1:80"),
        ("proxy_pass", "http://u:p@h/x", "http://***@h/x"),
        ("uri", "/x?a=1&access_token=abc&b=2", "/x?a=1&access_token=***&b=2"),
        ("password", "x", MASK),
        ("X-Api-Key", "x", MASK),
        ("Set-Cookie", "a=b", MASK),
        ("keepalive_connections", 3, 3),
        ("text", "Basic dXNlcjpwYXNz", "Basic ***"),
        ("text", "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln", MASK),
        ("text", "nxmesh_pat_abcdefghijkl", "nxmesh_pat_***"),
        ("text", "-----BEGIN EC PRIVATE KEY-----\nMHc\n-----END EC PRIVATE KEY-----", MASK),
        ("env_vars", {"HOME": "/root"}, {"HOME": MASK}),
        (
            "nginx_directives",
            {"gzip": "on", "proxy_set_header": "Authorization x"},
            {"gzip": "on", "proxy_set_header": MASK},
        ),
        ("labels", {"env": "production", "token": "x"}, {"env": "production", "token": MASK}),
        (
            "locations",
            [{"path": "/", "headers": {"name": "Cookie", "value": "x"}}],
            [{"path": "/", "headers": {"name": "Cookie", "value": MASK}}],
        ),
        ("nothing", None, None),
    ],
)
def test_what_is_called_or_looks_like_a_secret_is_masked(name: str, value: Any, told: Any) -> None:
    assert masked(value, name) == told


def resource(kind: AnyKind, spec: Any) -> AnyResource:
    return Resource(
        kind=kind.name,
        scope="org/o/ws/w",
        name="n",
        uid="0" * 32,
        labels={},
        spec=spec,
        status=None,
        conditions=(),
        revision=1,
        created_revision=1,
        generation=1,
        created_at_ns=0,
        updated_at_ns=0,
    )


def test_kinds_that_hold_what_nobody_should_know_are_not_described_at_all() -> None:
    token = resource(AGENT_TOKEN, AgentTokenSpec(digest="d", expires_at_ns=1))
    assert changes([(None, token)], token) == {}


def test_what_is_long_or_many_is_counted_instead() -> None:
    long = resource(SETTINGS, SettingsSpec(nginx_directives={"gzip": "x" * VALUE_LIMIT_BYTES}))
    assert changes([(None, long)], long)["nginx_directives"] == (None, f"{VALUE_LIMIT_BYTES + 11} bytes")
    many = [(None, resource(SETTINGS, SettingsSpec()))] * FIELDS_LIMIT
    others = [
        (
            None,
            Resource(**{**{field: getattr(one, field) for field in one.__struct_fields__}, "name": str(n)}),
        )
        for n, (_, one) in enumerate(many)
    ]
    told = changes(others, None)
    assert len(told) == FIELDS_LIMIT + 1
    assert told["..."] == (None, f"and {FIELDS_LIMIT} more fields")


async def test_a_request_cannot_write_its_own_circumstances_into_the_chain(tmp_path: Path) -> None:
    """Not even the one that logs in, which has no caller yet."""
    async with rest_api(tmp_path) as api:
        answer = await api.http.post(
            "/v1/auth/login",
            json={"email": ADMIN_EMAIL, "password": ADMIN_PASSWORD},
            headers={"x-request-id": "r&ip=6.6.6.6"},
        )
        entries = [read(row) async for row in api.store.audit()]
    assert answer.status_code == 200
    (login,) = [entry for entry in entries if entry.actor.startswith("login?")]
    said = parse_qs(login.actor.partition("?")[2])
    assert (said["request_id"], said["ip"]) == (["r&ip=6.6.6.6"], ["127.0.0.1"])


# Events.


async def test_administrators_hear_of_what_was_done_and_others_do_not(tmp_path: Path) -> None:
    async with events_rig(tmp_path) as rig:
        AuditNotes(rig.fleet.store, MasterKey(bytes(32), SystemClock()))
        admin = await rig.listen(await rig.member("ann", "admin"))
        viewer = await rig.listen(await rig.member("vic", "viewer"))
        await admin.ask(action="subscribe", events=["audit.*"], filter={"workspace_id": rig.workspace})
        await viewer.ask(action="subscribe", events=["audit.*", "virtual_host.*"])
        host = await rig.fleet.hosts.create(rig.fleet.scope, _spec(), actor=CALLER)

        heard = await admin.event("audit.created")
        first = await viewer.next()

    about = heard["data"]
    revision = about.pop("revision")
    assert revision > host.revision, "every event of a write has a revision of its own"
    assert about.pop("cursor").startswith(f"{revision}.")
    assert about == {
        "action": "virtual_host.create",
        "actor": {"type": "user", "id": "boss"},
        "resource": {"type": "virtual_host", "id": host.name, "name": "h"},
        "organization_id": rig.organization,
        "workspace_id": rig.workspace,
        "request_id": "req-7",
    }
    assert first["type"] == "virtual_host.created", "the viewer heard that, and of no audit before it"


async def test_what_was_done_while_nobody_listened_is_told_from_the_history(tmp_path: Path) -> None:
    async with events_rig(tmp_path) as rig:
        AuditNotes(rig.fleet.store, MasterKey(bytes(32), SystemClock()))
        since = rig.fleet.store.revision
        made = [
            await rig.fleet.hosts.create(rig.fleet.scope, _spec(f"h{n}"), actor=CALLER)
            for n in range(SLOTS + 3)
        ]
        await rig.caught_up()
        admin = await rig.listen(await rig.member("ann", "admin"))
        await admin.ask(action="subscribe", events=["audit.created"], since=since)
        heard = [(await admin.event("audit.created"))["data"]["resource"]["id"] for _ in made]
    assert heard == [host.name for host in made]


async def test_what_agents_and_the_server_write_is_no_audit_event(tmp_path: Path) -> None:
    async with events_rig(tmp_path) as rig:
        AuditNotes(rig.fleet.store, MasterKey(bytes(32), SystemClock()))
        await rig.fleet.hosts.create(rig.fleet.scope, _spec(), actor="system/acme")
        assert not rig.fleet.store.list(AUDIT_NOTE)


async def test_an_organizations_notes_go_with_it(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        organization, workspace = await api.workspace()
        assert api.store.list(AUDIT_NOTE)
        await api.admin.delete(f"/workspaces/{workspace}")
        await api.admin.delete(f"/organizations/{organization}")
        assert not api.store.list(AUDIT_NOTE)


def _spec(name: str = "h") -> VirtualHostSpec:
    return VirtualHostSpec(name=name, server_name=f"{name}.example", listen_port=80)
