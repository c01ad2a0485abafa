"""Verifying a release and unpacking it beside the version that runs. No code of it runs meanwhile.

Runs in a process of its own (`node/short_lived.py`), because of the library that checks signatures. Nothing
is unpacked before everything is verified: the signature of the manifest, that this machine can run the
release and with which wheels, then size and digest of each file. A wheel's members are taken by an
allow-list, and each must be what the wheel's own record says. What was unpacked gets its name last, when it
is on disk.
"""

from __future__ import annotations

import base64
import csv
import ctypes
import hashlib
import io
import os
import platform
import re
import shutil
import stat
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from fleetplane.kernel import release_documents as documents
from fleetplane.kernel.errors import (
    FailedPrecondition,
    IntegrityError,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
)
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
from fleetplane.node.upgrade import launcher
from fleetplane.node.upgrade.folder import MANIFEST, ReleaseFolder


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


MEMBERS_LIMIT: Final = 20_000
"""Files of one wheel; the largest that agents need has 1,500."""
UNPACKED_LIMIT_BYTES: Final = 1024 * 1024 * 1024
"""Of all wheels of a release, twice what their files may have."""
RECORD_LIMIT_BYTES: Final = 8 * 1024 * 1024
PIECE_BYTES: Final = 256 * 1024
_MEMBER: Final = re.compile(r"[A-Za-z0-9_.+@=, ~()\[\]/-]{1,400}")
_LIBRARY: Final = ("purelib", "platlib")
"""Of a wheel's data, what belongs beside the packages; scripts, headers and the like are left out."""


def verified(
    keys: Sequence[str], order: bytes, order_signature: bytes, manifest: bytes, manifest_signature: bytes
) -> tuple[UpgradeOrder, ReleaseManifest | None]:
    """An order and the manifest that it names, if one of our keys signed both."""
    _verify(keys, documents.order_payload(order), order_signature, what="order")
    ordered = documents.decode(order, UpgradeOrder)
    if not ordered.manifest:
        return ordered, None
    if documents.digest(manifest) != ordered.manifest:
        raise IntegrityError("the manifest is not the one that the order names")
    return ordered, verified_manifest(keys, manifest, manifest_signature)


def verified_manifest(keys: Sequence[str], document: bytes, signature: bytes) -> ReleaseManifest:
    """The manifest, if one of our keys signed it."""
    _verify(keys, documents.manifest_payload(document), signature, what="manifest")
    return documents.decode(document, ReleaseManifest)


def _verify(keys: Sequence[str], payload: bytes, signature: bytes, *, what: str) -> None:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    for key in keys:
        try:
            Ed25519PublicKey.from_public_bytes(documents.parse_key(key)).verify(signature, payload)
        except InvalidSignature:
            continue
        return
    raise PermissionDenied(
        f"the {what} is not signed with a release key that this agent trusts",
        hint="compare --release-key with `fleetplane releases key`",
    )


def install(
    root: Path, keys: Sequence[str], document: bytes, signature: bytes, wheels: Sequence[Wheel]
) -> str:
    """The name under which a downloaded release is now kept. Can be called again."""
    manifest = verified_manifest(keys, document, signature)
    folder = ReleaseFolder(root)
    place = folder.place(manifest.version, documents.digest(document))
    if launcher.is_installed(place):
        return place.name
    entries = {entry.name: entry for entry in manifest.files}
    for wheel in wheels:
        entry = entries[wheel.file]
        check_file(folder.downloads / entry.sha256, entry.sha256, entry.size)
    beside = folder.versions / f".{place.name}"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(mode=0o700)
    try:
        room = UNPACKED_LIMIT_BYTES
        for wheel in wheels:
            room -= unpack(folder.downloads / entries[wheel.file].sha256, wheel, beside, room=room)
        if not launcher.is_installed(beside):
            raise IntegrityError("the release has no package fleetplane")
        (beside / MANIFEST).write_bytes(document)
        _sync_file_system(beside)
        beside.rename(place)
        launcher.sync(folder.versions)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return place.name


