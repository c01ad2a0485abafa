"""The daemon's unit: what is written, and what systemd is asked for. Nothing is ever started here."""

from __future__ import annotations

import configparser
from collections.abc import Sequence
from pathlib import Path

import pytest

from fleetplane.domains.edge.agent.service_unit import NAME, SystemUnit, unit
from fleetplane.kernel.errors import AlreadyExists, InvalidArgument, SettingsError


class Recorder:
    def __init__(self, **codes: int) -> None:
        self.asked: list[list[str]] = []
        self._codes = codes

    def __call__(self, words: Sequence[str]) -> int:
        self.asked.append(list(words))
        return next((code for word, code in self._codes.items() if word.replace("_", "-") in words), 0)


def read(text: str) -> configparser.ConfigParser:
    found = configparser.ConfigParser(strict=True, interpolation=None)
    found.optionxform = str  # type: ignore[assignment,method-assign]
    found.read_string(text)
    return found


def test_the_unit_restarts_on_failure_only_and_is_shut_in() -> None:
    service = read(unit(state=Path("/home/me/.aegis/edge"), command="/usr/bin/fleetplane"))["Service"]
    assert service["ExecStart"] == "/usr/bin/fleetplane agent edge run --state-dir /home/me/.aegis/edge"
    assert (service["Restart"], service["RestartSec"]) == ("on-failure", "5")
    assert (service["NoNewPrivileges"], service["PrivateTmp"]) == ("yes", "yes")
    assert (service["ProtectSystem"], service["ProtectHome"]) == ("strict", "tmpfs")
    assert service["ReadWritePaths"] == "-/home/me/.aegis/edge"
    assert service["LimitNOFILE"] == "65536"


def test_words_are_quoted_as_systemd_reads_them() -> None:
    made = unit(state=Path('/a b/%h/"c'), options=["--authority", "/$x"], command="fp")
    assert r'--state-dir "/a b/%%h/\"c" --authority /$$x' in made
    with pytest.raises(InvalidArgument):
        unit(state=Path("/a\nExecStartPre=/bin/evil"))


def test_installing_writes_the_unit_once_and_asks_for_it_to_be_started(tmp_path: Path) -> None:
    run = Recorder()
    service = SystemUnit(folder=tmp_path / "units", run=run)
    assert service.install(state=tmp_path / "state") == []
    assert service.path.name == NAME
    assert ["systemctl", "--user", "enable", "--now", NAME] in run.asked
    with pytest.raises(AlreadyExists):
        service.install(state=tmp_path / "state")
    service.install(state=tmp_path / "other", force=True)
    assert "other" in service.path.read_text()
    assert service.status() == "running"
    assert service.uninstall() is True
    assert not service.path.exists()
    assert (service.uninstall(), service.status()) == (False, "not installed")


def test_what_does_not_work_is_said(tmp_path: Path) -> None:
    service = SystemUnit(folder=tmp_path, run=Recorder(enable_linger=1, is_active=3))
    (warning,) = service.install(state=tmp_path)
    assert "lingering" in warning
    assert service.status() == "not running"
    with pytest.raises(SettingsError, match="systemd does not answer"):
        SystemUnit(folder=tmp_path / "b", run=Recorder(daemon_reload=1)).install(state=tmp_path)


def test_nothing_is_started_when_that_is_not_wanted(tmp_path: Path) -> None:
    run = Recorder()
    SystemUnit(folder=tmp_path, run=run).install(state=tmp_path, start=False)
    assert run.asked == []
