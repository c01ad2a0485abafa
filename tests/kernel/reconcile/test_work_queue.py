from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fleetplane.kernel.errors import ResourceExhausted
from fleetplane.kernel.reconcile import WorkQueue


def test_a_key_is_taken_once_when_it_is_due() -> None:
    queue = WorkQueue()
    queue.add("a", 5.0)

    assert queue.take(4.9) is None
    assert queue.next_due() == 5.0
    assert queue.take(5.0) == "a"
    assert queue.take(9.0) is None
    queue.done("a", None)
    assert len(queue) == 0
    assert queue.next_due() == math.inf


def test_queueing_again_changes_nothing_but_to_an_earlier_moment() -> None:
    queue = WorkQueue()
    queue.add("a", 5.0)
    queue.add("a", 9.0)
    assert queue.due("a") == 5.0
    queue.add("a", 2.0)

    assert queue.take(2.0) == "a"
    queue.done("a", None)
    assert queue.take(100.0) is None, "the later moments are forgotten"


def test_a_key_queued_while_running_runs_once_more() -> None:
    queue = WorkQueue()
    queue.add("a", 0.0)
    queue.take(0.0)
    for due in (3.0, 1.0, 2.0):
        queue.add("a", due)
    assert queue.take(10.0) is None, "never twice at a time"
    queue.done("a", 7.0)

    assert queue.due("a") == 1.0
    assert queue.take(1.0) == "a"
    queue.done("a", None)
    assert len(queue) == 0


def test_a_failure_is_not_overtaken_by_what_was_asked_for_while_failing() -> None:
    queue = WorkQueue()
    queue.add("a", 0.0)
    queue.take(0.0)
    queue.add("a", 0.0)
    queue.failed("a", 8.0)
    assert queue.due("a") == 8.0

    queue.add("a", 3.0)  # but news from outside is worth a try
    assert queue.take(3.0) == "a"


def test_the_longest_due_comes_first_and_equals_in_order_of_asking() -> None:
    queue = WorkQueue()
    for key, due in (("c", 2.0), ("a", 1.0), ("b", 2.0)):
        queue.add(key, due)

    assert [queue.take(2.0) for _ in range(4)] == ["a", "c", "b", None]


def test_there_is_a_most_of_keys_and_known_ones_still_get_in() -> None:
    queue = WorkQueue(limit=2)
    queue.add("a", 0.0)
    queue.add("b", 0.0)

    with pytest.raises(ResourceExhausted):
        queue.add("c", 0.0)
    queue.add("a", -1.0)
    assert queue.take(0.0) == "a"
    queue.done("a", 1.0)
    assert len(queue) == 2


def test_moving_a_key_ever_earlier_does_not_fill_memory() -> None:
    queue = WorkQueue()
    for moment in range(10_000):
        queue.add("a", -float(moment))

    assert len(queue._heap) < 200
    assert queue.take(0.0) == "a"
    assert queue.take(0.0) is None


class QueueModel(RuleBasedStateMachine):
    """Against the plainest thing that could be right: dictionaries, looked through."""

    KEYS = ("a", "b", "c", "d")

    def __init__(self) -> None:
        super().__init__()
        self.queue = WorkQueue()
        self.waiting: dict[str, float] = {}
        self.running: dict[str, float | None] = {}
        self.now = 0.0

    @rule(key=st.sampled_from(KEYS), ahead=st.integers(-2, 5))
    def add(self, key: str, ahead: int) -> None:
        due = self.now + ahead
        self.queue.add(key, due)
        if key in self.running:
            again = self.running[key]
            self.running[key] = due if again is None else min(again, due)
        else:
            self.waiting[key] = min(due, self.waiting.get(key, math.inf))

    @rule(passed=st.integers(0, 3))
    def take(self, passed: int) -> None:
        self.now += passed
        key = self.queue.take(self.now)
        if key is None:
            assert all(due > self.now for due in self.waiting.values())
        else:
            assert self.waiting.pop(key) <= min([*self.waiting.values(), self.now])
            self.running[key] = None

    @precondition(lambda self: self.running)
    @rule(data=st.data(), ahead=st.none() | st.integers(0, 5), fails=st.booleans())
    def finish(self, data: st.DataObject, ahead: int | None, fails: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.running)))
        again = self.running.pop(key)
        due = None if ahead is None else self.now + ahead
        if fails and due is not None:
            self.queue.failed(key, due)
            self.waiting[key] = due
            return
        self.queue.done(key, due)
        moments = [moment for moment in (again, due) if moment is not None]
        if moments:
            self.waiting[key] = min(moments)

    @invariant()
    def agrees(self) -> None:
        assert len(self.queue) == len(self.waiting) + len(self.running)
        assert self.queue.running == len(self.running)
        assert self.queue.next_due() == min(self.waiting.values(), default=math.inf)
        for key in self.KEYS:
            expected = self.running[key] if key in self.running else self.waiting.get(key)
            assert self.queue.due(key) == expected


TestQueueModel = QueueModel.TestCase
TestQueueModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
