"""PUT, PATCH and DELETE of objects, what their conditions mean, and dry runs."""

from __future__ import annotations

from pathlib import Path

import msgspec
from support.fleet.plans_rig import ACME, another, group, layer, plans_rig

from fleetplane.domains.edge.nodes.config_layers import CONFIG_LAYER
from fleetplane.domains.edge.nodes.groups import EDGE_GROUP

PATH = "/edge-groups/web"


async def test_an_object_is_created_replaced_patched_and_deleted(tmp_path: Path) -> None:
    async with plans_rig(tmp_path) as rig:
        made = await rig.call("PUT", PATH, group("web", selector={"os": "linux"}))
        assert made.status_code == 201, made.text
        assert made.json()["spec"]["selector"]["os"] == "linux"
        read = await rig.call("GET", PATH, scope=ACME)
        assert read.json() == made.json()
        assert read.headers["etag"] == made.headers["etag"]

        blind = await rig.call("PUT", PATH, group("web", selector={"os": "darwin"}))
        assert (blind.status_code, blind.json()["reason"]) == (428, "PreconditionRequired")
        seen = {"if-match": made.headers["etag"]}
        replaced = await rig.call("PUT", PATH, group("web", selector={"os": "darwin"}), headers=seen)
        assert (replaced.status_code, replaced.json()["spec"]["selector"]["os"]) == (200, "darwin")
        stale = await rig.call("PUT", PATH, group("web"), headers=seen)
        assert (stale.status_code, stale.json()["reason"]) == (412, "PreconditionFailed")
        assert (await rig.call("DELETE", PATH, headers=seen)).status_code == 412

        patch = {"metadata": {"labels": {"team": "a"}}, "spec": {"selector": {"os": "linux"}}}
        assert (await rig.call("PATCH", PATH, patch)).status_code == 428
        patched = await rig.call("PATCH", PATH, patch, headers={"if-match": replaced.headers["etag"]})
        assert patched.status_code == 200, patched.text
        assert patched.json()["metadata"]["labels"] == {"team": "a"}
        assert patched.json()["spec"]["selector"]["os"] == "linux"

        assert (await rig.call("DELETE", PATH)).status_code == 204
        assert (await rig.call("GET", PATH)).status_code == 404
        assert (await rig.call("DELETE", PATH)).status_code == 404


async def test_a_whole_object_that_was_read_can_be_given_back(tmp_path: Path) -> None:
    async with plans_rig(tmp_path) as rig:
        made = await rig.call("PUT", PATH, group("web"))
        again = await rig.call("PUT", PATH, made.json(), headers={"if-match": "*"})
        assert again.status_code == 200, again.text
        assert again.json()["metadata"]["revision"] == made.json()["metadata"]["revision"]
        other = {**made.json(), "metadata": {**made.json()["metadata"], "uid": "f" * 32}}
        assert (await rig.call("PUT", PATH, other, headers={"if-match": "*"})).status_code == 409


async def test_a_dry_run_answers_as_if_and_writes_nothing(tmp_path: Path) -> None:
    async with plans_rig(tmp_path) as rig:
        revision = rig.store.revision
        tried = await rig.call("PUT", PATH, group("web", selector={"os": "linux"}), dryRun="1")
        assert (tried.status_code, tried.json()["spec"]["selector"]["os"]) == (201, "linux")
        assert rig.store.revision == revision
        await rig.call("PUT", PATH, group("web"))
        assert (await rig.call("DELETE", PATH, dryRun="1")).status_code == 204
        assert await rig.names("edge-groups") == ["web"]
        bad = await rig.call("PUT", PATH, group("web"), dryRun="yes")
        assert (bad.status_code, bad.json()["field"]) == (400, "dryRun")


