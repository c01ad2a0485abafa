"""What a board says of itself, read from folders that look like its /proc and /sys."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.boards.board_trees import FOURTH, plant

from fleetplane.domains.boards.agent.metrics import board as board_sources
from fleetplane.domains.boards.agent.metrics.values import BlockDevice, Power, Processes, Reserve, Zone


@pytest.fixture
def fourth(tmp_path: Path) -> Path:
    return plant(tmp_path, FOURTH)


def never_ask(argv: Sequence[str]) -> str:
    raise AssertionError(f"asked {argv}")


def test_a_board_says_who_it_is(fourth: Path) -> None:
    board = board_sources.board(fourth)
    assert board.model == "Raspberry Pi 4 Model B Rev 1.4"
    assert board.serial_number == "10000000abcdef01"
    assert board.boot_id == "4f1f0c7e-0000-4000-8000-000000000001"
    assert board.os_version == "Debian GNU/Linux 12 (bookworm)"
    assert board.cpu_cores == 2
    assert board.hostname
    assert board.kernel_version


def test_an_older_kernel_says_it_elsewhere(tmp_path: Path) -> None:
    plant(tmp_path, {"proc/cpuinfo": "processor\t: 0\nSerial\t\t: 00000000deadbeef\nModel\t\t: Old Board\n"})
    board = board_sources.board(tmp_path)
    assert (board.model, board.serial_number) == ("Old Board", "00000000deadbeef")


def test_a_folder_that_holds_nothing_answers_nothing_and_raises_nothing(tmp_path: Path) -> None:
    board = board_sources.board(tmp_path)
    assert (board.model, board.serial_number, board.boot_id, board.cpu_cores) == ("", "", "", 0)
    assert board_sources.power(tmp_path, never_ask) is None
    assert board_sources.under_voltage_alarm(tmp_path) is None
    assert board_sources.zones(tmp_path) == ()
    assert board_sources.storage(tmp_path) == ()
    assert board_sources.root_read_only(tmp_path) is None
    assert board_sources.processes(tmp_path) is None
    assert board_sources.uptime_seconds(tmp_path) is None


def test_garbage_is_no_figure(tmp_path: Path) -> None:
    plant(tmp_path, dict.fromkeys(FOURTH, b"\xff\xfe?!"))
    assert board_sources.power(tmp_path, never_ask) is None
    assert board_sources.zones(tmp_path) == ()
    assert board_sources.storage(tmp_path) == ()
    assert board_sources.processes(tmp_path) is None
    assert board_sources.uptime_seconds(tmp_path) is None
    assert board_sources.root_read_only(tmp_path) is None


def test_the_firmwares_word_is_taken_from_the_kernel_without_asking_further(fourth: Path) -> None:
    power = board_sources.power(fourth, never_ask)
    assert power == Power(
        raw=0x50005,
        under_voltage_now=True,
        frequency_capped_now=False,
        throttled_now=True,
        soft_temp_limit_now=False,
        under_voltage_seen=True,
        frequency_capped_seen=False,
        throttled_seen=True,
        soft_temp_limit_seen=False,
    )


@pytest.mark.parametrize(
    ("bit", "name"),
    [
        (0, "under_voltage_now"),
        (1, "frequency_capped_now"),
        (2, "throttled_now"),
        (3, "soft_temp_limit_now"),
        (16, "under_voltage_seen"),
        (17, "frequency_capped_seen"),
        (18, "throttled_seen"),
        (19, "soft_temp_limit_seen"),
    ],
)
def test_each_bit_of_the_word_has_its_meaning(bit: int, name: str) -> None:
    power = Power.of(1 << bit)
    said = {field for field in Power.__dataclass_fields__ if field != "raw" and getattr(power, field)}
    assert said == {name}


def test_where_the_kernel_does_not_say_the_firmwares_tool_is_asked(tmp_path: Path) -> None:
    plant(tmp_path, {"usr/bin/vcgencmd": ""})
    asked: list[Sequence[str]] = []

    def ask(argv: Sequence[str]) -> str:
        asked.append(argv)
        return "throttled=0x80000\n"

    power = board_sources.power(tmp_path, ask)
    assert power is not None
    assert power.soft_temp_limit_seen
    assert asked == [(str(tmp_path / "usr/bin/vcgencmd"), "get_throttled")]


@pytest.mark.parametrize(
    "failure",
    [OSError(), subprocess.TimeoutExpired("vcgencmd", 2), subprocess.CalledProcessError(1, "vcgencmd")],
)
def test_a_tool_that_fails_or_hangs_leaves_the_word_unknown(tmp_path: Path, failure: Exception) -> None:
    plant(tmp_path, {"usr/bin/vcgencmd": ""})

    def ask(argv: Sequence[str]) -> str:
        raise failure

    assert board_sources.power(tmp_path, ask) is None
    assert board_sources.power(tmp_path, lambda argv: "VCHI initialization failed\n") is None


def test_a_real_program_is_run_without_a_shell() -> None:
    assert board_sources.ask_program(("/bin/echo", "$HOME;", "throttled=0x0")) == "$HOME; throttled=0x0\n"
    with pytest.raises(subprocess.CalledProcessError):
        board_sources.ask_program(("/bin/false",))


def test_the_voltage_monitor_has_its_own_alarm(fourth: Path) -> None:
    assert board_sources.under_voltage_alarm(fourth) is True
    plant(fourth, {"sys/class/hwmon/hwmon1/in0_lcrit_alarm": "0\n"})
    assert board_sources.under_voltage_alarm(fourth) is False


def test_zones_and_other_sensors_are_each_told_once(fourth: Path) -> None:
    assert board_sources.zones(fourth) == (
        Zone(name="cpu-thermal", celsius=48.312, critical_celsius=110.0),
        Zone(name="nvme Composite", celsius=61.85, critical_celsius=84.85),
    )


@pytest.mark.parametrize(
    ("celsius", "critical", "status"),
    [
        (20.0, None, "ok"),
        (79.9, 110.0, "ok"),
        (80.0, 110.0, "hot"),
        (110.0, 110.0, "critical"),
        (60.0, 55.0, "critical"),
    ],
)
def test_a_zone_says_how_bad_it_is(celsius: float, critical: float | None, status: str) -> None:
    assert Zone(name="cpu", celsius=celsius, critical_celsius=critical).status == status


def test_storage_tells_what_was_written_and_what_the_device_admits_of_its_wear(fourth: Path) -> None:
    assert board_sources.storage(fourth) == (
        BlockDevice(name="mmcblk0", kind="sd", bytes_read=2000 * 512, bytes_written=4000 * 512),
        BlockDevice(
            name="mmcblk1",
            kind="mmc",
            bytes_read=1024,
            bytes_written=2048,
            life_used_percent=110,
            reserve=Reserve.WARNING,
        ),
        BlockDevice(name="nvme0n1", kind="nvme", bytes_read=4096, bytes_written=8192),
    )


@pytest.mark.parametrize(
    ("mounts", "read_only"),
    [
        ("/dev/a / ext4 rw,relatime 0 0\n", False),
        ("/dev/a / ext4 ro,relatime 0 0\n", True),
        ("/dev/a / ext4 rw,errors=remount-ro 0 0\n", False),
        ("/dev/a / ext4 rw 0 0\noverlay / overlay ro 0 0\n", True),
        ("/dev/a /boot vfat ro 0 0\n", None),
    ],
)
def test_the_last_mount_at_the_root_decides(tmp_path: Path, mounts: str, read_only: bool | None) -> None:
    assert board_sources.root_read_only(plant(tmp_path, {"proc/mounts": mounts})) is read_only


def test_every_process_is_in_one_of_four_states_whatever_it_calls_itself(fourth: Path) -> None:
    assert board_sources.processes(fourth) == Processes(total=7, running=1, sleeping=3, stopped=2, zombie=1)


def test_this_machine_has_processes_and_one_of_them_runs() -> None:
    found = board_sources.processes()
    assert found is not None
    assert found.running >= 1
    assert found.sleeping >= 1
    assert found.total >= found.running + found.sleeping + found.stopped + found.zombie


def test_the_kernel_says_whether_its_clock_is_right() -> None:
    assert board_sources.clock_synchronised() in (True, False)
