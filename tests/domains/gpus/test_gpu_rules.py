from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetplane.domains.gpus import rules
from fleetplane.domains.gpus.domain import OPERATOR_PROVIDER
from fleetplane.domains.gpus.kinds import GpuStatus, StatusReport
from fleetplane.domains.gpus.rules import GpuHealth, GpuPolicy, GpuState, TransitionTimes
from fleetplane.kernel.errors import ResourceExhausted
from fleetplane.kernel.resources import Condition

POLICY = GpuPolicy()


def ready(
    status: str = "True", *, at: int | None = None, writer: str = "nvml", kind: str = "Ready"
) -> Condition:
    return Condition(type=kind, status=status, changed_at_ns=at, writer=writer)


def reporting(*conditions: Condition, action: str = "") -> GpuState:
    return rules.set_status(StatusReport(conditions=conditions, recommended_action=action))


def test_a_new_condition_is_added_at_the_end_and_others_stay() -> None:
    before = reporting(ready(at=1, kind="A"), ready(at=1, kind="B"), action="drain")

    after = rules.set_condition(before, ready(kind="C"), now_ns=9, policy=POLICY)

    assert [c.type for c in after.conditions] == ["A", "B", "C"]
    assert after.conditions[:2] == before.conditions
    assert after.status == GpuStatus(recommended_action="drain")


def test_a_condition_of_the_same_type_is_replaced_in_its_place() -> None:
    before = reporting(ready(at=1, kind="A"), ready(at=1, kind="B"))

    after = rules.set_condition(before, ready("False", kind="A"), now_ns=9, policy=POLICY)

    assert [(c.type, c.status) for c in after.conditions] == [("A", "False"), ("B", "True")]


def test_the_first_condition_creates_the_status() -> None:
    assert rules.set_condition(GpuState(), ready(), now_ns=9, policy=POLICY).status == GpuStatus()


def test_the_transition_time_moves_only_when_the_status_does() -> None:
    state = rules.set_condition(GpuState(), ready("True"), now_ns=10, policy=POLICY)
    state = rules.set_condition(state, ready("True"), now_ns=20, policy=POLICY)
    assert state.conditions[0].changed_at_ns == 10

    state = rules.set_condition(state, ready("False"), now_ns=30, policy=POLICY)
    assert state.conditions[0].changed_at_ns == 30


def test_a_transition_time_that_the_caller_gives_is_kept_as_given() -> None:
    state = rules.set_condition(GpuState(), ready("True", at=5), now_ns=10, policy=POLICY)
    assert state.conditions[0].changed_at_ns == 5


def test_the_original_times_every_write() -> None:
    policy = GpuPolicy(transition_times=TransitionTimes.EVERY_WRITE)
    state = rules.set_condition(GpuState(), ready("True"), now_ns=10, policy=policy)
    state = rules.set_condition(state, ready("True"), now_ns=20, policy=policy)
    assert state.conditions[0].changed_at_ns == 20


def test_one_condition_type_too_many_is_refused_and_a_known_one_never() -> None:
    full = reporting(*(ready(at=1, kind=f"T{n}") for n in range(POLICY.max_condition_types)))

    with pytest.raises(ResourceExhausted, match="32 condition types") as caught:
        rules.set_condition(full, ready(kind="Another"), now_ns=1, policy=POLICY)
    assert caught.value.field == "condition.type"
    rules.set_condition(full, ready("False", kind="T31"), now_ns=1, policy=POLICY)


def test_conditions_grow_to_a_bound_and_may_always_shrink() -> None:
    policy = GpuPolicy(max_condition_bytes=100)
    long = Condition(type="T", status="True", message="\N{GREEK SMALL LETTER OMEGA}" * 60)

    with pytest.raises(ResourceExhausted, match="would take 121 bytes, more than 100") as caught:
        rules.set_condition(GpuState(), long, now_ns=1, policy=policy)
    assert caught.value.field == "condition.message"
    before = reporting(long, ready())
    after = rules.set_condition(before, Condition(type="T", status="False"), now_ns=1, policy=policy)
    assert after.conditions[0].status == "False"


