"""REST for operators of edge daemons: who may do what for whom, in both shapes, page by page."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from support.edge.edge_company import at_work
from support.edge.edge_site import PREFIX, Rest, Site, a_tenant, site, until
from support.edge.shipped_daemon import ShippedDaemon

from fleetplane.domains.edge import access
from fleetplane.domains.edge.rest.common import Manner
from fleetplane.web.rest.routes import Headers

SHIPPED = {"x-aegis-shapes": "shipped"}
JSON = {"accept": "application/json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One route, as it is asked for; its path may name things of a tenant."""

    method: str
    path: str
    scope: str
    body: Any = None
    finds: bool = True
    """Whether a stranger is told that there is nothing, or just gets nothing."""
    everyone: bool = False
    """Concerns all tenants, so a tenant's token may not."""

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"


ALL = {"target": "all", "tool": "cmd.run", "args": {"command": "true"}}
WAYS = [
    Way(method="POST", path="/enrollment-tokens", scope="enroll", body={}, finds=False),
    Way(method="GET", path="/enrollment-tokens", scope="enroll", finds=False),
    Way(method="DELETE", path="/enrollment-tokens/{token_id}", scope="enroll"),
    Way(method="GET", path="/hosts", scope="hosts.read", finds=False),
    Way(method="GET", path="/hosts/{node_id}", scope="hosts.read"),
    Way(method="PATCH", path="/hosts/{node_id}", scope="hosts.write", body={"name": "n"}),
    Way(method="POST", path="/hosts/{node_id}/tags", scope="hosts.write", body={"add": ["x"]}),
    Way(method="POST", path="/hosts/{node_id}/state", scope="hosts.write", body={"desired": "active"}),
    Way(method="DELETE", path="/hosts/{node_id}", scope="hosts.write"),
    Way(method="POST", path="/hosts/{node_id}/readmit", scope="hosts.write"),
    Way(method="GET", path="/config", scope="hosts.read", finds=False),
    Way(method="PUT", path="/config", scope="hosts.write", body={}, finds=False),
    Way(method="DELETE", path="/config", scope="hosts.write", finds=False),
    Way(method="GET", path="/hosts/{node_id}/config", scope="hosts.read"),
    Way(method="PUT", path="/hosts/{node_id}/config", scope="hosts.write", body={}),
    Way(method="DELETE", path="/hosts/{node_id}/config", scope="hosts.write"),
    Way(method="GET", path="/groups", scope="hosts.read", finds=False),
    Way(method="POST", path="/groups", scope="groups.write", body={"name": "made"}, finds=False),
    Way(method="GET", path="/groups/{group_id}", scope="hosts.read"),
    Way(method="PATCH", path="/groups/{group_id}", scope="groups.write", body={"pinned_members": []}),
    Way(method="DELETE", path="/groups/{group_id}", scope="groups.write"),
    Way(method="POST", path="/fleet/preview", scope="fleet.read", body={"target": {"Node": "{node_id}"}}),
    Way(method="POST", path="/fleet/invoke", scope="fleet.manage", body=ALL | {"target": "@{node_id}"}),
    Way(method="POST", path="/fleet/{run_id}/cancel", scope="fleet.manage"),
    Way(method="GET", path="/fleet/runs", scope="fleet.read", finds=False),
    Way(method="GET", path="/fleet/runs/{run_id}", scope="fleet.read"),
    Way(method="GET", path="/fleet/runs/{run_id}/events", scope="fleet.read"),
    Way(
        method="POST",
        path="/worker-tokens",
        scope="cluster.manage",
        everyone=True,
        body={"node_id": "11111111-2222-4333-8444-555555555555"},
    ),
    Way(method="GET", path="/workers", scope="cluster.manage", everyone=True),
    Way(
        method="POST",
        path="/workers/{worker_id}/state",
        scope="cluster.manage",
        everyone=True,
        body={"draining": True},
    ),
    Way(method="GET", path="/config/global", scope="cluster.manage", everyone=True),
    Way(method="PUT", path="/config/global", scope="cluster.manage", everyone=True, body={}),
    Way(method="DELETE", path="/config/global", scope="cluster.manage", everyone=True),
    Way(method="POST", path="/tenants/{tenant_id}/revoke", scope="cluster.manage", everyone=True, body={}),
]
ROLES = [str(permission) for permission in access.PERMISSIONS]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("rest") / "data") as here:
        yield here


@pytest.fixture
async def rest(house: Site) -> AsyncIterator[Rest]:
    async with house.rest(a_tenant()) as opened:
        yield opened


