"""The account of a person: one record, by whichever family of logins they come.

What a domain keeps of a person is a *profile*: the id that its clients know, what its API shows, and the
roles that it gives. The profile belongs to one account by a claim, `profile` = `FAMILY/ID`, and the account
names it in `profiles`; both are written in one transaction. The password, the bindings and whether the
person may log in at all are the account's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol, TypeVar

import msgspec

from fleetplane.kernel.resources import AnyKind, Kind, Nothing, Resource

SCOPE = "people"
FAMILY = "people"
"""Logins of accounts themselves; those of profiles are called as their domain."""
LOGIN_CLAIM = "login"
PROFILE_CLAIM = "profile"
SUBJECT_PREFIX = "account/"
LOGIN_FORM = re.compile(r"[a-z0-9][a-z0-9._@+-]{0,127}")

SpecT = TypeVar("SpecT")
StatusT = TypeVar("StatusT")


class AccountSpec(msgspec.Struct, frozen=True, kw_only=True):
    login: str
    """Its name, in lower case; it never changes."""
    display_name: str = ""
    email: str = ""
    disabled: bool = False
    created_by: str = ""
    issuer: str = ""
    """Of the identity provider that vouches for its owner; empty: none does."""
    subject: str = ""
    """What the provider calls them: with the issuer, the only thing by which they are recognised."""
    home: str = ""
    """The family whose API made it; empty: it belongs to the installation."""
    profiles: Mapping[str, str] = msgspec.field(default_factory=dict)
    """By family, the id of the person's profile there."""
    password_version: int = 0
    """How often the password was replaced: one that was checked before that opens no login any more."""
    disabled_by: str = ""
    """The family whose API disabled it; only that one, or who manages accounts, enables it again."""


Account = Resource[AccountSpec, Nothing]
ACCOUNT: Kind[AccountSpec, Nothing] = Kind("account", AccountSpec, Nothing)


class AccountReader(Protocol):
    """What a store and a draft have in common, where accounts are looked for by what they claim."""

    def get(self, kind: Kind[SpecT, StatusT], scope: str, name: str) -> Resource[SpecT, StatusT] | None: ...

    def claimed_by(self, kind: AnyKind, scope: str, field: str, value: str) -> str | None: ...


def subject_of(login: str) -> str:
    """As bindings, audits and revocations name an account."""
    return SUBJECT_PREFIX + login


def profile_key(family: str, profile: str) -> str:
    return f"{family}/{profile}"


def account_behind(reader: AccountReader, family: str, profile: str) -> Account | None:
    """The account of a profile; None where the profile is of before there were accounts."""
    name = reader.claimed_by(ACCOUNT, SCOPE, PROFILE_CLAIM, profile_key(family, profile))
    return reader.get(ACCOUNT, SCOPE, name) if name is not None else None


def account_named(reader: AccountReader, login: str) -> Account | None:
    """The account that logs in under this name."""
    name = reader.claimed_by(ACCOUNT, SCOPE, LOGIN_CLAIM, login) if login else None
    return reader.get(ACCOUNT, SCOPE, name) if name is not None else None
