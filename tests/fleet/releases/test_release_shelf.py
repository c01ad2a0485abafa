"""Files of releases where servers share a store: each server has them when an agent asks."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from fleetplane.fleet.releases import shelf as shelf_module
from fleetplane.fleet.releases.shelf import Shelf
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.objects import LocalObjects

CONTENT = b"a wheel " * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def take(shelf: Shelf, content: bytes = CONTENT) -> None:
    incoming = shelf.receive("one.whl")
    incoming.write(content)
    incoming.finish()


async def read(shelf: Shelf, offset: int = 0) -> bytes:
    return b"".join([piece async for piece in shelf.read(DIGEST, offset)])


@pytest.fixture
def objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalObjects:
    monkeypatch.setattr(shelf_module, "PART_BYTES", 3000)
    return LocalObjects(tmp_path / "objects")


async def test_a_file_that_one_server_took_is_served_by_another(
    tmp_path: Path, objects: LocalObjects
) -> None:
    one, two = Shelf(tmp_path / "one", objects), Shelf(tmp_path / "two", objects)
    take(one)
    await one.share(DIGEST)
    assert len(await objects.list("releases")) == 3
    many = await asyncio.gather(*(read(two, offset) for offset in (0, 10, 7990)))
    assert many == [CONTENT, CONTENT[10:], CONTENT[7990:]]
    assert [path.name for path in two.root.iterdir()] == [DIGEST], "kept, and nothing beside it"
    await one.unshare(DIGEST)
    assert await objects.list("releases") == []
    assert await read(two) == CONTENT
    assert two.sweep([]) == 1


async def test_a_file_of_which_a_part_is_missing_or_another_is_not_served(
    tmp_path: Path, objects: LocalObjects
) -> None:
    one, two = Shelf(tmp_path / "one", objects), Shelf(tmp_path / "two", objects)
    with pytest.raises(NotFound):
        await read(two)
    take(one)
    await one.share(DIGEST)
    await objects.put(f"releases/{DIGEST}/0001", b"something else")
    with pytest.raises(NotFound, match="does not have"):
        await read(two)
    assert list(two.root.iterdir()) == []
    await one.share(DIGEST)
    assert await read(two) == CONTENT


async def test_a_server_that_is_alone_shares_nothing(tmp_path: Path) -> None:
    alone = Shelf(tmp_path / "one")
    take(alone)
    await alone.share(DIGEST)
    await alone.unshare(DIGEST)
    assert await read(alone) == CONTENT
