from __future__ import annotations

import json
import threading
from pathlib import Path

import grpc
import pytest
import yaml
from support.gpus.device_api_double import DeviceApiDouble, eventually
from support.shared.cli_runner import Invoke

from fleetplane.cli import parameters
from fleetplane.domains.gpus.cli.view import ShownHealth, age, health
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2


def condition(kind: str, status: str, reason: str = "", *, seconds: int = 0) -> gpu_pb2.Condition:
    made = gpu_pb2.Condition(type=kind, status=status, reason=reason)
    if seconds:
        made.last_transition_time.FromSeconds(seconds)
    return made


@pytest.fixture
def two(device_api: DeviceApiDouble) -> DeviceApiDouble:
    device_api.put("gpu-a", condition("Ready", "True", "Fine", seconds=1_700_000_000))
    device_api.put("gpu-b", condition("Ready", "True"), condition("NVMLReady", "False", "XidError"))
    return device_api


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([], ShownHealth.UNKNOWN),
        (["True"], ShownHealth.HEALTHY),
        (["True", "True"], ShownHealth.HEALTHY),
        (["True", "Unknown"], ShownHealth.UNKNOWN),
        (["True", "odd"], ShownHealth.UNKNOWN),
        (["Unknown", "False"], ShownHealth.UNHEALTHY),
    ],
)
def test_one_false_condition_condemns_and_one_unknown_casts_doubt(
    statuses: list[str], expected: ShownHealth
) -> None:
    gpu = gpu_pb2.Gpu()
    gpu.status.conditions.extend(condition(f"C{i}", status) for i, status in enumerate(statuses))
    assert health(gpu) is expected


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (119, "119s"), (120, "2m"), (7199, "119m"), (7200, "2h"), (172_800, "2d")],
)
def test_ages_are_short(seconds: int, text: str) -> None:
    assert age(condition("Ready", "True", seconds=1_000_000), 1_000_000 + seconds) == text
    assert age(condition("Ready", "True"), 1_000_000.0) == "-"


def test_a_list_is_a_plain_table_outside_a_terminal(invoke: Invoke, two: DeviceApiDouble) -> None:
    outcome = invoke("gpus", "list", "--address", two.address)
    header, first, second = outcome.out.splitlines()
    assert outcome.code == 0
    assert header.split() == ["NAME", "HEALTH", "CONDITIONS", "SINCE", "ACTION", "VERSION"]
    assert first.split()[:3] == ["gpu-a", "Healthy", "Ready=True"]
    assert second.split()[:4] == ["gpu-b", "Unhealthy", "Ready=True", "NVMLReady=False(XidError)"]
    assert "\x1b" not in outcome.out


def test_an_empty_list_leaves_stdout_empty_and_says_so(invoke: Invoke, device_api: DeviceApiDouble) -> None:
    outcome = invoke("gpus", "list", "--address", device_api.address)
    assert (outcome.code, outcome.out) == (0, "")
    assert "No GPUs" in outcome.err
    assert (
        json.loads(invoke("gpus", "list", "-o", "json", "--address", device_api.address).out)["items"] == []
    )


def test_json_and_yaml_say_the_same_in_the_apis_own_words(invoke: Invoke, two: DeviceApiDouble) -> None:
    as_json = json.loads(invoke("gpus", "list", "-o", "json", "--address", two.address).out)
    as_yaml = yaml.safe_load(invoke("gpus", "list", "-o", "yaml", "--address", two.address).out)
    assert as_json == as_yaml
    first = as_json["items"][0]
    assert as_json["metadata"]["resourceVersion"] == "2"
    assert first["name"] == "gpu-a"
    assert first["resourceVersion"] == "1"
    assert first["status"]["conditions"][0]["lastTransitionTime"] == "2023-11-14T22:13:20Z"


def test_get_shows_one_gpu_with_its_conditions(invoke: Invoke, two: DeviceApiDouble) -> None:
    outcome = invoke("gpus", "get", "gpu-b", "--address", two.address)
    assert outcome.code == 0
    assert "NVMLReady" in outcome.out.split("TYPE")[1]
    assert (
        json.loads(invoke("gpus", "get", "gpu-b", "-o", "json", "--address", two.address).out)["name"]
        == "gpu-b"
    )


def test_get_of_an_unknown_gpu_is_not_found(invoke: Invoke, two: DeviceApiDouble) -> None:
    outcome = invoke("gpus", "get", "nope", "--address", two.address)
    assert (outcome.code, outcome.out) == (4, "")
    assert outcome.err == "fleetplane: not found: gpu not found\n"


def test_expect_exits_3_when_the_condition_does_not_hold(invoke: Invoke, two: DeviceApiDouble) -> None:
    assert invoke("gpus", "get", "gpu-b", "--expect", "Ready=True", "--address", two.address).code == 0
    outcome = invoke("gpus", "get", "gpu-b", "--expect", "NVMLReady=True", "--address", two.address)
    assert outcome.code == 3
    assert "NVMLReady=False (XidError)" in outcome.err
    assert invoke("gpus", "get", "gpu-b", "--expect", "Odd=True", "--address", two.address).code == 3