@dataclass(slots=True)
class Furnished:
    """A tenant with one of everything."""

    rest: Rest
    daemon: ShippedDaemon
    ids: dict[str, str] = field(default_factory=dict)

    async def ask(self, rest: Rest, way: Way) -> httpx.Response:
        body = way.body
        if isinstance(body, dict) and "target" in body:
            target = body["target"]
            wanted = self.ids["node_id"]
            given = {"Node": wanted} if isinstance(target, dict) else target.format(**self.ids)
            body = body | {"target": given}
        path = way.path.format(**self.ids)
        more: dict[str, Any] = {} if body is None else {"json": body}
        return await rest.http.request(way.method, PREFIX + path, headers=JSON, **more)


@pytest.mark.parametrize(
    ("method", "path", "member", "field"),
    [
        ("POST", "/fleet/invoke", "args", "args.a.a"),
        ("PUT", "/config", "", "config.a.a"),
    ],
)
@pytest.mark.parametrize("levels", [40, 900])
async def test_a_document_that_no_message_could_carry_is_refused_with_its_place(
    rest: Rest, method: str, path: str, member: str, field: str, levels: int
) -> None:
    deep = '{"a":' * levels + "[]" + "}" * levels
    body = f'{{"target": "all", "tool": "cmd.run", "{member}": {deep}}}' if member else deep
    headers = {"content-type": "application/json", **JSON}
    answer = await rest.call(method, path, json=None, content=body.encode(), headers=headers)
    assert answer.status_code == 400, answer.text
    assert field in answer.text
    assert "nested deeper than 3" in answer.text


@pytest.fixture
async def furnished(house: Site, rest: Rest) -> AsyncIterator[Furnished]:
    async with at_work(house, rest) as daemon:
        made = await rest.post("/enrollment-tokens", {"name": "open"})
        group = await rest.post("/groups", {"name": "secret-group", "pinned_members": [daemon.node_id]})
        assert (await rest.call("PUT", "/config", {"a": 1})).status_code == 200
        run_id = (await rest.do())["fleet_command_id"]
        ids = {
            "node_id": daemon.node_id,
            "group_id": group["id"],
            "run_id": run_id,
            "token_id": made["token_id"],
            "worker_id": "11111111-2222-4333-8444-555555555555",
            "tenant_id": "nobody-at-all",
        }
        yield Furnished(rest, daemon, ids)


# Who may.


async def test_the_document_is_valid_and_this_table_has_every_route_of_it(house: Site) -> None:
    async with httpx.AsyncClient(base_url=house.server.web, timeout=60) as anyone:
        document = (await anyone.get(f"{PREFIX}/openapi.json")).json()
    OpenAPIV31SpecValidator(document).validate()
    assert document["servers"] == [{"url": PREFIX}]
    served = {f"{method.upper()} {path}" for path, ways in document["paths"].items() for method in ways}
    assert served == {way.name for way in WAYS}


async def test_without_a_token_or_with_a_wrong_one_nothing_is_told(house: Site) -> None:
    async with httpx.AsyncClient(base_url=house.server.web, timeout=60) as anyone:
        nobody = Furnished(Rest(http=anyone, tenant=""), None, dict.fromkeys(NAMES, str(uuid.uuid4())))  # type: ignore[arg-type]
        for way in WAYS:
            answer = await nobody.ask(nobody.rest, way)
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated"), way.name
            anyone.headers["authorization"] = "Bearer fpt_nonsense"


NAMES = ("node_id", "group_id", "run_id", "token_id", "worker_id", "tenant_id")


async def test_each_route_needs_its_own_scope_and_no_other(house: Site, furnished: Furnished) -> None:
    tenant = furnished.rest.tenant
    for scope in {way.scope for way in WAYS}:
        role = f"aegis.edge.{scope}"
        assert role in ROLES
        others = [one for one in ROLES if one != role]
        async with house.rest(tenant, *others) as lacking, house.rest(tenant, role) as having:
            for way in (way for way in WAYS if way.scope == scope):
                answer = await furnished.ask(lacking, way)
                assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), way.name
                if not (way.method == "DELETE" and "node_id" in way.path):
                    answer = await furnished.ask(having, way)
                    if way.everyone:  # with the right scope, but for one tenant
                        assert answer.status_code == 403, way.name
                        continue
                    # One that is not revoked cannot be readmitted, which is said to those who may ask.
                    assert answer.status_code in (200, 201, 204, 404, 409), f"{way.name}: {answer.text}"


# For whom.


