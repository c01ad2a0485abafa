"""The one way in which a certificate is not to be had."""

from __future__ import annotations

from fleetplane.kernel.errors import FailedPrecondition

TEXT_LIMIT = 1000
"""Characters kept of an authority's explanation: enough for its type, its detail and the address it tried."""


class IssuanceFailed(FailedPrecondition):
    """Issuance failed; the message is the issuer's reason."""

    reason = "ISSUANCE_FAILED"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message[:TEXT_LIMIT], hint=hint)
