"""What follows from what is known about a board: which one it is, what it is like, and its state.

    declared                              whatever else is said       the state
    provisioning, failed, maintenance,    -                           as declared
      not_ready, unknown
    discovered, ready                     the board said goodbye      maintenance
    discovered, ready                     ten reports are missing     unknown
    discovered, ready                     three reports are missing   not_ready
    discovered, ready                     the board says otherwise    as it says
    discovered, ready                     nothing                     as declared

So silence never hides that a board is being worked on, a board cannot undo what its operators or
provisioning decided, and one that is heard again is what it was before. Pure.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from fleetplane.domains.boards.kinds import Board, BoardRole, BoardSilence, BoardSpec, BoardState, BoardStatus
from fleetplane.kernel.errors import AlreadyExists, InvalidArgument

NAME_LIMIT = 253
TEXT_LIMIT = 256
"""Of what a board says about itself, each; in characters."""
CORES_LIMIT = 4096
PORT_LIMIT = 65_535

SAYABLE: Final = frozenset(
    {BoardState.READY, BoardState.NOT_READY, BoardState.MAINTENANCE, BoardState.FAILED}
)
"""What a board can know about itself; the rest is the server's to say."""
_OPEN: Final = frozenset({BoardState.READY, BoardState.DISCOVERED})
"""Declared states in which reports and missing reports of the board change the state."""
_MAC = re.compile(r"[0-9a-f]{2}(?::[0-9a-f]{2}){5,19}")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_VAGUE_SYSTEMS: Final = frozenset({"linux"})
"""What agents say of an operating system about which they know nothing."""


# Which board it is.


class BoardFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody says about a board. Blank and zero mean that nothing is said."""

    name: str = ""
    ip_address: str = ""
    mac_address: str = ""
    architecture: str = ""
    model: str = ""
    serial_number: str = ""
    cpu_cores: int = 0
    memory_bytes: int = 0
    role: BoardRole | None = None
    cluster_id: int | None = None
    """0 to leave its cluster."""
    kube_version: str = ""
    node_name: str = ""
    os_version: str = ""
    kernel_version: str = ""

    def of_machine(self) -> BoardFacts:
        """Without what operators and provisioning decide: which role it has, and in which cluster."""
        return msgspec.structs.replace(self, role=None, cluster_id=None)


def checked(facts: BoardFacts) -> BoardFacts:
    """The facts in their stored spelling; raises `InvalidArgument` naming the field."""
    for field in _TEXTS:
        _check_text(field, getattr(facts, field), NAME_LIMIT if field == "name" else TEXT_LIMIT)
    if not 0 <= facts.cpu_cores <= CORES_LIMIT:
        raise InvalidArgument(f"cpu_cores must be 0 to {CORES_LIMIT}", field="cpu_cores")
    if facts.memory_bytes < 0:
        raise InvalidArgument("memory must not be negative", field="memory")
    return msgspec.structs.replace(
        facts,
        name=facts.name.strip(),
        mac_address=_mac(facts.mac_address),
        ip_address=_address(facts.ip_address),
        serial_number=facts.serial_number.strip(),
    )


_TEXTS: Final = (
    "name",
    "ip_address",
    "mac_address",
    "architecture",
    "model",
    "serial_number",
    "kube_version",
    "node_name",
    "os_version",
    "kernel_version",
)


def _check_text(field: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise InvalidArgument(f"{field} is longer than {limit} characters", field=field)
    if not text.isprintable():
        raise InvalidArgument(f"{field} contains characters that cannot be printed", field=field)


def _mac(text: str) -> str:
    mac = text.strip().lower().replace("-", ":")
    if mac and not _MAC.fullmatch(mac):
        raise InvalidArgument(f"{text!r} is no hardware address", field="mac_address")
    return mac


def _address(text: str) -> str:
    address = text.strip()
    try:
        return str(ipaddress.ip_address(address)) if address else ""
    except ValueError:
        if _HOST.fullmatch(address):
            return address
        raise InvalidArgument(f"{text!r} is neither an address nor a host name", field="ip_address") from None


KEYS: Final[Mapping[str, Callable[[BoardFacts | BoardSpec], str]]] = {
    "serial": lambda known: known.serial_number,
    "mac": lambda known: known.mac_address,
    "name": lambda known: known.name,
}
"""By which a board is recognised, the strongest first; also the claims it holds."""
_FIELDS: Final = {"serial": "serial_number", "mac": "mac_address", "name": "name"}


def recognise(facts: BoardFacts, find: Callable[[str, str], Board | None]) -> Board | None:
    """The board that these facts are about, if it is known.

    `find` looks one up by key and value. A weaker key is believed only as long as no stronger one
    speaks against it: the name or network card of one machine may turn up in another.
    """
    keys = list(KEYS)
    for strength, key in enumerate(keys):
        value = KEYS[key](facts)
        board = find(key, value) if value else None
        if board is None:
            continue
        for stronger in keys[:strength]:
            said, known = KEYS[stronger](facts), KEYS[stronger](board.spec)
            if said and known and said != known:
                raise AlreadyExists(
                    f"{_FIELDS[key]} {value!r} belongs to board {board.name}, whose "
                    f"{_FIELDS[stronger]} is {known!r}",
                    field=_FIELDS[key],
                    hint="boards may not share a name: choose another with --name" if key == "name" else None,
                    details={"board": board.name},
                )
        return board
    return None


# What it is like.


def merged(spec: BoardSpec, facts: BoardFacts) -> BoardSpec:
    """`spec` with what the facts add; what they leave blank stays as it was."""
    changes: dict[str, object] = {
        field: value
        for field in (*_TEXTS, "cpu_cores", "memory_bytes", "role")
        if (value := getattr(facts, field))
    }
    if spec.os_version and facts.os_version.lower() in _VAGUE_SYSTEMS:
        changes.pop("os_version")
    if facts.cluster_id is not None:
        changes["cluster_id"] = facts.cluster_id or None
    return msgspec.structs.replace(spec, **changes)


# Its state.


def state_of(status: BoardStatus) -> BoardState:
    if status.declared not in _OPEN:
        return status.declared
    if status.reported is BoardState.MAINTENANCE:  # gone on purpose is not lost
        return status.reported
    match status.silence:
        case BoardSilence.DEAD:
            return BoardState.UNKNOWN
        case BoardSilence.STALE:
            return BoardState.NOT_READY
        case BoardSilence.NONE:
            return status.reported or status.declared


def shown_state(status: BoardStatus) -> str:
    """The state as people are told it: `unheard` where it rests on a word from before the server began."""
    silent = state_of(msgspec.structs.replace(status, silence=BoardSilence.STALE))
    is_open = status.unheard and status.silence is BoardSilence.NONE and silent is not status.state
    return "unheard" if is_open else status.state


def settled(status: BoardStatus, *, now_ns: int) -> BoardStatus:
    """The status with the state that follows from it, and the time of its change."""
    state = state_of(status)
    if state is status.state:
        return status
    return msgspec.structs.replace(
        status, state=state, previous_state=status.state, state_changed_at_ns=now_ns
    )


def heard(status: BoardStatus, said: BoardState | None) -> BoardStatus:
    """After a word from the board itself, with or without one about its state.

    To repeat what it was told when it registered is no news, and "ready" withdraws whatever it
    said before. `settled` is the caller's next step.
    """
    reported = status.reported
    if said is not None and said in SAYABLE:
        is_news = said is not BoardState.READY and said is not status.registration_state
        reported = said if is_news else None
    return msgspec.structs.replace(status, reported=reported, silence=BoardSilence.NONE, unheard=False)


def registered(status: BoardStatus, *, now_ns: int) -> BoardStatus:
    """After the board's agent came, or came again: what it said before its restart is over.

    A board that was only known from hearsay is there now; one that was sent back to being
    discovered after an agent had come stays so, or a restart would undo that.
    """
    declared = status.declared
    if status.registered_at_ns is None and declared is BoardState.DISCOVERED:
        declared = BoardState.READY
    fresh = msgspec.structs.replace(
        status,
        declared=declared,
        reported=None,
        silence=BoardSilence.NONE,
        unheard=False,
        registered_at_ns=status.registered_at_ns or now_ns,
        arrivals=status.arrivals + 1,
        last_seen_at_ns=now_ns,
    )
    fresh = settled(fresh, now_ns=now_ns)
    return msgspec.structs.replace(fresh, registration_state=fresh.state)
