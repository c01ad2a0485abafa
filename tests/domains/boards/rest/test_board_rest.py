"""REST over boards and clusters: shapes, roles, pages, and what is refused."""

from __future__ import annotations

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from support.boards.boards_web import ROLES, BoardsWeb

from fleetplane.domains.boards.access import ADMINISTER, OPERATE, PROVISION, READ
from fleetplane.kernel.access import Permission

NODE = {
    "name": "pi-1",
    "ip_address": "10.0.0.11",
    "mac_address": "B8-27-EB-00-00-01",
    "role": "master",
    "architecture": "arm64",
    "model": "raspberry-pi",
    "serial_number": "10000000abcd",
    "cpu_cores": 4,
    "memory": 4 * 1024**3,
}
LOWEST: dict[Permission | None, str] = {
    READ: "viewer",
    OPERATE: "operator",
    PROVISION: "operator",
    ADMINISTER: "admin",
}


# Every route.


async def test_every_route_asks_for_exactly_the_role_it_names(web: BoardsWeb) -> None:
    """Those below are refused before anything is looked at; the lowest that may is not refused for that."""
    for route in web.rig.domain.rest.table.routes:
        if route.permission is None:
            continue
        path = route.path.replace("{", "no-such-").replace("}", "")
        lowest = ROLES.index(LOWEST[route.permission])
        for role in ROLES[:lowest]:
            assert (await web.call(route.method, path, {}, role=role)).status_code == 403, route.name
        answer = await web.call(route.method, path, {}, role=ROLES[lowest])
        assert answer.status_code not in (401, 403), (route.name, answer.text)


async def test_nobody_is_let_in_without_a_token_but_where_tokens_are_made(web: BoardsWeb) -> None:
    public = set()
    for route in web.rig.domain.rest.table.routes:
        path = route.path.replace("{", "").replace("}", "")
        answer = await web.call(route.method, path, {}, role=None)
        if answer.status_code != 401:
            public.add(route.name)
    assert public == {"GET /health", "POST /auth/login", "POST /auth/refresh"}


async def test_a_token_of_another_tenant_opens_nothing_here(web: BoardsWeb) -> None:
    foreign = web.token("admin", scope="tenant/acme")
    assert await web.refused("GET", "/nodes", token=foreign) == 403
    assert (await web.get("/auth/profile", token=foreign))["roles"] == []


async def test_every_answer_names_its_request_and_its_rate(web: BoardsWeb) -> None:
    answer = await web.call("GET", "/nodes", headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert int(answer.headers["x-ratelimit-remaining"]) < int(answer.headers["x-ratelimit-limit"])
    assert "access-control-allow-origin" not in answer.headers, "no origin is echoed"


async def test_words_that_look_like_another_language_are_words(web: BoardsWeb) -> None:
    """Values are never pasted into anything, so nothing in them is suspicious."""
    name = "'; drop--table select"
    assert (await web.get(f"/nodes?name={name}"))["total"] == 0
    made = await web.post("/clusters", {"name": name, "description": "<script>update</script>"})
    assert (await web.get(f"/clusters/{made['id']}"))["name"] == name


async def test_the_document_describes_every_route(web: BoardsWeb) -> None:
    document = await web.get("/openapi.json", role=None)
    OpenAPIV31SpecValidator(document).validate()
    told = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert told == {route.name for route in web.rig.domain.rest.table.routes}


async def test_the_probes_answer_where_known_clients_look(web: BoardsWeb) -> None:
    health = (await web.http.get("/health")).json()
    assert (health["status"], sorted(health)) == ("ok", ["status", "timestamp", "uptime"])
    ready = await web.http.get("/ready")
    assert (ready.status_code, ready.json()["services"]) == (200, {"database": "healthy"})
    assert (await web.http.post("/health")).status_code == 405
    assert (await web.http.get("/health/x")).status_code == 404
    assert (await web.get("/health", role=None))["status"] == "ok"


async def test_the_server_tells_of_itself_in_the_documented_words(web: BoardsWeb) -> None:
    info = await web.get("/system/info", role="viewer")
    assert set(info) == {
        "go_version",
        "go_os",
        "go_arch",
        "cpu_count",
        "goroutines",
        "memory",
        "gc",
        "timestamp",
        "uptime",
    }
    assert list(info["memory"]) == [
        "alloc",
        "total_alloc",
        "sys",
        "heap_alloc",
        "heap_sys",
        "heap_inuse",
        "heap_idle",
        "heap_objects",
    ]
    assert all(value > 0 for value in info["memory"].values())
    metrics = await web.get("/system/metrics", role="viewer")
    assert metrics["memory_alloc"] > 1024**2
    assert isinstance(metrics["timestamp"], int)


# Boards.


async def test_a_board_is_written_down_shown_changed_and_forgotten(web: BoardsWeb) -> None:
    made = (await web.post("/nodes", NODE, role="operator"))["data"]
    assert made["id"] == 1
    assert made["mac_address"] == "b8:27:eb:00:00:01"
    assert (made["status"], made["role"], made["memory"]) == ("discovered", "master", 4 * 1024**3)
    assert made["deleted_at"] is None

    changed = (await web.put("/nodes/1", {"model": "Pi 5", "status": "maintenance"}))["data"]
    assert (changed["model"], changed["status"]) == ("Pi 5", "maintenance")
    assert changed["serial_number"] == NODE["serial_number"], "what is left out stays"
    shown = (await web.get("/nodes/1"))["data"]
    assert shown["gpio_devices"] == []

    await web.delete("/nodes/1")
    assert await web.refused("GET", "/nodes/1") == 404
    again = (await web.post("/nodes", NODE))["data"]
    assert again["id"] == 2, "its name, card and serial are free; its number is not"


async def test_two_boards_cannot_share_a_name(web: BoardsWeb) -> None:
    await web.post("/nodes", NODE)
    answer = await web.call("POST", "/nodes", {"name": "pi-1"})
    assert answer.status_code == 409
    assert answer.json()["error"] == "Conflict"
    assert answer.json()["field"] == "name"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "name"),
        ({"name": ""}, "name"),
        ({"name": "x", "ip_address": "not an address"}, "ip_address"),
        ({"name": "x", "role": "king"}, "role"),
        ({"name": "x", "cpu_cores": -1}, "cpu_cores"),
        ({"name": "x", "colour": "red"}, "colour"),
    ],
)
async def test_what_is_wrong_with_a_board_is_named(web: BoardsWeb, body: object, field: str) -> None:
    answer = await web.call("POST", "/nodes", body)
    assert answer.status_code == 400
    assert field in answer.json()["message"]
    assert (await web.get("/nodes"))["total"] == 0


