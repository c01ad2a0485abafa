"""What an agent has to do to be someone: register, go on, or give up.

A table from what the identity folder holds. It is what makes every crash during registration
recoverable: whatever was on disk when the lights went out, the next start finds a row for it.

    key made, nothing sent             nonce waiting, certificate absent     -> register
    sent, answer lost                  nonce waiting, certificate absent     -> register, same key
    certificate on disk, nonce too     nonce left over, certificate usable   -> drop the nonce
    nonce gone                         nonce absent, certificate usable      -> connect

A nonce is left over when its file is older than the certificate's: it is the one that bought
it. A newer one was put there on purpose and is used, certificate or not. Pure.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class NonceState(StrEnum):
    ABSENT = "absent"
    WAITING = "waiting"
    LEFT_OVER = "left over"


class HeldCertificateState(StrEnum):
    ABSENT = "absent"
    USABLE = "usable"
    OVER = "over"
    FOREIGN = "foreign"
    """For another key, another instance or from another authority."""


class IdentityStep(StrEnum):
    REGISTER = "register"
    DROP_NONCE = "drop nonce"
    CONNECT = "connect"
    GIVE_UP = "give up"


_NONCE, _CERTIFICATE = NonceState, HeldCertificateState

STEPS: Final = {
    (_NONCE.ABSENT, _CERTIFICATE.ABSENT): IdentityStep.GIVE_UP,
    (_NONCE.ABSENT, _CERTIFICATE.USABLE): IdentityStep.CONNECT,
    (_NONCE.ABSENT, _CERTIFICATE.OVER): IdentityStep.GIVE_UP,
    (_NONCE.ABSENT, _CERTIFICATE.FOREIGN): IdentityStep.GIVE_UP,
    (_NONCE.WAITING, _CERTIFICATE.ABSENT): IdentityStep.REGISTER,
    (_NONCE.WAITING, _CERTIFICATE.USABLE): IdentityStep.REGISTER,
    (_NONCE.WAITING, _CERTIFICATE.OVER): IdentityStep.REGISTER,
    (_NONCE.WAITING, _CERTIFICATE.FOREIGN): IdentityStep.REGISTER,
    (_NONCE.LEFT_OVER, _CERTIFICATE.ABSENT): IdentityStep.REGISTER,  # the file is there but unreadable
    (_NONCE.LEFT_OVER, _CERTIFICATE.USABLE): IdentityStep.DROP_NONCE,
    (_NONCE.LEFT_OVER, _CERTIFICATE.OVER): IdentityStep.REGISTER,
    (_NONCE.LEFT_OVER, _CERTIFICATE.FOREIGN): IdentityStep.REGISTER,
}
"""Every pair has its row."""


def nonce_state(nonce_changed_ns: int | None, certificate_changed_ns: int | None) -> NonceState:
    """From the times the two files were last written; None for a file that is not there."""
    if nonce_changed_ns is None:
        return NonceState.ABSENT
    if certificate_changed_ns is None or nonce_changed_ns > certificate_changed_ns:
        return NonceState.WAITING
    return NonceState.LEFT_OVER


def next_step(nonce: NonceState, certificate: HeldCertificateState) -> IdentityStep:
    return STEPS[nonce, certificate]
