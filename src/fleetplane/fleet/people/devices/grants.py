"""Logins of programs without a browser, approved in one, as in RFC 8628.

A program asks, and shows its user a short code; whoever is signed in at the console reads it there, sees who
asks, and approves or refuses; the program asks in the meantime whether it may go on. A grant is known by two
codes: the device's, 256 random bits of which only the hash is kept, and the user's, short enough to be typed.
It ends after ten minutes, is approved once and redeemed once. What is on its way is in the store, so that a
server that was started again, or another one, goes on with it; how often a program asks is counted by each
server in memory.

Room for a newcomer is made by those who have most of it (`making_room`): whoever floods us loses their own.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from fleetplane.fleet.people.account_kind import SCOPE
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import NotFound, ResourceExhausted
from fleetplane.kernel.networks import network_of, wider_network_of
from fleetplane.kernel.resources import Key, Kind, Nothing, Resource
from fleetplane.kernel.store import ABSENT, Draft, Store, transact_found
from fleetplane.kernel.values.times import NS
from fleetplane.web.rest.gateway import RestRate

LIFE_SECONDS = 600.0
INTERVAL_SECONDS = 5.0
"""Between two questions of a program; each that comes sooner adds as much (RFC 8628, 3.5)."""
INTERVAL_LIMIT_SECONDS = 60.0
GRANTS_LIMIT = 1000
"""On their way at once; about 500 bytes each."""
GRANTS_PER_NETWORK = 20
"""Of one household or office, at once and a minute: each is written to the store."""
ALPHABET = "BCDFGHJKLMNPQRSTVWXZ"
"""No vowels, so that no code is a word, and nothing that looks like a digit (RFC 8628, 6.1)."""
USER_CODE_LENGTH = 8
"""20^8 = 25.6 billion: with 1,000 grants open, 10 guesses in a quarter of an hour hit one in 2.5 million."""
DEVICE_CODE_BYTES = 32
CLIENT_LIMIT = 128
ACTOR = "system/people"
_CODE = "code"
"""The claim of a user's code."""


class GrantStep(StrEnum):
    """How far a grant is, as its program is told."""

    PENDING = "pending"
    SLOW_DOWN = "slow_down"
    DENIED = "denied"
    EXPIRED = "expired"
    APPROVED = "approved"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantApproval:
    """By whom a grant was approved: the login that is good for it has to stand until it is redeemed."""

    account: str
    login: str


class DeviceGrantSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Named by the hash of the device's code."""

    user_code: str
    client: str
    """What the program calls itself; nobody vouches for it."""
    address: str
    asked_at_ns: int
    ends_at_ns: int
    denied: bool = False
    account: str = ""
    """By whom it was approved; empty while it is not."""
    login: str = ""

    @property
    def is_decided(self) -> bool:
        return self.denied or bool(self.account)


