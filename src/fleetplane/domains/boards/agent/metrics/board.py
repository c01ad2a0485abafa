"""What a board says of itself in /proc and /sys, and what its firmware says when asked.

Every function reads below `root`, which tests replace, and answers None or nothing where the board
does not say. Blocking, though never for long.
"""

from __future__ import annotations

import ctypes
import platform
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from fleetplane.domains.boards.agent.metrics.values import BlockDevice, Board, Power, Processes, Reserve, Zone

SECTOR_BYTES: Final = 512
"""The kernel counts in these whatever the device does."""
FIRMWARE_TOOLS: Final = ("usr/bin/vcgencmd", "opt/vc/bin/vcgencmd")
FIRMWARE_SECONDS: Final = 2.0
FILE_LIMIT_BYTES: Final = 65_536
"""Of any one file read here; the longest, a list of mounts, has a few kilobytes."""
ENTRIES_LIMIT: Final = 256
"""Zones, sensors and block devices looked at."""
HOST_KEYS_LIMIT: Final = 16
"""A host has a key for each of three or four algorithms."""
PROCESSES_LIMIT: Final = 65_536

_RESERVES: Final = {1: Reserve.NORMAL, 2: Reserve.WARNING, 3: Reserve.URGENT}
_SLEEPING: Final = "SDIWKP"
_STA_UNSYNC: Final = 0x40

Ask = Callable[[Sequence[str]], str]
"""Runs a program and gives what it printed; an argument, so that tests need no firmware."""


def ask_program(argv: Sequence[str]) -> str:
    done = subprocess.run(  # noqa: S603  # our own words, and an absolute path
        argv, capture_output=True, timeout=FIRMWARE_SECONDS, check=True, stdin=subprocess.DEVNULL
    )
    return done.stdout.decode("ascii", "replace")


def board(root: Path = Path("/")) -> Board:
    """Who this is. What it does not say is empty."""
    system = platform.uname()
    return Board(
        hostname=system.node,
        architecture=system.machine,
        kernel_version=system.release,
        os_version=_os_version(root),
        cpu_cores=_cores(root),
        model=_text(root / "proc/device-tree/model")
        or _cpuinfo(root, "Model")
        or _text(root / "sys/class/dmi/id/product_name"),
        serial_number=_text(root / "proc/device-tree/serial-number") or _cpuinfo(root, "Serial"),
        boot_id=_text(root / "proc/sys/kernel/random/boot_id"),
    )


def ssh_host_keys(root: Path = Path("/")) -> tuple[str, ...]:
    """Type and key of each public key of this machine's SSH host; nothing where there is none."""
    found = []
    for file in sorted(_entries(root / "etc/ssh", "ssh_host_*_key.pub")):
        words = _text(file).split()
        if len(words) >= 2:
            found.append(" ".join(words[:2]))
    return tuple(found[:HOST_KEYS_LIMIT])


def uptime_seconds(root: Path = Path("/")) -> int | None:
    words = _text(root / "proc/uptime").split()
    try:
        return int(float(words[0]))
    except (IndexError, ValueError):
        return None


def power(root: Path = Path("/"), ask: Ask = ask_program) -> Power | None:
    """The firmware's word on its supply: from the kernel, else from the firmware's own tool."""
    for file in _entries(root / "sys/devices/platform", "soc*/*firmware*/get_throttled"):
        raw = _number(_text(file), 16)
        if raw is not None:
            return Power.of(raw)
    for name in FIRMWARE_TOOLS:
        if (root / name).is_file():
            try:
                said = ask((str(root / name), "get_throttled"))
            except (OSError, subprocess.SubprocessError):
                return None
            raw = _number(said.partition("=")[2], 16)
            return Power.of(raw) if raw is not None else None
    return None


def under_voltage_alarm(root: Path = Path("/")) -> bool | None:
    for folder in _entries(root / "sys/class/hwmon", "hwmon*"):
        if _text(folder / "name") == "rpi_volt":
            alarm = _number(_text(folder / "in0_lcrit_alarm"))
            return None if alarm is None else bool(alarm)
    return None


def zones(root: Path = Path("/")) -> tuple[Zone, ...]:
    """Thermal zones, and whatever other sensors are not zones already."""
    found = {zone.name: zone for zone in _thermal_zones(root)}
    known = {name.replace("-", "_") for name in found}
    for zone, chip in _sensors(root):
        if chip.replace("-", "_") not in known:
            found.setdefault(zone.name, zone)
    return tuple(found.values())


