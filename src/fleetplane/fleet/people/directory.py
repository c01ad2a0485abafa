"""Every account and every open login of this installation, whichever domain's login it is.

A domain that has users adds a `Directory`, so that one list shows who can log in, and one verb ends a
login wherever it was opened. Users of a domain are shown as the accounts behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol

from fleetplane.fleet.people.account_kind import FAMILY, subject_of
from fleetplane.fleet.people.account_rules import AccountRules, S, T
from fleetplane.fleet.people.logins import Logins
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.resources import Resource
from fleetplane.kernel.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownAccount:
    """An account as everybody sees it."""

    subject: str
    """As bindings name it."""
    name: str
    """What its user logs in with."""
    directory: str
    """The family whose API made it; `people`: it belongs to the installation."""
    active: bool
    vouched_by: str = ""
    """Issuer and subject of an identity provider, by which its owner is recognised; empty: a password."""
    users: Mapping[str, str] = field(default_factory=dict)
    """By domain, the id of the user that the person is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownLogin:
    """An open login."""

    id: str
    directory: str
    subject: str
    name: str
    expires_at_ns: int


class Directory(Protocol):
    """The accounts and logins that one domain keeps."""

    @property
    def name(self) -> str: ...

    def accounts(self) -> Iterator[KnownAccount]: ...

    def logins(self) -> Iterator[KnownLogin]: ...

    async def end(self, login: KnownLogin, *, actor: str) -> None:
        """Close a login, and with it every token of its."""
        ...


class LoginDirectory(Generic[S, T]):
    """The directory of a domain whose accounts are those of `fleet.people.accounts`."""

    def __init__(
        self,
        name: str,
        store: Store,
        rules: AccountRules[S, T],
        logins: Logins[S, T],
        *,
        shown: Callable[[Resource[S, T]], str],
        vouched_by: Callable[[S], str] = lambda _: "",
    ) -> None:
        """`shown` is the name that a user of an account logs in with; `vouched_by` see `KnownAccount`."""
        self.name = name
        self._store = store
        self._rules = rules
        self._logins = logins
        self._shown = shown
        self._vouched_by = vouched_by

    def subject(self, user: str) -> str:
        """As bindings name the account behind a user; one of before has none."""
        account = self._rules.account(self._store, user)
        return subject_of(account.name) if account is not None else f"{self.name}-user/{user}"

    def accounts(self) -> Iterator[KnownAccount]:
        for one in self._store.list(self._rules.kind):
            account = self._rules.account(self._store, one.name)
            if account is not None and self.name != FAMILY:
                continue  # the accounts' own directory has it
            yield KnownAccount(
                subject=self.subject(one.name),
                name=self._shown(one),
                directory=account.spec.home or FAMILY if account is not None else self.name,
                active=self._rules.is_active(one.spec),
                vouched_by=self._vouched_by(one.spec),
                users=dict(account.spec.profiles) if account is not None else {},
            )

    def logins(self) -> Iterator[KnownLogin]:
        for one in self._logins.all():
            account = self._rules.find(self._store, one.account)
            if account is not None:
                yield KnownLogin(
                    id=one.key.name,
                    directory=self.name,
                    subject=self.subject(account.name),
                    name=self._shown(account),
                    expires_at_ns=one.expires_at_ns,
                )

    async def end(self, login: KnownLogin, *, actor: str) -> None:
        for one in self._logins.all():
            if one.key.name == login.id:
                await self._logins.close(one.account, only=login.id, actor=actor)


AnyDirectory = LoginDirectory[Any, Any]


class Directories:
    """All of them."""

    def __init__(self) -> None:
        self._directories: list[Directory] = []

    def add(self, directory: Directory) -> None:
        self._directories.append(directory)

    def accounts(self) -> Sequence[KnownAccount]:
        found = (one for directory in self._directories for one in directory.accounts())
        return sorted(found, key=lambda one: (one.directory, one.name))

    def logins(self) -> Sequence[KnownLogin]:
        found = (one for directory in self._directories for one in directory.logins())
        return sorted(found, key=lambda one: (one.directory, one.name, one.id))

    def subject(self, text: str) -> str:
        """As bindings name whoever is meant: `proxies-user/ID` is the account behind that user."""
        for one in self._directories:
            if isinstance(one, LoginDirectory) and text.startswith(f"{one.name}-user/"):
                return one.subject(text.partition("/")[2])
        return text

    def knows(self, subject: str) -> bool:
        return any(one.subject == subject for one in self.accounts())

    async def end(self, identity: str, *, actor: str) -> None:
        """Close the login of this id; raises `NotFound`."""
        for directory in self._directories:
            for one in directory.logins():
                if one.id == identity:
                    await directory.end(one, actor=actor)
                    return
        raise NotFound("there is no such session", field="id")
