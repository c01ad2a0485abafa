"""Users of before there were accounts: each gets one, with the password and the bindings that it had.

Each is one transaction, so that a start that is cut short is gone on with by the next; repeating it changes
nothing. The user itself is not written: ids, names, roles and open logins are as they were. A user whose
name is somebody's already is not taken for them: the account gets a qualified name, and a log event says so.
"""

from __future__ import annotations

import structlog

from fleetplane.fleet.people import profiles
from fleetplane.fleet.people.account_kind import FAMILY, subject_of
from fleetplane.fleet.people.account_rules import AccountRules, S, T
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.bindings import Bindings
from fleetplane.kernel.identity.passwords import Passwords
from fleetplane.kernel.resources import Resource
from fleetplane.kernel.store import Draft, Store

log = structlog.get_logger(__name__)

ACTOR = "system/people"


async def migrate(store: Store, master: MasterKey, rules: AccountRules[S, T]) -> int:
    """Make accounts for a domain's users who have none; how many."""
    without = [one for one in store.list(rules.kind) if rules.account(store, one.name) is None]
    for one in sorted(without, key=lambda user: user.created_revision):
        await _migrate(store, master, rules, one)
    if without:
        log.info("people.users_migrated", family=rules.family, users=len(without))
    return len(without)


async def _migrate(store: Store, master: MasterKey, rules: AccountRules[S, T], user: Resource[S, T]) -> None:
    former = Passwords(store, master, namespace=rules.namespace)
    passwords = Passwords(store, master, namespace=FAMILY)
    hashed = await former.stored(user.name)
    made = rules.profile(user.name, user.spec, created_by=ACTOR)
    assert made is not None, "accounts of the installation are accounts"
    subject = f"{rules.family}-user/{user.name}"

    def change(draft: Draft) -> str:
        name = profiles.make_account(draft, made)
        if hashed is not None:
            passwords.put(draft, name, hashed)
            former.remove(draft, user.name)
        Bindings.pass_on(draft, subject, subject_of(name))
        return name

    passed_on = [Bindings.keys_of(store, subject, given_to=subject_of(name)) for name in made.names]
    touches = [*made.keys, *(key for keys in passed_on for key in keys)]
    done = await store.transact(change, actor=ACTOR, action="people.account_migrate", touches=touches)
    if done.value != made.login.strip().lower():
        log.warning(
            "people.account_qualified",
            family=rules.family,
            user=user.name,
            wanted=made.login,
            account=done.value,
        )
