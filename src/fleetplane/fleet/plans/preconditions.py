"""What a request says about the version it has seen: `If-Match` and `If-None-Match`. Pure.

| The object | If-Match | Then |
|---|---|---|
| is there | names its ETag, or is `*` | goes on |
| is there | names another | 412 |
| is there | is missing, and the request replaces or patches | 428: say what you have seen |
| is not there | is given | 412 |
| is there | `If-None-Match: *` | 412 |
"""

from __future__ import annotations

from fleetplane.kernel.errors import FailedPrecondition, PreconditionFailed
from fleetplane.kernel.resources import AnyResource
from fleetplane.web.rest.routes import Headers, etag, is_of_another_lineage, matches


class PreconditionRequired(FailedPrecondition):
    """The request would overwrite something without saying which version of it was seen."""

    http_status = 428
    reason = "PRECONDITION_REQUIRED"
    hint = (
        "send If-Match with the ETag of the object as you have read it, or * to overwrite whatever is there"
    )


def check(headers: Headers, present: AnyResource | None, *, overwrites: bool) -> None:
    """Refuse a request whose conditions do not hold; `overwrites`: it needs one if the object is there."""
    wanted, unwanted = headers.get("if-match"), headers.get("if-none-match")
    if unwanted is not None and present is not None and unwanted.strip() in ("*", etag(present)):
        raise PreconditionFailed("the object is there already", field="If-None-Match")
    if present is None:
        if wanted is not None:
            raise PreconditionFailed("the object is not there", field="If-Match")
        return
    if wanted is None:
        if overwrites:
            raise PreconditionRequired("the object is there already", field="If-Match")
        return
    if not matches(wanted, present):
        lost = " it was lost before a backup was restored" if is_of_another_lineage(wanted, present) else ""
        raise PreconditionFailed(f"If-Match names another version than the present one;{lost}".rstrip(";"))
