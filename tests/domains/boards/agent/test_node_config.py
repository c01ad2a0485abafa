"""The node's own configuration: what is read from it, and what stops the agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetplane.domains.boards.agent import config as node_config
from fleetplane.domains.boards.agent.commands.rules import (
    RULES,
    CommandPolicy,
    Free,
    ProgramRequest,
    decide,
    diagnostics,
)
from fleetplane.domains.boards.agent.config import GpioDriverName
from fleetplane.domains.boards.agent.pins.rules import PinOperation, SafeState
from fleetplane.kernel.errors import PermissionDenied, SettingsError

WHOLE = """
[node]
name = "pump-house"
labels = { site = "north" }

[listen]
addresses = ["192.168.1.5", "fd00::5"]
port = 9191
plaintext = "127.0.0.1:9092"

[gpio]
driver = "gpiod"
operations = ["read", "write", "configure", "release", "lease"]
unprotected = [2, 3]
restricted = [4]
safe_state = "low"
pins = [{ pin = 18, safe_state = "high", safe_on_loss = true, dwell_seconds = 0.5 }]

[buses]
i2c_buses = [0, 1]

[commands]
diagnostics = true
free = "admins"
run_as = "daemon"

[[commands.profiles]]
name = "pumps"
timeout_seconds = 5
environment = ["PUMP"]
rules = [{ program = "/usr/local/bin/pump", forms = [["status"], ["speed", "[0-9]{1,3}"]] }]

[logs]
redact = ["password=\\\\S+"]
files = { pump = "/var/log/pump.log" }

[access]
refuse = ["operator/gone", "0a1b"]

[report]
loss_after_seconds = 30
"""


def test_everything_that_can_be_said(tmp_path: Path) -> None:
    path = tmp_path / "board.toml"
    path.write_text(WHOLE)
    config = node_config.load(path)

    assert (config.node.name, config.listen.port, config.gpio.driver) == (
        "pump-house",
        9191,
        GpioDriverName.GPIOD,
    )
    pins = config.gpio.policy()
    assert PinOperation.PWM not in pins.operations
    assert (pins.rule(18).safe_state, pins.rule(18).safe_on_loss) == (SafeState.HIGH, True)
    assert pins.rule(5).safe_state is SafeState.LOW
    commands = config.commands.policy()
    assert [one.name for one in commands.profiles] == ["diagnostics", "pumps"]
    assert commands.free is Free.ADMINS
    job = decide(commands, ProgramRequest(command="pump", arguments=("speed", "50")), free=False)
    assert (job.timeout_seconds, job.run_as) == (5, "daemon")
    assert config.redaction().clean("password=x y") == "[redacted] y"
    assert config.logs.paths() == {"pump": Path("/var/log/pump.log")}
    assert config.access.refuse == ("operator/gone", "0a1b")


def test_without_a_file_nothing_is_allowed_that_could_do_harm() -> None:
    config = node_config.load(None)
    assert config.commands.policy().profiles == ()
    assert config.commands.free is Free.NEVER
    assert config.listen.plaintext == ""
    assert config.gpio.policy().unprotected == frozenset()
    assert config.buses.policy().i2c_buses == {1}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[gpio]\nsafe_sate = 'low'", "safe_sate"),
        ("[gpoi]", "gpoi"),
        ("gpio = 1", "gpio"),
        ("[gpio]\nrestricted = [99]", "no pin 99"),
        ("[gpio]\npins = [{ pin = 40 }]", "no pin 40"),
        ("[gpio]\nsafe_state = 'off'", "safe_state"),
        ("[gpio]\ndwell_seconds = -1", "dwell"),
        ("[commands]\nfree = 'yes'", "free"),
        ("[[commands.profiles]]\nname = 'x'", "rules"),
        ("[[commands.profiles]]\nname = 'x'\nrules = [{ program = 'df' }]", "absolute"),
        ("[[commands.profiles]]\nname = 'x'\nrules = [{ program = '/bin/df', forms = [['(']] }]", "pattern"),
        ("[[commands.profiles]]\nname='x'\nrules=[]\nenvironment=['LD_PRELOAD']", "LD_PRELOAD"),
        ("[commands]\nmemory_bytes = 1", "16 MiB"),
        ("[logs]\nredact = ['(']", "pattern"),
        ("[logs.files]\nx = 'var/log'", "absolute"),
        ("[logs.files]\n'../x' = '/var/log/x'", "no name"),
        ("[listen]\nport = 70000", "port"),
        ("[listen]\naddresses = []", "addresses"),
        ("[report]\nloss_after_seconds = 0", "loss_after"),
        ("not toml", "not TOML"),
    ],
)
def test_what_cannot_be_meant_stops_the_agent(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "board.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=words):
        node_config.load(path)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot read"):
        node_config.load(tmp_path / "none")


def test_the_shipped_profile_looks_and_changes_nothing() -> None:
    profile = diagnostics(lambda _: True)
    assert len(profile.rules) == len(RULES)
    policy = CommandPolicy(profiles=(profile,))

    def allowed(command: str, *arguments: str) -> bool:
        try:
            decide(policy, ProgramRequest(command=command, arguments=arguments), free=False)
        except PermissionDenied:
            return False
        return True

    for good in (
        ("uptime",),
        ("df", "-h"),
        ("free", "-m"),
        ("ip", "addr"),
        ("ip", "-4", "route"),
        ("ss", "-tlnp"),
        ("journalctl", "--no-pager", "-n", "50", "-u", "k3s.service"),
        ("vcgencmd", "get_throttled"),
        ("k3s", "kubectl", "get", "nodes", "-o", "wide"),
        ("systemctl", "is-active", "k3s"),
        ("systemctl", "--no-pager", "status", "ssh.service"),
    ):
        assert allowed(*good), good
    for bad in (
        ("ip", "link", "set", "eth0", "down"),
        ("ip", "netns"),
        ("journalctl", "--vacuum-time=1s"),
        ("journalctl", "--no-pager", "-n", "5", "-u", "--flush"),
        ("vcgencmd", "otp_dump"),
        ("systemctl", "stop", "ssh"),
        ("systemctl", "is-active", "--root=/tmp"),
        ("ss", "-K"),
        ("k3s", "kubectl", "delete", "nodes"),
        ("k3s", "kubectl", "get", "secrets"),
        ("uname", "--help"),
        ("df", "-h", "/etc"),
    ):
        assert not allowed(*bad), bad


def test_programs_that_are_not_here_are_not_offered() -> None:
    assert diagnostics(lambda _: False).rules == ()