def storage(root: Path = Path("/")) -> tuple[BlockDevice, ...]:
    """Block devices with hardware behind them."""
    found: list[BlockDevice] = []
    for folder in _entries(root / "sys/block", "*"):
        counts = _text(folder / "stat").split()
        if not (folder / "device").exists() or len(counts) < 7 or "boot" in folder.name:
            continue  # loops and memory disks wear nothing; boot partitions belong to their card
        device = folder / "device"
        found.append(
            BlockDevice(
                name=folder.name,
                kind=_kind(folder.name, _text(device / "type")),
                bytes_read=(_number(counts[2]) or 0) * SECTOR_BYTES,
                bytes_written=(_number(counts[6]) or 0) * SECTOR_BYTES,
                life_used_percent=_life_used(_text(device / "life_time")),
                reserve=_RESERVES.get(_number(_text(device / "pre_eol_info"), 16) or 0),
            )
        )
    return tuple(found)


def root_read_only(root: Path = Path("/")) -> bool | None:
    """From the last mount at /, which is the one in force."""
    answer: bool | None = None
    for line in _text(root / "proc/mounts").splitlines():
        words = line.split()
        if len(words) > 3 and words[1] == "/":
            answer = "ro" in words[3].split(",")
    return answer


def processes(root: Path = Path("/")) -> Processes | None:
    states = Counter(_states(root / "proc"))
    if not states:
        return None
    return Processes(
        total=states.total(),
        running=states["R"],
        sleeping=sum(states[letter] for letter in _SLEEPING),
        stopped=states["T"] + states["t"],
        zombie=states["Z"] + states["X"],
    )


class _Timex(ctypes.Structure):
    """The head of the kernel's struct timex, and room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    )


def clock_synchronised() -> bool | None:
    """Whether the kernel holds its clock for right; None when it does not say."""
    timex = _Timex()
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else not timex.status & _STA_UNSYNC


def _thermal_zones(root: Path) -> Iterator[Zone]:
    for folder in _entries(root / "sys/class/thermal", "thermal_zone*"):
        celsius = _thousandths(folder / "temp")
        if celsius is not None:
            name = _text(folder / "type") or folder.name
            yield Zone(name=name, celsius=celsius, critical_celsius=_critical(folder))


def _critical(folder: Path) -> float | None:
    for trip in _entries(folder, "trip_point_*_type"):
        if _text(trip) == "critical":
            return _thousandths(trip.with_name(trip.name.replace("_type", "_temp")))
    return None


def _sensors(root: Path) -> Iterator[tuple[Zone, str]]:
    for file in _entries(root / "sys/class/hwmon", "hwmon*/temp*_input"):
        celsius = _thousandths(file)
        if celsius is None:
            continue
        chip = _text(file.with_name("name")) or file.parent.name
        number = file.name.removesuffix("_input")
        label = _text(file.with_name(f"{number}_label")) or number
        critical = _thousandths(file.with_name(f"{number}_crit"))
        yield Zone(name=f"{chip} {label}", celsius=celsius, critical_celsius=critical), chip


def _states(proc: Path) -> Iterator[str]:
    try:
        folders = [folder for folder in proc.iterdir() if folder.name.isdigit()]
    except OSError:
        return
    for folder in folders[:PROCESSES_LIMIT]:
        # The name in the second column may hold anything, brackets included: the last one ends it.
        _, bracket, rest = _text(folder / "stat").rpartition(")")
        if bracket and rest.split():
            yield rest.split(maxsplit=1)[0]


def _kind(name: str, kind: str) -> str:
    if kind:
        return kind.lower()
    return "nvme" if name.startswith("nvme") else "disk"


def _life_used(text: str) -> int | None:
    """The worse of a card's two estimates: 1 is up to a tenth, 10 all of it, 11 more."""
    estimates = [number for word in text.split() if (number := _number(word, 16)) is not None]
    worst = max(estimates, default=0)
    return min(worst, 11) * 10 if worst else None


def _os_version(root: Path) -> str:
    for line in _text(root / "etc/os-release").splitlines():
        name, _, value = line.partition("=")
        if name == "PRETTY_NAME":
            return value.strip("\"'")
    return ""


def _cores(root: Path) -> int:
    return len(_entries(root / "sys/devices/system/cpu", "cpu[0-9]*"))


def _cpuinfo(root: Path, field: str) -> str:
    for line in _text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""


def _entries(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern))[:ENTRIES_LIMIT]


def _text(path: Path) -> str:
    """A small file's words, without what ends them; empty when it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(FILE_LIMIT_BYTES).decode("utf-8", "replace").strip("\0\n\t ")
    except OSError:
        return ""


def _number(text: str, base: int = 10) -> int | None:
    try:
        return int(text, base)
    except ValueError:
        return None


def _thousandths(path: Path) -> float | None:
    number = _number(_text(path))
    return None if number is None else number / 1000
