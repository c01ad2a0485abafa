from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from support.gpus.device_api_double import DeviceApiDouble, eventually
from support.shared.cli_runner import COMMAND, Invoke, execute, spawn

from fleetplane.cli.main import MainVerbs, fleetplane
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2

HEAVY = ("grpc", "sqlalchemy", "rich", "structlog", "google.protobuf", "asyncio", "httpx")


def test_help_names_every_verb_and_the_exit_codes() -> None:
    result = CliRunner().invoke(fleetplane, ["--help"])
    assert result.exit_code == 0
    for word in (*MainVerbs.entries, "124", "timeout"):
        assert word in result.output


def test_version_is_the_packages_own() -> None:
    result = CliRunner().invoke(fleetplane, ["--version"], prog_name="fleetplane")
    assert result.output == f"fleetplane {version('fleetplane')}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["gpus", "--help"],
        ["gpus", "list", "--help"],
        ["instances", "--help"],
        ["instances", "scale", "--help"],
        ["instances", "drain", "--help"],
        ["explain", "--help"],
        ["freeze", "--help"],
        ["get", "--help"],
    ],
)
def test_help_is_there_without_importing_what_only_verbs_need(arguments: list[str]) -> None:
    program = (
        "import sys; from fleetplane.cli.main import run; run(sys.argv[1:]); "
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stderr == "[]\n"


def test_an_unknown_command_is_a_usage_error_that_names_the_nearest(invoke: Invoke) -> None:
    outcome = invoke("gpsu")
    assert outcome.code == 2
    assert "Did you mean 'gpus'?" in outcome.err
    assert outcome.out == ""


def test_an_unknown_verb_of_a_group_names_the_nearest_too(invoke: Invoke) -> None:
    assert "Did you mean 'list'?" in invoke("gpus", "lst").err


def test_a_command_like_no_other_lists_what_there_is(invoke: Invoke) -> None:
    known = ", ".join(fleetplane.list_commands(click.Context(fleetplane)))
    assert known.startswith("agent, apply, audit, ")
    assert {"boards", "edge", "gpus", "instances", "proxies", "get"} <= set(known.split(", "))
    assert known in invoke("zzzz").err


def test_an_unknown_option_is_a_usage_error(invoke: Invoke) -> None:
    assert invoke("gpus", "list", "--nope").code == 2


def test_a_group_without_a_verb_shows_its_help_as_usage(invoke: Invoke) -> None:
    outcome = invoke("gpus")
    assert outcome.code == 2
    assert "set-condition" in outcome.out + outcome.err


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    def broken(*_arguments: object, **_options: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("fleetplane.cli.clients.client.DeviceClient.__init__", broken)
    with pytest.raises(ZeroDivisionError):
        invoke("gpus", "list")


def test_a_process_ends_with_the_code_and_one_line_on_stderr(tmp_path: Path) -> None:
    outcome = execute("gpus", "list", "--address", str(tmp_path / "none.sock"), "--timeout", "50s")
    assert outcome.code == 8
    assert outcome.out == ""
    assert outcome.err.count("\n") == 1
    assert outcome.err.startswith("fleetplane: ")
    assert "fleetplane server" in outcome.err


def test_a_reader_that_leaves_ends_the_command_quietly(device_api: DeviceApiDouble) -> None:
    message = "x" * 50_000
    for index in range(60):  # three megabytes, more than any pipe holds
        condition = gpu_pb2.Condition(type="Ready", status="False", reason="Long", message=message)
        device_api.put(f"gpu-{index}", condition)
    writer = spawn("gpus", "conditions", "--address", device_api.address)
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.read(10)
    writer.stdout.close()
    said = writer.stderr.read()
    writer.stderr.close()
    assert (writer.wait(60), said) == (141, "")


def test_ctrl_c_ends_a_watch_quietly(device_api: DeviceApiDouble) -> None:
    watcher = spawn("gpus", "watch", "--address", device_api.address)
    eventually(lambda: device_api.calls_of("WatchGpus"), "the watch is open")
    watcher.send_signal(signal.SIGINT)
    out, err = watcher.communicate(timeout=60)
    assert (watcher.returncode, out, err) == (130, "", "")


def test_the_module_runs_as_the_console_script_does() -> None:
    script = Path(sys.executable).with_name("fleetplane")
    assert script.exists(), "install the project: pip install -e ."
    by_script = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    by_module = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=True)
    assert by_script.stdout == by_module.stdout


def test_an_argument_that_is_no_text_is_a_usage_error() -> None:
    done = subprocess.run([*COMMAND, "gpus", "get", b"\xff"], capture_output=True, check=False)
    assert done.returncode == 2
    assert b"is not valid UTF-8" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("redirection", [">&-", ">/dev/full"])
def test_output_that_cannot_be_written_is_a_failure_told_in_one_line(
    device_api: DeviceApiDouble, redirection: str
) -> None:
    device_api.put("gpu-a")
    command = shlex.join([*COMMAND, "gpus", "list", "--address", device_api.address])
    done = subprocess.run(["/bin/sh", "-c", f"{command} {redirection}"], stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(b"fleetplane: ")
