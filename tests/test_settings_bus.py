"""The table `[bus]`, and settings that lie in files of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetplane import settings
from fleetplane.kernel.errors import SettingsError

NATS = {"FLEETPLANE_BUS__URL": "nats://one:4222, tls://two:4222"}


def test_without_an_address_there_is_no_bus() -> None:
    assert settings.load(config=None, environment={}).bus.nats is None


def test_several_servers_have_commas_between_them() -> None:
    found = settings.load(config=None, environment={**NATS, "FLEETPLANE_BUS__TOKEN": "t"}).bus.nats
    assert found is not None
    assert (found.servers, found.token, found.needs_tls) == (("nats://one:4222", "tls://two:4222"), "t", True)
    assert "'t'" not in repr(found)


def test_secrets_may_lie_in_files(tmp_path: Path) -> None:
    address, password = tmp_path / "url", tmp_path / "password"
    address.write_text("postgresql://me:secret@db/fleet\n")
    password.write_text("hidden\n")
    loaded = settings.load(
        config=None,
        environment={
            **NATS,
            "FLEETPLANE_STORE__URL_FILE": str(address),
            "FLEETPLANE_BUS__USER": "me",
            "FLEETPLANE_BUS__PASSWORD_FILE": str(password),
        },
    )
    assert loaded.store.url == "postgresql://me:secret@db/fleet"
    assert loaded.bus.nats is not None
    assert loaded.bus.nats.password == "hidden"


@pytest.mark.parametrize(
    ("environment", "setting"),
    [
        ({"FLEETPLANE_BUS__URL": "http://nats:4222"}, "bus.url"),
        ({"FLEETPLANE_BUS__URL": "nats://"}, "bus.url"),
        ({"FLEETPLANE_BUS__URL": "nats://nats:x"}, "bus.url"),
        ({"FLEETPLANE_BUS__URL": "nats://me:secret@nats:4222"}, "bus.url"),
        ({"FLEETPLANE_BUS__URL": ",".join(f"nats://n{n}:4222" for n in range(17))}, "bus.url"),
        ({"FLEETPLANE_BUS__TOKEN": "secret"}, "bus.token"),
        ({**NATS, "FLEETPLANE_BUS__USER": "me"}, "bus.user"),
        ({**NATS, "FLEETPLANE_BUS__CERT_FILE": "x"}, "bus.cert_file"),
        ({**NATS, "FLEETPLANE_BUS__TOKEN": "secret", "FLEETPLANE_BUS__CREDENTIALS_FILE": "x"}, "bus.token"),
        ({**NATS, "FLEETPLANE_BUS__TOKEN_FILE": "/nowhere/secret"}, "bus.token_file"),
        ({"FLEETPLANE_STORE__URL_FILE": "/dev/null"}, "store.url_file"),
        ({"FLEETPLANE_STORE__URL_FILE": "/dev/zero"}, "store.url_file"),
        (
            {"FLEETPLANE_STORE__URL_FILE": "/x", "FLEETPLANE_STORE__URL": "postgresql://secret"},
            "store.url_file",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(environment: dict[str, str], setting: str) -> None:
    with pytest.raises(SettingsError) as refused:
        settings.load(config=None, environment=environment)
    assert refused.value.message.startswith(f"{setting}:")
    assert "secret@" not in refused.value.message
    assert "//secret" not in refused.value.message