async def test_boards_are_found_by_what_they_are(web: BoardsWeb) -> None:
    cluster = (await web.post("/clusters", {"name": "lab"}))["id"]
    for number in range(5):
        await web.post("/nodes", {"name": f"pi-{number}", "cluster_id": cluster if number < 2 else None})
    await web.put("/nodes/1", {"role": "master"})

    async def names(query: str) -> list[str]:
        return [node["name"] for node in (await web.get(f"/nodes?{query}"))["data"]]

    assert await names(f"cluster_id={cluster}") == ["pi-0", "pi-1"]
    assert await names("role=master") == ["pi-0"]
    assert await names("status=ready") == []
    assert await names("name=pi-3") == ["pi-3"]
    assert await names("limit=2&offset=3") == ["pi-3", "pi-4"]
    page = await web.get("/nodes?limit=2&offset=4")
    assert (page["count"], page["total"], page["limit"], page["offset"]) == (1, 5, 2, 4)
    assert await names("limit=0") == []


@pytest.mark.parametrize("query", ["limit=1001", "limit=x", "offset=-1", "status=fine", "cluster_id=0"])
async def test_a_question_that_means_nothing_is_refused(web: BoardsWeb, query: str) -> None:
    assert await web.refused("GET", f"/nodes?{query}") == 400


async def test_labels_that_a_board_brought_find_it(web: BoardsWeb) -> None:
    await web.rig.join("pi-1", labels={"room": "attic"})
    await web.rig.join("pi-2", labels={"room": "cellar"})
    found = (await web.get("/nodes?label=room=attic"))["data"]
    assert [node["name"] for node in found] == ["pi-1"]
    assert found[0]["agent"]["registered_at"] is not None
    assert await web.refused("GET", "/nodes?label=room") == 400


async def test_a_discovered_board_is_adopted_once(web: BoardsWeb) -> None:
    await web.post("/nodes", {"name": "pi-1"})
    told = await web.post("/nodes/1/adopt", {"trust_token": "whatever"}, status=200, role="operator")
    assert told["data"]["status"] == "ready"
    assert await web.refused("POST", "/nodes/1/adopt") == 400


async def test_a_board_that_is_deleted_is_cut_off(web: BoardsWeb) -> None:
    member = await web.rig.join("pi-1")
    await web.delete(f"/nodes/{member.number}")
    assert web.rig.kernel.revocations.find(principal=f"board/{member.number}") is not None


# Clusters.


