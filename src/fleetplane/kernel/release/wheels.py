"""Names of wheels, and whether one can be used on a machine. Pure.

Only wheels are files of a release: they are unpacked, and nothing of them runs while that is done.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from fleetplane.kernel.errors import InvalidArgument

AGENT: Final = "fleetplane_agent"
"""The distribution that every release has."""
NAME_LIMIT: Final = 200
_PART = r"[A-Za-z0-9_.]+"
_NAME = re.compile(
    rf"(?P<distribution>{_PART})-(?P<version>[A-Za-z0-9_.!+]+)(-(?P<build>[0-9]{_PART}))?"
    rf"-(?P<pythons>{_PART})-(?P<abis>{_PART})-(?P<platforms>{_PART})\.whl"
)
_MANYLINUX = re.compile(r"manylinux_([0-9]{1,4})_([0-9]{1,4})_([A-Za-z0-9_]+)")
_OLD_MANYLINUX: Final = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A wheel by what its name says."""

    file: str
    distribution: str
    """As it is compared: lower case, words joined by underscores."""
    version: str
    pythons: Sequence[str]
    abis: Sequence[str]
    platforms: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelPlatform:
    """What decides which wheels can be used."""

    python: tuple[int, int]
    machine: str
    """Such as `x86_64`."""
    glibc: tuple[int, int] | None = None
    """None where the C library is another."""

    def __str__(self) -> str:
        libc = "glibc-{}.{}".format(*self.glibc) if self.glibc is not None else "musl"
        return f"python-{self.python[0]}.{self.python[1]} linux-{self.machine}-{libc}"


def parse_wheel(file: str) -> Wheel:
    """What a file's name says; anything that is not the name of a wheel is refused, paths included."""
    found = _NAME.fullmatch(file) if len(file) <= NAME_LIMIT else None
    if found is None or ".." in file:
        raise InvalidArgument(
            f"{file[:NAME_LIMIT]!r} is not the name of a wheel",
            field="file",
            hint="a release has wheels only, such as fleetplane_agent-1.0-py3-none-any.whl",
        )
    return Wheel(
        file=file,
        distribution=re.sub(r"[-_.]+", "_", found["distribution"]).lower(),
        version=found["version"],
        pythons=found["pythons"].split("."),
        abis=found["abis"].split("."),
        platforms=found["platforms"].split("."),
    )


def fits(wheel: Wheel, machine: WheelPlatform) -> bool:
    """Whether a wheel can be used on a machine."""
    return any(_fits_python(python, abi, machine) for python in wheel.pythons for abi in wheel.abis) and any(
        _fits_platform(platform, machine) for platform in wheel.platforms
    )


def choose(files: Iterable[str], machine: WheelPlatform) -> Sequence[Wheel]:
    """One wheel of each distribution for a machine, the most specific first.

    Raises `InvalidArgument` if a distribution has none that fits, or the agent is not among them.
    """
    offered: dict[str, list[Wheel]] = {}
    for file in files:
        wheel = parse_wheel(file)
        offered.setdefault(wheel.distribution, []).append(wheel)
    if AGENT not in offered:
        raise InvalidArgument(f"the release has no wheel of {AGENT}", field="files")
    chosen = []
    for distribution, wheels in sorted(offered.items()):
        usable = sorted(
            (one for one in wheels if fits(one, machine)),
            key=lambda one: (one.platforms == ["any"], one.file),
        )
        if not usable:
            raise InvalidArgument(f"the release has no wheel of {distribution} for {machine}", field="files")
        chosen.append(usable[0])
    return chosen


def _fits_python(python: str, abi: str, machine: WheelPlatform) -> bool:
    found = re.fullmatch(r"(py|cp)([0-9])([0-9]{0,3})", python)
    if found is None or int(found[2]) != machine.python[0]:
        return False
    minor = int(found[3]) if found[3] else 0
    if found[1] == "py":
        return abi == "none" and minor <= machine.python[1]
    if abi == "abi3":
        return minor <= machine.python[1]
    return minor == machine.python[1] and abi in ("none", f"cp{found[2]}{found[3]}")


def _fits_platform(platform: str, machine: WheelPlatform) -> bool:
    if platform in ("any", f"linux_{machine.machine}"):
        return True
    if platform.startswith("musllinux_"):
        return machine.glibc is None and platform.endswith(f"_{machine.machine}")
    needed = None
    if (found := _MANYLINUX.fullmatch(platform)) is not None:
        needed, built_for = (int(found[1]), int(found[2])), found[3]
    else:
        name, _, built_for = platform.partition("_")
        needed = _OLD_MANYLINUX.get(name)
    return (
        needed is not None
        and machine.glibc is not None
        and built_for == machine.machine
        and needed <= machine.glibc
    )
