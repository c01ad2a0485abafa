"""What may be set for a provider from the server, and within which bounds. Pure; both sides check by it.

Only what is named here can be set. The bounds keep a mistake small: heartbeats stay well below the lease,
and an XID that is known to need a reset or a new part can be ignored on its node only.
"""

from __future__ import annotations

import math

import msgspec

from fleetplane.domains.gpus.xids import CRITICAL_XIDS, LARGEST_XID
from fleetplane.gen.fleetplane.device.v1 import provider_settings_pb2 as pb
from fleetplane.kernel.errors import InvalidArgument

HEARTBEAT_SECONDS = (0.1, 3600.0)
HEARTBEATS_A_LEASE = 3
"""Two of them may be lost before the lease runs out."""
ENUMERATE_SECONDS = (10.0, 7 * 86_400.0)
"""Enumerating opens the driver anew, which takes tens of seconds without persistence mode."""
IGNORED_LIMIT = 64


class ProviderSettingsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What is set; None and nothing leave it to the provider. As it is stored: no field may be renamed."""

    heartbeat_seconds: float | None = None
    ignored_xids: tuple[int, ...] = ()
    """Besides those that applications cause."""
    enumerate_every_seconds: float | None = None


def checked(spec: ProviderSettingsSpec, *, lease_seconds: float) -> ProviderSettingsSpec:
    """The settings in their stored spelling, or InvalidArgument naming the field."""
    _check_bounds("heartbeatSeconds", spec.heartbeat_seconds, HEARTBEAT_SECONDS)
    _check_bounds("enumerateEverySeconds", spec.enumerate_every_seconds, ENUMERATE_SECONDS)
    check_lease(spec, lease_seconds=lease_seconds)
    if len(spec.ignored_xids) > IGNORED_LIMIT:
        raise InvalidArgument(
            f"has {len(spec.ignored_xids)} entries, more than {IGNORED_LIMIT}", field="ignoredXids"
        )
    for at, xid in enumerate(spec.ignored_xids):
        if not 0 < xid <= LARGEST_XID:
            raise InvalidArgument(f"{xid} is not an XID", field=f"ignoredXids[{at}]")
        if xid in CRITICAL_XIDS:
            raise InvalidArgument(
                f"XID {xid} needs a reset or a new part, and cannot be ignored from here",
                field=f"ignoredXids[{at}]",
                hint="ignore it on its node, with --ignored-xids",
            )
    return msgspec.structs.replace(spec, ignored_xids=tuple(sorted(set(spec.ignored_xids))))


def check_lease(spec: ProviderSettingsSpec, *, lease_seconds: float) -> None:
    """Refuse heartbeats that a lease would not outlast if two of them were lost."""
    most = lease_seconds / HEARTBEATS_A_LEASE
    if lease_seconds and spec.heartbeat_seconds is not None and spec.heartbeat_seconds > most:
        raise InvalidArgument(
            f"is {spec.heartbeat_seconds:g}; with leases of {lease_seconds:g} s it may be {most:g} at most",
            field="heartbeatSeconds",
            hint=f"a lease lasts {HEARTBEATS_A_LEASE} heartbeats: shorten it, or raise gpus.lease_seconds",
        )


def _check_bounds(field: str, value: float | None, bounds: tuple[float, float]) -> None:
    low, high = bounds
    if value is not None and not (math.isfinite(value) and low <= value <= high):
        raise InvalidArgument(f"is {value:g}; write {low:g} to {high:g}", field=field)


def encoded(spec: ProviderSettingsSpec | None) -> bytes:
    """What a version is made of."""
    return msgspec.json.encode(spec or ProviderSettingsSpec(), order="sorted")


def decoded(content: bytes) -> ProviderSettingsSpec:
    """The settings of a version that is kept."""
    return msgspec.json.decode(content, type=ProviderSettingsSpec)


def message(version: str, content: bytes) -> pb.ProviderSettings:
    """A version as providers are sent it."""
    spec = decoded(content)
    return pb.ProviderSettings(
        digest=version,
        heartbeat_seconds=spec.heartbeat_seconds,
        ignored_xids=spec.ignored_xids,
        enumerate_every_seconds=spec.enumerate_every_seconds,
    )


def received(said: pb.ProviderSettings) -> ProviderSettingsSpec:
    """A version as a provider got it."""
    return ProviderSettingsSpec(
        heartbeat_seconds=said.heartbeat_seconds if said.HasField("heartbeat_seconds") else None,
        ignored_xids=tuple(said.ignored_xids),
        enumerate_every_seconds=(
            said.enumerate_every_seconds if said.HasField("enumerate_every_seconds") else None
        ),
    )
