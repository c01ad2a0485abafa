"""The domains that come with this package, read from its own folder: no installed metadata is loaded.

For starting a command fast and small. What else is installed, and whether two packages collide, is for
`discovery` to say.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fleetplane.domains.declaration import Declaration, load


@cache
def declarations() -> tuple[Declaration, ...]:
    """The declaration of every folder beside this module that has one."""
    folders = sorted(path.parent.name for path in Path(__file__).parent.glob("*/domain.py"))
    return tuple(load(f"fleetplane.domains.{name}.domain:DOMAIN") for name in folders)