async def test_nothing_of_a_tenant_is_there_for_another(house: Site, furnished: Furnished) -> None:
    before = await _everything(furnished.rest)
    async with house.rest(a_tenant()) as stranger:
        for way in WAYS:
            answer = await furnished.ask(stranger, way)
            if way.everyone:
                assert answer.status_code == 403, way.name
            elif way.finds:
                assert (answer.status_code, answer.json()["code"]) == (404, "not_found"), way.name
            else:
                assert answer.status_code in (200, 201, 204), way.name
            leaked = answer.text.replace(answer.headers["x-request-id"], "")
            for name in ("secret-group", furnished.rest.tenant):
                assert name not in leaked, way.name
            if not answer.is_error:
                assert not [value for value in furnished.ids.values() if value in leaked], way.name
    assert await _everything(furnished.rest) == before


async def _everything(rest: Rest) -> list[Any]:
    found = [await rest.get(path) for path in ("/groups", "/fleet/runs", "/enrollment-tokens", "/config")]
    hosts = (await rest.get("/hosts"))["items"]
    heard = {"last_heartbeat_at", "last_seen_at"}
    return [*found, [{key: value for key, value in host.items() if key not in heard} for host in hosts]]


@pytest.mark.parametrize("header", ["x-aegis-tenant", "x-tenant-id"])
async def test_a_tenants_token_acts_for_that_tenant_only_and_an_operators_says_for_whom(
    house: Site, furnished: Furnished, header: str
) -> None:
    other = a_tenant()
    switched = await furnished.rest.call("GET", "/hosts", headers={header: other})
    assert (switched.status_code, switched.json()["error"]["cause"]) == (403, "forbidden_tenant_switch")
    same = await furnished.rest.call("GET", "/hosts", headers={header: furnished.rest.tenant})
    assert len(same.json()["items"]) == 1
    team = await furnished.rest.call("POST", "/enrollment-tokens", {"team_tenant_id": other})
    assert team.status_code == 403
    async with house.rest("") as operator:
        unnamed = await operator.call("POST", "/groups", {"name": "x"})
        assert (unnamed.status_code, unnamed.json()["code"]) == (400, "bad_request")
        named = await operator.call("GET", "/hosts", headers={header: furnished.rest.tenant})
        assert [host["node_id"] for host in named.json()["items"]] == [furnished.daemon.node_id]
        everyone = await operator.get("/hosts?limit=200")  # of all tenants
        assert furnished.daemon.node_id in [host["node_id"] for host in everyone["items"]]
        odd = await operator.call("GET", "/groups", headers={header: "Not A Slug"})
        assert odd.status_code == 400


# Shapes.


async def test_the_documented_shapes(furnished: Furnished) -> None:
    rest, node_id = furnished.rest, furnished.daemon.node_id
    hosts = await rest.get("/hosts")
    assert hosts["next_cursor"] is None
    (host,) = hosts["items"]
    assert {
        "node_id",
        "name",
        "tenant_id",
        "status",
        "since",
        "last_heartbeat_at",
        "tags",
        "capabilities",
    } <= host.keys()
    assert {"os", "arch", "local_tools", "labels"} <= host["capabilities"].keys()
    one = await rest.host(node_id)
    assert {"command_id", "tool", "dispatched_at", "outcome", "duration_ms"} == one["recent_commands"][
        0
    ].keys()
    (group,) = (await rest.get("/groups"))["items"]
    assert group["resolved_member_count"] == 1
    members = (await rest.get(f"/groups/{group['id']}"))["resolved_members"]
    assert members == [{"node_id": node_id, "name": host["name"], "status": "Connected"}]
    preview = await rest.post("/fleet/preview", {"target": {"All": None}})
    assert preview == {"resolved": members, "skipped": []}
    made = await rest.post("/enrollment-tokens", {"name": "x", "ttl_seconds": 60})
    assert made["qr_payload"] == f"aegis-edge-enroll://{made['token']}"
    assert made["command_hint"] == f"fleetplane agent edge enroll {made['token']}"
    runs = await rest.get("/fleet/runs?outcome=complete&tool=cmd.run")
    assert [run["fleet_command_id"] for run in runs["items"]] == [furnished.ids["run_id"]]
    assert (await rest.get("/fleet/runs?outcome=halted"))["items"] == []
    (target,) = (await rest.run(furnished.ids["run_id"]))["per_node"]
    assert {
        "node_id",
        "command_id",
        "outcome",
        "exit_code",
        "duration_ms",
        "stdout_tail",
        "stderr_tail",
    } <= target.keys()


