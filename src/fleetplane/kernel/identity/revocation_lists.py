"""The list of revocations as agents get it, and who has taken it up.

The list is made anew when a revocation was added, lifted or swept, and signed by the authority. Who has which
list is kept in memory: agents tell with every heartbeat, so a server that was started again knows soon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import structlog

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.identity.authority import Authority
from fleetplane.kernel.identity.revocation import REVOCATION
from fleetplane.kernel.revocation_list import (
    ENTRIES_LIMIT,
    RevocationList,
    SignedList,
    packed,
    signed_bytes,
)
from fleetplane.kernel.store import Store

log = structlog.get_logger(__name__)

CALLERS = ("operator/", "board-controller/")
"""Names of principals that call agents; revocations of others concern the server alone."""
AHEAD_LIMIT_MS = 366 * 86_400_000
"""How far in the future a number may lie that an agent reports and we continue after."""

CONTINUE_SECONDS = 3600
"""An agent's greater number is continued after once in so long: ours never goes back while we run."""


class UptakeState(StrEnum):
    CURRENT = "current"
    BEHIND = "behind"
    """It has an older list, or none, and was heard since this server started."""
    UNHEARD = "unheard"
    """It has not reported since this server started."""
    UNABLE = "unable"
    """It takes no lists: an agent without TLS, or of a version that knows none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptingAgent:
    """An agent that accepts callers, as its domain knows it."""

    agent: str
    """Such as `board/3`."""
    name: str
    able: bool = True
    """Whether it can take a list at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uptake:
    agent: str
    name: str
    state: UptakeState
    number: int = 0
    heard_at_ns: int | None = None


class RevocationLists:
    def __init__(self, store: Store, authority: Authority, clock: Clock) -> None:
        self._store = store
        self._authority = authority
        self._clock = clock
        self._number = 0
        self._made_of: tuple[object, str] | None = None
        self._entries: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self._packed = b""
        self._issued_at_ns = 0
        self._heard: dict[str, tuple[int, int]] = {}
        """By agent, the number of its list and when it said so."""
        self._continued: dict[str, int] = {}
        """By agent, when its number was last continued after."""
        self._domains: list[Callable[[], Iterable[AcceptingAgent]]] = []

    def __repr__(self) -> str:
        return f"<RevocationLists number={self._number} agents={len(self._heard)}>"

    # The list.

    @property
    def number(self) -> int:
        """The number of the list in force."""
        self._make()
        return self._number

    @property
    def issued_at_ns(self) -> int:
        self._make()
        return self._issued_at_ns

    @property
    def entries(self) -> int:
        self._make()
        return sum(map(len, self._entries))

    def current(self) -> bytes:
        """The signed list that holds now."""
        self._make()
        return self._packed

    def _make(self) -> None:
        kept = self._store.list(REVOCATION)
        made_of = (kept, self._authority.key_id)
        if self._made_of is not None and self._made_of[0] is kept and self._made_of[1] == made_of[1]:
            return
        serials = tuple(sorted(one.spec.serial for one in kept if one.spec.serial))
        named = (one.spec.principal for one in kept)
        principals = tuple(sorted(name for name in named if name.startswith(CALLERS)))
        unchanged = self._made_of is not None and (serials, principals) == self._entries
        same_key = self._made_of is not None and self._made_of[1] == made_of[1]
        self._made_of, self._entries = made_of, (serials, principals)
        if not (unchanged and same_key):
            self._sign()

    def _sign(self) -> None:
        serials, principals = self._entries
        complete = len(serials) + len(principals) <= ENTRIES_LIMIT
        if not complete:
            log.error("revocations.too_many", entries=len(serials) + len(principals), limit=ENTRIES_LIMIT)
        # From the time, and not from what is stored: a database that was restored does not go back.
        self._issued_at_ns = self._clock.now_ns()
        self._number = max(self._issued_at_ns // 1_000_000, self._number + 1)
        content = msgspec.msgpack.encode(
            RevocationList(
                number=self._number,
                issued_at_ns=self._issued_at_ns,
                complete=complete,
                serials=serials if complete else (),
                principals=principals if complete else (),
            )
        )
        signature = self._authority.sign(signed_bytes(content))
        self._packed = packed(SignedList(content=content, signature=signature))

    # Who has it.

    def expect(self, callers: Callable[[], Iterable[AcceptingAgent]]) -> None:
        """Have a domain's agents listed, also those that say nothing."""
        self._domains.append(callers)

    def heard(self, agent: str, number: int) -> bytes | None:
        """Note which list an agent has; the one that it should have, if that is another."""
        now_ns = self._clock.now_ns()
        if self.number < number < now_ns // 1_000_000 + AHEAD_LIMIT_MS and self._believes(agent, now_ns):
            # Our clock went back, or our database did: continue after what agents hold already.
            self._number = number
            self._sign()
        self._heard[agent] = (number, now_ns)
        return None if number == self._number else self._packed

    def _believes(self, agent: str, now_ns: int) -> bool:
        """One that names a greater number each time would have every agent sent every list anew."""
        last_ns = self._continued.get(agent)
        if last_ns is not None and 0 <= now_ns - last_ns < CONTINUE_SECONDS * 1_000_000_000:
            return False
        self._continued[agent] = now_ns
        return True

    def forget(self, agent: str) -> None:
        self._heard.pop(agent, None)  # when it was continued after is kept: joining again is easy

    def uptake(self) -> Sequence[Uptake]:
        """Every agent that accepts callers, and whether it has the list that holds now."""
        number = self.number
        return [self._standing(caller, number) for domain in self._domains for caller in domain()]

    def _standing(self, caller: AcceptingAgent, number: int) -> Uptake:
        held, heard_at_ns = self._heard.get(caller.agent, (0, None))
        if not caller.able:
            state = UptakeState.UNABLE
        elif heard_at_ns is None:
            state = UptakeState.UNHEARD
        else:
            state = UptakeState.CURRENT if held == number else UptakeState.BEHIND
        return Uptake(agent=caller.agent, name=caller.name, state=state, number=held, heard_at_ns=heard_at_ns)
