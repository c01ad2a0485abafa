"""Passwords of people: argon2id, hashed and checked off the event loop, a few at a time.

Unknown users cost as much time as known ones: their password is checked against the hash of
something nobody knows. Decides what a password must be like, whether one fits, which is checked
next, and when somebody guesses too much; knows no users.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from fleetplane.kernel.errors import ResourceExhausted
from fleetplane.kernel.identity.master_key import MasterKey
from fleetplane.kernel.networks import wider_network_of
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.unbroken import run_to_completion

CONCURRENT_HASHES = 2
"""Each takes 64 MiB and a tenth of a second of several cores: more at once are not faster."""
STRANGERS_REST = 3
"""Times what a check took: so long passes before the next one of a stranger. All of them together take a
quarter of one of two places, half a core, however many they are."""
STRANGERS_WAITING = 16
"""At 0.4 seconds each, the last of them waits for 6.4 seconds."""
KNOWN_WAITING = 64
"""At two in 0.1 seconds, the last of them waits for 3.2 seconds."""
WAIT_SECONDS = 10.0
"""On a machine that is so busy that they wait longer, they are refused, too."""
RETRY_SECONDS = 5.0
PASSWORD_MINIMUM = 12
PASSWORD_LIMIT_BYTES = 1024
NOBODYS = "$argon2id$v=19$m=65536,t=3,p=4$lWUjrYEPcoQhj7OIshxJTA$A3A3Ur8OKqPQfeQPX/3Hf84E4Rks5vlQfCyQ+uc+60U"
"""The hash of 32 random bytes that were not kept, with the parameters of all others: no password fits it."""
PAUSE_SECONDS = 15 * 60
ACCOUNTS_REMEMBERED = 10_000
"""Accounts with recent failures; the oldest is forgotten first."""


class PasswordFault(StrEnum):
    """Why a password cannot be set."""

    TOO_SHORT = f"Must have at least {PASSWORD_MINIMUM} characters"
    TOO_LONG = f"Must take at most {PASSWORD_LIMIT_BYTES} bytes"


def fault(password: str) -> PasswordFault | None:
    if len(password) < PASSWORD_MINIMUM:
        return PasswordFault.TOO_SHORT
    return PasswordFault.TOO_LONG if _is_too_long(password) else None


class HashingQueue:
    """A bounded queue of those whose password is hashed next, for all logins of a server.

    Who is signed in, or comes from an address that signed in to the account before, goes first. Strangers
    have one place, in turn by network (/24 and /48), and rest in between. Who finds the queue full is refused
    before anything is hashed, unless another network has more waiting: then the last of that one is.
    """

    def __init__(self) -> None:
        self._free = CONCURRENT_HASHES
        self._stranger_is_in = False
        self._known: deque[asyncio.Future[None]] = deque()
        self._strangers: dict[str, deque[asyncio.Future[None]]] = {}
        """By network, in the order of their turns."""
        self.refused = 0

    def __repr__(self) -> str:
        return f"<HashingQueue known={len(self._known)} strangers={self._strangers_waiting()}>"

    @asynccontextmanager
    async def place(self, stranger: str = "") -> AsyncIterator[None]:
        """A place to hash in, for a stranger's address, or for somebody who is known."""
        await self._admitted(wider_network_of(stranger) if stranger else "")
        clock = asyncio.get_running_loop()
        began = clock.time()
        try:
            yield
        finally:
            self._free += 1
            if stranger:
                clock.call_later((clock.time() - began) * STRANGERS_REST, self._stranger_rested)
            self._go_on()

    async def _admitted(self, network: str) -> None:
        coming: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = self._room_for(network) if network else self._known
        if len(self._known) >= KNOWN_WAITING and not network:
            raise self._refusal()
        queue.append(coming)
        self._go_on()
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await coming
        except BaseException as error:
            if coming.done() and not coming.cancelled() and coming.exception() is None:
                self._free += 1  # its caller left in the moment in which it came in
                self._stranger_is_in = self._stranger_is_in and not network
                self._go_on()
            else:
                self._left(network, coming)
            if isinstance(error, TimeoutError):
                raise self._refusal() from None
            raise

    def _room_for(self, network: str) -> deque[asyncio.Future[None]]:
        if self._strangers_waiting() >= STRANGERS_WAITING:
            most = max(self._strangers.values(), key=len)
            if len(most) <= len(self._strangers.get(network, ())) + 1:
                raise self._refusal()
            most.pop().set_exception(self._refusal())
        return self._strangers.setdefault(network, deque())

    def _go_on(self) -> None:
        while self._free:
            if self._known:
                coming = self._known.popleft()
            elif self._strangers and not self._stranger_is_in:
                network = next(iter(self._strangers))
                waiting = self._strangers.pop(network)
                coming = waiting.popleft()
                if waiting:
                    self._strangers[network] = waiting  # the last to have the next turn
                self._stranger_is_in = not coming.done()
            else:
                return
            if not coming.done():
                self._free -= 1
                coming.set_result(None)

    def _stranger_rested(self) -> None:
        self._stranger_is_in = False
        self._go_on()

    def _left(self, network: str, coming: asyncio.Future[None]) -> None:
        queue = self._strangers.get(network, deque()) if network else self._known
        if coming in queue:
            queue.remove(coming)
        if network and not queue:
            self._strangers.pop(network, None)

    def _strangers_waiting(self) -> int:
        return sum(map(len, self._strangers.values()))

    def _refusal(self) -> ResourceExhausted:
        self.refused += 1
        return ResourceExhausted(
            "too many passwords wait to be checked",
            hint="try again in some seconds",
            retry_after_seconds=RETRY_SECONDS,
            details={"cause": "busy"},
        )