async def test_the_shipped_shapes_on_request(furnished: Furnished) -> None:
    rest, node_id = furnished.rest, furnished.daemon.node_id
    (host,) = await rest.get("/hosts", headers=SHIPPED)
    assert {
        "id",
        "name",
        "tenant_id",
        "status",
        "connected",
        "tags",
        "os",
        "arch",
        "enrolled_at",
        "last_seen_at",
    } <= host.keys()
    assert (host["id"], host["connected"]) == (node_id, True)
    (group,) = await rest.get("/groups", headers=SHIPPED)
    assert {
        "id",
        "name",
        "tenant_id",
        "selector",
        "pinned_members",
        "created_by",
        "created_at",
    } <= group.keys()
    preview = await rest.post("/fleet/preview", {"target": "All"}, headers=SHIPPED)
    assert preview["resolved"] == [node_id]
    made = await rest.post("/enrollment-tokens", {"issued_to": "x"}, headers=SHIPPED)
    assert made["qr_payload"] == made["command_hint"] == f"aegis edge enroll {made['token']}"
    body: dict[str, Any] = {
        "target": {"Selector": {"tools": [], "labels": [], "tags": []}},
        "tool_name": "cmd.run",
        "args": {"command": "echo", "args": ["hi"]},
        "security_context_name": "zaru-free",
        "user_security_token": "a.b.c",
        "mode": "rolling=5",
        "batch": None,
        "max_concurrency": None,
        "failure_policy": "stop-after=1",
        "stop_after": None,
        "require_min_targets": 1,
        "deadline_secs": 60,
    }
    async with rest.events("/fleet/invoke", method="POST", json=body, headers=SHIPPED) as events:
        told = [event async for event in events]
    assert [event.kind for event in told] == [""] * len(told)
    assert [next(iter(event.data)) for event in told] == [
        "Started",
        "NodeStarted",
        "NodeProgress",
        "NodeCompleted",
        "Done",
    ]
    done = told[3].data["NodeCompleted"]
    assert (done["node_id"], done["ok"], done["exit_code"], done["stdout"]) == (node_id, True, 0, "hi\n")
    renamed = await rest.call("PATCH", f"/hosts/{node_id}", {"name": "b", "add_tags": ["x"]}, headers=SHIPPED)
    assert (renamed.json()["name"], renamed.json()["tags"]) == ("b", ["x"])
    blank = await rest.call("PATCH", f"/hosts/{node_id}", {"name": "  "}, headers=SHIPPED)
    assert blank.status_code == 400


def test_a_server_may_speak_the_shipped_shapes_unless_asked_otherwise(tmp_path: Any) -> None:
    with site(tmp_path / "data", "--set", "edge.shipped_shapes=true") as here:
        headers = {"authorization": f"Bearer {here.token(tenant=a_tenant())}"}
        with httpx.Client(base_url=here.server.web + PREFIX, headers=headers, timeout=60) as client:
            assert client.get("/hosts").json() == client.get("/groups").json() == []
            asked = client.get("/hosts", headers={"x-aegis-shapes": "documented"})
            assert asked.json() == {"items": [], "next_cursor": None}


@pytest.mark.parametrize(
    ("headers", "shipped"),
    [
        ({b"accept": b"*/*"}, True),
        ({b"accept": b"*/*", b"user-agent": b"curl/8.5"}, False),
        ({b"accept": b"application/json"}, False),
        ({b"accept": b"*/*", b"x-aegis-shapes": b"documented"}, False),
        ({b"user-agent": b"curl/8.5", b"x-aegis-shapes": b"shipped"}, True),
        ({}, False),
    ],
)
def test_the_first_command_line_is_known_by_what_it_asks(headers: dict[bytes, bytes], shipped: bool) -> None:
    assert Manner(shipped=False).is_shipped(Headers(headers)) is shipped


