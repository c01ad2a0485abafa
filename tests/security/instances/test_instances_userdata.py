"""Variables choose a name in the address of user data: what they hold is no template and no address."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetplane.domains.instances.configuration.schema import Userdata
from fleetplane.domains.instances.configuration.templates.template import TemplateData
from fleetplane.domains.instances.content.downloads import Downloads
from fleetplane.domains.instances.content.user_data import user_data
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import FailedPrecondition, FleetplaneError
from fleetplane.kernel.objects import LocalObjects

DOCUMENT = "shard/main/config.jsonc"
SECRET = b"what other tenants have"


async def booted(tmp_path: Path, content: str, variables: dict[str, str]) -> bytes:
    objects = LocalObjects(tmp_path / "objects")
    await objects.put(DOCUMENT, SECRET)
    await objects.put("boot/prod", b"#!/bin/sh")
    await objects.put("prod", b"#!/bin/sh")
    data = TemplateData(instance_id="i", instance_kind="wkr", vars=variables)
    wanted = Userdata(source="url", content=content)
    return await user_data(wanted, Downloads(objects, SystemClock()), data, nonce="n")


@pytest.mark.parametrize("content", ["storage:{{ .Vars.a }}", "storage:boot/{{ .Vars.a }}", "{{ .Vars.a }}"])
@pytest.mark.parametrize(
    "value", ["{{ .Vars.b }}", "{{.Vars.b}}", f"storage:{DOCUMENT}", DOCUMENT, f"../{DOCUMENT}"]
)
async def test_a_variable_that_is_a_template_or_an_address_leads_nowhere(
    tmp_path: Path, content: str, value: str
) -> None:
    for inner in (DOCUMENT, f"../{DOCUMENT}", f"storage:{DOCUMENT}"):
        with pytest.raises(FleetplaneError):
            await booted(tmp_path, content, {"a": value, "b": inner})


async def test_a_variable_still_names_an_object(tmp_path: Path) -> None:
    assert await booted(tmp_path, "storage:boot/{{ .Vars.a }}", {"a": "prod"}) == b"#!/bin/sh"
    assert await booted(tmp_path, "storage:{{ .Vars.a }}", {"a": "prod"}) == b"#!/bin/sh"
    with pytest.raises(FailedPrecondition, match="into the storage"):
        await booted(tmp_path, "{{ .Vars.a }}", {"a": "storage:prod"})
