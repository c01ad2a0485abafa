"""Accounts and profiles in one transaction: made, linked, left and migrated. Nothing here waits.

Two people are never joined because they are called the same: a name that is somebody's, or to which
something was bound in advance, is not taken, and the account gets a qualified one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from fleetplane.fleet.people.account_kind import (
    ACCOUNT,
    LOGIN_CLAIM,
    LOGIN_FORM,
    PROFILE_CLAIM,
    SCOPE,
    Account,
    AccountSpec,
    account_named,
    profile_key,
    subject_of,
)
from fleetplane.kernel.errors import AlreadyExists
from fleetplane.kernel.identity.bindings import Bindings
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import ABSENT, Draft

TEXT_LIMIT = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class NewProfile:
    """A profile that has no account yet."""

    family: str
    id: str
    login: str
    """What its owner logs in with, and what the account is called if nobody else is."""
    display_name: str = ""
    email: str = ""
    created_by: str = ""

    @property
    def names(self) -> Sequence[str]:
        """What its account may be called, best first; the last ones are nobody else's choice."""
        login, own = self.login.strip().lower(), f"{self.family}-{self.id}"
        found = (login, f"{login}-{self.family}", own, f"{own}-account")
        return tuple(one for one in found if LOGIN_FORM.fullmatch(one))

    @property
    def keys(self) -> Sequence[Key]:
        """What a transaction announces that makes the account."""
        return [ACCOUNT.key(SCOPE, one) for one in self.names]


def is_free(draft: Draft, name: str) -> bool:
    """Whether an account may be called so without being taken for another."""
    return account_named(draft, name) is None and not Bindings.is_bound(draft, subject_of(name))


def make_account(draft: Draft, profile: NewProfile) -> str:
    """Make the account of a profile; its name."""
    name = next((one for one in profile.names if is_free(draft, one)), None)
    if name is None:
        raise AlreadyExists(f"there is an account {profile.names[-1]!r} already", field="name")
    spec = AccountSpec(
        login=name,
        display_name=_text(profile.display_name),
        email=_text(profile.email),
        created_by=profile.created_by,
        home=profile.family,
        profiles={profile.family: profile.id},
    )
    draft.claim(ACCOUNT, SCOPE, LOGIN_CLAIM, name, name)
    draft.claim(ACCOUNT, SCOPE, PROFILE_CLAIM, profile_key(profile.family, profile.id), name)
    draft.put(ACCOUNT, SCOPE, name, spec=spec, expect=ABSENT)
    return name


def link(draft: Draft, account: Account, family: str, profile: str) -> None:
    """Give an account a profile of a family in which it has none."""
    spec = replace(account.spec, profiles={**account.spec.profiles, family: profile})
    draft.claim(ACCOUNT, SCOPE, PROFILE_CLAIM, profile_key(family, profile), account.name)
    draft.put(ACCOUNT, SCOPE, account.name, spec=spec)


def leave(draft: Draft, account: Account, family: str, *, whole: bool) -> bool:
    """Take a profile from its account; True if the account ended with it.

    An account that its family made, and that has no other profile, ends with it if the caller may decide
    about all of it (`whole`). Any other stays, and belongs to the installation.
    """
    profile = account.spec.profiles[family]
    rest = {name: one for name, one in account.spec.profiles.items() if name != family}
    draft.release(ACCOUNT, SCOPE, PROFILE_CLAIM, profile_key(family, profile), account.name)
    if whole and account.spec.home == family and not rest and not account.spec.subject:
        draft.release(ACCOUNT, SCOPE, LOGIN_CLAIM, account.spec.login, account.name)
        draft.delete(ACCOUNT, SCOPE, account.name)
        return True
    home = "" if account.spec.home == family else account.spec.home
    draft.put(ACCOUNT, SCOPE, account.name, spec=replace(account.spec, profiles=rest, home=home))
    return False


def follow(draft: Draft, account: Account, family: str, *, active: bool) -> None:
    """Disable an account with its only profile, or enable it again if that family disabled it."""
    spec = account.spec
    if set(spec.profiles) != {family} or spec.home != family:
        return
    if not active and not spec.disabled:
        draft.put(ACCOUNT, SCOPE, account.name, spec=replace(spec, disabled=True, disabled_by=family))
    elif active and spec.disabled and spec.disabled_by == family:
        draft.put(ACCOUNT, SCOPE, account.name, spec=replace(spec, disabled=False, disabled_by=""))


def _text(text: str) -> str:
    """What an account shows; something too long is shown by the profile alone."""
    return text if len(text) <= TEXT_LIMIT and text.isprintable() else ""
