"""Which pin may be touched, decided without a chip or a clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetplane.domains.boards.agent.pins.rules import (
    HEADER,
    LEASE_LIMIT_SECONDS,
    PROTECTED,
    PinCaller,
    PinEvent,
    PinLease,
    PinOperation,
    PinPolicy,
    PinRule,
    dwell_refusal,
    lease_after,
    lease_refusal,
    order_refusal,
    pin_refusal,
    waveform_dwell_refusal,
    waveform_refusal,
)
from fleetplane.domains.boards.fences import Fence, parsed
from fleetplane.kernel.errors import (
    Conflict,
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    SettingsError,
)

ANN = PinCaller(user="ann", lease_id="a1")
BOB = PinCaller(user="bob", lease_id="b1")
NOBODY = PinCaller(user="eve")
LEASE = PinLease(id="a1", holder="ann", expires_at=100.0)


@pytest.mark.parametrize("pin", [0, 1, 2, 3, 14, 15])
@pytest.mark.parametrize("operation", list(PinOperation))
def test_protected_pins_are_refused_by_default_whatever_is_asked(pin: int, operation: PinOperation) -> None:
    refusal = pin_refusal(PinPolicy(), operation, pin)
    assert refusal is not None
    assert refusal.event == "critical_pin_access_denied"
    assert isinstance(refusal.error, PermissionDenied)
    assert refusal.error.details == {"cause": "protected"}
    assert PROTECTED[pin] in refusal.error.message


def test_an_allow_list_does_not_open_a_protected_pin_but_naming_it_does() -> None:
    listed = PinPolicy(allowed=frozenset({2, 17}))
    refusal = pin_refusal(listed, PinOperation.WRITE, 2)
    assert refusal is not None
    assert refusal.event is PinEvent.PROTECTED_DENIED
    opened = PinPolicy(allowed=frozenset({2, 17}), unprotected=frozenset({2}))
    assert pin_refusal(opened, PinOperation.WRITE, 2) is None


def test_by_default_every_other_pin_of_the_header_may_be_used() -> None:
    free = [pin for pin in range(-5, 64) if pin_refusal(PinPolicy(), PinOperation.WRITE, pin) is None]
    assert free == sorted(set(HEADER) - set(PROTECTED))


@pytest.mark.parametrize("pin", [-1, 28, 40, 2**31 - 1])
def test_a_pin_that_is_not_on_the_header_is_a_bad_argument(pin: int) -> None:
    refusal = pin_refusal(PinPolicy(), PinOperation.READ, pin)
    assert refusal is not None
    assert refusal.event is PinEvent.READ_FAILED
    assert isinstance(refusal.error, InvalidArgument)
    assert refusal.error.field == "pin"


def test_checks_speak_in_their_order() -> None:
    everything_wrong = PinPolicy(
        operations=frozenset({PinOperation.READ}), restricted=frozenset({2, 17}), allowed=frozenset({5})
    )

    def event(operation: PinOperation, pin: int) -> str | None:
        refusal = pin_refusal(everything_wrong, operation, pin)
        return refusal.event if refusal else None

    assert event(PinOperation.WRITE, 2) == "operation_denied"
    assert event(PinOperation.READ, 2) == "critical_pin_access_denied"
    assert event(PinOperation.READ, 17) == "restricted_pin_access"
    assert event(PinOperation.READ, 18) == "pin_not_allowed"
    assert event(PinOperation.READ, 99) == "pin_not_allowed"
    assert event(PinOperation.READ, 5) is None


@given(pin=st.integers(), operation=st.sampled_from(list(PinOperation)))
def test_whatever_is_asked_the_answer_is_a_refusal_or_a_usable_pin(pin: int, operation: PinOperation) -> None:
    refusal = pin_refusal(PinPolicy(), operation, pin)
    assert (refusal is None) == (pin in HEADER and pin not in PROTECTED)
    assert refusal is None or refusal.error.details["cause"] in ("protected", "range")


@pytest.mark.parametrize(
    ("frequency", "duty", "field"),
    [
        (0, 50, "frequency"),
        (-1, 50, "frequency"),
        (40_001, 50, "frequency"),
        (1, -1, "duty_cycle"),
        (1, 101, "duty_cycle"),
        (1, 0, None),
        (40_000, 100, None),
    ],
)
def test_a_waveform_has_its_limits(frequency: int, duty: int, field: str | None) -> None:
    refusal = waveform_refusal(frequency, duty)
    assert (refusal and refusal.error.field) == field
    assert refusal is None or refusal.event == "pwm_set_failed"


@pytest.mark.parametrize("operation", sorted(set(PinOperation) - {PinOperation.READ}))
def test_while_a_lease_lasts_only_its_holder_changes_the_pin(operation: PinOperation) -> None:
    assert lease_refusal(LEASE, operation, 17, ANN, now=99.9) is None
    for other in (BOB, NOBODY):
        refusal = lease_refusal(LEASE, operation, 17, other, now=99.0)
        assert refusal is not None
        assert refusal.event is PinEvent.LEASE_CONFLICT
        assert isinstance(refusal.error, Conflict)
        assert refusal.error.details == {"cause": "leased", "holder": "ann"}
        assert "a1" not in refusal.error.message  # the id is what proves a lease
    assert lease_refusal(LEASE, operation, 17, BOB, now=100.0) is None


def test_anyone_may_read_a_leased_pin() -> None:
    assert lease_refusal(LEASE, PinOperation.READ, 17, NOBODY, now=0.0) is None


def test_a_lease_is_extended_by_its_id_and_never_shortened() -> None:
    assert lease_after(None, NOBODY, now=0.0) is None
    assert lease_after(LEASE, NOBODY, now=0.0) is LEASE
    taken = lease_after(None, ANN, now=10.0)
    assert taken == PinLease(id="a1", holder="ann", expires_at=70.0)
    longer = lease_after(taken, PinCaller(user="ann", lease_id="a1", lease_seconds=600), now=20.0)
    assert longer is not None
    assert longer.expires_at == 620.0
    assert lease_after(longer, ANN, now=20.0) == longer
    after = lease_after(LEASE, BOB, now=100.0)
    assert after == PinLease(id="b1", holder="bob", expires_at=160.0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, LEASE_LIMIT_SECONDS + 1, float("nan"), float("inf")])
def test_a_lease_that_never_or_no_longer_ends_is_refused(seconds: float) -> None:
    caller = PinCaller(user="ann", lease_id="a1", lease_seconds=seconds)
    refusal = lease_refusal(None, PinOperation.WRITE, 17, caller, now=0.0)
    assert refusal is not None
    assert isinstance(refusal.error, InvalidArgument)
    assert refusal.error.field == "lease_seconds"


def test_a_lease_id_has_a_length() -> None:
    refusal = lease_refusal(None, PinOperation.WRITE, 17, PinCaller(user="ann", lease_id="x" * 129), now=0.0)
    assert refusal is not None
    assert refusal.error.field == "lease_id"


def test_a_pin_that_just_changed_says_when_it_may_change_again() -> None:
    rule = PinRule(dwell_seconds=2.0)
    refusal = dwell_refusal(rule, 17, changed_at=10.0, now=11.5)
    assert refusal is not None
    assert refusal.event is PinEvent.DWELL_DENIED
    assert isinstance(refusal.error, ResourceExhausted)
    assert refusal.error.retry_after_seconds == 0.5
    assert dwell_refusal(rule, 17, changed_at=10.0, now=12.0) is None
    assert dwell_refusal(rule, 17, changed_at=None, now=0.0) is None
    assert dwell_refusal(PinRule(), 17, changed_at=10.0, now=10.0) is None


def test_a_pin_with_a_dwell_time_carries_no_waveform() -> None:
    refusal = waveform_dwell_refusal(PinRule(dwell_seconds=0.1), 17)
    assert refusal is not None
    assert isinstance(refusal.error, FailedPrecondition)
    assert waveform_dwell_refusal(PinRule(), 17) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"allowed": frozenset({28})},
        {"restricted": frozenset({-1})},
        {"unprotected": frozenset({99})},
        {"rules": {40: PinRule()}},
        {"rules": {4: PinRule(dwell_seconds=-1)}},
        {"default_rule": PinRule(dwell_seconds=1e9)},
    ],
)
def test_a_policy_about_pins_that_do_not_exist_is_no_policy(settings: dict[str, object]) -> None:
    with pytest.raises(SettingsError):
        PinPolicy(**settings)  # type: ignore[arg-type]


def test_an_order_older_than_the_newest_is_refused_if_it_would_change_something() -> None:
    newest = Fence(lineage="l", revision=7)

    def refused(operation: PinOperation, fence: Fence | None, before: Fence | None = newest) -> bool:
        return order_refusal(before, operation, 17, PinCaller(user="ann", fence=fence)) is not None

    assert refused(PinOperation.WRITE, Fence(lineage="l", revision=6))
    assert refused(PinOperation.RELEASE, Fence(lineage="l", revision=6))
    assert not refused(PinOperation.READ, Fence(lineage="l", revision=6))
    assert not refused(PinOperation.WRITE, newest)  # one order may take several calls
    assert not refused(PinOperation.WRITE, Fence(lineage="l", revision=8))
    assert not refused(PinOperation.WRITE, Fence(lineage="restored", revision=1))
    assert not refused(PinOperation.WRITE, Fence(lineage="l", revision=1), None)
    assert not refused(PinOperation.WRITE, None)


@pytest.mark.parametrize(
    "text", ["", "l", "l/", "/7", "l/-1", "l/7 ", "l/" + "9" * 20, "x" * 65 + "/7", "l/7/8"]
)
def test_a_place_that_cannot_be_read_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parsed(text, field="fleetplane-order")
    assert refused.value.field == "fleetplane-order"
    assert str(parsed("9f2c/4711", field="")) == "9f2c/4711"