DeviceGrant = Resource[DeviceGrantSpec, Nothing]
DEVICE_GRANT: Kind[DeviceGrantSpec, Nothing] = Kind("device-grant", DeviceGrantSpec, Nothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedGrant:
    """A grant that was begun, with what is shown once."""

    device_code: str
    user_code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Polled:
    step: GrantStep
    interval_seconds: float = INTERVAL_SECONDS
    approval: GrantApproval | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _PollPace:
    next_at: float
    interval_seconds: float = INTERVAL_SECONDS


def making_room(present: Sequence[DeviceGrant], address: str) -> list[DeviceGrant]:
    """Which grants go so that one of this address can come; raises `ResourceExhausted` if none may go. Pure.

    Of one network the oldest goes; where all of them are too many, the oldest of the wider network (what one
    customer of a provider has) that has most. Those that somebody has decided about stay.
    """
    by_age = sorted(present, key=lambda one: (one.spec.asked_at_ns, one.created_revision))
    undecided = [one for one in by_age if not one.spec.is_decided]
    network = network_of(address)
    near = [one for one in undecided if network_of(one.spec.address) == network]
    if len(near) >= GRANTS_PER_NETWORK:
        return near[: len(near) + 1 - GRANTS_PER_NETWORK]
    if len(present) < GRANTS_LIMIT:
        return []
    if not undecided:
        raise ResourceExhausted("too many logins wait for approval", retry_after_seconds=60.0)
    crowds = Counter(wider_network_of(one.spec.address) for one in undecided)
    largest = max(crowds.values())
    crowd = (one for one in undecided if crowds[wider_network_of(one.spec.address)] == largest)
    return [next(crowd)]


class DeviceGrants:
    """Every grant that is on its way."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._paces: OrderedDict[str, _PollPace] = OrderedDict()
        self._by_network = RestRate(GRANTS_PER_NETWORK)

    def __repr__(self) -> str:
        return f"<DeviceGrants {self._store.count(DEVICE_GRANT)}>"

    async def begin(self, client: str, address: str) -> StartedGrant:
        """A new grant; raises `ResourceExhausted` where a network begins too many."""
        allowance = self._by_network.take(network_of(address), now=self._clock.now_ns() / NS)
        if not allowance.allowed:
            raise ResourceExhausted(
                "too many logins were begun from this network", retry_after_seconds=allowance.reset_seconds
            )
        code = base64.urlsafe_b64encode(self._clock.token_bytes(DEVICE_CODE_BYTES)).rstrip(b"=").decode()
        name, user_code = _digest(code), self._new_user_code()

        def every(reader: Store | Draft) -> Sequence[Key]:
            return [one.key for one in reader.list(DEVICE_GRANT, SCOPE)]

        def going(reader: Store | Draft) -> Sequence[Key]:
            now_ns = reader.now_ns if isinstance(reader, Draft) else self._clock.now_ns()
            over, present = _parted(reader, now_ns)
            return [one.key for one in (*over, *making_room(present, address))]

        def change(draft: Draft, going: Sequence[Key]) -> None:
            for key in going:
                current = draft.get(DEVICE_GRANT, SCOPE, key.name)
                assert current is not None, "it was found in the same draft"
                _end(draft, current)
            spec = DeviceGrantSpec(
                user_code=user_code,
                client=client[:CLIENT_LIMIT],
                address=address,
                asked_at_ns=draft.now_ns,
                ends_at_ns=draft.now_ns + round(LIFE_SECONDS * NS),
            )
            draft.claim(DEVICE_GRANT, SCOPE, _CODE, user_code, name)
            draft.put(DEVICE_GRANT, SCOPE, name, spec=spec, expect=ABSENT)

        await transact_found(
            self._store,
            going,
            change,
            actor=ACTOR,
            action="people.device_begin",
            touches=[DEVICE_GRANT.key(SCOPE, name)],
            among=every,
        )
        return StartedGrant(device_code=code, user_code=user_code)

    def pending(self, user_code: str) -> DeviceGrant:
        """The grant that a user was shown, while nobody has decided about it; raises `NotFound`."""
        name = self._store.claimed_by(DEVICE_GRANT, SCOPE, _CODE, normalised(user_code))
        found = self._store.get(DEVICE_GRANT, SCOPE, name) if name is not None else None
        if found is None or not _is_open(found, self._clock.now_ns()):
            raise _unknown()
        return found

    async def decide(self, user_code: str, approval: GrantApproval | None, *, actor: str) -> DeviceGrant:
        """Approve, or refuse with None; once."""
        found = self.pending(user_code)

        def change(draft: Draft) -> None:
            current = draft.get(DEVICE_GRANT, SCOPE, found.name)
            if current is None or not _is_open(current, draft.now_ns):
                raise _unknown()
            decided = msgspec.structs.replace(
                current.spec,
                denied=approval is None,
                account=approval.account if approval is not None else "",
                login=approval.login if approval is not None else "",
            )
            draft.put(DEVICE_GRANT, SCOPE, found.name, spec=decided)

        action = "people.device_refuse" if approval is None else "people.device_approve"
        touches = [DEVICE_GRANT.key(SCOPE, found.name)]
        await self._store.transact(change, actor=actor, action=action, touches=touches)
        return found

    async def poll(self, device_code: str) -> Polled:
        """How far a grant is. One that is approved, denied or over is not known afterwards."""
        name = _digest(device_code)
        found = self._store.get(DEVICE_GRANT, SCOPE, name)
        if found is None or _is_over(found, self._clock.now_ns()):
            self._paces.pop(name, None)
            return Polled(step=GrantStep.EXPIRED)
        pace, is_early = self._paced(name)
        if is_early:
            return Polled(step=GrantStep.SLOW_DOWN, interval_seconds=pace.interval_seconds)
        if not found.spec.is_decided:
            return Polled(step=GrantStep.PENDING, interval_seconds=pace.interval_seconds)
        self._paces.pop(name, None)
        if not await self._redeemed(name):
            return Polled(step=GrantStep.EXPIRED)
        if found.spec.denied:
            return Polled(step=GrantStep.DENIED)
        approval = GrantApproval(account=found.spec.account, login=found.spec.login)
        return Polled(step=GrantStep.APPROVED, approval=approval)

    async def sweep(self) -> None:
        """Delete grants that are over."""
        over, _ = _parted(self._store, self._clock.now_ns())
        if not over:
            return

        def change(draft: Draft) -> None:
            for one in over:
                current = draft.get(DEVICE_GRANT, SCOPE, one.name)
                if current is not None:
                    _end(draft, current)

        touches = [DEVICE_GRANT.key(SCOPE, one.name) for one in over]
        await self._store.transact(change, actor=ACTOR, action="people.device_sweep", touches=touches)

    async def _redeemed(self, name: str) -> bool:
        """Take a decided grant away; False if another question did so."""

        def change(draft: Draft) -> bool:
            current = draft.get(DEVICE_GRANT, SCOPE, name)
            if current is None:
                return False
            _end(draft, current)
            return True

        touches = [DEVICE_GRANT.key(SCOPE, name)]
        done = await self._store.transact(change, actor=ACTOR, action="people.device_redeem", touches=touches)
        return done.value

    def _paced(self, name: str) -> tuple[_PollPace, bool]:
        """How often a program may ask from now on, and whether this question came too early."""
        now = self._clock.monotonic()
        known = self._paces.pop(name, None)
        is_early = known is not None and now < known.next_at
        interval = known.interval_seconds if known is not None else INTERVAL_SECONDS
        if is_early:
            interval = min(interval + INTERVAL_SECONDS, INTERVAL_LIMIT_SECONDS)
        self._paces[name] = pace = _PollPace(next_at=now + interval, interval_seconds=interval)
        if len(self._paces) > GRANTS_LIMIT:
            self._paces.popitem(last=False)
        return pace, is_early

    def _new_user_code(self) -> str:
        claimed = self._store.claimed_by
        return next(code for code in self._codes() if claimed(DEVICE_GRANT, SCOPE, _CODE, code) is None)

    def _codes(self) -> Iterator[str]:
        while True:
            # Of 256 values 240 are 12 times each letter; the rest is left out, so that none comes more often.
            drawn = [one for one in self._clock.token_bytes(4 * USER_CODE_LENGTH) if one < 240]
            if len(drawn) >= USER_CODE_LENGTH:
                yield "".join(ALPHABET[one % len(ALPHABET)] for one in drawn[:USER_CODE_LENGTH])


def _is_over(grant: DeviceGrant, now_ns: int) -> bool:
    return grant.spec.ends_at_ns <= now_ns


def _is_open(grant: DeviceGrant, now_ns: int) -> bool:
    return not grant.spec.is_decided and not _is_over(grant, now_ns)


def _parted(reader: Store | Draft, now_ns: int) -> tuple[list[DeviceGrant], list[DeviceGrant]]:
    """Those that are over, and those that are not."""
    every = reader.list(DEVICE_GRANT, SCOPE)
    over = [one for one in every if _is_over(one, now_ns)]
    return over, [one for one in every if not _is_over(one, now_ns)]


def _end(draft: Draft, grant: DeviceGrant) -> None:
    draft.delete(DEVICE_GRANT, SCOPE, grant.name)
    draft.release(DEVICE_GRANT, SCOPE, _CODE, grant.spec.user_code, grant.name)


def _unknown() -> NotFound:
    return NotFound("there is no such code, or it was used or has expired", field="code")


def normalised(user_code: str) -> str:
    """A code as it was made, however its user typed it."""
    return "".join(one for one in user_code.upper()[:64] if one in ALPHABET)


def shown(user_code: str) -> str:
    """A code as people read it: WDJB-MJHT."""
    return f"{user_code[:4]}-{user_code[4:]}"


def _digest(code: str) -> str:
    return hashlib.sha256(code.encode("utf-8", "replace")).hexdigest()