def check_file(path: Path, sha256: str, size: int) -> None:
    """Raise unless a file has the size and the digest that the manifest says."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size != size:
            raise IntegrityError(f"the file {sha256[:16]}… is not {size} bytes long")
        while piece := file.read(PIECE_BYTES):
            found.update(piece)
    if found.hexdigest() != sha256:
        raise IntegrityError(f"the file {sha256[:16]}… has another digest")


def unpack(path: Path, wheel: Wheel, target: Path, *, room: int) -> int:
    """Unpack a wheel into a folder; how many bytes that were. `IntegrityError` for what is no wheel."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = [one for one in archive.infolist() if not one.is_dir()]
            _check_members(wheel, members, room)
            record = _record(archive, wheel, members)
            for member in members:
                _take(archive, member, record, wheel, target)
            return sum(member.file_size for member in members)
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError) as error:
        raise IntegrityError(f"{wheel.file} cannot be unpacked: {error}") from error


def _check_members(wheel: Wheel, members: Sequence[zipfile.ZipInfo], room: int) -> None:
    if len(members) > MEMBERS_LIMIT:
        raise ResourceExhausted(f"{wheel.file} has more than {MEMBERS_LIMIT} files")
    if sum(member.file_size for member in members) > room:
        raise ResourceExhausted(f"{wheel.file} is larger than {UNPACKED_LIMIT_BYTES} bytes once unpacked")
    for member in members:
        kind = stat.S_IFMT(member.external_attr >> 16)
        if kind not in (0, stat.S_IFREG):
            raise IntegrityError(f"{wheel.file}: {member.filename!r} is not an ordinary file")
        parts = member.filename.split("/")
        allowed = _MEMBER.fullmatch(member.filename) is not None and not {"", ".", ".."} & set(parts)
        if not allowed or (len(parts) == 1 and not member.filename.endswith((".py", ".so"))):
            raise IntegrityError(f"{wheel.file}: {member.filename!r} has no place in a release")
    if len({member.filename for member in members}) != len(members):
        raise IntegrityError(f"{wheel.file} has a file twice")


def _record(archive: zipfile.ZipFile, wheel: Wheel, members: Iterable[zipfile.ZipInfo]) -> Mapping[str, str]:
    """Digests by file, as the wheel's own record has them."""
    found = [one for one in members if re.fullmatch(r"[^/]+\.dist-info/RECORD", one.filename)]
    if len(found) != 1 or found[0].file_size > RECORD_LIMIT_BYTES:
        raise IntegrityError(f"{wheel.file} has no record of its files")
    rows = csv.reader(io.StringIO(archive.read(found[0]).decode()))
    record = {row[0]: row[1] for row in rows if len(row) == 3 and row[0] != found[0].filename}
    return {**record, found[0].filename: ""}


def _take(
    archive: zipfile.ZipFile,
    member: zipfile.ZipInfo,
    record: Mapping[str, str],
    wheel: Wheel,
    target: Path,
) -> None:
    name = _destination(member.filename)
    wanted = record.get(member.filename)
    if wanted is None:
        raise IntegrityError(f"{wheel.file}: {member.filename!r} is not in the wheel's record")
    if name is None:
        return
    path = target / name
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    try:
        with archive.open(member) as source, path.open("xb") as file:
            actual = _copy(source, file, member.file_size)
    except FileExistsError:
        raise IntegrityError(f"{wheel.file}: another wheel of the release has {name!r} too") from None
    if wanted and wanted != actual:
        raise IntegrityError(f"{wheel.file}: {member.filename!r} is not what the wheel's record says")


def _destination(name: str) -> str | None:
    """Where a member goes below the folder of the version; None for what is not installed."""
    top, _, rest = name.partition("/")
    if not top.endswith(".data"):
        return name
    kind, _, inner = rest.partition("/")
    return inner if kind in _LIBRARY and inner and not inner.endswith(".pth") else None


def _copy(source: IO[bytes], file: IO[bytes], size: int) -> str:
    """Copy so many bytes; their digest as a record has it."""
    found = hashlib.sha256()
    left = size
    while piece := source.read(PIECE_BYTES):
        left -= len(piece)
        if left < 0:
            raise ValueError("a file is larger than the archive says")
        found.update(piece)
        file.write(piece)
    return "sha256=" + base64.urlsafe_b64encode(found.digest()).rstrip(b"=").decode()


def _sync_file_system(folder: Path) -> None:
    """On disk before it has its name: syncing thousands of small files one by one takes much longer."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            raise OSError(ctypes.get_errno(), "the release could not be written to disk")
    finally:
        os.close(descriptor)
