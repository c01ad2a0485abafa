"""What controllers found, as REST answers show it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fleetplane.kernel.reconcile.explanation import Finding
from fleetplane.kernel.values.times import spelled, spelled_or_null


class ShownReason(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str
    subject: str


class ShownFinding(msgspec.Struct, frozen=True, kw_only=True):
    """What one controller found the last time it looked."""

    controller: str
    """Who noted it; `record` for what follows from the record and the open connection."""
    at: str
    next_due: str | None
    failures: int
    last_error: str
    reasons: Sequence[ShownReason]


def shown(found: Finding, *, about: str = "") -> ShownFinding:
    """With `about`, only the reasons that concern that subject or everyone."""
    explanation = found.explanation
    return ShownFinding(
        controller=found.controller,
        at=spelled(explanation.at_ns),
        next_due=spelled_or_null(explanation.next_due_ns),
        failures=explanation.failures,
        last_error=explanation.last_error,
        reasons=[
            ShownReason(code=reason.code, message=reason.message, subject=reason.subject)
            for reason in explanation.reasons
            if not about or reason.subject in ("", about)
        ],
    )
