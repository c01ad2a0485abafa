"""What a lamp is to the store."""

from __future__ import annotations

import msgspec

from fleetplane.kernel.resources import Kind

SCOPE = "tenant/default"


class LampSpec(msgspec.Struct, frozen=True, kw_only=True):
    pass


class LampStatus(msgspec.Struct, frozen=True, kw_only=True):
    lit: bool


LAMP: Kind[LampSpec, LampStatus] = Kind(name="lamp", spec=LampSpec, status=LampStatus)
