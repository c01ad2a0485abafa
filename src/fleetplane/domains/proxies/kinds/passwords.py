"""Passwords of basic authentication: only their hashes are kept. Pure."""

from __future__ import annotations

import hashlib
import secrets
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from fleetplane.domains.proxies.kinds.records import AccessListSpec, VirtualHostSpec
from fleetplane.domains.proxies.typed_options import Access, BasicUser

ROUNDS: Final = 5000
"""The default of crypt(3), so that every system's NGINX checks it; 2 ms with each request."""
_ALPHABET: Final = "./0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ORDER: Final = tuple(
    (one, two, three)
    for first in range(21)
    for one, two, three in [
        ((first, first + 21, first + 42), (first + 21, first + 42, first), (first + 42, first, first + 21))[
            first % 3
        ]
    ]
)


def hashed(password: str, salt: str = "") -> str:
    """SHA-512 in the form of crypt(3), as its specification has it."""
    salt = salt or "".join(secrets.choice(_ALPHABET) for _ in range(16))
    key, salted = password.encode(), salt.encode()
    other = hashlib.sha512(key + salted + key).digest()
    first = hashlib.sha512(key + salted + _repeated(other, len(key)))
    length = len(key)
    while length:
        first.update(other if length & 1 else key)
        length >>= 1
    digest = first.digest()
    keys = _repeated(hashlib.sha512(key * len(key)).digest(), len(key))
    salts = _repeated(hashlib.sha512(salted * (16 + digest[0])).digest(), len(salted))
    for turn in range(ROUNDS):
        mixed = keys if turn & 1 else digest
        mixed += salts if turn % 3 else b""
        mixed += keys if turn % 7 else b""
        digest = hashlib.sha512(mixed + (digest if turn & 1 else keys)).digest()
    return f"$6${salt}${_encoded(digest)}"


def _repeated(block: bytes, length: int) -> bytes:
    return (block * (length // len(block) + 1))[:length]


def _encoded(digest: bytes) -> str:
    groups = [(digest[one] << 16 | digest[two] << 8 | digest[three], 4) for one, two, three in _ORDER]
    return "".join(
        _ALPHABET[value >> (6 * place) & 0x3F]
        for value, count in (*groups, (digest[63], 2))
        for place in range(count)
    )


def _with_known(access: Access | UnsetType, before: Access | UnsetType) -> Access | UnsetType:
    """Who comes with neither password nor hash keeps the hash that was there under the name."""
    if not (access and access.users):
        return access
    known = {user.name: user.password_hash for user in (before and before.users) or ()}
    users = (
        BasicUser(name=user.name, password_hash=known.get(user.name, UNSET))
        if user.password is UNSET and user.password_hash is UNSET
        else user
        for user in access.users
    )
    return msgspec.structs.replace(access, users=tuple(users))


LOCKED: Final = f"$6$locked${'.' * 86}"
"""In the form of a hash, but of no password that anybody knows: its user is refused until one is set."""


def _locked(access: Access | UnsetType) -> Access | UnsetType:
    if not (access and access.users):
        return access
    users = (
        BasicUser(name=user.name, password_hash=LOCKED)
        if user.password is UNSET and user.password_hash is UNSET
        else user
        for user in access.users
    )
    return msgspec.structs.replace(access, users=tuple(users))


def _sealed(access: Access | UnsetType) -> Access | UnsetType:
    if not (access and access.users):
        return access
    users = (
        BasicUser(name=user.name, password_hash=hashed(user.password))
        if isinstance(user.password, str)
        else user
        for user in access.users
    )
    return msgspec.structs.replace(access, users=tuple(users))


def with_known_passwords(spec: VirtualHostSpec, before: VirtualHostSpec | None) -> VirtualHostSpec:
    """Before a host is judged: users that were there keep their passwords unless they get new ones."""
    if before is None:
        return spec
    places = {location.path: location.access for location in before.locations}
    return msgspec.structs.replace(
        spec,
        access=_with_known(spec.access, before.access),
        locations=tuple(
            msgspec.structs.replace(one, access=_with_known(one.access, places.get(one.path, UNSET)))
            for one in spec.locations
        ),
    )


def sealed(spec: VirtualHostSpec) -> VirtualHostSpec:
    """A host with hashes instead of passwords. Takes 10 ms for each password: not on the event loop."""
    return msgspec.structs.replace(
        spec,
        access=_sealed(spec.access),
        locations=tuple(msgspec.structs.replace(one, access=_sealed(one.access)) for one in spec.locations),
    )


def locked(spec: VirtualHostSpec) -> VirtualHostSpec:
    """A host whose users without a password are refused until one is set."""
    return msgspec.structs.replace(
        spec,
        access=_locked(spec.access),
        locations=tuple(msgspec.structs.replace(one, access=_locked(one.access)) for one in spec.locations),
    )


def list_locked(spec: AccessListSpec) -> AccessListSpec:
    """A list whose users without a password are refused until one is set."""
    made = _locked(Access(users=spec.users))
    return msgspec.structs.replace(spec, users=(made and made.users) or ())


def locked_users(*groups: Access | UnsetType) -> list[str]:
    """Users that nobody can log in as, in the order of their names."""
    return sorted(
        {user.name for one in groups if one for user in one.users or () if user.password_hash == LOCKED}
    )


def list_with_known_passwords(spec: AccessListSpec, before: AccessListSpec) -> AccessListSpec:
    known = _with_known(Access(users=spec.users), Access(users=before.users))
    return msgspec.structs.replace(spec, users=(known and known.users) or ())


def list_sealed(spec: AccessListSpec) -> AccessListSpec:
    made = _sealed(Access(users=spec.users))
    return msgspec.structs.replace(spec, users=(made and made.users) or ())


def has_passwords(spec: VirtualHostSpec) -> bool:
    groups = (spec.access, *(one.access for one in spec.locations))
    return any(user.password is not UNSET for one in groups if one for user in one.users or ())


def host_without_hashes(spec: VirtualHostSpec) -> VirtualHostSpec:
    """As it is shown."""
    return msgspec.structs.replace(
        spec,
        access=without_hashes(spec.access),
        locations=tuple(
            msgspec.structs.replace(one, access=without_hashes(one.access)) for one in spec.locations
        ),
    )


def without_hashes(access: Access | UnsetType) -> Access | UnsetType:
    """As it is shown."""
    if not (access and access.users):
        return access
    return msgspec.structs.replace(access, users=tuple(BasicUser(name=user.name) for user in access.users))
