"""What an operator of one tenant can get of another tenant's through the document they share."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.instances.configuration_samples import complaints
from support.instances.controller_rig import rig as controller_rig
from support.instances.instances_lab import document as lab_document
from support.instances.operator_rig import OTHER, TENANT, Operator, Rig, document, operator_rig

from fleetplane.domains.instances.configuration.templates.template import TemplateData
from fleetplane.domains.instances.content.downloads import reachable
from fleetplane.domains.instances.content.files import InstanceSecrets
from fleetplane.domains.instances.rules.stored_paths import object_path
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import FailedPrecondition, NotFound
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.objects import LocalObjects

Code = grpc.StatusCode
KEY_FILE = {"tls.key": {"kind": "secret", "source": "umbrella-tls"}}


def two_tenants() -> dict[str, Any]:
    """The other tenant's template carries a key file; one more is for everyone."""
    wanted = document()
    wanted["templates"]["vault"] = {"kind": "vlt", "arch": "amd64", "subnet_pool": "open", "files": KEY_FILE}
    wanted["templates"]["shared"] = {"kind": "shr", "arch": "amd64", "subnet_pool": "open", "tenants": ["*"]}
    wanted["groups"][OTHER]["vault"] = {"template": "vault", "size": 1}
    return wanted


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with operator_rig(tmp_path, two_tenants()) as rig:
        yield rig


@pytest.fixture
async def eve(rig: Rig) -> Operator:
    return await rig.operator(TENANT)


async def refused(call: Any) -> tuple[Code, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def test_another_tenants_template_is_not_found_like_one_that_does_not_exist(
    rig: Rig, eve: Operator
) -> None:
    theirs = await refused(eve.upsert("mine", template="vault", size=1))
    nobodys = await refused(eve.upsert("mine", template="vxxlt", size=1))
    assert theirs[0] is nobodys[0] is Code.NOT_FOUND
    assert theirs[1].replace("vault", "") == nobodys[1].replace("vxxlt", ""), "no way to tell them apart"
    assert "vault" not in nobodys[1]
    assert {group.key for group in await eve.groups()} == {"api", "web"}


async def test_a_template_for_everyone_is_for_everyone(rig: Rig, eve: Operator) -> None:
    assert (await eve.upsert("mine", template="shared", size=1)).key == "mine"
    assert (await (await rig.operator(OTHER)).upsert("mine", template="vault", size=1)).key == "mine"


async def test_an_instance_on_demand_is_not_made_from_another_tenants_template(tmp_path: Path) -> None:
    wanted = lab_document(0)
    wanted["templates"]["vault"] = {"kind": "vlt", "arch": "amd64", "files": KEY_FILE}
    wanted["groups"]["umbrella"] = {"vault": {"template": "vault"}}
    async with controller_rig(tmp_path, wanted) as rig:
        view = rig.groups.view("acme", "workers")
        assert view is not None
        with pytest.raises(NotFound, match="no template 'vault'"):
            rig.groups.chosen(view, template="vault")


async def test_a_group_made_before_its_template_was_another_tenants_gets_nothing_of_it(
    rig: Rig, eve: Operator
) -> None:
    await eve.upsert("mine", template="shared", size=1)
    narrowed = two_tenants()
    narrowed["templates"]["shared"]["tenants"] = [OTHER]
    await rig.configure(narrowed)
    await eve.refresh()
    assert rig.groups.view(TENANT, "mine") is None
    assert "no longer has for this tenant" in rig.groups.unresolved(TENANT, "mine"), "left alone, not deleted"


async def test_files_go_to_the_tenants_they_name(tmp_path: Path) -> None:
    wanted = two_tenants()
    wanted["templates"]["shared"]["files"] = {
        "all.json": {"kind": "json", "template": {}},
        "one.json": {"kind": "json", "template": {}, "tenants": [OTHER]},
    }
    async with operator_rig(tmp_path, wanted) as rig:
        got = {}
        for tenant in (TENANT, OTHER):
            await (await rig.operator(tenant)).upsert("mine", template="shared", size=1)
            view = rig.groups.view(tenant, "mine")
            assert view is not None
            got[tenant] = set(view.group.files)
    assert got == {TENANT: {"all.json"}, OTHER: {"all.json", "one.json"}}


def test_a_document_cannot_give_a_tenants_group_what_is_for_others() -> None:
    found = complaints(
        templates__worker__tenants=["umbrella", "Not A Name"],
        groups={"acme": {"web": {"template": "worker"}}},
    )
    assert set(found) == {"groups.acme.web.template", "templates.worker.tenants[1]"}


async def test_a_secret_is_given_to_its_tenants_and_to_no_name_put_together(tmp_path: Path) -> None:
    master = MasterKey(bytes(32), SystemClock())
    tenants = {"umbrella-tls": ("umbrella",), "open": ("*",)}
    secrets = InstanceSecrets(LocalObjects(tmp_path), master, lambda name: tenants.get(name, ()))
    for name in ("umbrella-tls", "open", "older"):
        await secrets.put(name, name.encode())

    async def got(name: str, tenant: str, *, written_out: bool = False) -> bool:
        try:
            return await secrets.get(name, tenant=tenant, written_out=written_out) == name.encode()
        except NotFound:
            return False

    assert not await got("umbrella-tls", "acme")
    assert not await got("umbrella-tls", "acme", written_out=True), "whatever the document says"
    assert await got("umbrella-tls", "umbrella")
    assert await got("open", "acme")
    assert not await got("older", "acme"), "an operator's variable chose it"
    assert await got("older", "acme", written_out=True)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("files/{{ .Vars.env }}", "../shard/local/config.jsonc"),
        ("files/{{ .Vars.env }}", "a/b"),
        ("{{ .Vars.env }}", "shard/local/config.jsonc"),
        ("{{ .Vars.env }}/local/config.jsonc", "shard"),
        ("{{ .Vars.env }}/secret/umbrella-tls", "cluster"),
        ("files/{{ .Vars.env }}/x", ".."),
        ("files/{{ .Vars.env }}/x", ""),
        ("config/local.jsonc", ""),
    ],
)
def test_a_variable_does_not_lead_to_the_servers_own_objects(text: str, value: str) -> None:
    data = TemplateData(instance_id="i", instance_kind="wkr", vars={"env": value})
    with pytest.raises(FailedPrecondition):
        object_path(text, data)


