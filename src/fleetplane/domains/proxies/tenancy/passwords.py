"""Passwords as this domain's routes speak of them; the kernel keeps and checks them."""

from __future__ import annotations

from fleetplane.kernel.identity.passwords import PasswordFault, fault
from fleetplane.web.rest.problems import Code, Problem

_CODES = {PasswordFault.TOO_SHORT: Code.OUT_OF_RANGE, PasswordFault.TOO_LONG: Code.TOO_LONG}


def problems(password: str, *, field: str) -> list[Problem]:
    """Why a password cannot be set."""
    found = fault(password)
    return [] if found is None else [Problem(field=field, message=found.value, code=_CODES[found])]
