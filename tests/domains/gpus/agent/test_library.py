"""One contract, two libraries: the simulated one, and pynvml over a compiled stub."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from support.gpus.nvml_stub import A100, LOST, NOT_SUPPORTED, FakeDriver, NvmlRig, Rig, fresh_pynvml, uuid

from fleetplane.domains.gpus.agent import driver
from fleetplane.domains.gpus.agent.health import GpuUuid
from fleetplane.domains.gpus.agent.library import (
    WATCHED_EVENTS,
    DriverError,
    DriverEventKind,
    DriverUnavailable,
    EventSet,
    GpuLost,
    NotSupported,
    NvmlLibrary,
    find_library,
)
from fleetplane.domains.gpus.agent.simulated import SimulatedLibrary


def subscribed(rig: Rig) -> EventSet:
    rig.library.open()
    events = rig.library.event_set()
    for device in rig.library.devices():
        events.add(device, device.supported_events())
    return events


def test_devices_answer_for_themselves(rig: Rig) -> None:
    rig.library.open()
    devices = rig.library.devices()
    assert [device.uuid() for device in devices] == rig.uuids
    assert rig.library.driver_version()
    for device in devices:
        assert device.product()
        assert device.memory_bytes() >= 1024**3
        assert device.supported_events() == WATCHED_EVENTS
        assert device.retirement_pending() is False
    rig.library.close()


def test_closing_twice_and_opening_again_is_harmless(rig: Rig) -> None:
    rig.library.open()
    rig.library.close()
    rig.library.close()
    rig.library.open()
    assert len(rig.library.devices()) == 2
    rig.library.close()


def test_a_closed_simulated_library_answers_nothing() -> None:
    with pytest.raises(DriverError):
        SimulatedLibrary(1, clock=time.monotonic).devices()


def test_a_quiet_wait_ends_in_none_when_the_time_is_up(rig: Rig) -> None:
    events = subscribed(rig)
    started = time.monotonic()
    assert events.wait(60) is None
    assert time.monotonic() - started >= 0.04
    events.close()


def test_an_xid_comes_with_its_gpu_and_number_in_order(rig: Rig) -> None:
    events = subscribed(rig)
    rig.xid(1, 79)
    rig.xid(0, 13)
    first, second = events.wait(60_000), events.wait(60_000)
    assert first is not None
    assert second is not None
    assert (first.uuid, first.kind, first.data) == (rig.uuids[1], DriverEventKind.XID, 79)
    assert (second.uuid, second.data) == (rig.uuids[0], 13)
    events.close()


def test_an_event_ends_a_wait_that_has_begun(rig: Rig) -> None:
    events = subscribed(rig)
    timer = threading.Timer(0.1, rig.xid, (0, 48))
    timer.start()
    event = events.wait(60_000)
    timer.join()
    assert event is not None
    assert event.data == 48
    events.close()


def test_a_gpu_that_was_not_added_is_not_heard(rig: Rig) -> None:
    rig.library.open()
    events = rig.library.event_set()
    events.add(rig.library.devices()[0], WATCHED_EVENTS)
    rig.xid(1, 79)
    rig.xid(0, 48)
    event = events.wait(60_000)
    assert event is not None
    assert event.uuid == rig.uuids[0]
    events.close()


def test_a_kind_that_was_not_added_is_not_heard(rig: Rig) -> None:
    rig.library.open()
    events = rig.library.event_set()
    events.add(rig.library.devices()[0], DriverEventKind.XID)
    rig.ecc(0)
    assert events.wait(50) is None
    events.close()


def test_a_lost_gpu_raises_in_the_wait_and_stops_answering(rig: Rig) -> None:
    events = subscribed(rig)
    healthy, lost = rig.library.devices()
    assert lost.uuid() == rig.uuids[1]
    rig.lose(1)
    with pytest.raises(GpuLost):
        events.wait(60_000)
    with pytest.raises(GpuLost):
        lost.memory_bytes()
    assert healthy.memory_bytes()
    events.close()


def test_a_pending_page_retirement_is_told(rig: Rig) -> None:
    rig.library.open()
    rig.retire_page(0)
    assert [device.retirement_pending() for device in rig.library.devices()] == [True, False]


def test_enumeration_sees_what_the_devices_say(rig: Rig) -> None:
    rig.library.open()
    rig.retire_page(1)
    seen = driver.enumerate_gpus(rig.library)
    assert list(seen.sightings) == rig.uuids
    assert [sighting.sound for sighting in seen.sightings.values()] == [True, False]
    assert seen.skipped == 0


def test_enumeration_skips_a_device_without_a_uuid(fake_driver: FakeDriver) -> None:
    fake_driver.lines.append(fake_driver.gpu(2))
    fake_driver.set_gpu(1, name="-")
    rig = NvmlRig(fake_driver)
    rig.library.open()
    seen = driver.enumerate_gpus(rig.library)
    assert list(seen.sightings) == [uuid(0), uuid(2)]
    assert seen.skipped == 1
    assert seen.driver_version == "575.57.08"
    assert seen.sightings[uuid(0)].product == A100


def test_memory_that_cannot_be_asked_for_is_no_fault(fake_driver: FakeDriver) -> None:
    fake_driver.set_gpu(0, error=NOT_SUPPORTED)
    rig = NvmlRig(fake_driver)
    rig.library.open()
    device = rig.library.devices()[0]
    with pytest.raises(NotSupported):
        device.memory_bytes()
    sighting = driver.enumerate_gpus(rig.library).sightings[uuid(0)]
    assert sighting.sound
    assert sighting.memory_bytes is None


def test_gpus_without_events_are_left_out_and_none_at_all_means_no_set(fake_driver: FakeDriver) -> None:
    fake_driver.set_gpu(0, mask=0)
    rig = NvmlRig(fake_driver)
    rig.library.open()
    some = driver.subscribe(rig.library, driver.enumerate_gpus(rig.library).devices)
    assert some is not None
    assert some[1] == 1
    some[0].close()
    fake_driver.set_gpu(1, error=NOT_SUPPORTED)
    assert driver.subscribe(rig.library, driver.enumerate_gpus(rig.library).devices) is None
    assert fake_driver.calls.count("create") == fake_driver.calls.count("free") == 2


def test_an_event_of_a_gpu_that_no_longer_tells_its_uuid_is_still_attributed(fake_driver: FakeDriver) -> None:
    rig = NvmlRig(fake_driver)
    rig.library.open()
    seen = driver.enumerate_gpus(rig.library)
    events = rig.library.event_set()
    events.add(seen.devices[uuid(1)], WATCHED_EVENTS)
    fake_driver.set_gpu(1, error=LOST)
    rig.xid(1, 79)
    event = events.wait(60_000)
    assert event is not None
    assert (event.uuid, event.data) == (uuid(1), 79)
    events.close()


def test_without_a_library_the_operator_is_told_what_is_missing_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DriverUnavailable) as caught:
        NvmlLibrary(fresh_pynvml(), driver_root=tmp_path).open()
    assert "libnvidia-ml.so.1" in caught.value.message
    assert str(tmp_path) in caught.value.message
    assert "--driver-root" in caught.value.advice


@pytest.mark.parametrize(("code", "words"), [(9, "not loaded"), (999, "did not start")])
def test_a_driver_that_does_not_start_says_why(fake_driver: FakeDriver, code: int, words: str) -> None:
    fake_driver.fail_init(code)
    library = NvmlLibrary(fresh_pynvml(), driver_root=fake_driver.driver_root)
    with pytest.raises(DriverUnavailable, match=words):
        library.open()
    library.close()
    assert "shutdown" not in fake_driver.calls


def test_a_file_that_is_no_library_is_named(tmp_path: Path) -> None:
    bogus = tmp_path / "lib" / "libnvidia-ml.so.1"
    bogus.parent.mkdir()
    bogus.write_text("not a library")
    with pytest.raises(DriverUnavailable, match=str(bogus)):
        NvmlLibrary(fresh_pynvml(), driver_root=tmp_path).open()


def test_the_library_is_searched_in_the_known_order(tmp_path: Path) -> None:
    assert find_library(tmp_path) is None
    for folder in ("lib", "usr/lib", "usr/lib/x86_64-linux-gnu", "usr/lib64"):
        place = tmp_path / folder / "libnvidia-ml.so.1"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
        assert find_library(tmp_path) == place


def test_the_same_seed_and_clock_give_the_same_fate() -> None:
    def story(seed: int) -> list[tuple[GpuUuid | None, int]]:
        now = [0.0]
        library = SimulatedLibrary(3, clock=lambda: now[0], seed=seed)
        library.open()
        events = library.event_set()
        for device in library.devices():
            events.add(device, WATCHED_EVENTS)
        heard = []
        for _ in range(2000):
            now[0] += 1.0
            while (event := events.wait(0)) is not None:
                heard.append((event.uuid, event.data))
        return heard

    assert story(1) == story(1)
    assert story(1) != story(2)
    assert len(story(1)) > 20


def test_a_lost_simulated_gpu_does_not_keep_the_wait_awake() -> None:
    asked = 0

    def clock() -> float:
        nonlocal asked
        asked += 1
        return time.monotonic()

    library = SimulatedLibrary(1, clock=clock)
    library.open()
    events = library.event_set()
    (device,) = library.devices()
    events.add(device, WATCHED_EVENTS)
    device.next_event_at = 0.0  # type: ignore[attr-defined]  # overdue, as it is after a long silence
    library.lose(device.uuid())
    with pytest.raises(GpuLost):
        events.wait(10)
    asked = 0
    assert events.wait(100) is None
    assert asked < 50


async def test_a_driver_that_hangs_does_not_hang_the_caller() -> None:
    release = threading.Event()
    with pytest.raises(DriverUnavailable, match="did not answer"):
        await driver.in_thread(release.wait, limit_seconds=0.05)
    release.set()