def test_a_variable_fills_in_a_name() -> None:
    data = TemplateData(instance_id="i", instance_kind="wkr", vars={"env": "prod"})
    assert object_path("files/{{ .Vars.env }}/boot.json", data) == "files/prod/boot.json"


async def test_a_refused_refresh_names_only_what_the_caller_may_see(rig: Rig, eve: Operator) -> None:
    wanted = copy.deepcopy(two_tenants())
    wanted["groups"][TENANT]["web"]["size"] = -1
    wanted["groups"][OTHER]["vault"]["template"] = "vulat"
    wanted["templates"]["vault"]["files"] = {"umbrella-tls.exe": {"kind": "secret", "source": "umbrella-tls"}}
    wanted["shard"]["subnet_pools"]["Hidden Pool"] = ["net-9"]
    await rig.configure(wanted)
    code, text = await refused(eve.refresh())
    assert code is Code.INVALID_ARGUMENT
    assert f"groups.{TENANT}.web.size" in text
    for hidden in ("vault", "vulat", "umbrella-tls", "Hidden", OTHER):
        assert hidden not in text
    [told] = rig.errors.recent(TENANT, 9)
    assert told.text == text
    theirs = await rig.operator(OTHER)
    _, text = await refused(theirs.refresh())
    assert f"groups.{OTHER}.vault.template" in text
    assert TENANT not in text


@pytest.mark.parametrize(
    "address",
    [
        "192.0.0.1",
        "192.0.0.192",
        "192.0.0.8",
        "192.0.0.170",
        "2002:a00:1::1",
        "2002:a9fe:a9fe::1",
        "2002:808:808::1",
        "2001::1",
        "2001:db8::1",
        "64:ff9b::a00:1",
        "64:ff9b:1::1",
        "::10.0.0.1",
        "fec0::1",
        "fd00:ec2::254",
        "100.64.0.1",
        "100.100.100.200",
        "168.63.129.16",
        "198.18.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "ff0e::1",
        "::ffff:192.0.0.8",
        "::ffff:127.0.0.1",
        "3fff::1",
        "5f00::1",
        "100::1",
    ],
)
def test_user_data_is_fetched_from_global_unicast_addresses_alone(address: str) -> None:
    assert not reachable(address, private=False)


@pytest.mark.parametrize(
    "address", ["169.254.169.254", "64:ff9b::a9fe:a9fe", "fd00:ec2::254", "100.100.100.200"]
)
def test_nobody_reaches_where_clouds_keep_credentials(address: str) -> None:
    assert not reachable(address, private=True)