async def test_what_is_wrong_is_said_in_both_shapes_at_once(furnished: Furnished) -> None:
    rest = furnished.rest
    tries: list[tuple[str, str, Any, int, str]] = [
        ("POST", "/groups", {"name": "secret-group"}, 409, "conflict"),
        ("POST", "/groups", {"name": "x", "selector": "os~linux"}, 400, "bad_request"),
        ("POST", "/groups", {}, 400, "bad_request"),
        ("POST", "/enrollment-tokens", {"ttl_seconds": 901}, 400, "bad_request"),
        ("GET", "/hosts?limit=201", None, 400, "bad_request"),
        ("GET", "/hosts?cursor=!", None, 400, "bad_request"),
        ("GET", "/hosts?connected=maybe", None, 400, "bad_request"),
        ("GET", f"/hosts/{uuid.uuid4()}", None, 404, "not_found"),
        ("GET", "/nowhere", None, 404, "not_found"),
        ("PUT", "/hosts", None, 405, "method_not_allowed"),
        ("POST", "/fleet/invoke", ALL | {"mode": "sideways"}, 400, "bad_request"),
        ("POST", "/fleet/invoke", ALL | {"require_min_targets": 2}, 409, "conflict"),
        ("POST", "/fleet/invoke", ALL | {"target": "tags=nobody"}, 503, "unavailable"),
        ("POST", "/fleet/preview", {"target": {"Node": 1}}, 400, "bad_request"),
    ]
    for method, path, body, status, code in tries:
        answer = await rest.call(method, path, body)
        told = answer.json()
        assert (answer.status_code, told["status"], told["code"]) == (status, status, code), path
        assert told["message"] == told["error"]["message"] != "", path
        assert told["error"]["request_id"] == answer.headers["x-request-id"]
    broken = await rest.call("POST", "/groups", content=b"{", headers={"content-type": "application/json"})
    assert broken.status_code == 400


# Pages and keys.


async def test_pages_miss_nothing_and_repeat_nothing_while_rows_come_and_go(rest: Rest) -> None:
    for number in range(7):
        await rest.invite(f"first-{number}")
    seen, cursor = [], ""
    while cursor is not None:
        page = await rest.get(
            "/enrollment-tokens", params={"limit": 3} | ({"cursor": cursor} if cursor else {})
        )
        seen += [one["issued_to"] for one in page["items"]]
        cursor = page["next_cursor"]
        if len(seen) == 3:
            await rest.invite("later")
    assert seen == [*(f"first-{number}" for number in range(7)), "later"]


async def test_hosts_are_found_by_tag_label_and_connection(house: Site, rest: Rest) -> None:
    away = await house.shipped(rest, "away")
    async with at_work(house, rest, name="here", labels={"rack": "7"}) as daemon:
        await rest.post(f"/hosts/{daemon.node_id}/tags", {"add": ["prod", "eu"]})
        for query, wanted in {
            "tag=prod&tag=eu": [daemon.node_id],
            "tag=prod&tag=us": [],
            "label=rack=7": [daemon.node_id],
            "label=rack=8": [],
            "connected=true": [daemon.node_id],
            "connected=false": [away.node_id],
            "limit=1": [away.node_id],
        }.items():
            found = await rest.get(f"/hosts?{query}")
            assert [host["node_id"] for host in found["items"]] == wanted, query


async def test_a_request_that_is_sent_twice_with_a_key_happens_once(furnished: Furnished) -> None:
    rest = furnished.rest
    for path, body in (
        ("/enrollment-tokens", {"name": "k"}),
        ("/groups", {"name": "k"}),
        ("/fleet/invoke", ALL),
    ):
        headers = JSON | {"idempotency-key": "the-key"}
        first, second = [await rest.call("POST", path, body, headers=headers) for _ in range(2)]
        assert first.json() == second.json()
        assert second.headers["idempotency-replayed"] == "true"
        other = await rest.call("POST", path, {**body, "name": "other"}, headers=headers)
        assert other.status_code in (400, 409)
        assert "once=" not in first.text
    assert len((await rest.get("/fleet/runs"))["items"]) == 2
    assert not [one for one in (await rest.get("/enrollment-tokens"))["items"] if "once=" in str(one)]


async def test_a_followed_run_that_is_asked_for_again_is_named_and_not_started_again(
    furnished: Furnished,
) -> None:
    rest, headers = furnished.rest, {"idempotency-key": "followed"}
    async with rest.events("/fleet/invoke", method="POST", json=ALL, headers=headers) as events:
        first = [event async for event in events]
    again = await rest.call("POST", "/fleet/invoke", ALL, headers=headers)
    assert again.headers["idempotency-replayed"] == "true"
    assert again.json()["fleet_command_id"] == first[0].data["fleet_command_id"]
    assert again.headers["x-fleet-command-id"] == first[0].data["fleet_command_id"]


async def test_the_same_key_at_once_starts_one_run(furnished: Furnished) -> None:
    headers = JSON | {"idempotency-key": "at once"}
    answers = await asyncio.gather(
        *(furnished.rest.call("POST", "/fleet/invoke", ALL, headers=headers) for _ in range(8))
    )
    assert {answer.status_code for answer in answers} <= {200, 409}
    begun = {answer.json()["fleet_command_id"] for answer in answers if answer.status_code == 200}
    assert len(begun) == 1
    await until(lambda: _runs(furnished.rest, 2))


async def _runs(rest: Rest, number: int) -> bool:
    return len((await rest.get("/fleet/runs"))["items"]) == number
