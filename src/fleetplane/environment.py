"""The process environment: the only module that reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping

PREFIX = "FLEETPLANE_"


def current() -> Mapping[str, str]:
    """Every variable of this process."""
    return os.environ


def taken(name: str) -> str:
    """A variable that is nobody else's in this process; empty if it is not set."""
    return os.environ.pop(name, "")


def inherited() -> Mapping[str, str]:
    """The environment that helpers of this process may be started with: none of our own settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
