"""Discovery, lists, objects and tables of `/apis/v1`."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest_asyncio
from support.fleet.resources_rig import EDGE_ADMIN, VIEWER, ResourcesRig, resources_rig


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[ResourcesRig]:
    async with resources_rig(tmp_path) as made:
        yield made


async def test_discovery_names_every_resource_and_what_the_caller_may_do(rig: ResourcesRig) -> None:
    found = (await rig.get("", await rig.token("v", VIEWER))).json()
    by_plural = {one["plural"]: one for one in found["resources"]}
    gpus, nodes = by_plural["gpus"], by_plural["edge-nodes"]
    assert (gpus["name"], gpus["shortNames"], gpus["may"]) == ("gpu", ["g"], gpus["verbs"])
    assert gpus["scopes"] == ["/"]
    assert (nodes["may"], nodes["scopes"]) == ([], [])
    assert gpus["columns"][0] == {"title": "NAME", "type": "text", "wide": False}
    assert "Gpu" in gpus["schema"]["$defs"]
    assert found["caller"] == "token/v"


async def test_an_object_has_the_envelope_and_an_etag(rig: ResourcesRig) -> None:
    await rig.gpu("gpu-0", "False", rack="a")
    viewer = await rig.token("v", VIEWER)
    answer = await rig.get("/gpus/gpu-0", viewer)
    body = answer.json()
    assert body["kind"] == "gpu"
    assert body["metadata"]["scope"] == "/"
    assert body["metadata"]["labels"] == {"rack": "a"}
    assert body["spec"] == {"uuid": "GPU-gpu-0"}
    assert body["status"]["health"] == "unhealthy"
    assert body["conditions"][0]["observedBy"] == "p"
    assert answer.headers["etag"].startswith('W/"')
    by_uid = await rig.get(f"/gpus/{body['metadata']['uid']}", viewer)
    assert by_uid.json() == body


async def test_a_list_is_at_and_below_a_scope_in_the_path_or_the_query(rig: ResourcesRig) -> None:
    for tenant, name in (("acme", "n1"), ("acme", "n2"), ("other", "n3")):
        await rig.node(tenant, name)
    everyone = await rig.token("all", EDGE_ADMIN)

    async def names(path: str, token: str) -> list[str]:
        answer = await rig.get(path, token)
        assert answer.status_code == 200, answer.text
        return [one["metadata"]["name"] for one in answer.json()["items"]]

    assert await names("/edge-nodes", everyone) == ["n1", "n2", "n3"]
    assert await names("/scopes/tenants/acme/edge-nodes", everyone) == ["n1", "n2"]
    assert await names("/edge-nodes?scope=/tenants/other", everyone) == ["n3"]
    assert await names("/edge-nodes", await rig.token("a", EDGE_ADMIN, tenant="acme")) == ["n1", "n2"]


async def test_what_belongs_to_another_tenant_is_not_found(rig: ResourcesRig) -> None:
    await rig.node("other", "n3")
    acme = await rig.token("a", EDGE_ADMIN, tenant="acme")
    for path in (
        "/scopes/tenants/other/edge-nodes",
        "/scopes/tenants/nobody/edge-nodes",
        "/scopes/tenants/other/edge-nodes/n3",
        "/edge-nodes/n3",
        "/edge-nodes/no-such-node",
        "/table/edge-nodes?scope=/tenants/other",
    ):
        answer = await rig.get(path, acme)
        assert (answer.status_code, answer.json()["reason"]) == (404, "NotFound"), path
    there = (await rig.get("/edge-nodes/n3", acme)).json()["detail"]
    missing = (await rig.get("/edge-nodes/n4", acme)).json()["detail"]
    assert there.replace("n3", "") == missing.replace("n4", "")


async def test_a_list_goes_on_where_it_was_although_it_changes_meanwhile(rig: ResourcesRig) -> None:
    for number in range(0, 20, 2):
        await rig.gpu(f"gpu-{number:02}")
    viewer = await rig.token("v", VIEWER)
    first = (await rig.get("/gpus", viewer, limit=4)).json()
    await rig.gpu("gpu-01")  # before the place that was reached
    await rig.gpu("gpu-09")  # after it
    await rig.remove_gpu("gpu-06")  # the very object that ended the page
    await rig.remove_gpu("gpu-08")
    seen = [one["metadata"]["name"] for one in first["items"]]
    page = first
    while page["continue"]:
        page = (await rig.get("/gpus", viewer, limit=4, **{"continue": page["continue"]})).json()
        assert page["revision"] == first["revision"]
        seen += [one["metadata"]["name"] for one in page["items"]]
    assert seen == [f"gpu-{number:02}" for number in (0, 2, 4, 6, 9, 10, 12, 14, 16, 18)]


async def test_lists_are_selected_and_sorted(rig: ResourcesRig) -> None:
    await rig.gpu("a", "True", rack="1", owner="x")
    await rig.gpu("b", "False", rack="2")
    await rig.gpu("c", "True", rack="2", owner="y")
    viewer = await rig.token("v", VIEWER)

    async def names(**query: str) -> list[str]:
        answer = await rig.get("/gpus", viewer, **query)
        assert answer.status_code == 200, answer.text
        return [one["metadata"]["name"] for one in answer.json()["items"]]

    assert await names(labels="rack=2") == ["b", "c"]
    assert await names(labels="owner") == ["a", "c"]
    assert await names(labels="rack in (1,2),!owner") == ["b"]
    assert await names(fields="status.health=healthy,metadata.name!=a") == ["c"]
    assert await names(sort="-metadata.name") == ["c", "b", "a"]
    assert await names(sort="status.health,-metadata.name") == ["c", "a", "b"]
    assert await names(sort="metadata.labels.owner") == ["b", "a", "c"]
    first = (await rig.get("/gpus", viewer, sort="-metadata.labels.rack", limit="1")).json()
    rest = (
        await rig.get("/gpus", viewer, sort="-metadata.labels.rack", **{"continue": first["continue"]})
    ).json()
    assert [one["metadata"]["name"] for one in (*first["items"], *rest["items"])] == ["b", "c", "a"]


WRONG: Sequence[tuple[dict[str, str], str]] = (
    ({"limit": "1000000000"}, "limit"),
    ({"limit": "0"}, "limit"),
    ({"limit": "-1"}, "limit"),
    ({"labels": "a=b," * 400 + "a=b"}, "labels"),
    ({"labels": "((((("}, "labels"),
    ({"fields": "status.health"}, "fields"),
    ({"fields": "__class__.x=1"}, "fields"),
    ({"fields": "spec.a=1," * 100 + "spec.a=1"}, "fields"),
    ({"sort": "a,b,c,d"}, "sort"),
    ({"sort": "spec"}, "sort"),
    ({"scope": "tenants/acme"}, "scope"),
    ({"scope": "/tenants/../x"}, "scope"),
    ({"scope": "/" + "x" * 5000}, "scope"),
    ({"continue": "%%%"}, "continue"),
    ({"continue": "x" * 9000}, "continue"),
    ({"unknown": "1"}, "unknown"),
)


async def test_a_query_that_means_nothing_is_refused_with_its_field(rig: ResourcesRig) -> None:
    viewer = await rig.token("v", VIEWER)
    for query, field in WRONG:
        answer = await rig.get("/gpus", viewer, **query)
        body = answer.json()
        assert (answer.status_code, body["field"]) == (400, field), query
        assert answer.headers["content-type"] == "application/problem+json"
        assert body["requestId"] == answer.headers["x-request-id"]
        assert body["reason"] == "InvalidArgument"


async def test_a_forged_continuation_shows_nothing_more(rig: ResourcesRig) -> None:
    for number in range(3):
        await rig.node("acme", f"a{number}")
        await rig.node("other", f"o{number}")
    acme = await rig.token("a", EDGE_ADMIN, tenant="acme")
    token = (await rig.get("/edge-nodes", acme, limit=1)).json()["continue"]
    digest, revision, *_ = msgspec.json.decode(base64.urlsafe_b64decode(token + "=="))

    async def forged(*parts: object) -> tuple[int, list[str]]:
        made = base64.urlsafe_b64encode(msgspec.json.encode(parts)).decode().rstrip("=")
        answer = await rig.get("/edge-nodes", acme, **{"continue": made})
        items = answer.json().get("items", ())
        return answer.status_code, [one["metadata"]["name"] for one in items]

    assert await forged(digest, revision, [], "/tenants/other", "", "") == (200, [])
    assert await forged(digest, revision, [], "/", "", "") == (200, ["a0", "a1", "a2"])
    assert (await forged(digest, 10**15, [], "/", "", ""))[0] == 400
    assert (await forged("another", revision, [], "/", "", ""))[0] == 400
    assert (await forged(digest, revision, [[1, 2]], "/", "", ""))[0] == 400
    assert (await forged(digest, revision, {}, "/"))[0] == 400


async def test_a_table_has_the_declared_columns(rig: ResourcesRig) -> None:
    await rig.gpu("gpu-0", "False")
    viewer = await rig.token("v", VIEWER)
    answer = await rig.get("/table/gpus", viewer)
    assert answer.headers["content-type"] == "application/vnd.fleetplane.table+json"
    table = answer.json()
    titles = [one["title"] for one in table["columns"]]
    cells = dict(zip(titles, table["rows"][0]["cells"], strict=True))
    assert (cells["NAME"], cells["HEALTH"], cells["REASON"]) == ("gpu-0", "unhealthy", "Said")
    accepted = await rig.client.get(
        "/apis/v1/gpus",
        headers={"authorization": f"Bearer {viewer}", "accept": "application/vnd.fleetplane.table+json"},
    )
    assert accepted.json() == table


async def test_neither_keys_nor_tokens_leave_with_a_daemon(rig: ResourcesRig) -> None:
    await rig.node("acme", "n1")
    answer = await rig.get("/edge-nodes/n1", await rig.token("all", EDGE_ADMIN))
    assert answer.status_code == 200
    assert "hidden-token-id" not in answer.text
    assert "kkkk" not in answer.text


async def test_refusals_are_problem_details(rig: ResourcesRig) -> None:
    await rig.gpu("gpu-0")
    nobody = await rig.get("/gpus", "")
    assert (nobody.status_code, nobody.json()["reason"]) == (401, "Unauthenticated")
    assert nobody.headers["www-authenticate"] == "Bearer"
    forbidden = await rig.get("/gpus", await rig.token("e", EDGE_ADMIN))
    assert (forbidden.status_code, forbidden.json()["reason"]) == (403, "PermissionDenied")
    assert "gpus.read" in forbidden.json()["detail"]
    nowhere = await rig.get("/gpuz", await rig.token("v", VIEWER))
    assert (nowhere.status_code, nowhere.headers["content-type"]) == (404, "application/problem+json")
    wrong = await rig.client.post("/apis/v1/gpus", headers={"authorization": "Bearer x"})
    assert wrong.status_code == 405
