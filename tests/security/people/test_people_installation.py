"""What a neighbour on the machine can read of a server's secrets."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from support.shared.server_process import run_server, running_server

from fleetplane import settings
from fleetplane.kernel.errors import SettingsError
from fleetplane.kernel.files import ensure_private
from fleetplane.sections.base import is_secret

SECRETS = sorted(key for key, kind in settings.known_keys() if is_secret(kind))


def test_a_data_directory_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    ensure_private(tmp_path / "data", setting="data_dir")

    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o770, 0o702, 0o704])
def test_a_data_directory_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)

    with pytest.raises(SettingsError, match="can be read or written by other users") as refused:
        ensure_private(tmp_path, setting="data_dir")

    assert f"chmod 700 {tmp_path}" in (refused.value.advice)


def test_a_server_puts_nothing_where_others_can_read_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(0o755)

    refused = run_server(data, ["--only", "gpus"])

    assert refused.returncode != 0
    assert f"{data} can be read or written by other users (mode 0755)" in refused.stderr
    assert list(data.iterdir()) == []


def test_a_data_directory_that_others_may_only_pass_through_is_accepted(tmp_path: Path) -> None:
    tmp_path.chmod(0o711)

    ensure_private(tmp_path, setting="data_dir")

    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o711


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to somebody else")
def test_a_data_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    os.chown(data, 65534, 65534)

    with pytest.raises(SettingsError, match="belongs to user 65534"):
        ensure_private(data, setting="data_dir")


def test_a_file_in_place_of_the_data_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")

    with pytest.raises(SettingsError, match=r"data_dir: .*data is not a directory"):
        ensure_private(tmp_path / "data", setting="data_dir")


def test_every_setting_whose_name_says_that_it_is_a_secret_is_one() -> None:
    named = {key for key, _ in settings.known_keys() if key.endswith(("password", "_key", "secret", "token"))}

    assert named <= set(SECRETS)
    assert "identity.master_key" in SECRETS


@pytest.mark.parametrize("key", SECRETS)
def test_a_secret_on_the_command_line_is_refused_and_its_value_not_repeated(key: str) -> None:
    with pytest.raises(SettingsError) as refused:
        settings.assignments([f"{key}=hunter2-hunter2"])

    assert str(refused.value).startswith(f"--set {key}: is a secret")
    assert f"FLEETPLANE_{key.upper().replace('.', '__')}" in (refused.value.advice)
    assert "hunter2" not in f"{refused.value} {refused.value.advice}"


def test_a_secret_in_the_environment_is_taken(tmp_path: Path) -> None:
    with running_server(tmp_path, "--only", "proxies", admin_password="correct horse battery") as server:
        assert server.stop() == 0
