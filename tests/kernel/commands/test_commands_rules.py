from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetplane.kernel.commands.rules import OPEN, OUTCOMES, TABLE, State, Step, after


def test_the_table_has_a_row_for_every_state_and_no_way_out_of_an_outcome() -> None:
    assert set(TABLE) == set(State)
    assert set(OUTCOMES) == {"ok", "failed", "timed_out", "cancelled", "expired", "undeliverable"}
    assert all(not TABLE[outcome] for outcome in OUTCOMES)


@pytest.mark.parametrize("state", sorted(OPEN))
def test_from_every_open_state_time_and_cancelling_lead_to_an_end(state: State) -> None:
    for step in (Step.TOO_LATE, Step.CANCEL, Step.REMOVED):
        for delivered in (False, True):
            assert after(state, step, delivered=delivered) in OUTCOMES


@pytest.mark.parametrize("state", sorted(OPEN - {State.HELD}))
@pytest.mark.parametrize("word", [Step.SUCCEEDED, Step.FAILED, Step.GAVE_UP, Step.STOPPED])
def test_the_targets_word_ends_whatever_may_have_reached_it(state: State, word: Step) -> None:
    for delivered in (False, True):
        assert after(state, word, delivered=delivered) in OUTCOMES


def test_nobody_can_answer_what_is_held() -> None:
    for word in (Step.STARTED, Step.SUCCEEDED, Step.FAILED, Step.GAVE_UP, Step.STOPPED, Step.HAND_OVER):
        assert after(State.HELD, word) is State.HELD
    assert after(State.HELD, Step.RELEASE) is State.WAITING


def test_a_lost_session_ends_only_what_cannot_be_sent_again() -> None:
    for state in (State.SENT, State.RUNNING):
        assert after(state, Step.LOST, repeatable=False) is State.FAILED
        assert after(state, Step.LOST, repeatable=True) is state
    assert after(State.WAITING, Step.LOST, repeatable=False) is State.WAITING


@given(st.lists(st.sampled_from(Step)), st.booleans())
def test_whatever_happens_the_first_outcome_stays(steps: list[Step], repeatable: bool) -> None:
    states = list(
        itertools.accumulate(
            steps, lambda state, step: after(state, step, repeatable=repeatable), initial=State.WAITING
        )
    )
    ended = [state for state in states if state in OUTCOMES]
    assert len(set(ended)) <= 1


def test_the_two_deadlines_end_differently() -> None:
    assert after(State.WAITING, Step.TOO_LATE) is State.EXPIRED
    assert after(State.SENT, Step.TOO_LATE) is State.TIMED_OUT
    assert after(State.RUNNING, Step.TOO_LATE) is State.TIMED_OUT


def test_what_may_have_arrived_never_ends_as_if_it_had_not() -> None:
    for step in Step:
        assert after(State.WAITING, step, delivered=True) not in (State.EXPIRED, State.UNDELIVERABLE)


def test_only_a_repeatable_command_is_sent_again_in_a_new_session() -> None:
    assert after(State.SENT, Step.NEW_SESSION, repeatable=True) is State.WAITING
    assert after(State.SENT, Step.NEW_SESSION, repeatable=False) is State.SENT
    assert after(State.RUNNING, Step.NEW_SESSION, repeatable=True) is State.RUNNING
