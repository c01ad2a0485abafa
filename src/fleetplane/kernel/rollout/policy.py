"""With which care a rollout goes through its targets. Shape and bounds; decisions are in `passes`. Pure."""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.rollout import amounts
from fleetplane.kernel.rollout.windows import Window

WAVES_LIMIT = 50
GATES_LIMIT = 20
WINDOWS_LIMIT = 20
DAY_SECONDS = 86_400.0
REST = "rest"
LABEL = "label "


class OnHalt(StrEnum):
    WAIT = "wait"
    ROLL_BACK = "roll_back"


class Gate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A condition on a measurement of the targets that have moved. Without data it is not passed."""

    name: str
    query: str
    """A measurement that the subject has, such as `error_rate`; or `prometheus EXPRESSION`, `webhook URL` or
    `probe NAME`."""
    max: float | None = None
    """The most that the measurement may be."""
    min: float | None = None
    """The least."""
    max_increase: float | None = None
    """The most by which it may be above the same targets' value of before the rollout."""
    window_seconds: float = 300.0
    """The time over which it is measured, up to now; and before the rollout, for comparison."""
    halts: bool = False
    """Whether a breach halts at once; else it starts the soak anew, which `max_soak_seconds` bounds."""


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a rollout proceeds, when it stops and what it does then."""

    waves: tuple[str, ...] = ("1", "10%", "50%", "rest")
    """Each a number, a percentage of all targets, `label SELECTOR`, or `rest`, which is the last."""
    max_in_flight: str = "100%"
    """Targets of a wave that are asked at once and have not confirmed."""
    max_unavailable: str = "0"
    """Of all targets: how many may be without one at work while they are replaced. Only where a target is
    changed by replacing it."""
    max_failures: str = "0"
    """Of all targets; the rollout halts when more have failed."""
    max_failures_per_wave: str = "100%"
    """Of the targets of the wave that is under way."""
    max_offline: str = "10%"
    """Of a wave: targets that it may go on without. The last wave waits for all until `deliver_seconds`."""
    confirm_seconds: float = 120.0
    """How long a target that is connected may take to confirm."""
    deliver_seconds: float = 3600.0
    """How long a target that is not connected is waited for, from the start of its wave."""
    unhealthy_seconds: float = 0.0
    """How long a target that has moved may be unhealthy before it has failed."""
    soak_seconds: float = 60.0
    """How long health and gates must hold without a break after a wave."""
    max_soak_seconds: float = 600.0
    """How long that may take; then the rollout halts."""
    gates: tuple[Gate, ...] = ()
    windows: tuple[Window, ...] = ()
    """A wave starts only while one of them is open; at any time if there are none."""
    approvals: tuple[int, ...] = ()
    """Waves, counted from 1, that start only after somebody approved them."""
    on_halt: OnHalt = OnHalt.WAIT
    roll_back_in_flight: str = "100%"
    """Targets that go back at once."""
    roll_back_max_failures: str = "100%"
    """Of the targets that go back; the roll back halts when more could not."""

    def check(self) -> None:
        """Refuse what cannot be meant, naming the field."""
        self._check_waves()
        for name in (
            "max_unavailable",
            "max_failures",
            "max_failures_per_wave",
            "max_offline",
            "roll_back_max_failures",
        ):
            amounts.check(getattr(self, name), field=name)
        for name in ("max_in_flight", "roll_back_in_flight"):
            amounts.check(getattr(self, name), field=name, at_least_one=True)
        _seconds("confirm_seconds", self.confirm_seconds, low=1.0, high=DAY_SECONDS)
        _seconds("deliver_seconds", self.deliver_seconds, low=1.0, high=90 * DAY_SECONDS)
        _seconds("unhealthy_seconds", self.unhealthy_seconds, low=0.0, high=DAY_SECONDS)
        _seconds("soak_seconds", self.soak_seconds, low=0.0, high=30 * DAY_SECONDS)
        _seconds("max_soak_seconds", self.max_soak_seconds, low=1.0, high=60 * DAY_SECONDS)
        if self.max_soak_seconds < self.soak_seconds:
            raise InvalidArgument(
                f"is {self.max_soak_seconds:g}, less than soak_seconds, {self.soak_seconds:g}",
                field="max_soak_seconds",
            )
        for number in self.approvals:
            if not 1 <= number <= len(self.waves):
                raise InvalidArgument(
                    f"there is no wave {number}: there are {len(self.waves)}", field="approvals"
                )
        self._check_gates()
        if len(self.windows) > WINDOWS_LIMIT:
            raise InvalidArgument(f"has {len(self.windows)}, more than {WINDOWS_LIMIT}", field="windows")
        for at, window in enumerate(self.windows):
            window.check(f"windows[{at}]")

    def _check_waves(self) -> None:
        if not 1 <= len(self.waves) <= WAVES_LIMIT:
            raise InvalidArgument(f"must be 1 to {WAVES_LIMIT} waves, not {len(self.waves)}", field="waves")
        for at, wave in enumerate(self.waves):
            field, is_last = f"waves[{at}]", at == len(self.waves) - 1
            if (wave == REST) is not is_last:
                raise InvalidArgument(
                    "the last wave is `rest`, and no other", field=field, hint="end the waves with rest"
                )
            if wave.startswith(LABEL):
                if not wave.removeprefix(LABEL).strip():
                    raise InvalidArgument("has no selector after `label`", field=field)
            elif wave != REST:
                amounts.check(wave, field=field, at_least_one=True)

    def _check_gates(self) -> None:
        if len(self.gates) > GATES_LIMIT:
            raise InvalidArgument(f"has {len(self.gates)}, more than {GATES_LIMIT}", field="gates")
        names = [gate.name for gate in self.gates]
        for at, gate in enumerate(self.gates):
            field = f"gates[{at}]"
            if not gate.name or len(gate.name) > 100 or names.count(gate.name) > 1:
                raise InvalidArgument("each gate has a name of its own", field=f"{field}.name")
            bounds = [one for one in (gate.max, gate.min, gate.max_increase) if one is not None]
            if not bounds or not all(map(math.isfinite, bounds)):
                raise InvalidArgument("needs max, min or max_increase, each a finite number", field=field)
            _seconds(f"{field}.window_seconds", gate.window_seconds, low=1.0, high=7 * DAY_SECONDS)


def _seconds(field: str, value: float, *, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidArgument(f"must be between {low:g} and {high:g} seconds, not {value:g}", field=field)
