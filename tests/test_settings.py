from __future__ import annotations

from pathlib import Path

import pytest

from fleetplane import settings
from fleetplane.domains.gpus.settings import DeviceApiSettings, GpuSettings
from fleetplane.domains.gpus.wire import GpuDialect
from fleetplane.kernel.errors import SettingsError
from fleetplane.kernel.telemetry import TelemetryLimits
from fleetplane.server import assembly


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "fleetplane.toml"
    path.write_text(text)
    return path


def test_nothing_configured_gives_the_documented_defaults() -> None:
    loaded = settings.load(config=None, environment={})

    assert loaded.data_dir == "./fleetplane-data"
    assert loaded.domains == settings.domain_names() == ("gpus", "instances", "proxies", "boards", "edge")
    assert loaded.listeners.web.addresses == ("127.0.0.1:8080",)
    assert loaded.listener("device-api").addresses == ("unix:", "127.0.0.1:50051")
    device_api = loaded.listener("device-api")
    assert isinstance(device_api, DeviceApiSettings)
    assert device_api.dialect is GpuDialect.SUPERSET


def test_flags_beat_the_environment_and_the_environment_beats_the_file(tmp_path: Path) -> None:
    config = write(tmp_path, "[gpus]\nlease_seconds = 1\nmax_gpus = 1\nmax_providers = 1\n")
    environment = {"FLEETPLANE_GPUS__LEASE_SECONDS": "2", "FLEETPLANE_GPUS__MAX_GPUS": "2"}

    loaded = settings.load(config=config, environment=environment, flags={"gpus.lease_seconds": "3"})
    gpus = loaded.of(GpuSettings)

    assert (gpus.lease_seconds, gpus.max_gpus, gpus.max_providers) == (3.0, 2, 1)


def test_lists_are_comma_separated_outside_the_file() -> None:
    environment = {"FLEETPLANE_LISTENERS__DEVICE_API__ADDRESSES": "unix:///run/x.sock, 127.0.0.1:0"}

    loaded = settings.load(config=None, environment=environment, flags={"only": "gpus"})

    assert loaded.listener("device-api").addresses == ("unix:///run/x.sock", "127.0.0.1:0")
    assert loaded.only == ("gpus",)


@pytest.mark.parametrize(
    ("config", "environment", "flags", "nearest"),
    [
        ("[gpus]\nlease_second = 5\n", {}, {}, "gpus.lease_seconds"),
        ("[listners.web]\naddresses = []\n", {}, {}, "listeners.web.addresses"),
        ("data-dir = 'x'\n", {}, {}, "data_dir"),
        ("[listners.web]\n", {}, {}, "listeners.web.addresses"),
        ("", {"FLEETPLANE_GPUS__LEASE": "5"}, {}, "FLEETPLANE_GPUS__LEASE_SECONDS"),
        ("", {"FLEETPLANE_DATADIR": "x"}, {}, "FLEETPLANE_DATA_DIR"),
        ("", {}, {"log.levle": "info"}, "log.level"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest_known_one(
    tmp_path: Path, config: str, environment: dict[str, str], flags: dict[str, str], nearest: str
) -> None:
    with pytest.raises(SettingsError, match=f"did you mean '{nearest}'"):
        settings.load(config=write(tmp_path, config), environment=environment, flags=flags)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ("[gpus]\nlease_seconds = 'soon'\n", "gpus.lease_seconds"),
        ("[gpus]\nmax_gpus = 0\n", "gpus.max_gpus: 0 is below 1"),
        ("[log]\nlevel = 'loud'\n", "log.level: 'loud' is not one of debug"),
        ("only = ['gpu']\n", "only: 'gpu' is not one of gpus, instances"),
        ("[listeners.device-api]\nsocket_mode = 'rw'\n", "socket_mode: 'rw' is no octal file mode"),
        ("[listeners.device-api]\ndialect = 'first'\n", "dialect: 'first' is not one of superset"),
        ("data_dir = ''\n", "data_dir: must not be empty"),
        ("[gpus\n", "is not TOML"),
    ],
)
def test_a_bad_value_is_an_error_that_names_the_key(tmp_path: Path, config: str, complaint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        settings.load(config=write(tmp_path, config), environment={})

    assert complaint in caught.value.message


def test_a_configuration_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read .*absent\.toml"):
        settings.load(config=tmp_path / "absent.toml", environment={})


@pytest.mark.parametrize(
    "variable",
    [
        "FLEETPLANE_TOKEN",
        "FLEETPLANE_PROXY_SERVER",
        "FLEETPLANE_DEVICE_API",
        "FLEETPLANE_BOARD_AGENT_NAME",
        "FLEETPLANE_EDGE_AGENT_STATE_DIR",
    ],
)
def test_variables_of_clients_and_agents_are_not_mistaken_for_settings(variable: str) -> None:
    assert settings.load(config=None, environment={variable: "x"})


def test_every_setting_has_one_environment_variable() -> None:
    variables = [key.upper().replace(".", "__").replace("-", "_") for key, _ in settings.known_keys()]

    assert len(variables) == len(set(variables)) > 15


def test_a_known_section_may_be_empty_and_a_domain_named_twice(tmp_path: Path) -> None:
    loaded = settings.load(
        config=write(tmp_path, "[gpus]\n[listeners.web]\n"), environment={}, flags={"only": "gpus,gpus"}
    )
    assert loaded.domains == ("gpus",)


def test_how_long_and_how_much_of_the_past_is_kept_can_be_set() -> None:
    assert assembly.telemetry_limits(settings.load(config=None, environment={})) == TelemetryLimits()

    flags = {"telemetry.points_days": "2", "telemetry.lines_days": "0.5", "telemetry.size_mebibytes": "64"}
    limits = assembly.telemetry_limits(settings.load(config=None, environment={}, flags=flags))

    assert (limits.points_age_seconds, limits.lines_age_seconds) == (172_800.0, 43_200.0)
    assert limits.size_bytes == 64 * 1024**2


@pytest.mark.parametrize("name", ["points_days", "lines_days", "size_mebibytes"])
def test_a_past_of_no_length_or_size_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=f"telemetry.{name}"):
        settings.load(config=None, environment={}, flags={f"telemetry.{name}": "0"})
