"""The parts of a certificate order: the authority's options, the challenges, and `IssuanceFailed`.

The conversation with the authority is in `authority`, whose libraries are loaded for the first order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fleetplane.kernel.errors import FailedPrecondition

TEXT_LIMIT = 1000
"""Characters kept of an authority's explanation: enough for its type, its detail and the address it tried."""


ACTOR = "system/acme"


class IssuanceFailed(FailedPrecondition):
    """Issuance failed; the message is the issuer's reason."""

    reason = "ISSUANCE_FAILED"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message[:TEXT_LIMIT], hint=hint)


LETS_ENCRYPT = "https://acme-v02.api.letsencrypt.org/directory"
LETS_ENCRYPT_STAGING = "https://acme-staging-v02.api.letsencrypt.org/directory"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorityOptions:
    directory_url: str = LETS_ENCRYPT
    terms_agreed: bool = False
    """Whether the operator has agreed to the authority's terms of service."""
    contact_email: str = ""
    ca_file: str = ""
    """What vouches for the authority's own web server; the usual roots when empty."""
    eab_key_id: str = ""
    eab_hmac_key: str = ""
    """External account binding, for authorities that want a customer's account."""
    user_agent: str = "fleetplane"


class ChallengeMethod(StrEnum):
    HTTP = "http-01"
    DNS = "dns-01"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What the authority wants to find."""

    method: ChallengeMethod
    domain: str
    token: str
    """For HTTP: the last part of the path."""
    record: str
    """For DNS: the name of the TXT record."""
    content: str
    challenge: Any
    """The authority's own form of it."""


class AccountUnknown(IssuanceFailed):
    """The authority does not know our account: it has lost it, or never had it."""

    reason = "ACCOUNT_UNKNOWN"
