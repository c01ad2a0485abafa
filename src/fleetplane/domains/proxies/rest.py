"""What the REST rooms share: the words of the route table, and the circumstances of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fleetplane.domains.proxies import audit_trail
from fleetplane.domains.proxies.access import Caller
from fleetplane.kernel.resources import AnyResource
from fleetplane.web import bodies, times
from fleetplane.web.problems import Code, Problem, Rejected
from fleetplane.web.routes import Answer, Call, Query, etag

ProxyCall = Call[Caller]
NO_CONTENT = 204
CREATED = 201

PAGING: Sequence[Query] = (
    Query(name="page", summary="From 1", kind="integer", default=1, low=1),
    Query(name="per_page", summary="Rows a page", kind="integer", default=20, low=1, high=100),
)
WINDOW: Sequence[Query] = (
    Query(name="from", summary="Inclusive; one hour before `to` when absent", kind="date-time"),
    Query(name="to", summary="Exclusive; now when absent", kind="date-time"),
)
NS_PER_HOUR = 3600 * times.NS_PER_SECOND
NS_PER_DAY = 24 * NS_PER_HOUR


def actor(call: ProxyCall) -> str:
    """Who is audited for a write, and under which circumstances; what it writes happens once."""
    return call.signed(commander(call))


def commander(call: ProxyCall) -> str:
    """The same for a command to an agent. One that was not carried out may be given again."""
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


def shown(view: Any, resource: AnyResource) -> Answer[Any]:
    """A single resource, with the tag that a later change may name."""
    return Answer(content=view, headers={"etag": etag(resource)})


def created(view: Any, resource: AnyResource, place: str) -> Answer[Any]:
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
    to_ns = times.parsed(query["to"], field="to") if "to" in query else now_ns
    from_ns = times.parsed(query["from"], field="from") if "from" in query else to_ns - NS_PER_HOUR
    if from_ns >= to_ns:
        raise Rejected(Problem(field="from", message="Must be before `to`", code=Code.OUT_OF_RANGE))
    if to_ns - from_ns > longest_ns:
        days = longest_ns // NS_PER_DAY
        raise Rejected(Problem(field="from", message=f"More than {days} days", code=Code.OUT_OF_RANGE))
    return from_ns, to_ns