async def test_a_cluster_lives_with_its_boards_and_not_without_leave(web: BoardsWeb) -> None:
    made = await web.post("/clusters", {"name": "lab", "description": "in the lab"}, role="operator")
    assert (made["id"], made["status"], made["nodes"]) == (1, "pending", [])
    await web.post("/nodes", {"name": "pi-1"})
    await web.post("/clusters/1/nodes", {"node_id": 1}, status=200)

    shown = await web.get("/clusters/1")
    assert [node["name"] for node in shown["nodes"]] == ["pi-1"]
    members = await web.get("/clusters/1/nodes")
    assert (members["count"], members["cluster_id"]) == (1, 1)
    assert await web.refused("DELETE", "/clusters/1") == 409

    await web.delete("/clusters/1/nodes/1")
    assert await web.refused("DELETE", "/clusters/1/nodes/1") == 404
    await web.delete("/clusters/1")
    assert await web.refused("GET", "/clusters/1") == 404
    await web.delete("/clusters/1")  # as the original answers: it is not there any more


async def test_a_cluster_is_changed_in_part(web: BoardsWeb) -> None:
    await web.post("/clusters", {"name": "lab", "description": "old"})
    changed = await web.put("/clusters/1", {"status": "maintenance"})
    assert (changed["status"], changed["description"]) == ("maintenance", "old")
    status = await web.call("GET", "/clusters/1/status", role="viewer")
    assert status.json() == "maintenance"
    assert await web.refused("PUT", "/clusters/1", {"status": "perfect"}) == 400
    listed = await web.get("/clusters")
    assert (listed["count"], listed["total"], listed["clusters"][0]["name"]) == (1, 1, "lab")


async def test_a_cluster_that_is_asked_for_twice_with_one_key_is_made_once(web: BoardsWeb) -> None:
    key, token = {"idempotency-key": "k1"}, web.token("operator")
    one = await web.post("/clusters", {"name": "lab"}, headers=key, token=token)
    two = await web.post("/clusters", {"name": "lab"}, headers=key, token=token)
    assert one == two
    assert await web.refused("POST", "/clusters", {"name": "lab"}) == 409


@pytest.mark.parametrize("number", ["0", "-1", "x", "4294967296", "1e3", "٣"])
async def test_only_numbers_are_numbers(web: BoardsWeb, number: str) -> None:
    assert await web.refused("GET", f"/clusters/{number}") == 400


# Joining.


async def test_a_join_token_lets_a_board_in_and_is_shown_once(web: BoardsWeb) -> None:
    made = await web.post("/join-tokens", {"name": "pi-1", "role": "master"}, role="operator")
    listed = (await web.get("/join-tokens", role="operator"))["data"]
    assert [(one["id"], one["state"], one["name"]) for one in listed] == [(made["id"], "good", "pi-1")]
    assert "token" not in listed[0]
    assert web.rig.core.join_tokens.find(made["token"]).name == made["id"]

    await web.delete(f"/join-tokens/{made['id']}", role="operator")
    assert await web.refused("DELETE", f"/join-tokens/{made['id']}") == 404


async def test_operators_cannot_make_tokens_that_take_a_place_or_see_everything(web: BoardsWeb) -> None:
    await web.post("/nodes", {"name": "pi-1"})
    for body in ({"replaces": 1}, {"purpose": "controller", "name": "second"}):
        assert await web.refused("POST", "/join-tokens", body, role="operator") == 403
        await web.post("/join-tokens", body)
    assert await web.refused("POST", "/join-tokens", {"ttl_seconds": 10**9}) == 400


async def test_an_administrator_says_who_takes_a_boards_place(web: BoardsWeb) -> None:
    from support.boards.boards_rig import BoardKey

    from fleetplane.gen.boards import boards_pb2 as pb

    await web.rig.join("pi-1", serial_number="s1")
    stranger = await web.rig.stranger()
    asking = pb.NodeRegistration(
        name="pi-1", serial_number="s1", join_token=await web.rig.token(), csr_pem=BoardKey().csr
    )
    assert not (await stranger.RegisterNode(asking)).success

    waiting = (await web.get("/approvals", role="viewer"))["data"]
    assert [(one["name"], one["state"]) for one in waiting] == [("pi-1", "pending")]
    path = f"/approvals/{waiting[0]['id']}"
    assert await web.refused("POST", path, {"approve": True}, role="operator") == 403
    told = (await web.post(path, {"approve": True}, status=200))["data"]
    assert (told["state"], told["decided_by"]) == ("approved", "operator/boss")
    assert await web.refused("POST", path, {"approve": False}) == 409
    assert (await stranger.RegisterNode(asking)).success
