"""A configuration document decides which machines there are; it does not decide what the server runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.instances.configuration_samples import complaints

from fleetplane.domains.instances.providers.contract import CreateRequest, ProviderContext
from fleetplane.domains.instances.providers.local.provider import LocalProvider
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import InvalidArgument, SettingsError

CHOOSE_CODE = (
    "PATH",
    "LD_PRELOAD",
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "BASH_ENV",
    "OPENSSL_CONF",
    "nstance_x",
    "",
)


def local(folder: Path, **extras: object) -> LocalProvider:
    environment = {"PATH": os.environ["PATH"]}
    return LocalProvider(
        ProviderContext(clock=SystemClock(), state_directory=folder, environment=environment, **extras)  # type: ignore[arg-type]
    )


def test_a_document_that_names_a_program_is_refused() -> None:
    found = complaints(
        shard__infra={
            "provider": "local",
            "region": "here",
            "zone": "here-a",
            "options": {"command": ["/bin/sh", "-c", "touch /tmp/pwned"]},
        }
    )
    assert found == {"shard.infra.options.command": "a document cannot name programs"}


def test_the_provider_itself_takes_no_program_from_options(tmp_path: Path) -> None:
    provider = local(tmp_path, command=("owners-agent",))
    with pytest.raises(SettingsError, match="cannot name programs"):
        provider.configure({"command": ["/bin/sh"]})
    assert provider._command == ("owners-agent",)


@pytest.mark.parametrize("name", CHOOSE_CODE)
async def test_variables_that_choose_code_are_not_for_documents(tmp_path: Path, name: str) -> None:
    provider = local(tmp_path)
    provider.configure({"environment": {name: "/tmp/evil"}})
    [problem] = provider.validate()
    assert "cannot set the environment variable" in problem
    request = CreateRequest(
        cluster="c", shard="s", instance_id="wkr06gy2sjewdv2v3jjq1ve39x0c4", args={"environment": {name: "x"}}
    )
    with pytest.raises(InvalidArgument, match="cannot set the environment variable"):
        await provider.create_instance(request)
    assert list(tmp_path.iterdir()) == [], "nothing was begun"


def test_what_the_owner_allows_may_be_set(tmp_path: Path) -> None:
    provider = local(tmp_path, variables=frozenset({"COLOUR"}))
    provider.configure({"environment": {"NSTANCE_DEBUG": "1", "COLOUR": "blue"}})
    assert provider.validate() == []