async def test_what_is_wrong_is_named_by_its_field(tmp_path: Path) -> None:
    async with plans_rig(tmp_path) as rig:
        for body, field in (
            ({**group("web"), "spec": {"selektor": None}}, "spec.selektor"),
            ({**group("web"), "spec": {"pinnedMembers": ["no-uuid"]}}, "spec.pinned_members"),
            (group("other"), "metadata.name"),
            ({**group("web"), "kind": "gpu"}, "kind"),
            ({**group("web"), "more": 1}, "more"),
            (group("web", scope="/nowhere"), "scope"),
            (group("web", scope="/"), "scope"),
        ):
            answer = await rig.call("PUT", PATH, body)
            assert answer.status_code == 400, answer.text
            assert answer.json()["field"].removeprefix("spec.") == field.removeprefix("spec."), answer.text
        assert await rig.names("edge-groups") == []
        unwritable = await rig.call("PUT", "/edge-nodes/x", group("x"))
        assert unwritable.status_code == 405


async def test_only_who_may_write_writes_and_strangers_find_nothing(tmp_path: Path) -> None:
    async with plans_rig(tmp_path) as rig:
        await rig.call("PUT", PATH, group("web"))
        reader = await another(rig, "reader", "aegis.edge.hosts.read", tenant="acme")
        refused = await reader.call("DELETE", PATH)
        assert (refused.status_code, refused.json()["reason"]) == (403, "PermissionDenied")
        stranger = await another(rig, "stranger", "edge.admin", tenant="other")
        assert (await stranger.call("PUT", PATH, group("web"))).status_code == 404
        assert (await stranger.call("DELETE", PATH, scope=ACME)).status_code == 404
        everyone = {"kind": "edge-config", "metadata": {"name": "global"}, "spec": {"config": {}}}
        writer = await another(rig, "hosts", "aegis.edge.hosts.write", "aegis.edge.hosts.read")
        assert (await writer.call("PUT", "/edge-configs/global", everyone)).status_code == 403
        assert (await rig.call("PUT", "/edge-configs/global", everyone)).status_code == 201


async def test_a_change_of_the_api_is_a_change_of_the_domain(tmp_path: Path) -> None:
    async with plans_rig(tmp_path) as rig:
        await rig.call("PUT", PATH, group("web", pinnedMembers=["8c5b1c3e-0a53-4c0e-9d0b-3f6c8f1f0a11"]))
        (stored,) = rig.store.list(EDGE_GROUP)
        assert (stored.spec.name, stored.spec.created_by) == ("web", "token/writer")
        assert rig.store.claimed_by(EDGE_GROUP, "tenant/acme", "name", "web") == stored.name
        set_ = await rig.call("PUT", "/edge-configs/tenant", layer({"a": 1}))
        assert set_.status_code == 201, set_.text
        assert set_.json()["status"]["setBy"] == "token/writer"


async def test_secrets_of_a_configuration_are_masked_and_kept_when_it_is_applied_again(
    tmp_path: Path,
) -> None:
    async with plans_rig(tmp_path) as rig:
        made = await rig.call("PUT", "/edge-configs/tenant", layer({"password": "hunter2", "a": 1}))
        assert made.json()["spec"]["config"] == {"password": "***", "a": 1}
        exported = await rig.call("GET", "/export")
        assert "hunter2" not in exported.text
        assert "***" in exported.text
        again = await rig.applied(layer({"password": "***", "a": 2}))
        assert "hunter2" not in str(again)
        stored = rig.store.list(CONFIG_LAYER)[0].spec.content
        assert msgspec.json.decode(stored) == {"password": "hunter2", "a": 2}
        patch = {"spec": {"config": {"a": 3}}}
        patched = await rig.call(
            "PATCH", "/edge-configs/tenant", patch, headers={"if-match": "*"}, scope=ACME
        )
        assert patched.status_code == 200, patched.text
        stored = rig.store.list(CONFIG_LAYER)[0].spec.content
        assert msgspec.json.decode(stored) == {"password": "hunter2", "a": 3}
        refused = await rig.call(
            "PUT", "/edge-configs/tenant", layer({"token": "***"}), headers={"if-match": "*"}
        )
        assert (refused.status_code, refused.json()["field"]) == (400, "spec.config.token")
