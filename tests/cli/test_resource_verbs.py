"""Verbs of the resource API, once at the owner's socket and once over TLS from another folder."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from support.shared.seats import SOCKET, TLS, Seat, seated
from support.shared.server_process import ServerProcess, running_server

from fleetplane.client import connect, connect_sync
from fleetplane.client.contexts import Context, ContextFile
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2, provider_pb2, provider_pb2_grpc
from fleetplane.kernel.errors import NotFound

GPUS = ("gpu-a", "gpu-b", "gpu-c")
ROLES = ("fleet.operator", "edge.admin", "gpus.viewer")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    """A server with three GPUs, one of them ill, that other machines could reach."""
    data = tmp_path_factory.mktemp("verbs") / "d"
    web = ("--set", "listeners.web.addresses=0.0.0.0:0")
    with running_server(data, "--only", "gpus,edge", *web) as server:
        with grpc.insecure_channel(server.socket) as channel:
            provider = provider_pb2_grpc.ProviderServiceStub(channel)
            for name in GPUS:
                ready = gpu_pb2.Condition(
                    type="Ready", status="False" if name == "gpu-b" else "True", reason="Tested"
                )
                provider.RegisterGpu(
                    provider_pb2.RegisterGpuRequest(
                        name=name, spec=gpu_pb2.GpuSpec(uuid=f"GPU-{name}"), provider_id="test"
                    )
                )
                provider.UpdateGpuCondition(
                    provider_pb2.UpdateGpuConditionRequest(name=name, condition=ready, provider_id="test")
                )
        yield server, data


@pytest.fixture(scope="module", params=[SOCKET, TLS])
def seat(
    request: pytest.FixtureRequest,
    house: tuple[ServerProcess, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Seat:
    server, data = house
    return seated(request.param, server, data, tmp_path_factory.mktemp(f"seat-{request.param}"), ROLES)


def test_objects_are_shown_in_every_form(seat: Seat) -> None:
    listed = seat.apart("get", "gpus")
    assert (listed.code, listed.err) == (0, "")
    head, *rows = listed.out.splitlines()
    assert head.split()[:3] == ["NAME", "HEALTH", "REASON"]
    assert [row.split()[0] for row in rows] == list(GPUS)
    assert "unhealthy" in rows[1]
    assert "UUID" in seat("get", "g", "-o", "wide").out
    found = json.loads(seat("get", "gpu", "-o", "json").out)["items"]
    assert [one["metadata"]["name"] for one in found] == list(GPUS)
    assert yaml.safe_load(seat("get", "gpu/gpu-a", "-o", "yaml").out)["spec"] == {"uuid": "GPU-gpu-a"}
    assert seat("get", "gpus", "gpu-a", "gpu-b", "-o", "name").out == "gpu/gpu-a\ngpu/gpu-b\n"
    assert seat("get", "gpus", "-o", "jsonpath={.items[1].status.health}").out == "unhealthy\n"


def test_objects_are_selected_and_sorted(seat: Seat) -> None:
    ill = seat("get", "gpus", "--field-selector", "status.health=unhealthy", "-o", "name")
    assert ill.out == "gpu/gpu-b\n"
    backwards = seat("get", "gpus", "--sort-by=-metadata.name", "-o", "name")
    assert backwards.out.split() == [f"gpu/{name}" for name in reversed(GPUS)]
    assert seat("get", "gpus", "-l", "no=such", "-o", "json").out.count("metadata") == 0


def test_an_empty_list_says_where_was_looked(seat: Seat) -> None:
    outcome = seat("get", "edge-nodes", "--tenant", "acme", "-l", "a=b")
    assert (outcome.code, outcome.out) == (0, "")
    assert "no edge-nodes at /tenants/acme, with labels a=b" in outcome.err
    assert "-A looks in every scope" in outcome.err
    assert ("admin.sock" if seat.is_owner else "context lab") in outcome.err


def test_what_is_not_there_is_not_found_and_a_word_is_nearly_right(seat: Seat) -> None:
    missing = seat("get", "gpu/none")
    assert (missing.code, missing.out) == (4, "")
    unknown = seat("get", "gpuz")
    assert unknown.code == 4
    assert "did you mean gpu" in unknown.err
    assert seat("get", "gpu/", "x").code == 2
    assert seat("get", "gpus", "-o", "xml").code == 2
    assert seat("delete", "gpus").code == 2


def test_an_object_is_described_with_its_conditions(seat: Seat) -> None:
    outcome = seat("describe", "gpu/gpu-b")
    assert outcome.code == 0, outcome.err
    assert re.search(r"Ready\s+False\s+Tested", outcome.out)
    assert "GPU-gpu-b" in outcome.out


def test_kinds_are_listed_with_what_one_may_do(seat: Seat) -> None:
    outcome = seat("kinds")
    assert re.search(r"gpus\s+g\s+\S*get", outcome.out)


def test_waiting_ends_when_it_holds_already(seat: Seat) -> None:
    outcome = seat("get", "gpu/gpu-a", "--wait-for", "Ready=True")
    assert outcome.code == 0, outcome.err
    assert "gpu-a" in outcome.out


def test_changes_are_followed_one_a_line(seat: Seat) -> None:
    changes = [json.loads(line) for line in seat.first_lines(len(GPUS), "watch", "gpus", "-o", "json")]
    assert sorted(one["object"]["metadata"]["name"] for one in changes) == list(GPUS)
    assert {one["type"] for one in changes} == {"added"}
    lines = "".join(seat.first_lines(len(GPUS), "watch", "g"))
    assert re.search(r"added +gpu/gpu-b +Ready=False\(Tested\)", lines)
    assert seat("watch", "nothing").code == 4
    assert seat("watch", "gpus", "--for", "100ms").code == 0


def test_events_tell_what_became_of_which_object(seat: Seat) -> None:
    lines = "".join(seat.first_lines(2 * len(GPUS), "events", "-f"))
    assert re.search(
        r"^\S+Z gpu\.unhealthy gpus/gpu-b +before=unknown reason=Ready Tested$", lines, re.MULTILINE
    )
    assert re.search(r"gpu\.unhealthy +gpus/gpu-b", seat("events").out)


def set_ready(seat: Seat, name: str, status: str) -> None:
    with grpc.insecure_channel(seat.server.socket) as channel:
        condition = gpu_pb2.Condition(type="Ready", status=status, reason="Tested")
        provider_pb2_grpc.ProviderServiceStub(channel).UpdateGpuCondition(
            provider_pb2.UpdateGpuConditionRequest(name=name, condition=condition, provider_id="test")
        )


async def test_waiting_ends_when_it_comes_to_hold_and_tells_what_is_so_instead(
    seat: Seat, house: tuple[ServerProcess, Path]
) -> None:
    late = seat("get", "gpu/gpu-b", "--wait-for", "Ready", "--wait-timeout", "6s")
    assert late.code == 124
    assert "Ready is False (Tested) after 6 s, not Ready=True" in late.err
    async with connect(**client_options(seat, house)) as fleet:
        set_ready(seat, "gpu-c", "False")
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(fleet.gpus.wait_for("gpu-c", "Ready=True", seconds=60))
            async with contextlib.aclosing(fleet.gpus.watch()) as changes:
                async for change in changes:
                    if change.object.name == "gpu-c":
                        break
            await asyncio.to_thread(set_ready, seat, "gpu-c", "True")
            found = await waiting
    assert found is not None
    assert found.name == "gpu-c"


def test_it_is_told_who_one_is_and_what_one_may_do_and_why(seat: Seat) -> None:
    who = json.loads(seat("whoami", "-o", "json").out)
    assert who["name"] == ("operator/local" if seat.is_owner else f"token/{seat.folder.name}")
    assert seat.is_owner or {one["role"] for one in who["roles"]} >= set(ROLES)
    assert "ROLE" in seat("whoami").out
    yes = seat("can-i", "get", "gpus")
    assert (yes.code, yes.out) == (0, "yes\n")
    no = seat("can-i", "get", "tokens") if not seat.is_owner else None
    assert no is None or (no.code, no.out) == (3, "no\n"), no


def config(level: str, tenant: str) -> str:
    metadata = {"name": "tenant", "scope": f"/tenants/{tenant}"}
    return yaml.safe_dump({"kind": "edge-config", "metadata": metadata, "spec": {"config": {"level": level}}})


def test_what_should_be_is_planned_compared_applied_and_exported(seat: Seat) -> None:
    tenant = seat.folder.name.strip("-0123456789")
    site, place = seat.folder / "site", f"/tenants/{tenant}"
    site.mkdir()
    (site / "a.yaml").write_text(config("info", tenant))
    owned = ("-f", str(site), "--owner", tenant)

    assert seat("diff", *owned).code == 3
    planned = seat("plan", *owned, "-o", "name")
    assert planned.code == 0, planned.err
    stale = planned.out.strip().partition("/")[2]
    applied = seat("apply", *owned)
    assert (applied.code, applied.out.splitlines()[0]) == (0, f"+ edge-config/tenant  {place}")
    assert seat("diff", *owned).code == 0
    moved = seat("apply", "--plan", stale)
    assert moved.code == 6, moved.err

    (site / "a.yaml").write_text(config("debug", tenant))
    assert 'level: "info" -> "debug"' in seat("plan", *owned).out
    assert seat("apply", *owned).code == 0
    exported = seat("export", "--tenant", tenant)
    assert yaml.safe_load(exported.out)["objects"][0]["spec"] == {"config": {"level": "debug"}}
    again = seat.folder / "exported.yaml"
    again.write_text(exported.out)
    assert seat("diff", "-f", str(again), "--owner", tenant).code == 0

    pruned = seat("apply", "--prune", "--owner", tenant, "--tenant", tenant)
    assert pruned.out == f"- edge-config/tenant  {place} (pruned)\n"
    assert seat("get", "edge-config/tenant", "--tenant", tenant).code == 4


def test_what_is_applied_with_a_policy_goes_out_in_a_rollout_of_its_own(seat: Seat) -> None:
    tenant = "wave" + seat.folder.name.strip("-0123456789")
    file, policy = seat.folder / "waves.yaml", seat.folder / "policy.yaml"
    file.write_text(config("info", tenant))
    policy.write_text("waves: [1, rest]\nmax_failures: 10%\n")
    applied = seat("apply", "-f", str(file), "--rollout", str(policy))
    assert applied.code == 0, applied.err
    name = f"tenant.{tenant}:edge.config"
    assert f"+ rollout-policy/{name}  /tenants/{tenant}" in applied.out
    assert f"+ edge-config/tenant  /tenants/{tenant}" in applied.out
    # Nobody is there who could have it: there is nothing to roll out, and the policy goes by itself.
    end = time.monotonic() + 60.0
    while seat("get", f"rollout-policy/{name}", "--tenant", tenant).code != 4:
        assert time.monotonic() < end
    policy.write_text("waves: [1]\n")
    file.write_text(config("debug", tenant))
    refused = seat("apply", "-f", str(file), "--rollout", str(policy))
    assert refused.code == 2, refused
    assert "rest" in refused.err


def test_one_object_is_edited_and_deleted(seat: Seat) -> None:
    tenant = "edit" + seat.folder.name.strip("-0123456789")
    file = seat.folder / "one.yaml"
    file.write_text(config("info", tenant))
    assert seat("apply", "-f", str(file)).code == 0
    editing = replace(seat, variables={**seat.variables, "EDITOR": "sed -i s/info/warn/"})
    done = editing("edit", "edge-config/tenant", "--tenant", tenant)
    assert (done.code, done.out) == (0, "edge-config/tenant is changed\n"), done.err
    level = ("get", "edge-config/tenant", "--tenant", tenant, "-o", "jsonpath=.spec.config.level")
    assert seat(*level).out == "warn\n"
    unchanged = editing("edit", "edge-config/tenant", "--tenant", tenant)
    assert "nothing was changed" in unchanged.err

    gone = ("delete", "edge-config/tenant", "--tenant", tenant)
    assert seat(*gone, "--dry-run").out == "edge-config/tenant would be deleted\n"
    assert seat(*gone).out == "edge-config/tenant is deleted\n"
    assert seat(*gone).code == 4


@pytest.mark.parametrize("text", ["{", "just text", "- 1", "kind: ''", "a: !!python/object:os.system {}"])
def test_files_that_hold_no_objects_are_refused_by_name(seat: Seat, text: str) -> None:
    file = seat.folder / "bad.yaml"
    file.write_text(text)
    outcome = seat("apply", "-f", str(file))
    assert outcome.code == 2
    assert "bad.yaml" in outcome.err


def client_options(seat: Seat, house: tuple[ServerProcess, Path]) -> dict[str, Any]:
    if seat.is_owner:
        return {"data_dir": house[1]}
    context: Context = ContextFile(Path(seat.variables["FLEETPLANE_CONTEXTS"])).read().get("lab")
    ca = seat.folder / "ca.pem"
    ca.write_text(context.ca_pem)
    return {"server": context.server, "token": context.token, "ca": ca}


async def test_the_python_clients_find_the_same(seat: Seat, house: tuple[ServerProcess, Path]) -> None:
    options = client_options(seat, house)
    with connect_sync(**options) as fleet:
        found = fleet.gpus.list(fields="status.health=unhealthy")
        assert [one.name for one in found.items] == ["gpu-b"]
        one = fleet.gpus.get("gpu-a")
        assert one.etag
        assert one.condition("Ready") is not None
        with pytest.raises(NotFound):
            fleet.gpus.get("none")
    async with connect(**options) as there:
        assert await there.gpus.list() == (await there.resource("gpus").list())
        assert (await there.gpus.get("gpu-a")).raw == one.raw
        with pytest.raises(NotFound):
            await there.gpus.get("none")
        assert (await there.gpus.wait_for("gpu-a", "Ready", seconds=60)) is not None
