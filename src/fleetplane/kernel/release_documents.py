"""Releases of agents: their signed documents, the order of versions, and which wheel fits a machine. Pure.

A manifest says what a release consists of and never changes. An order answers one check-in of one agent, by
the nonce that the agent chose, so that a recorded order cannot be shown to it again. What is signed begins
with the document's purpose: neither can pass for the other.

Only wheels are files of a release: they are unpacked, and nothing of them runs while that is done.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

import msgspec

from fleetplane.kernel.errors import InvalidArgument

VERSION_LIMIT = 64
"""Characters; a version is also the name of a folder."""
_VERSION = re.compile(
    r"(?P<numbers>[0-9]{1,9}(\.[0-9]{1,9}){0,3})((?P<stage>a|b|rc)(?P<stage_number>[0-9]{1,9}))?"
    r"(\.post(?P<post>[0-9]{1,9}))?(\.dev(?P<dev>[0-9]{1,9}))?"
)
_STAGES = {"a": 0, "b": 1, "rc": 2}
_FINAL = 3
NUMBERS = 4

VersionKey = tuple[tuple[int, ...], int, int, int, int, int]


def version_key(text: str, *, field: str = "version") -> VersionKey:
    """Sorts versions as Python's packaging does: `1.2.dev1` < `1.2a1` < `1.2rc1` < `1.2` < `1.2.post1`."""
    found = _VERSION.fullmatch(text) if len(text) <= VERSION_LIMIT else None
    if found is None:
        raise InvalidArgument(f"{text[:VERSION_LIMIT]!r} is not a version such as 1.4.2", field=field)
    numbers = [int(one) for one in found["numbers"].split(".")]
    padded = tuple(numbers + [0] * (NUMBERS - len(numbers)))
    stage = _STAGES.get(found["stage"] or "", _FINAL)
    post, dev = found["post"], found["dev"]
    if stage == _FINAL and dev is not None and post is None:
        stage = -1  # a development version comes before every stage of the same number
    return (
        padded,
        stage,
        int(found["stage_number"] or 0),
        -1 if post is None else int(post),
        1 if dev is None else 0,
        int(dev or 0),
    )


def is_older(one: str, other: str) -> bool:
    """Whether a version comes before another."""
    return version_key(one) < version_key(other)


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


WHEEL_LIMIT_BYTES: Final = 64 * 1024 * 1024
"""Of one wheel; the largest that agents need has 7 MB."""
FILES_LIMIT: Final = 200
"""Wheels of one release: 25 distributions for eight platforms."""
RELEASE_LIMIT_BYTES: Final = 512 * 1024 * 1024
"""Of all files of a release."""
DOCUMENT_LIMIT_BYTES: Final = 64 * 1024
"""200 files of 300 bytes, and what stands beside them."""
NONCE_BYTES: Final = 16
KEY_PREFIX: Final = "ed25519:"
KEY_BYTES: Final = 32
_MANIFEST: Final = b"fleetplane release manifest 1\0"
_ORDER: Final = b"fleetplane release order 1\0"

D = TypeVar("D", bound=msgspec.Struct)


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a release."""

    name: str
    sha256: str
    size: int


class ReleaseManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a release consists of."""

    version: str
    files: tuple[FileEntry, ...]
    created_at_ns: int
    floor: str = ""
    """Agents that had this release install nothing older than this version; empty for no such floor."""
    ignores_floor: bool = False
    """Whether this release may be installed although it is older than an agent's floor."""


class UpgradeOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One agent is to run one version."""

    agent: str
    nonce: str
    """Of the check-in that it answers, in hexadecimal."""
    version: str
    manifest: str
    """SHA-256 of the manifest; empty for a version that the agent keeps."""
    attempt: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    """Counts how often the agent was asked; one that failed is not tried again under the same number."""
    seconds: float
    """The time that the new version has to say hello."""


def manifest_payload(document: bytes) -> bytes:
    """The bytes that a manifest's signature is for."""
    return _MANIFEST + document


def order_payload(document: bytes) -> bytes:
    """The bytes that an order's signature is for."""
    return _ORDER + document


def encode(document: ReleaseManifest | UpgradeOrder) -> bytes:
    """A document as it is signed and sent: JSON."""
    return msgspec.json.encode(document)


def decode(document: bytes, kind: type[D]) -> D:
    """A document whose signature was verified."""
    if len(document) > DOCUMENT_LIMIT_BYTES:
        raise InvalidArgument(f"the {kind.__name__.lower()} is larger than {DOCUMENT_LIMIT_BYTES} bytes")
    try:
        return msgspec.json.decode(document, type=kind)
    except msgspec.MsgspecError as error:
        raise InvalidArgument(f"the {kind.__name__.lower()} cannot be read: {error}") from error


def digest(content: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def key_text(public_key: bytes) -> str:
    """A public key as people copy it."""
    return KEY_PREFIX + base64.b64encode(public_key).decode()


def parse_key(text: str) -> bytes:
    """A public key from what `key_text` wrote."""
    try:
        key = base64.b64decode(text.removeprefix(KEY_PREFIX).encode(), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not text.startswith(KEY_PREFIX) or len(key) != KEY_BYTES:
        raise InvalidArgument(
            f"{text[:80]!r} is not a release key",
            field="release-key",
            hint="`fleetplane releases key` prints it: ed25519: and 44 characters",
        )
    return key
