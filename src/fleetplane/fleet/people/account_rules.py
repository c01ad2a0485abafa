"""What a domain decides about its accounts, and what the audit log calls their changes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

import msgspec

from fleetplane.fleet.people.account_kind import Account, account_behind
from fleetplane.fleet.people.attempts.throttle import ThrottleLimits
from fleetplane.fleet.people.profiles import NewProfile
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.resources import AnyKind, Key, Kind, Resource
from fleetplane.kernel.store import Draft

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T", bound=msgspec.Struct)
SpecT = TypeVar("SpecT")
StatusT = TypeVar("StatusT")


class AccountSource(Protocol):
    """What a store and a draft have in common."""

    def get(self, kind: Kind[SpecT, StatusT], scope: str, name: str) -> Resource[SpecT, StatusT] | None: ...

    def list(self, kind: Kind[SpecT, StatusT], scope: str = "") -> Sequence[Resource[SpecT, StatusT]]: ...

    def claimed_by(self, kind: AnyKind, scope: str, field: str, value: str) -> str | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Companion:
    """What a domain writes in the transaction that creates or deletes an account."""

    change: Callable[[Draft], None] = lambda _: None
    touches: Sequence[Key] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountActions:
    """What the audit log calls the changes of accounts."""

    create: str
    update: str
    delete: str
    reset: str
    """A user's password was replaced by an administrator."""
    rehash: str
    """The same password, hashed anew with today's parameters."""
    deactivate: str = ""
    """The logins of a user who was deactivated were closed."""
    names_closing: bool = False
    """Whether closing logins is recorded under the change that caused it; otherwise as a logout."""


class AccountRules(ABC, Generic[S, T]):
    """What a domain decides about its accounts. Nothing here waits."""

    kind: Kind[S, T]
    family: ClassVar[str]
    """What logins of these users are called; `people` where they are accounts and not profiles of some."""
    namespace: ClassVar[str]
    """Known addresses are sealed below this name, and passwords of before there were accounts."""
    actions: ClassVar[AccountActions]
    limits: ClassVar[ThrottleLimits]
    login_claim: ClassVar[str]
    """The claim that keeps login names unique."""
    login_scope: ClassVar[str]
    wrong_login: ClassVar[str]
    """The message for a wrong password and an unknown name alike."""
    tells_inactive: ClassVar[bool]
    """Whether a deactivated user with the right password learns that the account is not active."""
    capacity: ClassVar[int | None] = None
    """How many accounts there may be; None where something else limits them."""

    @abstractmethod
    def scope(self, name: str) -> str:
        """The scope in which the account of this name is stored."""

    @abstractmethod
    def login_names(self, spec: S) -> frozenset[str]:
        """The names a user may log in with, in lower case."""

    @abstractmethod
    def checked(self, spec: S, password: str | None = None) -> S:
        """The spec in its stored spelling; raises where it, or a new account's password, is not valid."""

    @abstractmethod
    def check_password(self, password: str, *, field: str) -> None:
        """Raise where a password cannot be set."""

    @abstractmethod
    def is_active(self, spec: S) -> bool: ...

    @abstractmethod
    def is_administrator(self, spec: S) -> bool: ...

    @abstractmethod
    def principal(self, account: Resource[S, T]) -> str:
        """The account's name wherever callers are named: in audits and revocations."""

    @abstractmethod
    def missing(self) -> FleetplaneError:
        """The error for an account that does not exist."""

    @abstractmethod
    def taken(self, login: str) -> FleetplaneError:
        """The error for a login name that another account has."""

    @abstractmethod
    def last_administrator(self) -> FleetplaneError:
        """The error for a change that would leave no active administrator."""

    def find(self, reader: AccountSource, name: str) -> Resource[S, T] | None:
        return reader.get(self.kind, self.scope(name), name)

    def present(self, reader: AccountSource, name: str) -> Resource[S, T]:
        found = self.find(reader, name)
        if found is None:
            raise self.missing()
        return found

    def active(self, reader: AccountSource, name: str) -> Resource[S, T] | None:
        """A user who may log in: neither the profile nor the account behind it is deactivated."""
        found = self.find(reader, name)
        if found is None or not self.is_active(found.spec):
            return None
        behind = self.account(reader, name)
        return None if behind is not None and behind.spec.disabled else found

    def account(self, reader: AccountSource, name: str) -> Account | None:
        """The account behind a user; None for one of before, who has not been migrated."""
        return account_behind(reader, self.family, name)

    def profile(self, name: str, spec: S, *, created_by: str) -> NewProfile | None:  # noqa: ARG002
        """What the account of a user is made of; None where the users are accounts themselves."""
        return None