class Passwords:
    """The passwords of one kind of users; hashes are sealed below `{namespace}/password/`."""

    def __init__(
        self, store: Store, master: MasterKey, *, namespace: str, queue: HashingQueue | None = None
    ) -> None:
        self._store = store
        self._master = master
        self._namespace = namespace
        self._hasher = PasswordHasher()
        self._queue = queue or HashingQueue()

    def __repr__(self) -> str:
        return f"<Passwords {self._namespace}>"

    async def hash(self, password: str) -> str:
        """For somebody who is signed in."""
        async with self._queue.place():
            hashing = asyncio.to_thread(self._hasher.hash, password.encode("utf-8", "surrogatepass"))
            return await run_to_completion(hashing)

    async def verify_own(self, user: str, password: str) -> str | None:
        """What is stored of the user's password, if it is this one; for somebody who is signed in."""
        async with self._queue.place():
            return await self.verify(user, password)

    async def verify(self, user: str | None, password: str) -> str | None:
        """The same for a caller who has a place to hash in, and keeps it until the thread is done."""
        stored = await self.stored(user) if user is not None else None
        tried = NOBODYS if stored is None else stored
        if _is_too_long(password):
            return None
        fits = await run_to_completion(asyncio.to_thread(self._fits, tried, password))
        return stored if fits else None

    def _fits(self, hashed: str, password: str) -> bool:
        try:
            return self._hasher.verify(hashed, password.encode("utf-8", "surrogatepass"))
        except (VerificationError, InvalidHashError):
            return False

    def outdated(self, hashed: str) -> bool:
        """Whether it was made with other parameters than today's."""
        return self._hasher.check_needs_rehash(hashed)

    def put(self, draft: Draft, user: str, hashed: str) -> None:
        name = self._secret(user)
        draft.put_secret(name, self._master.seal(hashed.encode(), purpose=name))

    def remove(self, draft: Draft, user: str) -> None:
        draft.delete_secret(self._secret(user))

    async def stored(self, user: str) -> str | None:
        """What is stored of a user's password; None if there is none."""
        name = self._secret(user)
        sealed = await self._store.get_secret(name)
        return None if sealed is None else self._master.open(sealed, purpose=name).decode()

    def _secret(self, user: str) -> str:
        return f"{self._namespace}/password/{user}"


def _is_too_long(password: str) -> bool:
    return len(password.encode("utf-8", "replace")) > PASSWORD_LIMIT_BYTES


class LoginFailures:
    """Failed logins per account, and the pause after too many. Pure but for what it remembers."""

    def __init__(self, *, limit: int, pause_seconds: float = PAUSE_SECONDS) -> None:
        self._limit = limit
        self._pause = pause_seconds
        self._at: OrderedDict[str, list[float]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Failures accounts={len(self._at)}>"

    def pause_seconds(self, account: str, *, now: float) -> float:
        """How long the account has to wait; 0 if it need not."""
        recent = [at for at in self._at.get(account, ()) if now - at < self._pause]
        return recent[0] + self._pause - now if len(recent) >= self._limit else 0.0

    def failed(self, account: str, *, now: float) -> None:
        recent = [at for at in self._at.pop(account, ()) if now - at < self._pause]
        self._at[account] = [*recent, now][-self._limit :]
        if len(self._at) > ACCOUNTS_REMEMBERED:
            self._at.popitem(last=False)

    def succeeded(self, account: str) -> None:
        self._at.pop(account, None)

    def pardon(self, prefix: str) -> None:
        """Forget the failures of all accounts that begin so."""
        for account in [one for one in self._at if one.startswith(prefix)]:
            del self._at[account]

    def take_back(self, account: str) -> None:
        """The last one was none after all; what others did still counts."""
        if found := self._at.get(account):
            found.pop()
