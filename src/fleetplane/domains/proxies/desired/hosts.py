"""Upstreams and virtual hosts as objects that people write through the resource API.

By the changes of `serving`, in a draft: what one request changes in a workspace is one version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fleetplane.domains.proxies import access
from fleetplane.domains.proxies.desired.common import (
    ProxyParts,
    batch_of,
    certificates_called,
    place_of,
    raw_right,
    reloads,
    required_place,
)
from fleetplane.domains.proxies.kinds.passwords import (
    has_passwords,
    locked,
    locked_users,
    with_known_passwords,
)
from fleetplane.domains.proxies.kinds.records import (
    ACCESS_LIST,
    AGENT,
    UPSTREAM,
    VIRTUAL_HOST,
    Upstream,
    UpstreamSpec,
    VirtualHost,
    VirtualHostSpec,
)
from fleetplane.domains.proxies.kinds.unique import refuse
from fleetplane.domains.proxies.resources.places import MIRROR
from fleetplane.domains.proxies.serving.hosts import WantedHost
from fleetplane.fleet.masking import masked_values, with_known_secrets
from fleetplane.fleet.resources.declaration import ViewReader, Writable, WriteCall
from fleetplane.kernel.errors import Conflict, InvalidArgument
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import Draft

_NAME = "name"

# Upstreams.


def find_upstream(_domain: object, draft: Draft, scope: str, name: str) -> Upstream | None:
    """By its name."""
    at = place_of(draft, scope)
    found = None if at is None else draft.claimed_by(UPSTREAM, at, _NAME, name)
    return None if at is None or found is None else draft.get(UPSTREAM, at, found)


def put_upstream(call: WriteCall) -> Upstream:
    """Create an upstream, or replace it."""
    domain: ProxyParts = call.domain
    scope, stored = required_place(call), call.stored
    spec: UpstreamSpec = MIRROR.stored(call.spec, _identities(scope, call.draft), name=call.name)
    if stored is not None:
        spec = with_known_secrets(spec, stored.spec)
    refuse(masked_values(spec))
    identity = call.new_id() if stored is None else stored.name
    return domain.hosts.upstreams.put_in(batch_of(call), scope, identity, spec)


def delete_upstream(call: WriteCall) -> None:
    """Delete an upstream that no virtual host refers to."""
    domain: ProxyParts = call.domain
    assert call.stored is not None
    domain.hosts.upstreams.delete_in(batch_of(call), call.stored)


# Virtual hosts.


def find_host(_domain: object, draft: Draft, scope: str, name: str) -> VirtualHost | None:
    """By its name, which the proxies' own API does not keep unique."""
    at = place_of(draft, scope)
    found = [] if at is None else [one for one in draft.list(VIRTUAL_HOST, at) if one.spec.name == name]
    if len(found) > 1:
        raise Conflict(
            f"{len(found)} virtual hosts of {scope} are called {name!r}",
            field="name",
            hint="give them different names first: PATCH /v1/virtual-hosts/ID",
        )
    return found[0] if found else None


def put_host(call: WriteCall) -> VirtualHost:
    """Create a virtual host, or replace it."""
    domain: ProxyParts = call.domain
    scope, stored = required_place(call), call.stored
    spec: VirtualHostSpec = MIRROR.stored(call.spec, _identities(scope, call.draft), name=call.name)
    if stored is not None:
        spec = with_known_passwords(with_known_secrets(spec, stored.spec), stored.spec)
    refuse(masked_values(spec))
    if has_passwords(spec):
        raise InvalidArgument(
            "passwords are not set through this API; those that are set stay",
            field="access.users",
            hint="set them through the proxies' own API: PATCH /v1/virtual-hosts/ID",
        )
    identity = call.new_id() if stored is None else stored.name
    wanted = WantedHost(identity=identity, spec=locked(spec), raw=raw_right(call))
    return domain.hosts.put_in(batch_of(call), scope, wanted)


def delete_host(call: WriteCall) -> None:
    """Delete a virtual host."""
    domain: ProxyParts = call.domain
    assert call.stored is not None
    domain.hosts.delete_in(batch_of(call), call.stored, raw=raw_right(call))


def _identities(scope: str, draft: Draft) -> Mapping[str, Callable[[str], str]]:
    """From the names that things refer to, to ids; what is not known stays, and is refused by its field."""

    def by_claim(kind: AnyKind) -> Callable[[str], str]:
        return lambda name: draft.claimed_by(kind, scope, _NAME, name) or name

    def certificate(domain: str) -> str:
        found = certificates_called(draft, scope, domain)
        return found[0] if len(found) == 1 else domain

    return {
        "certificate": certificate,
        "client_certificate": certificate,
        "authority": certificate,
        "access_lists": by_claim(ACCESS_LIST),
        "upstream": by_claim(UPSTREAM),
        "agents": by_claim(AGENT),
    }


def host_warnings(made: VirtualHost, _reading: ViewReader) -> Sequence[str]:
    """Users that nobody can log in as yet."""
    groups = (made.spec.access, *(one.access for one in made.spec.locations))
    return [
        f"user {name!r} has no password and is refused: PATCH /v1/virtual-hosts/{made.name}"
        for name in locked_users(*groups)
    ]


UPSTREAM_WRITER = Writable(
    anywhere=True,
    permission=access.OPERATE,
    find=find_upstream,
    put=put_upstream,
    delete=delete_upstream,
    rank=12,
    referred_to=True,
    disturbs=reloads,
)
HOST_WRITER = Writable(
    anywhere=True,
    permission=access.OPERATE,
    find=find_host,
    put=put_host,
    delete=delete_host,
    rank=13,
    disturbs=reloads,
    warns=host_warnings,
)
