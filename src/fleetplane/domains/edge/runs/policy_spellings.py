"""From what a client asks for to the policy of a run, in every spelling that clients use. Pure."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from fleetplane.fleet.runs.policy import Mode, OnFailure, RunPolicy
from fleetplane.kernel.errors import InvalidArgument

_WITH_NUMBER = re.compile(r"([a-z-]+)[=(](\d{1,6})\)?")
_MODES = {"sequential": Mode.SEQUENTIAL, "parallel": Mode.PARALLEL, "rolling": Mode.ROLLING}
SPELLED = {
    "require_min": "require_min_targets",
    "deadline_seconds": "deadline_secs",
    "deliver_within_seconds": "deliver_by_secs",
}
"""What clients of edge call fields of a policy."""
_FAILURES = {
    "fail-fast": OnFailure.FAIL_FAST,
    "failfast": OnFailure.FAIL_FAST,
    "continue": OnFailure.CONTINUE,
    "continue-on-error": OnFailure.CONTINUE,
    "continueonerror": OnFailure.CONTINUE,
    "stop-after": OnFailure.STOP_AFTER,
    "stopafter": OnFailure.STOP_AFTER,
}


class PolicyBody(msgspec.Struct, forbid_unknown_fields=True):
    """The documented place of a policy, and the fields that may stand flat beside the target."""

    mode: Any = None
    batch: int | None = None
    max_concurrency: int | None = None
    failure_policy: Any = None
    stop_after: int | None = None
    require_min_targets: int | None = None
    per_target_deadline_secs: float | None = None
    deadline_secs: float | None = None
    durable: bool = False
    deliver_by_secs: float | None = None


def policy_of(asked: PolicyBody, *, deadline_seconds: float) -> RunPolicy:
    """`deadline_seconds` counts when the client says nothing."""
    mode, batch = _read(asked.mode, _MODES, Mode.SEQUENTIAL, field="mode")
    on_failure, stop_after = _read(
        asked.failure_policy, _FAILURES, OnFailure.FAIL_FAST, field="failure_policy"
    )
    deadline = asked.per_target_deadline_secs or asked.deadline_secs or deadline_seconds
    policy = RunPolicy(
        mode=mode,
        batch=_first(batch, asked.batch, 1),
        max_concurrency=asked.max_concurrency,
        on_failure=on_failure,
        stop_after=_first(stop_after, asked.stop_after, 1),
        require_min=asked.require_min_targets or 0,
        deadline_seconds=deadline,
        wait=asked.durable,
        deliver_within_seconds=_first(asked.deliver_by_secs, RunPolicy().deliver_within_seconds),
    )
    if policy.mode is Mode.ROLLING and batch is None and asked.batch is None:
        raise InvalidArgument("rolling needs a number of targets at a time: rolling=N", field="mode")
    if policy.on_failure is OnFailure.STOP_AFTER and stop_after is None and asked.stop_after is None:
        raise InvalidArgument("stop-after needs a number of failures: stop-after=N", field="failure_policy")
    policy.check(SPELLED)
    return policy


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _read(value: object, words: dict[str, Any], default: Any, *, field: str) -> tuple[Any, int | None]:
    """A word, a word with its number (`rolling=5`), or an object with one key (`{"Rolling": …}`)."""
    number: object = None
    if isinstance(value, dict) and len(value) == 1:
        ((value, number),) = value.items()
        if isinstance(number, dict) and len(number) == 1:
            (number,) = number.values()
        if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
            raise InvalidArgument("its number must be a whole one", field=field)
    if value is None:
        return default, None
    word = str(value).strip().lower().replace("_", "-")
    if (found := _WITH_NUMBER.fullmatch(word)) is not None:
        word, number = found[1], int(found[2])
    if word not in words:
        raise InvalidArgument(f"{str(value)[:80]!r} is not one of {', '.join(words)}", field=field)
    return words[word], number if isinstance(number, int) else None
