"""What is verified before a release is unpacked, and what of it is."""

from __future__ import annotations

import stat
import zipfile
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.fleet.releases_kit import record_digest, tiny_wheel

from fleetplane.domains.edge.agent.tools.registry import GROUP
from fleetplane.kernel import release_documents as documents
from fleetplane.kernel.errors import IntegrityError, PermissionDenied, ResourceExhausted
from fleetplane.kernel.release_documents import FileEntry, ReleaseManifest, UpgradeOrder, parse_wheel
from fleetplane.node.upgrade import installing
from fleetplane.node.upgrade.folder import ReleaseFolder

KEY = Ed25519PrivateKey.generate()
TRUSTED = [documents.key_text(KEY.public_key().public_bytes_raw())]
INFO = "fleetplane_agent-2.0.dist-info"


class Case:
    """A release of one wheel, downloaded but not installed."""

    def __init__(self, folder: Path) -> None:
        self.wheel = tiny_wheel(folder, "2.0", {"fleetplane/node/part.py": b"x = 1\n"})
        self.folder = ReleaseFolder(folder / "releases")
        self.folder.make()

    def install(self, key: Ed25519PrivateKey = KEY) -> str:
        content = self.wheel.read_bytes()
        entry = FileEntry(name=self.wheel.name, sha256=documents.digest(content), size=len(content))
        (self.folder.downloads / entry.sha256).write_bytes(content)
        return self.finish(entry, key)

    def finish(self, entry: FileEntry, key: Ed25519PrivateKey = KEY) -> str:
        manifest = documents.encode(ReleaseManifest(version="2.0", files=(entry,), created_at_ns=1))
        signature = key.sign(documents.manifest_payload(manifest))
        return installing.install(
            self.folder.root, TRUSTED, manifest, signature, [parse_wheel(self.wheel.name)]
        )

    def repack(self, *members: tuple[zipfile.ZipInfo | str, bytes], recorded: bool = True) -> None:
        """The wheel with further members."""
        with zipfile.ZipFile(self.wheel) as source:
            kept = {one: source.read(one) for one in source.namelist()}
        record = kept.pop(f"{INFO}/RECORD").decode()
        with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_DEFLATED) as made:
            for name, content in kept.items():
                made.writestr(name, content)
            for member, content in members:
                made.writestr(member, content)
                name = member if isinstance(member, str) else member.filename
                record += f'"{name}",{record_digest(content)},{len(content)}\n' if recorded else ""
            made.writestr(f"{INFO}/RECORD", record)

    @property
    def nothing_is_there(self) -> bool:
        return list(self.folder.versions.iterdir()) == []


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_a_release_is_unpacked_under_a_name_of_its_own_and_only_once(case: Case) -> None:
    name = case.install()
    place = case.folder.versions / name

    assert name.startswith("2.0-")
    assert (place / "fleetplane/node/part.py").read_bytes() == b"x = 1\n"
    assert list(case.folder.installed()) == [name]
    made = place.stat().st_ino
    assert case.install() == name
    assert place.stat().st_ino == made


def test_a_release_that_somebody_else_signed_is_not_even_opened(case: Case) -> None:
    case.wheel.write_bytes(b"no zip at all")
    with pytest.raises(PermissionDenied, match="not signed with a release key"):
        case.install(Ed25519PrivateKey.generate())
    assert case.nothing_is_there


def test_a_signature_for_one_document_is_none_for_the_other() -> None:
    order = documents.encode(
        UpgradeOrder(agent="a", nonce="00", version="2.0", manifest="", attempt=1, seconds=60.0)
    )
    wrong, right = KEY.sign(documents.manifest_payload(order)), KEY.sign(documents.order_payload(order))

    with pytest.raises(PermissionDenied):
        installing.verified(TRUSTED, order, wrong, b"", b"")
    assert installing.verified(TRUSTED, order, right, b"", b"")[0].version == "2.0"
    other = documents.encode(ReleaseManifest(version="2.0", files=(), created_at_ns=1))
    named = documents.encode(
        UpgradeOrder(agent="a", nonce="00", version="2.0", manifest="f" * 64, attempt=1, seconds=60.0)
    )
    with pytest.raises(IntegrityError, match="not the one that the order names"):
        installing.verified(TRUSTED, named, KEY.sign(documents.order_payload(named)), other, b"")


def _truncated(case: Case, content: bytes) -> FileEntry:
    entry = FileEntry(name=case.wheel.name, sha256=documents.digest(content), size=len(content))
    (case.folder.downloads / entry.sha256).write_bytes(content[:-1])
    return entry


def _changed(case: Case, content: bytes) -> FileEntry:
    entry = FileEntry(name=case.wheel.name, sha256=documents.digest(content), size=len(content))
    (case.folder.downloads / entry.sha256).write_bytes(content[:-1] + b"\x00")
    return entry