def test_replacing_the_status_with_nothing_clears_it() -> None:
    assert rules.set_status(None) == GpuState(conditions=(), status=None)


def test_silence_turns_only_that_providers_conditions_to_unknown() -> None:
    before = reporting(ready(at=1, kind="A"), ready(at=1, kind="B", writer="dcgm"))

    after = rules.silence(before, provider="nvml", message="quiet", now_ns=50)

    assert [(c.type, c.status, c.reason, c.changed_at_ns) for c in after.conditions] == [
        ("A", "Unknown", "ProviderSilent", 50),
        ("B", "True", "", 1),
    ]


@pytest.mark.parametrize("provider", [None, OPERATOR_PROVIDER])
def test_what_an_operator_set_by_hand_is_never_silenced(provider: str | None) -> None:
    before = reporting(ready("False", at=1, writer=OPERATOR_PROVIDER))
    assert rules.silence(before, provider=provider, message="quiet", now_ns=50) is before


def test_silencing_twice_changes_nothing_the_second_time() -> None:
    once = rules.silence(reporting(ready(at=1)), provider="nvml", message="quiet", now_ns=50)
    assert rules.silence(once, provider="nvml", message="quiet", now_ns=60) is once


def test_a_provider_that_returns_finds_its_words_as_it_left_them() -> None:
    before = reporting(ready("False", at=1), ready("Unknown", at=2, kind="B"))
    silent = rules.silence(before, provider="nvml", message="quiet", now_ns=50)

    back = rules.restore(silent, provider="nvml", now_ns=70)

    assert [(c.type, c.status, c.changed_at_ns) for c in back.conditions] == [
        ("Ready", "False", 70),
        ("B", "Unknown", 2),
    ]
    assert back.silenced == ()


def test_what_another_provider_wrote_meanwhile_is_not_overwritten_on_return() -> None:
    silent = rules.silence(reporting(ready(at=1)), provider="nvml", message="quiet", now_ns=50)
    sharing = GpuPolicy(shared_writes=True)
    taken_over = rules.set_condition(silent, ready("False", writer="dcgm"), now_ns=60, policy=sharing)

    back = rules.restore(taken_over, provider="nvml", now_ns=70)

    assert [(c.status, c.writer) for c in back.conditions] == [("False", "dcgm")]


conditions = st.builds(
    Condition,
    type=st.sampled_from(["A", "B", "C"]),
    status=st.sampled_from(["True", "False", "Unknown", "odd"]),
    changed_at_ns=st.integers(0, 100),
    writer=st.sampled_from(["nvml", "dcgm", ""]),
)


@given(st.lists(conditions, max_size=6), st.sampled_from(["nvml", "dcgm", ""]))
def test_silence_and_return_give_back_what_was_said(said: list[Condition], provider: str) -> None:
    before = reporting(*said)
    back = rules.restore(
        rules.silence(before, provider=provider, message="m", now_ns=200), provider=provider, now_ns=300
    )

    assert [(c.type, c.status, c.reason, c.writer) for c in back.conditions] == [
        (c.type, c.status, c.reason, c.writer) for c in said
    ]


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([], GpuHealth.UNKNOWN),
        (["True"], GpuHealth.HEALTHY),
        (["True", "True"], GpuHealth.HEALTHY),
        (["True", "Unknown"], GpuHealth.UNKNOWN),
        (["True", ""], GpuHealth.UNKNOWN),
        (["Unknown", "False"], GpuHealth.UNHEALTHY),
    ],
)
def test_false_beats_unknown_and_unknown_beats_true(statuses: list[str], expected: GpuHealth) -> None:
    assert rules.health([ready(status, kind=str(n)) for n, status in enumerate(statuses)]) is expected
