"""What people may see of instances over the web, and of whom."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from support.instances.instances_lab import TENANT
from support.instances.instances_web_rig import OTHER, SECONDS, two_tenants, web

from fleetplane.domains.instances.access import VIEWER
from fleetplane.domains.instances.kinds import DrainState, HealthReport
from fleetplane.domains.instances.rest.remote import OFFERED
from fleetplane.fleet.explain import shown
from fleetplane.kernel.freeze import freeze
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.reconcile import Reason
from fleetplane.kernel.reconcile.explanation import Explanation, Finding

NS = 1_000_000_000


async def test_groups_are_shown_with_what_they_should_be_and_what_they_are(tmp_path: Path) -> None:
    async with web(tmp_path) as site:
        first, second = await site.provisioned(2)
        now_ns = time.time_ns()
        await site.change(first.name, registered_at_ns=now_ns)
        drain = DrainState(reason="requested", started_at_ns=now_ns, delete_at_ns=now_ns + 3600 * NS)
        await site.change(second.name, registered_at_ns=now_ns, drain=drain)
        await site.provisioned(3)  # the one that takes its place, so that nothing moves any more
        ada = await site.viewer()
        shown = (await ada.get("/groups"))["items"]
        assert [group["name"] for group in shown] == ["workers"]
        assert shown[0] == await ada.get("/groups/workers")
        assert (shown[0]["size"], shown[0]["wanted"]) == (2, 2)
        assert (shown[0]["ready"], shown[0]["draining"]) == (1, 1)
        assert (shown[0]["configured"], shown[0]["asleep"], shown[0]["frozen"]) == (True, False, None)


async def test_a_frozen_group_says_who_froze_it_and_why(tmp_path: Path) -> None:
    async with web(tmp_path) as site:
        ada = await site.viewer()
        store = site.lab.kernel.store
        await freeze(store, f"tenant/{TENANT}/group/workers", reason="audit week", actor="grace")
        frozen = (await ada.get("/groups/workers"))["frozen"]
        assert (frozen["reason"], frozen["actor"], frozen["until"]) == ("audit week", "grace", None)
        bob = await site.viewer("bob", tenant=OTHER)
        assert (await bob.get("/groups/workers"))["frozen"] is None


async def test_an_instance_is_shown_with_what_its_agent_said_last(tmp_path: Path) -> None:
    async with web(tmp_path) as site:
        name = (await site.provisioned(1))[0].name
        ada = await site.viewer()
        assert (await ada.get(f"/instances/{name}"))["health"] == "starting"
        await site.change(name, registered_at_ns=time.time_ns(), last_error="the disk was full")
        reports = site.lab.domain._reports
        reports.take(HealthReport(instance=name, files={"app.env": "no space", "b": ""}, cpu_usage=12.5))
        shown = await ada.get(f"/instances/{name}")
        assert (shown["state"], shown["health"], shown["last_error"]) == (
            "registered",
            "failing",
            "the disk was full",
        )
        assert shown["file_errors"] == {"app.env": "no space"}
        assert shown["cpu_usage"] == 12.5
        assert shown["last_seen"] is not None


async def test_nothing_that_opens_a_door_is_shown(tmp_path: Path) -> None:
    async with web(tmp_path) as site:
        found = (await site.provisioned(2))[0]
        ada = await site.viewer()
        said = (await ada.ask(f"/instances/{found.name}")).text + (await ada.ask("/groups")).text
        assert found.status is not None
        assert found.status.nonce_digest
        assert found.status.nonce_digest not in said
        assert found.status.nonce_id not in said
        assert "blue" not in said  # a variable of the template


async def test_instances_come_in_pages_and_by_group_and_state(tmp_path: Path) -> None:
    async with web(tmp_path, two_tenants(5)) as site:
        made = await site.provisioned(5)
        ada = await site.viewer()
        seen: list[str] = []
        cursor = ""
        while True:
            page = await ada.get(f"/instances?limit=2{cursor}")
            assert len(page["items"]) <= 2
            seen += [one["id"] for one in page["items"]]
            if page["next_cursor"] is None:
                break
            cursor = f"&cursor={page['next_cursor']}"
        assert seen == [one.name for one in made]
        await site.change(made[0].name, registered_at_ns=time.time_ns())
        registered = await ada.get("/instances?state=registered&group=workers")
        assert [one["id"] for one in registered["items"]] == [made[0].name]
        assert (await ada.get("/instances?group=elsewhere"))["items"] == []


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/instances?state=tired", "state"),
        ("/instances?limit=0", "limit"),
        ("/instances?limit=x", "limit"),
        ("/instances?cursor=!", "cursor"),
        ("/errors?limit=501", "limit"),
        ("/explain", "about"),
    ],
)
async def test_a_wrong_question_is_refused_by_the_name_of_its_part(
    tmp_path: Path, path: str, field: str
) -> None:
    async with web(tmp_path) as site:
        answer = await (await site.viewer()).ask(path)
        assert answer.status_code == 422
        assert [one["field"] for one in answer.json()["error"]["details"]] == [field]


async def test_another_tenants_things_are_not_found(tmp_path: Path) -> None:
    wanted = two_tenants()
    wanted["groups"][OTHER]["hidden"] = {"template": "worker", "size": 0}
    async with web(tmp_path, wanted) as site:
        theirs = (await site.provisioned(1, tenant=OTHER))[0]
        ada = await site.viewer()
        for path in (f"/instances/{theirs.name}", f"/explain?about={theirs.name}", "/groups/hidden"):
            missing = path.replace(theirs.name, "wkr0000000000000000000000000").replace("hidden", "absent")
            refused, unknown = await ada.ask(path), await ada.ask(missing)
            assert (refused.status_code, unknown.status_code) == (404, 404), path
        assert (await ada.ask(f"/explain?about={OTHER}/workers")).status_code == 404
        assert theirs.name not in (await ada.ask("/instances")).text
        site.lab.domain._errors.tell(OTHER, "workers", theirs.name, "their own trouble")
        assert (await ada.get("/errors"))["items"] == []


async def test_a_token_of_one_tenant_cannot_name_another(tmp_path: Path) -> None:
    async with web(tmp_path) as site:
        same = await site.viewer("same", says=TENANT)
        assert (await same.ask("/groups")).status_code == 200
        switching = await site.viewer("switching", says=OTHER)
        assert (await switching.ask("/groups")).status_code == 403


async def test_a_token_of_no_tenant_sees_those_of_all_and_one_that_it_names(tmp_path: Path) -> None:
    wanted = two_tenants()
    wanted["groups"][OTHER]["hidden"] = {"template": "worker", "size": 0}
    async with web(tmp_path, wanted) as site:
        theirs, ours = (await site.provisioned(1, tenant=OTHER))[0], (await site.provisioned(1))[0]
        silent = await site.viewer("silent", tenant="")
        assert {group["tenant"] for group in (await silent.get("/groups"))["items"]} == {TENANT, OTHER}
        found = (await silent.get("/instances?group=workers"))["items"]
        assert {theirs.name, ours.name} <= {one["id"] for one in found}
        assert (await silent.get(f"/instances/{theirs.name}"))["tenant"] == OTHER
        assert (await silent.get("/groups/hidden"))["tenant"] == OTHER
        assert (await silent.get(f"/explain?about={theirs.name}"))["group"] == "workers"
        assert (await silent.ask("/instances/wkr0000000000000000000000000")).status_code == 404
        site.lab.domain._errors.tell(OTHER, "workers", theirs.name, "their own trouble")
        assert [one["error"] for one in (await silent.get("/errors"))["items"]] == ["their own trouble"]
        for path in ("/groups/workers", "/explain?about=workers"):
            refused = await silent.ask(path)
            field = refused.json()["error"]["details"][0]["field"]
            assert (refused.status_code, field) == (422, "x-tenant-id"), path
        assert (await silent.ask("/groups", **{"x-tenant-id": "No Such"})).status_code == 422
        for tenant in (TENANT, OTHER):
            shown = (await silent.ask("/groups", **{"x-tenant-id": tenant})).json()["items"]
            assert {group["tenant"] for group in shown} == {tenant}


async def test_only_viewers_may_look(tmp_path: Path) -> None:
    async with web(tmp_path) as site:
        nobody = await site.http.get("/v1/instances/groups")
        assert (nobody.status_code, nobody.headers["www-authenticate"]) == (401, "Bearer")
        guest = await site.viewer("guest", role="edge.admin")
        for path in (
            "/groups",
            "/groups/workers",
            "/instances",
            "/explain?about=workers",
            "/errors",
        ):
            assert (await guest.ask(path)).status_code == 403, path
        ada = await site.viewer()
        assert (await ada.http.post("/v1/instances/groups", headers=ada.headers)).status_code == 405


async def test_sessions_of_the_owner_are_taken_beside_tokens(tmp_path: Path) -> None:
    async with web(tmp_path) as site:
        operators: Operators = site.lab.kernel.operators
        await operators.offer_sessions()
        token = operators.session("local", roles=[VIEWER], scope=f"tenant/{TENANT}", life_seconds=60)
        good = await site.http.get("/v1/instances/groups", headers={"authorization": f"Bearer {token}"})
        assert good.status_code == 200


async def test_errors_are_remembered_newest_first(tmp_path: Path) -> None:
    async with web(tmp_path) as site:
        feed = site.lab.domain._errors
        for text in ("first", "second", "third"):
            feed.tell(TENANT, "workers", "", text)
        ada = await site.viewer()
        assert [one["error"] for one in (await ada.get("/errors"))["items"]] == ["third", "second", "first"]
        assert [one["error"] for one in (await ada.get("/errors?limit=1"))["items"]] == ["third"]


async def test_why_is_answered_for_a_group_and_for_one_of_its_instances(tmp_path: Path) -> None:
    async with web(tmp_path) as site:
        name = (await site.provisioned(2))[0].name
        await freeze(site.lab.kernel.store, f"tenant/{TENANT}", reason="audit week", actor="grace")
        ada = await site.viewer()

        async def codes(about: str) -> set[str]:
            found = await ada.get(f"/explain?about={about}")
            assert (found["about"], found["group"]) == (about, "workers")
            return {reason["code"] for finding in found["findings"] for reason in finding["reasons"]}

        async with asyncio.timeout(SECONDS):
            while "FROZEN" not in await codes("workers"):
                await asyncio.sleep(0.05)
        assert "FROZEN" in await codes(name)


def test_what_concerns_another_instance_is_no_answer_about_this_one() -> None:
    reasons = (
        Reason(code="WAITING", message="for all of us"),
        Reason(code="WAITING", message="for one", subject="wkr1"),
        Reason(code="WAITING", message="for two", subject="wkr2"),
    )
    found = Finding(
        controller="groups", explanation=Explanation(key="acme/workers", at_ns=NS, reasons=reasons)
    )
    assert [one.message for one in shown(found).reasons] == ["for all of us", "for one", "for two"]
    assert [one.message for one in shown(found, about="wkr1").reasons] == ["for all of us", "for one"]


async def test_the_document_names_every_route_that_is_served(tmp_path: Path) -> None:
    async with web(tmp_path) as site:
        told = (await site.http.get("/v1/instances/openapi.json")).json()
        OpenAPIV31SpecValidator(told).validate()
        assert set(told["paths"]) == {
            "/groups",
            "/groups/{name}",
            "/instances",
            "/instances/{instance_id}",
            "/explain",
            "/errors",
            *(f"/calls/{service}/{method}" for service, method in OFFERED),
        }
