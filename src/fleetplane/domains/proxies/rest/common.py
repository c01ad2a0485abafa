"""What the REST modules share: the authenticator, parts of the route table, audit details, masked secrets.

A caller who may only read gets the same document with every field masked that is, or looks like, a secret, as
the audit log has it. Settings are an administrator's and hosts an operator's, so each sees what they may
write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from fleetplane.domains.proxies import audit as audit_trail
from fleetplane.domains.proxies.access import OPERATE, RAW, SYSTEM, Access, ProxyCaller
from fleetplane.domains.proxies.kinds.records import SettingsSpec
from fleetplane.domains.proxies.rules.configuration import Difference
from fleetplane.domains.proxies.tenancy.logins import ProxyBearers
from fleetplane.fleet.masking import masked, without_secrets
from fleetplane.kernel.access import Permission
from fleetplane.kernel.errors import PermissionDenied
from fleetplane.kernel.resources import AnyResource
from fleetplane.kernel.values.times import NS
from fleetplane.web.rest import bodies
from fleetplane.web.rest.problems import Code, Problem, Rejected
from fleetplane.web.rest.routes import Answer, Call, Headers, Query, etag


class Gatekeeper:
    def __init__(self, access: Access, bearers: ProxyBearers) -> None:
        self._access = access
        self._bearers = bearers

    def authenticate(self, headers: Headers) -> ProxyCaller:
        return self._bearers.of_header(headers.credential)

    def of_token(self, token: str) -> ProxyCaller:
        """The caller of a bearer token, for whatever else takes one."""
        return self._bearers.of_token(token)

    def admit(self, caller: ProxyCaller, permission: Permission | None, path: Mapping[str, str]) -> str:
        if permission == SYSTEM:
            if not caller.is_system_admin:
                raise PermissionDenied("only a system administrator may do this")
            return ""
        return self._access.admit(caller, permission, path)


V = TypeVar("V")

ProxyCall = Call[ProxyCaller]
NO_CONTENT = 204
CREATED = 201
STOP_LIMIT_SECONDS = 600
"""That a stop of NGINX may take."""

PAGING: Sequence[Query] = (
    Query(name="page", summary="Page number, from 1", kind="integer", default=1, low=1),
    Query(name="per_page", summary="Rows per page", kind="integer", default=20, low=1, high=100),
)
WINDOW: Sequence[Query] = (
    Query(name="from", summary="Inclusive; one hour before `to` when absent", kind="date-time"),
    Query(name="to", summary="Exclusive; now when absent", kind="date-time"),
)
NS_PER_HOUR = 3600 * NS
NS_PER_DAY = 24 * NS_PER_HOUR


def actor(call: ProxyCall) -> str:
    """Who is audited for a write, and under which circumstances; what it writes happens once."""
    return call.signed(commander(call))


def commander(call: ProxyCall) -> str:
    """The actor of a command to an agent, without a receipt: a command that failed may be repeated."""
    return circumstances(call, call.caller.name)


def circumstances(call: ProxyCall, name: str) -> str:
    """A name with what is known of the request."""
    return audit_trail.actor(
        name,
        request_id=call.request_id,
        address=call.address,
        user_agent=call.user_agent,
    )


def if_match(call: ProxyCall) -> str | None:
    return call.headers.get("if-match")


def shown(view: V, resource: AnyResource) -> Answer[V]:
    """A single resource, with the tag that a later change may name."""
    return Answer(content=view, headers={"etag": etag(resource)})


def created(view: V, resource: AnyResource, place: str) -> Answer[V]:
    return Answer(content=view, headers={"etag": etag(resource), "location": f"/v1/{place}/{resource.name}"})


def done() -> Answer[None]:
    return Answer(content=None)


def changes(patch: msgspec.Struct) -> dict[str, Any]:
    """The fields that a PATCH names; none is a mistake."""
    found = bodies.given(patch)
    if not found:
        raise Rejected(Problem(field="", message="Nothing to change", code=Code.REQUIRED))
    return found


def window(query: Mapping[str, str], *, now_ns: int, longest_ns: int) -> tuple[int, int]:
    """The time that a question is about."""
    to_ns = bodies.parsed(query["to"], field="to") if "to" in query else now_ns
    from_ns = bodies.parsed(query["from"], field="from") if "from" in query else to_ns - NS_PER_HOUR
    if from_ns >= to_ns:
        raise Rejected(Problem(field="from", message="Must be before `to`", code=Code.OUT_OF_RANGE))
    if to_ns - from_ns > longest_ns:
        days = longest_ns // NS_PER_DAY
        raise Rejected(Problem(field="from", message=f"More than {days} days", code=Code.OUT_OF_RANGE))
    return from_ns, to_ns


T = TypeVar("T")
SETTINGS_SECTION = "settings"


class Secrecy:
    def __init__(self, access: Access) -> None:
        self._access = access

    def settings(self, call: ProxyCall, spec: SettingsSpec) -> SettingsSpec:
        return spec if self._access.may(call.caller, RAW, call.scope) else without_secrets(spec)

    def hosts(self, call: ProxyCall, view: T) -> T:
        """A virtual host, an upstream, or a document with nothing but such in it."""
        return view if self._access.may(call.caller, OPERATE, call.scope) else without_secrets(view)

    def document(self, call: ProxyCall, whole: T) -> T:
        """Anything that has settings beside hosts and upstreams."""
        if self._access.may(call.caller, RAW, call.scope):
            return whole
        if not self._access.may(call.caller, OPERATE, call.scope):
            return without_secrets(whole)
        fields: dict[str, Any] = msgspec.to_builtins(whole)
        if SETTINGS_SECTION in fields:
            fields[SETTINGS_SECTION] = masked(fields[SETTINGS_SECTION])
        return msgspec.convert(fields, type(whole))

    def differences(self, call: ProxyCall, found: Iterator[Difference]) -> Iterator[Difference]:
        raw, operate = (self._access.may(call.caller, right, call.scope) for right in (RAW, OPERATE))
        for one in found:
            if raw if one.section == SETTINGS_SECTION else operate:
                yield one
            else:
                yield msgspec.structs.replace(
                    one,
                    fields={
                        name: (masked(_plain(old), name), masked(_plain(new), name))
                        for name, (old, new) in one.fields.items()
                    },
                )


def _plain(value: object) -> Any:
    return msgspec.to_builtins(value)
