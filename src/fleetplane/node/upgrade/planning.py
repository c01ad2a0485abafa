"""Whether an order can be carried out here, and with which wheels."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence

from fleetplane.kernel import release_documents as documents
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from fleetplane.kernel.release_documents import (
    AGENT,
    ReleaseManifest,
    UpgradeOrder,
    Wheel,
    WheelPlatform,
    choose,
    is_older,
    parse_wheel,
    version_key,
)


def this_machine() -> WheelPlatform:
    """What decides here which wheels can be used."""
    name, version = platform.libc_ver()
    numbers = version.split(".")[:2]
    glibc = (int(numbers[0]), int(numbers[1])) if name == "glibc" and len(numbers) == 2 else None
    return WheelPlatform(python=sys.version_info[:2], machine=platform.machine(), glibc=glibc)


def planned(
    order: UpgradeOrder, manifest: ReleaseManifest, *, floor: str, machine: WheelPlatform
) -> Sequence[Wheel]:
    """The wheels to install for an order whose signatures hold; raises why it is refused. Pure."""
    if order.version != manifest.version:
        raise InvalidArgument(f"the manifest is of version {manifest.version}, not of {order.version}")
    version_key(manifest.version)
    check_floor(manifest.version, floor=floor, ignores_floor=manifest.ignores_floor)
    for entry in manifest.files:
        parse_wheel(entry.name)
        if not 0 < entry.size <= documents.WHEEL_LIMIT_BYTES:
            raise ResourceExhausted(f"{entry.name} has {entry.size} bytes")
        if len(entry.sha256) != 64 or set(entry.sha256) - set("0123456789abcdef"):
            raise InvalidArgument(f"{entry.name} has no SHA-256 digest")
    if len(manifest.files) > documents.FILES_LIMIT:
        raise ResourceExhausted(f"the release has more than {documents.FILES_LIMIT} files")
    wheels = choose([entry.name for entry in manifest.files], machine)
    agent = next(wheel for wheel in wheels if wheel.distribution == AGENT)
    if agent.version != manifest.version:
        raise InvalidArgument(f"{agent.file} is not of version {manifest.version}")
    return wheels


def check_floor(version: str, *, floor: str, ignores_floor: bool) -> None:
    """Raise for a version that is older than this agent may install."""
    if floor and not ignores_floor and is_older(version, floor):
        raise FailedPrecondition(
            f"version {version} is older than {floor}, below which this agent installs nothing",
            hint="add the release with --ignore-floor if it is meant",
        )
