"""What the REST rooms share: parts of the route table, and the audit details of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from fleetplane.domains.proxies.access import ProxyCaller
from fleetplane.domains.proxies.audit import trail as audit_trail
from fleetplane.kernel.resources import AnyResource
from fleetplane.kernel.values.times import NS
from fleetplane.web.rest import bodies
from fleetplane.web.rest.problems import Code, Problem, Rejected
from fleetplane.web.rest.routes import Answer, Call, Query, etag

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
