"""Clusters and pins as objects that people write through the resource API, by the changes of this domain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from fleetplane.domains.boards import access
from fleetplane.domains.boards.inventory import clusters
from fleetplane.domains.boards.inventory.clusters import Clusters
from fleetplane.domains.boards.kinds import BOARD, CLUSTER, SCOPE, Board, Cluster, ClusterSpec, number_of
from fleetplane.domains.boards.pins.devices import Devices, remove_device
from fleetplane.domains.boards.pins.kinds import GPIO_DEVICE, Device, GpioSpec, device_number
from fleetplane.domains.boards.resources import MIRROR, TENANT, ClusterSpecView, cluster_place
from fleetplane.fleet.resources.declaration import ViewReader, Writable, WriteCall
from fleetplane.kernel.errors import InvalidArgument, NotFound, PermissionDenied
from fleetplane.kernel.resources import AnyResource
from fleetplane.kernel.store import Draft


class PinParts(Protocol):
    """What of the running domain writes pins."""

    @property
    def devices(self) -> Devices: ...


class BoardParts(Protocol):
    """What of the running domain writes."""

    @property
    def clusters(self) -> Clusters: ...

    @property
    def nodes(self) -> PinParts: ...


def find_cluster(_domain: object, draft: Draft, scope: str, name: str) -> Cluster | None:
    """By its name."""
    if scope != TENANT:
        raise InvalidArgument(f"clusters lie at {TENANT}, not at {scope}", field="scope")
    found = draft.claimed_by(CLUSTER, SCOPE, "name", name)
    return None if found is None else draft.get(CLUSTER, SCOPE, found)


def put_cluster(call: WriteCall) -> Cluster:
    """Create a cluster, or change what is said of it."""
    domain: BoardParts = call.domain
    given: ClusterSpecView = call.spec
    if call.stored is not None:
        return clusters.change_cluster(
            call.draft,
            number_of(call.stored),
            description=given.description,
            version=given.version,
            master_endpoint=given.master_endpoint,
        )
    spec = ClusterSpec(
        name=call.name,
        description=given.description,
        version=given.version,
        master_endpoint=given.master_endpoint,
    )
    return domain.clusters.make(call.draft, domain.clusters.take_number(call.draft), spec)


def delete_cluster(call: WriteCall) -> None:
    """Delete a cluster that has no boards: for administrators, as in the boards' own API."""
    assert call.stored is not None
    _require_administrator(call, "deleting a cluster")
    clusters.remove_cluster(call.draft, number_of(call.stored))


def _require_administrator(call: WriteCall, what: str) -> None:
    if not call.may(access.ADMINISTER):
        raise PermissionDenied(f"{what} needs an administrator", details={"permission": access.ADMINISTER})


# Pins.


def find_pin(_domain: object, draft: Draft, scope: str, name: str) -> Device | None:
    """By the name of its board and its number, `attic.17`; not one that is on its way out."""
    board, pin = _board_and_pin(draft, scope, name)
    owner = draft.claimed_by(GPIO_DEVICE, SCOPE, "pin", f"{board.name}/{pin}")
    found = None if owner is None else draft.get(GPIO_DEVICE, SCOPE, owner)
    return None if found is None or found.spec.removing else found


def _board_and_pin(draft: Draft, scope: str, name: str) -> tuple[Board, int]:
    called, _, number = name.rpartition(".")
    if not called or not (number.isascii() and number.isdecimal()) or len(number) > 2:
        raise InvalidArgument(
            f"{name[:64]!r} is no name of a pin", field="name", hint="write BOARD.PIN, such as attic.17"
        )
    owner = draft.claimed_by(BOARD, SCOPE, "name", called)
    board = None if owner is None else draft.get(BOARD, SCOPE, owner)
    if board is None or cluster_place(board.spec.cluster_id, draft) != scope:
        raise NotFound(f"there is no board {called[:64]!r} in {scope}", field="name")
    return board, int(number)


def put_pin(call: WriteCall) -> Device:
    """Describe a pin, and say what it drives; its board follows when it can."""
    domain: BoardParts = call.domain
    devices, given = domain.nodes.devices, call.spec
    board, pin = _board_and_pin(call.draft, call.scope, call.name)
    for field, said, meant in (("board", given.board, board.spec.name), ("pin", given.pin, pin)):
        if said not in ("", None, meant):
            raise InvalidArgument(f"is {said!r}; the name says {meant!r}", field=field)
    described = {
        "name": given.display_name or call.name,
        "description": given.description,
        "direction": given.direction,
        "pull": given.pull,
        "device_type": given.type,
        "config": MIRROR.stored(given.config),
        "enabled": given.enabled,
    }
    if call.stored is None:
        spec = GpioSpec(board=number_of(board), pin=pin, **described)
        number = devices.take_number(call.draft)
        devices.make(call.draft, number, spec)
    else:
        number = device_number(call.stored)
        before = {field: getattr(call.stored.spec, field) for field in described}
        if described != before:
            devices.redescribe(call.draft, number, holder=call.actor, **described)
    return devices.drive(call.draft, number, given.level, holder=call.actor)


def delete_pin(call: WriteCall) -> None:
    """Give a pin up: for administrators, as in the boards' own API."""
    assert call.stored is not None
    _require_administrator(call, "deleting a pin")
    remove_device(call.draft, device_number(call.stored), holder=call.actor)


def pin_disturbs(
    before: AnyResource | None, after: AnyResource | None, _reading: ViewReader
) -> Sequence[str]:
    """What happens on the wire."""
    if before is not None and after is None:
        return ("the board gives the pin up",)
    driven = None if after is None else after.spec.level
    was = None if before is None else before.spec.level
    return () if driven is None or driven == was else (f"the board drives the pin to {driven}",)


WRITERS: Mapping[str, Writable] = {
    "cluster": Writable(
        permission=access.OPERATE,
        find=find_cluster,
        put=put_cluster,
        delete=delete_cluster,
        rank=20,
        referred_to=True,
        anywhere=True,
    ),
    "pin": Writable(
        permission=access.OPERATE,
        find=find_pin,
        put=put_pin,
        delete=delete_pin,
        rank=21,
        anywhere=True,
        exported=lambda _stored: False,  # its board has to enrol first
        disturbs=pin_disturbs,
    ),
}