@pytest.mark.parametrize(("spoil", "words"), [(_truncated, "bytes long"), (_changed, "another digest")])
def test_a_file_that_is_not_what_was_signed_is_refused(
    case: Case, spoil: Callable[[Case, bytes], FileEntry], words: str
) -> None:
    with pytest.raises(IntegrityError, match=words):
        case.finish(spoil(case, case.wheel.read_bytes() + b"#"))
    assert case.nothing_is_there


def link_to(name: str) -> zipfile.ZipInfo:
    found = zipfile.ZipInfo(name)
    found.external_attr = (stat.S_IFLNK | 0o777) << 16
    return found


@pytest.mark.parametrize(
    "member",
    ["../outside.py", "/etc/outside.py", "fleetplane/../../outside.py", "fleetplane\\..\\x.py", "a/./b.py",
     "evil.pth", "sitecustomize.pth", "C:x.py", link_to("fleetplane/link.py")],
    ids=str,
)  # fmt: skip
def test_a_member_that_has_no_place_in_a_release_is_refused(
    case: Case, member: zipfile.ZipInfo | str, tmp_path: Path
) -> None:
    case.repack((member, b"/etc/passwd"))
    before = sorted(tmp_path.rglob("*outside*"))

    with pytest.raises(IntegrityError):
        case.install()
    assert case.nothing_is_there
    assert sorted(tmp_path.rglob("*outside*")) == before


def test_a_file_that_the_wheels_record_does_not_have_is_refused(case: Case) -> None:
    case.repack(("fleetplane/extra.py", b"import os\n"), recorded=False)
    with pytest.raises(IntegrityError, match="not in the wheel's record"):
        case.install()
    assert case.nothing_is_there


def test_a_file_that_is_not_what_the_record_says_is_refused(case: Case) -> None:
    with zipfile.ZipFile(case.wheel) as source:
        kept = {one: source.read(one) for one in source.namelist()}
    with zipfile.ZipFile(case.wheel, "w") as made:
        for name, content in kept.items():
            made.writestr(name, content.replace(b"x = 1", b"x = 2"))
    with pytest.raises(IntegrityError, match="not what the wheel's record says"):
        case.install()
    assert case.nothing_is_there


def test_what_grows_beyond_all_bounds_is_refused(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.repack(("fleetplane/zeros.py", bytes(2_000_000)))
    monkeypatch.setattr(installing, "UNPACKED_LIMIT_BYTES", 1_000_000)
    with pytest.raises(ResourceExhausted, match="larger than 1000000 bytes once unpacked"):
        case.install()
    assert case.nothing_is_there


def test_scripts_of_a_wheel_are_left_out_and_its_libraries_are_not(case: Case) -> None:
    data = "fleetplane_agent-2.0.data"
    case.repack((f"{data}/scripts/run-me", b"#!python\n"), (f"{data}/purelib/other/mod.py", b"y = 1\n"))
    place = case.folder.versions / case.install()

    assert (place / "other/mod.py").is_file()
    assert not list(place.rglob("run-me"))


def test_tools_of_edge_daemons_come_with_a_release_as_wheels_of_their_own(case: Case, tmp_path: Path) -> None:
    info = "site_tools-1.0.dist-info"
    files = {
        "site_tools.py": b"",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: site-tools\nVersion: 1.0\n",
        f"{info}/entry_points.txt": f"[{GROUP}]\npump = site_tools:Pump\n".encode(),
    }
    tools = tmp_path / "site_tools-1.0-py3-none-any.whl"
    with zipfile.ZipFile(tools, "w") as made:
        for name, content in files.items():
            made.writestr(name, content)
        rows = [f"{name},{record_digest(content)},{len(content)}\n" for name, content in files.items()]
        made.writestr(f"{info}/RECORD", "".join([*rows, f"{info}/RECORD,,\n"]))
    entries = []
    for wheel in (case.wheel, tools):
        content = wheel.read_bytes()
        entries.append(FileEntry(name=wheel.name, sha256=documents.digest(content), size=len(content)))
        (case.folder.downloads / entries[-1].sha256).write_bytes(content)
    manifest = documents.encode(ReleaseManifest(version="2.0", files=tuple(entries), created_at_ns=1))
    wheels = [parse_wheel(one.name) for one in entries]
    signature = KEY.sign(documents.manifest_payload(manifest))
    name = installing.install(case.folder.root, TRUSTED, manifest, signature, wheels)
    found = [
        offer.name
        for one in distributions(path=[str(case.folder.versions / name)])
        for offer in one.entry_points
        if offer.group == GROUP
    ]
    assert found == ["pump"], "whoever starts with the release finds what it offers"


def test_a_folder_that_was_left_half_unpacked_is_no_version(case: Case) -> None:
    (case.folder.versions / ".2.0-half/fleetplane").mkdir(parents=True)
    (case.folder.versions / ".2.0-half/fleetplane/__init__.py").touch()
    assert list(case.folder.installed()) == []
    case.folder.prune("")
    assert case.nothing_is_there


def test_a_floor_is_raised_and_never_lowered(case: Case) -> None:
    for version in ("1.5", "1.2", ""):
        case.folder.raise_floor(version)
    assert case.folder.floor() == "1.5"
