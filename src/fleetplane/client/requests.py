"""The requests of the resource API, by what is asked; shared by both clients. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleetplane.client.calls import PAGE, PREFIX, Request, object_path, read
from fleetplane.kernel.errors import IntegrityError, InvalidArgument

MERGE_PATCH = "application/merge-patch+json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Which objects of a list."""

    scope: str = ""
    """At and below which scope; everything that the caller may see when empty."""
    labels: str = ""
    """A selector of labels, such as `role=web,env!=test`."""
    fields: str = ""
    """Requirements of fields, such as `status.state=connected`."""
    sort: str = ""
    """Paths, most important first; with - before one, descending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What applying some objects would change, computed by the server."""

    id: str
    steps: Sequence[Mapping[str, Any]]
    warnings: Sequence[str] = ()
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def is_empty(self) -> bool:
        """Whether everything is as it should be already."""
        return all(one.get("operation") == "nothing" for one in self.steps)

    @classmethod
    def of(cls, told: Any) -> Plan:
        """A plan from what the server wrote."""
        held = mapping(told)
        try:
            return cls(
                id=str(held["id"]),
                steps=[mapping(one) for one in held["steps"]],
                warnings=[str(one) for one in held.get("warnings") or ()],
                raw=held,
            )
        except (KeyError, TypeError) as error:
            raise IntegrityError(f"the server's answer is no plan: {error!r}") from error


def mapping(told: Any) -> Mapping[str, Any]:
    """An answer that has to be a JSON object."""
    if not isinstance(told, dict):
        raise IntegrityError("the server's answer is no JSON object")
    return told


def items(told: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The entries of a list that comes whole."""
    found = told.get("items")
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise IntegrityError("the server's answer is no list")
    return found


def discovery() -> Request:
    """What the API offers."""
    return read("")


def page(
    plural: str, query: Query, following: str = "", *, as_table: bool = False, limit: int = PAGE
) -> Request:
    """One page of a list, or of its table."""
    asked = {
        "scope": query.scope,
        "labels": query.labels,
        "fields": query.fields,
        "sort": query.sort,
        "limit": str(limit),
        "continue": following,
    }
    path = object_path("table", plural) if as_table else f"{PREFIX}/{_word(plural)}"
    return Request(method="GET", path=path, query=asked)


def check_goes_on(before: str, following: str) -> None:
    """Refuse a list whose pages never end."""
    if following == before:
        raise IntegrityError("the server's list goes in a circle")


def get(plural: str, name: str, scope: str = "") -> Request:
    """One object."""
    return Request(method="GET", path=object_path(_word(plural), _name(name)), query={"scope": scope})


def put(plural: str, wanted: Mapping[str, Any], *, etag: str = "", dry_run: bool = False) -> Request:
    """Create an object, or replace a version of it."""
    metadata = wanted.get("metadata") or {}
    return Request(
        method="PUT",
        path=object_path(_word(plural), _name(str(metadata.get("name") or ""))),
        query={"scope": str(metadata.get("scope") or ""), **_dry(dry_run)},
        body=wanted,
        headers=_if_match(etag),
    )


def patch(
    plural: str, name: str, patch: Mapping[str, Any], *, scope: str, etag: str, dry_run: bool
) -> Request:
    """Merge into an object."""
    return Request(
        method="PATCH",
        path=object_path(_word(plural), _name(name)),
        query={"scope": scope, **_dry(dry_run)},
        body=patch,
        headers={"content-type": MERGE_PATCH, **_if_match(etag)},
    )


def delete(plural: str, name: str, *, scope: str, etag: str, dry_run: bool) -> Request:
    """Delete an object."""
    return Request(
        method="DELETE",
        path=object_path(_word(plural), _name(name)),
        query={"scope": scope, **_dry(dry_run)},
        headers=_if_match(etag),
    )


def act(plural: str, name: str, action: str, body: Any, *, scope: str) -> Request:
    """Have something done with an object."""
    path = object_path(_word(plural), _name(name), "actions", action)
    return Request(method="POST", path=path, query={"scope": scope}, body={} if body is None else body)


def explain(plural: str, name: str, *, scope: str) -> Request:
    """Why an object is as it is."""
    return Request(
        method="GET", path=object_path(_word(plural), _name(name), "explain"), query={"scope": scope}
    )


def figures(plural: str, query: Query) -> Request:
    """What was measured of objects lately."""
    asked = {"scope": query.scope, "labels": query.labels, "fields": query.fields}
    return Request(method="GET", path=object_path("figures", _word(plural)), query=asked)


def history(plural: str, name: str, *, scope: str, since: str, until: str, step: int) -> Request:
    """What was measured of an object over time."""
    asked = {"scope": scope, "from": since, "to": until, "step": str(step) if step else ""}
    return Request(method="GET", path=object_path(_word(plural), _name(name), "figures"), query=asked)


def plan(
    objects: Sequence[Mapping[str, Any]], *, owner: str, scope: str, prune: bool, take_over: bool
) -> Request:
    """What applying these objects would change."""
    body: dict[str, Any] = {"objects": list(objects)}
    if owner:
        body["owner"] = owner
    if scope:
        body["scope"] = scope
    if prune:
        body["prune"] = True
    if take_over:
        body["takeOver"] = True
    return Request(method="POST", path=f"{PREFIX}/plans", body=body)


def apply_plan(plan_id: str) -> Request:
    """Apply a plan."""
    return Request(method="POST", path=object_path("plans", plan_id, "apply"), body={})


def forget_plan(plan_id: str) -> Request:
    """Forget a plan."""
    return Request(method="DELETE", path=object_path("plans", plan_id))


def export(scope: str, kinds: str) -> Request:
    """All desired state, as objects for a plan elsewhere."""
    return read("/export", scope=scope, kinds=kinds)


def whoami() -> Request:
    """Who the caller is, with every role and what gave it."""
    return read("/people/whoami")


def can_i(verb: str, plural: str, scope: str) -> Request:
    """Whether the caller may do something, and why."""
    return read("/people/can-i", verb=verb, kind=plural, scope=scope)


def tokens(method: str, name: str = "", body: Any = None) -> Request:
    """Tokens of programs: list them, make one, or revoke one by its name."""
    path = object_path("people", "tokens", _name(name)) if name else object_path("people", "tokens")
    return Request(method=method, path=path, body=body)


def watched(plural: str, scope: str) -> str:
    """A resource in a watch, at and below a scope."""
    return f"{plural}@{scope}" if scope else plural


def _dry(dry_run: bool) -> dict[str, str]:
    return {"dryRun": "1"} if dry_run else {}


def _if_match(etag: str) -> dict[str, str]:
    return {"if-match": etag} if etag else {}


def _word(plural: str) -> str:
    if not plural or not all(one.isalnum() or one == "-" for one in plural) or not plural.isascii():
        raise InvalidArgument(f"{plural!r} is no resource", field="resource")
    return plural


def _name(name: str) -> str:
    if not name or name in (".", ".."):
        raise InvalidArgument(f"{name!r} is no name of an object", field="name")
    return name
