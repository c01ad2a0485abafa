"""What differs between the token families of two domains, and how each stores its logins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from fleetplane.fleet.people.account_rules import AccountSource
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.identity.signing import Algorithm
from fleetplane.kernel.resources import AnyKind, Key
from fleetplane.kernel.store import Draft


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginPolicy:
    """What differs between the token families of two domains."""

    algorithm: Algorithm
    audience: str
    keys: str
    """The purpose under which the signing keys are sealed."""
    access_seconds: int
    refresh_seconds: int
    """The longest that a login lasts, however often it is refreshed."""
    refresh_secret: str = ""
    """The sealed MAC key of rotating refresh tokens; empty where they are signed and stay the same."""
    idle_seconds: int | None = None
    """How long a login lasts without a refresh, where a refresh prolongs it."""
    limit: int
    """Logins of one account; a further one ends the oldest."""
    key_life_seconds: float = 30 * 86_400.0
    """How long one key signs; its public half serves until its last token has expired."""
    actor: str
    """Who sweeps and rotates, in the audit log."""

    @property
    def longest_token_seconds(self) -> int:
        """The longest lifetime of a signed token."""
        return self.access_seconds if self.refresh_secret else max(self.access_seconds, self.refresh_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginActions:
    """What the audit log calls the steps of a login."""

    opened: str
    closed: str
    swept: str
    refreshed: str = ""
    reused: str = ""
    """A refresh token was used twice, and its login ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginRecord:
    """One login as its record tells it, whichever kind that has."""

    key: Key
    account: str
    expires_at_ns: int
    idle_expires_at_ns: int | None = None
    generation: int = 1
    """Of the one refresh token that is good, where each is good once."""
    opened_at_ns: int | None = None
    """None where every login of the family lasts equally long, so that it follows from the end."""
    groups: tuple[str, ...] = ()
    """Of an identity provider that vouched for the user at this login."""

    def is_over(self, now_ns: int) -> bool:
        ends = [at for at in (self.expires_at_ns, self.idle_expires_at_ns) if at is not None]
        return min(ends) <= now_ns


class LoginRecords(ABC):
    """How a domain stores logins."""

    actions: LoginActions
    kind: AnyKind

    @abstractmethod
    def new_id(self, clock: Clock) -> str: ...

    @abstractmethod
    def key(self, account: str, login: str) -> Key: ...

    @abstractmethod
    def locate(self, login: str) -> Key | None:
        """Where the login of this id is stored, if there is one."""

    @abstractmethod
    def read(self, reader: AccountSource, key: Key) -> LoginRecord | None: ...

    @abstractmethod
    def list(self, reader: AccountSource, account: str | None = None) -> Sequence[LoginRecord]:
        """Logins of one account or all, oldest first."""

    @abstractmethod
    def write(self, draft: Draft, login: LoginRecord) -> None: ...

    @abstractmethod
    def end(self, draft: Draft, key: Key) -> None:
        """Delete the record, if it is there."""
