"""New ids, unique values, and refusals that every registry shares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fleetplane.domains.proxies.kinds.records import ID_CLAIM
from fleetplane.kernel.errors import AlreadyExists, Conflict, PreconditionFailed
from fleetplane.kernel.resources import AnyKind, AnyResource
from fleetplane.kernel.store import Draft
from fleetplane.web.rest.problems import Code, ConflictBlocker, Problem, Rejected
from fleetplane.web.rest.routes import is_of_another_lineage, matches


def register(draft: Draft, kind: AnyKind, scope: str, identity: str) -> None:
    """Make a thing's place known by its id."""
    draft.claim(kind, "", ID_CLAIM, identity, scope)


def unregister(draft: Draft, kind: AnyKind, scope: str, identity: str) -> None:
    draft.release(kind, "", ID_CLAIM, identity, scope)


def claim_unique(draft: Draft, kind: AnyKind, scope: str, field: str, value: str, owner: str) -> None:
    try:
        draft.claim(kind, scope, field, value, owner)
    except AlreadyExists as error:
        raise AlreadyExists(f"{field} {value!r} is taken", field=field) from error


def move_unique(
    draft: Draft, kind: AnyKind, scope: str, field: str, before: str, after: str, owner: str
) -> None:
    if before != after:
        claim_unique(draft, kind, scope, field, after, owner)
        draft.release(kind, scope, field, before, owner)


def check_match(condition: str | None, resource: AnyResource) -> None:
    """Refuse a change by one who has not seen the latest version."""
    if matches(condition, resource):
        return
    if is_of_another_lineage(condition, resource):
        raise PreconditionFailed("If-Match names a version that was lost before a backup was restored")
    raise Conflict("If-Match names another version than the present one")


def refuse(problems: Iterable[Problem]) -> None:
    if found := list(problems):
        raise Rejected(*found)


def hold(message: str, holders: Iterable[Problem]) -> None:
    """Refuse while anything holds on to the thing."""
    if found := list(holders):
        raise ConflictBlocker(message, found)


def holders(field: str, word: str, resources: Iterable[AnyResource]) -> Iterator[Problem]:
    for resource in resources:
        name = getattr(resource.spec, "name", None) or getattr(resource.spec, "domain", "")
        name = name or getattr(resource.spec, "zone", "")
        yield Problem(field=field, message=f"{word} {name!r} ({resource.name})", code=Code.IN_USE)
