from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetplane.kernel.commands.rules import OPEN, OUTCOMES, TABLE, CommandState, CommandStep, after


def test_the_table_has_a_row_for_every_state_and_no_way_out_of_an_outcome() -> None:
    assert set(TABLE) == set(CommandState)
    assert set(OUTCOMES) == {"ok", "failed", "timed_out", "cancelled", "expired", "undeliverable"}
    assert all(not TABLE[outcome] for outcome in OUTCOMES)


@pytest.mark.parametrize("state", sorted(OPEN))
def test_from_every_open_state_time_and_cancelling_lead_to_an_end(state: CommandState) -> None:
    for step in (CommandStep.TOO_LATE, CommandStep.CANCEL, CommandStep.REMOVED):
        for delivered in (False, True):
            assert after(state, step, delivered=delivered) in OUTCOMES


@pytest.mark.parametrize("state", sorted(OPEN - {CommandState.HELD}))
@pytest.mark.parametrize(
    "word", [CommandStep.SUCCEEDED, CommandStep.FAILED, CommandStep.GAVE_UP, CommandStep.STOPPED]
)
def test_the_targets_word_ends_whatever_may_have_reached_it(state: CommandState, word: CommandStep) -> None:
    for delivered in (False, True):
        assert after(state, word, delivered=delivered) in OUTCOMES


def test_nobody_can_answer_what_is_held() -> None:
    for word in (
        CommandStep.STARTED,
        CommandStep.SUCCEEDED,
        CommandStep.FAILED,
        CommandStep.GAVE_UP,
        CommandStep.STOPPED,
        CommandStep.HAND_OVER,
    ):
        assert after(CommandState.HELD, word) is CommandState.HELD
    assert after(CommandState.HELD, CommandStep.RELEASE) is CommandState.WAITING


def test_a_lost_session_ends_only_what_cannot_be_sent_again() -> None:
    for state in (CommandState.SENT, CommandState.RUNNING):
        assert after(state, CommandStep.LOST, repeatable=False) is CommandState.FAILED
        assert after(state, CommandStep.LOST, repeatable=True) is state
    assert after(CommandState.WAITING, CommandStep.LOST, repeatable=False) is CommandState.WAITING


@given(st.lists(st.sampled_from(CommandStep)), st.booleans())
def test_whatever_happens_the_first_outcome_stays(steps: list[CommandStep], repeatable: bool) -> None:
    states = list(
        itertools.accumulate(
            steps, lambda state, step: after(state, step, repeatable=repeatable), initial=CommandState.WAITING
        )
    )
    ended = [state for state in states if state in OUTCOMES]
    assert len(set(ended)) <= 1


def test_the_two_deadlines_end_differently() -> None:
    assert after(CommandState.WAITING, CommandStep.TOO_LATE) is CommandState.EXPIRED
    assert after(CommandState.SENT, CommandStep.TOO_LATE) is CommandState.TIMED_OUT
    assert after(CommandState.RUNNING, CommandStep.TOO_LATE) is CommandState.TIMED_OUT


def test_what_may_have_arrived_never_ends_as_if_it_had_not() -> None:
    for step in CommandStep:
        assert after(CommandState.WAITING, step, delivered=True) not in (
            CommandState.EXPIRED,
            CommandState.UNDELIVERABLE,
        )


def test_only_a_repeatable_command_is_sent_again_in_a_new_session() -> None:
    assert after(CommandState.SENT, CommandStep.NEW_SESSION, repeatable=True) is CommandState.WAITING
    assert after(CommandState.SENT, CommandStep.NEW_SESSION, repeatable=False) is CommandState.SENT
    assert after(CommandState.RUNNING, CommandStep.NEW_SESSION, repeatable=True) is CommandState.RUNNING
