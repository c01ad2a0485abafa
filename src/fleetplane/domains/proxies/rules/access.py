"""Access options of hosts and locations, and access lists. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from fleetplane.domains.proxies.kinds.records import AccessListSpec
from fleetplane.domains.proxies.rules import directives
from fleetplane.domains.proxies.rules.texts import (
    count_problems,
    header_name_fault,
    network_fault,
    networks_problems,
    range_problems,
    url_fault,
)
from fleetplane.domains.proxies.typed_options import (
    Access,
    AccessRule,
    BasicUser,
    ConnectionLimit,
    ForwardAuth,
    RateLimit,
)
from fleetplane.web.rest.problems import Code, Problem

RULES_LIMIT = 1000
BANNED_LIMIT = 2000
USERS_LIMIT = 100
LISTS_LIMIT = 8
LIMITS_LIMIT = 8
HEADERS_LIMIT = 16
PASSWORD_LIMIT = 256
RATE_LIMIT = 1_000_000
_USER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@+-]{0,63}")
_HASH = re.compile(r"\$6\$(?:rounds=[0-9]{4,9}\$)?[A-Za-z0-9./]{1,16}\$[A-Za-z0-9./]{86}")
_KEY = re.compile(r"address|host|uri|header:[A-Za-z][A-Za-z0-9-]{0,63}|cookie:[A-Za-z][A-Za-z0-9_]{0,63}")


def access_problems(access: Access, field: str, lists: Collection[str]) -> Iterator[Problem]:
    """`lists` are the access lists that there are."""
    yield from count_problems(access.list_ids or (), LISTS_LIMIT, f"{field}.list_ids")
    for index, identity in enumerate((access.list_ids or ())[:LISTS_LIMIT]):
        if identity not in lists:
            yield Problem(
                field=f"{field}.list_ids.{index}",
                message="There is no such access list in this workspace",
                code=Code.UNKNOWN_REFERENCE,
            )
    yield from rules_problems(access.rules or (), f"{field}.rules")
    if access.banned:
        yield from networks_problems(access.banned, f"{field}.banned", limit=BANNED_LIMIT)
    yield from users_problems(access.users or (), f"{field}.users")
    if isinstance(access.realm, str) and (fault := _realm_fault(access.realm)):
        yield Problem(field=f"{field}.realm", message=fault)
    if access.forward_auth:
        yield from _forward_problems(access.forward_auth, f"{field}.forward_auth")
    yield from _limit_problems(access, field)


def is_key(text: str) -> bool:
    """Whether requests can be counted or told apart by it."""
    return _KEY.fullmatch(text) is not None


def list_problems(spec: AccessListSpec) -> Iterator[Problem]:
    if not 1 <= len(spec.name.strip()) <= 100 or directives.text_fault(spec.name):
        yield Problem(field="name", message="Must be 1 to 100 characters without control characters")
    yield from rules_problems(spec.rules, "rules")
    if spec.banned:
        yield from networks_problems(spec.banned, "banned", limit=BANNED_LIMIT)
    yield from users_problems(spec.users, "users")


def rules_problems(rules: Sequence[AccessRule], field: str) -> Iterator[Problem]:
    if len(rules) > RULES_LIMIT:
        yield Problem(field=field, message=f"More than {RULES_LIMIT} rules", code=Code.TOO_MANY)
        return
    for index, rule in enumerate(rules):
        if rule.network != "all" and (fault := network_fault(rule.network)):
            yield Problem(field=f"{field}.{index}.network", message=f"{fault}, or all")


def users_problems(users: Sequence[BasicUser], field: str) -> Iterator[Problem]:
    if len(users) > USERS_LIMIT:
        yield Problem(field=field, message=f"More than {USERS_LIMIT} users", code=Code.TOO_MANY)
        return
    if len({user.name for user in users}) < len(users):
        yield Problem(field=field, message="A name is given twice", code=Code.NOT_UNIQUE)
    for index, user in enumerate(users):
        where = f"{field}.{index}"
        if not _USER.fullmatch(user.name):
            message = "Must be 1 to 64 of a-z, A-Z, 0-9 and '_.@+-', beginning with a letter or digit"
            yield Problem(field=f"{where}.name", message=message)
        if isinstance(user.password, str):
            if not 1 <= len(user.password) <= PASSWORD_LIMIT or directives.text_fault(user.password):
                message = f"Must be 1 to {PASSWORD_LIMIT} characters without control characters"
                yield Problem(field=f"{where}.password", message=message)
        elif not isinstance(user.password_hash, str):
            yield Problem(field=f"{where}.password", message="A new user needs one", code=Code.REQUIRED)
        elif not _HASH.fullmatch(user.password_hash):
            yield Problem(
                field=f"{where}.password_hash", message="Must be a SHA-512 hash of crypt(3), $6$..."
            )


def _realm_fault(realm: str) -> str:
    if not 1 <= len(realm) <= 100 or '"' in realm or "\\" in realm:
        return "Must be 1 to 100 characters without quotes and backslashes"
    return directives.text_fault(realm)


def _forward_problems(auth: ForwardAuth, field: str) -> Iterator[Problem]:
    for name in ("url", "sign_in_url"):
        if isinstance(text := getattr(auth, name), str) and (fault := url_fault(text)):
            yield Problem(field=f"{field}.{name}", message=fault)
    headers = auth.response_headers or ()
    yield from count_problems(headers, HEADERS_LIMIT, f"{field}.response_headers")
    for index, header in enumerate(headers[:HEADERS_LIMIT]):
        if fault := header_name_fault(header) or ("Must have no '_'" if "_" in header else ""):
            yield Problem(field=f"{field}.response_headers.{index}", message=fault)


def _limit_problems(access: Access, field: str) -> Iterator[Problem]:
    rates, connections = access.rate_limits or (), access.connection_limits or ()
    yield from _counted(rates, f"{field}.rate_limits")
    yield from _counted(connections, f"{field}.connection_limits")
    for index, rate in enumerate(rates[:LIMITS_LIMIT]):
        yield from range_problems(rate.rate, 1, RATE_LIMIT, f"{field}.rate_limits.{index}.rate")
        yield from range_problems(rate.burst, 0, RATE_LIMIT, f"{field}.rate_limits.{index}.burst")
    for index, one in enumerate(connections[:LIMITS_LIMIT]):
        where = f"{field}.connection_limits.{index}.connections"
        yield from range_problems(one.connections, 1, 65_535, where)
    keys = [one.key for one in connections]
    if len(set(keys)) < len(keys):
        yield Problem(
            field=f"{field}.connection_limits", message="A key is given twice", code=Code.NOT_UNIQUE
        )


def _counted(limits: Sequence[RateLimit | ConnectionLimit], field: str) -> Iterator[Problem]:
    yield from count_problems(limits, LIMITS_LIMIT, field)
    for index, limit in enumerate(limits[:LIMITS_LIMIT]):
        where = f"{field}.{index}"
        if not _KEY.fullmatch(limit.key):
            message = "Must be address, host, uri, header:NAME or cookie:NAME"
            yield Problem(field=f"{where}.key", message=message)
        yield from range_problems(limit.status, 400, 599, f"{where}.status")
        if limit.status != limits[0].status:
            message = "Must be the same for all limits of a location"
            yield Problem(field=f"{where}.status", message=message, code=Code.INCOMPATIBLE)
