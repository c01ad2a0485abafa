"""The server is killed in every step of growing and of shrinking; what exists stays accounted for."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from support.instances.instance_fault_lab import FaultLab, fault, wait_for

from fleetplane.domains.instances.kinds import DrainState, Instance
from fleetplane.domains.instances.rules import decide as rules

SIZE = 4
WINDOW_SECONDS = 60.0
"""How wide each step is made, so that the kill falls into it."""


def provisioned(lab: FaultLab) -> bool:
    statuses = lab.statuses()
    return len(statuses) >= SIZE and all(status.provider_id for status in statuses)


def grow(lab: FaultLab) -> None:
    """Undisturbed, to the full size."""
    lab.configure(SIZE)
    with lab.server():
        wait_for(lambda: provisioned(lab), "every instance has its machine")


def assert_nothing_leaked_or_doubled(lab: FaultLab) -> None:
    # Records of instances that were made and given up again would be here too: nothing is purged yet.
    assert len(lab.records()) == SIZE
    assert lab.machines() == set(lab.records())


# Growing


def one_creation(made: int, *, after: bool) -> list[dict[str, Any]]:
    """What the last server began is gone on with at once; the next is in its window until the kill."""
    first = [fault("create_instance", after=after, seconds=0, count=1)] if made else []
    return [*first, fault("create_instance", after=after, seconds=WINDOW_SECONDS)]


@pytest.mark.parametrize("after", [False, True], ids=["not yet made", "made, answer on its way"])
def test_killed_in_every_step_of_a_scale_up_the_group_converges(tmp_path: Path, after: bool) -> None:
    lab = FaultLab(tmp_path)
    for made in range(SIZE):
        window = (made + 1, made + 1) if after else (made + 1, made)
        lab.configure(SIZE, *one_creation(made, after=after))
        with lab.server():
            wait_for(lambda window=window: lab.counts() == window, f"(recorded, made) is {window}")  # type: ignore[misc]
        if after:
            assert sum(not status.provider_id for status in lab.statuses()) == 1, "its answer was lost"

    grow(lab)
    assert_nothing_leaked_or_doubled(lab)


def test_killed_at_random_while_growing_the_group_converges(tmp_path: Path) -> None:
    lab, dice = FaultLab(tmp_path), random.Random(7)
    # The first server never gets to the last of them, however fast it is and slow the kill.
    some = [fault("create_instance", after=False, seconds=0, count=SIZE - 1)]
    lab.configure(
        SIZE, *some, fault("create_instance", after=False, seconds=WINDOW_SECONDS), delay_seconds=0.05
    )
    rounds = 0
    while rounds < 5 and not provisioned(lab):
        with lab.server():
            time.sleep(dice.uniform(0, 0.15))
        assert lab.machines() <= set(lab.records()), "a machine that nobody wrote down"
        rounds += 1

    assert rounds >= 2, "nothing was interrupted"
    grow(lab)
    assert_nothing_leaked_or_doubled(lab)


# Shrinking


def drains(lab: FaultLab) -> dict[str, DrainState]:
    found = lab.records().values()
    return {one.name: one.status.drain for one in found if one.status is not None and one.status.drain}


def gone(lab: FaultLab) -> list[Instance]:
    return [one for one in lab.records().values() if rules.state(one) is rules.State.DELETED]


def assert_each_had_its_drain(lab: FaultLab, promised: dict[str, DrainState]) -> None:
    missing = set(lab.records()) - lab.machines()
    for name in missing:
        status = lab.records()[name].status
        assert status is not None
        assert status.drain == promised[name], "a restart must not begin the drain anew"
        assert status.deleting_at_ns is not None
        assert status.deleting_at_ns >= status.drain.delete_at_ns, "deleted before its drain was over"


def one_deletion(left: int, *, after: bool) -> list[dict[str, Any]]:
    """They are asked for side by side: let one be in its window, and the others wait before theirs."""
    first = [] if after or not left else [fault("delete_instance", after=False, seconds=0, count=1)]
    window = fault("delete_instance", after=after, seconds=WINDOW_SECONDS, count=1)
    return [*first, window, fault("delete_instance", after=False, seconds=WINDOW_SECONDS)]


@pytest.mark.parametrize("after", [False, True], ids=["not yet gone", "gone, answer on its way"])
def test_killed_in_every_step_of_a_drain_each_instance_keeps_its_notice(tmp_path: Path, after: bool) -> None:
    lab = FaultLab(tmp_path)
    grow(lab)
    lab.register_everyone()
    oldest = sorted(lab.records().values(), key=lambda one: (one.created_at_ns, one.name))
    keep, leave = {one.name for one in oldest[SIZE - 2 :]}, {one.name for one in oldest[: SIZE - 2]}

    lab.configure(2, *one_deletion(0, after=after))
    with lab.server():
        wait_for(lambda: bool(drains(lab)), "the first drain is written down")
    with lab.server():
        wait_for(lambda: drains(lab).keys() == leave, "the oldest are draining")
        promised = drains(lab)
    for left in range(len(leave)):
        machines = SIZE - left - (1 if after else 0)

        def in_the_window(left: int = left, machines: int = machines) -> bool:
            asked = sum(status.deleting_at_ns is not None for status in lab.statuses())
            return asked > left and len(lab.machines()) == machines

        lab.configure(2, *one_deletion(left, after=after))
        with lab.server():
            wait_for(in_the_window, f"deletion {left + 1} is under way")
        assert_each_had_its_drain(lab, promised)

    lab.configure(2)
    with lab.server():
        wait_for(lambda: len(gone(lab)) == len(leave), "all that were to leave are gone")
    assert {one.name for one in gone(lab)} == leave
    assert lab.machines() == keep
    assert_each_had_its_drain(lab, promised)
    assert set(lab.records()) == keep | leave, "nobody was replaced"


def test_killed_at_random_while_draining_the_group_converges(tmp_path: Path) -> None:
    lab, dice = FaultLab(tmp_path), random.Random(11)
    grow(lab)
    lab.register_everyone()
    lab.configure(0, delay_seconds=0.05)
    promised: dict[str, DrainState] = {}
    for _ in range(5):
        with lab.server():
            time.sleep(dice.uniform(0, 0.3))
        for name, drain in drains(lab).items():
            assert promised.setdefault(name, drain) == drain
        assert_each_had_its_drain(lab, promised)

    with lab.server():
        wait_for(lambda: len(gone(lab)) == SIZE, "all are gone")
    for name, drain in drains(lab).items():
        promised.setdefault(name, drain)
    assert lab.machines() == set()
    assert_each_had_its_drain(lab, promised)
    assert len(lab.records()) == SIZE


# A provider that cannot be had


def test_a_document_with_a_wrong_provider_leaves_the_server_standing(tmp_path: Path) -> None:
    lab = FaultLab(tmp_path)
    lab.configure(SIZE, wrong_option=1)
    with lab.server() as server:
        wait_for(
            lambda: any(
                line["event"] == "instances.bad_configuration" and "wrong_option" in str(line["error"])
                for line in server.logged()
            ),
            "it says what is wrong",
        )
        assert server.process.poll() is None
        assert lab.counts() == (0, 0)
    grow(lab)
    assert_nothing_leaked_or_doubled(lab)