def test_wait_for_returns_once_the_condition_holds(invoke: Invoke, two: DeviceApiDouble) -> None:
    def heal() -> None:
        eventually(lambda: two.calls_of("WatchGpus"))
        two.put("gpu-b", condition("NVMLReady", "True", "Recovered"))

    healer = threading.Thread(target=heal)
    healer.start()
    outcome = invoke(
        "gpus",
        "get",
        "gpu-b",
        "--wait-for",
        "NVMLReady=True",
        "--timeout",
        "60s",
        "-o",
        "json",
        "--address",
        two.address,
    )
    healer.join()
    assert outcome.code == 0
    assert json.loads(outcome.out)["status"]["conditions"][0]["reason"] == "Recovered"


def test_wait_for_a_gpu_that_is_not_there_yet(invoke: Invoke, device_api: DeviceApiDouble) -> None:
    def appear() -> None:
        eventually(lambda: device_api.calls_of("WatchGpus"))
        device_api.put("gpu-c", condition("Ready", "True"))

    maker = threading.Thread(target=appear)
    maker.start()
    arguments = ("--wait-for", "Ready=True", "--timeout", "60s", "--address", device_api.address)
    assert invoke("gpus", "get", "gpu-c", *arguments).code == 0
    maker.join()


def test_wait_for_in_vain_exits_124_and_says_what_is_the_case(invoke: Invoke, two: DeviceApiDouble) -> None:
    arguments = ("--wait-for", "NVMLReady=True", "--timeout", "5s", "--address", two.address)
    outcome = invoke("gpus", "get", "gpu-b", *arguments)
    assert outcome.code == 124
    assert "NVMLReady=False (XidError)" in outcome.err
    assert invoke("gpus", "get", "nope", *arguments).code == 124


def test_conditions_of_all_or_of_one(invoke: Invoke, two: DeviceApiDouble) -> None:
    everything = json.loads(invoke("gpus", "conditions", "-o", "json", "--address", two.address).out)
    assert [(entry["gpu"], entry["type"]) for entry in everything] == [
        ("gpu-a", "Ready"),
        ("gpu-b", "Ready"),
        ("gpu-b", "NVMLReady"),
    ]
    one = invoke("gpus", "conditions", "gpu-a", "--address", two.address)
    assert len(one.out.splitlines()) == 2
    assert invoke("gpus", "conditions", "nope", "--address", two.address).code == 4


@pytest.mark.parametrize("variable", ["FLEETPLANE_DEVICE_API", "NVIDIA_DEVICE_API_TARGET"])
def test_the_address_can_come_from_the_environment(
    invoke: Invoke, two: DeviceApiDouble, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, two.address)
    assert "gpu-a" in invoke("gpus", "list").out


def test_a_server_started_in_this_folder_is_found(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A server of the whole machine comes first, and one may well run beside the tests.
    monkeypatch.setattr(parameters, "SYSTEM_SOCKET", tmp_path / "none" / "device.sock")
    (tmp_path / "fleetplane-data").mkdir()
    double = DeviceApiDouble(tmp_path / "fleetplane-data" / "device.sock")
    double.start()
    try:
        double.put("here")
        assert "here" in invoke("gpus", "list").out
    finally:
        double.stop()


def test_a_bad_address_is_a_usage_error(invoke: Invoke) -> None:
    outcome = invoke("gpus", "list", "--address", "nonsense")
    assert outcome.code == 2
    assert "host:port" in outcome.err


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (grpc.StatusCode.PERMISSION_DENIED, 5),
        (grpc.StatusCode.ABORTED, 6),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 8),
        (grpc.StatusCode.INTERNAL, 1),
    ],
)
def test_a_refusal_has_its_exit_code(
    invoke: Invoke, two: DeviceApiDouble, status: grpc.StatusCode, code: int
) -> None:
    two.refusals["ListGpus"] = status
    outcome = invoke("gpus", "list", "--address", two.address)
    assert outcome.code == code
    assert "ListGpus is refused" in outcome.err


def test_writing_verbs_register_report_and_remove(invoke: Invoke, device_api: DeviceApiDouble) -> None:
    at = ("--address", device_api.address)
    assert "registered" in invoke("gpus", "register", "gpu-x", "--uuid", "GPU-1", *at).out
    assert "already" in invoke("gpus", "register", "gpu-x", *at).out
    outcome = invoke(
        "gpus", "set-condition", "gpu-x", "Ready=False", "--reason", "Burning", "--message", "smoke", *at
    )
    assert outcome.code == 0
    held = device_api.condition("gpu-x", "Ready")
    assert held is not None
    assert (held.status, held.reason, held.message) == ("False", "Burning", "smoke")
    assert device_api.gpus["gpu-x"].spec.uuid == "GPU-1"
    assert invoke("gpus", "set-condition", "nope", "Ready=True", *at).code == 4
    assert invoke("gpus", "unregister", "gpu-x", *at).code == 0
    assert invoke("gpus", "unregister", "gpu-x", *at).code == 4


def test_control_characters_of_a_provider_do_not_reach_the_terminal(
    invoke: Invoke, device_api: DeviceApiDouble
) -> None:
    device_api.put("gpu\x1b[31m\nevil", condition("Ready", "True"))
    outcome = invoke("gpus", "list", "--address", device_api.address)
    assert "\x1b" not in outcome.out
    assert len(outcome.out.splitlines()) == 2


def test_a_name_with_a_line_break_does_not_make_a_second_line_of_a_change(
    invoke: Invoke, device_api: DeviceApiDouble
) -> None:
    device_api.put("gpu-a\nDELETED  gpu-b\x1b[2J")
    outcome = invoke("gpus", "watch", "--timeout", "5s", "--address", device_api.address)
    assert len(outcome.out.splitlines()) == 1
    assert "\x1b" not in outcome.out
