"""Answers that lie ready: given at once when they are true now, and not otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fleetplane.domains.gpus import wire
from fleetplane.domains.gpus.grpc import encodings as module
from fleetplane.domains.gpus.grpc.encodings import Encodings
from fleetplane.domains.gpus.kinds import GPU, SCOPE
from fleetplane.domains.gpus.registry import Gpus
from fleetplane.domains.gpus.rules import GpuPolicy
from fleetplane.domains.gpus.wire import GpuDialect
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.resources import Condition
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.rpc import Framed


class Shelf:
    """A store with two GPUs, and their answers of one dialect."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.gpus = Gpus(store, GpuPolicy())
        self.encodings = Encodings(self.gpus, GpuDialect.SUPERSET)

    async def register(self, *names: str) -> None:
        for name in names:
            await self.gpus.register(name, uuid=None, report=None, provider="", actor="test")
            self.read(name)

    async def set_ready(self, name: str, status: str) -> None:
        condition = Condition(type="Ready", status=status, writer="")
        await self.gpus.set_condition(name, condition, actor="test")

    def read(self, name: str) -> Framed:
        """As the ordinary way reads it, once there is nothing to wait for."""
        gpu = self.store.get(GPU, SCOPE, name)
        assert gpu is not None
        return self.encodings.get(gpu)

    def at_once(self, name: str, **fields: str) -> Framed | None:
        request = gpu_pb2.GetGpuRequest(name=name).SerializeToString()
        return self.encodings.get_at_once(request, {k.encode(): v.encode() for k, v in fields.items()})


@pytest.fixture
async def shelf(tmp_path: Path) -> AsyncIterator[Shelf]:
    settings = StoreSettings(path=tmp_path / "state.db")
    async with Store.open(settings, kinds=(GPU,), clock=SystemClock()) as store:
        shelf = Shelf(store)
        await shelf.register("gpu-1", "gpu-2")
        yield shelf


async def test_what_was_read_before_is_given_at_once(shelf: Shelf) -> None:
    for _ in range(2):
        assert shelf.at_once("gpu-1") is shelf.read("gpu-1")
        assert shelf.at_once("gpu-2") is shelf.read("gpu-2")


async def test_while_a_change_is_being_written_only_that_gpu_has_to_be_waited_for(shelf: Shelf) -> None:
    write = asyncio.ensure_future(shelf.set_ready("gpu-1", "False"))
    while shelf.store.unsettled(GPU, SCOPE, "gpu-1") is None:
        await asyncio.sleep(0)
    assert shelf.at_once("gpu-1") is None
    assert shelf.at_once("gpu-2") is shelf.read("gpu-2")
    await write


async def test_a_changed_gpu_is_never_answered_with_what_it_was(shelf: Shelf) -> None:
    before = shelf.at_once("gpu-1")
    await shelf.set_ready("gpu-1", "False")
    assert shelf.at_once("gpu-1") is None
    after = shelf.read("gpu-1")
    assert shelf.at_once("gpu-1") is after
    assert after != before


async def test_a_gpu_that_is_gone_has_no_answer_and_may_return(shelf: Shelf) -> None:
    assert shelf.at_once("gpu-1") is not None
    await shelf.gpus.unregister("gpu-1", actor="test")
    assert shelf.at_once("gpu-1") is None
    await shelf.register("gpu-1")
    assert shelf.at_once("gpu-1") is shelf.read("gpu-1")


async def test_what_is_unusual_is_left_to_the_ordinary_way(shelf: Shelf) -> None:
    assert shelf.at_once("gpu-1", **{wire.DIALECT_HEADER: "name"}) is None
    assert shelf.at_once("") is None
    assert shelf.at_once("unknown") is None
    assert shelf.encodings.get_at_once(b"\xff", {}) is None


async def test_the_list_is_given_at_once_unless_something_is_being_written(shelf: Shelf) -> None:
    assert shelf.encodings.list_at_once(b"", {}) is shelf.encodings.list()
    assert shelf.encodings.list_at_once(b"", {wire.DIALECT_FIELD: b"name"}) is None
    assert shelf.encodings.list_at_once(b"\xff", {}) is None
    write = asyncio.ensure_future(shelf.set_ready("gpu-2", "False"))
    while shelf.store.unsettled(GPU) is None:
        await asyncio.sleep(0)
    assert shelf.encodings.list_at_once(b"", {}) is None
    before = shelf.encodings.list()
    await write
    assert shelf.encodings.list_at_once(b"", {}) not in (None, before)


async def test_requests_are_remembered_in_bounded_number_and_size(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REQUESTS_KNOWN", 4)
    request = gpu_pb2.GetGpuRequest(name="gpu-1").SerializeToString()
    for number in range(10):
        # The same question in other words: a field that nobody knows.
        assert shelf.encodings.get_at_once(request + b"\x78" + bytes([number]), {}) is not None
        assert len(shelf.encodings._names) <= 4
    shelf.encodings._names.clear()
    long = request + b"\x7a\xff\x0f" + bytes(2047)
    assert shelf.encodings.get_at_once(long, {}) is not None
    assert shelf.at_once("unknown") is None
    assert not shelf.encodings._names
