"""Pages over instances that are kept sorted by id, for providers that hold their own list."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from fleetplane.domains.instances.providers.contract import PAGE_LIMIT_MAX


def ids_after(ids: Sequence[str], token: str, limit: int) -> tuple[Sequence[str], str]:
    """The page of sorted `ids` that follows `token`, and the token of the next one.

    A token is the last id of its page, so that neither a deletion nor a creation in between
    moves the others: none is given twice and none that stays is skipped.
    """
    limit = max(1, min(limit, PAGE_LIMIT_MAX))
    start = bisect_right(ids, token) if token else 0
    page = ids[start : start + limit]
    return page, page[-1] if start + limit < len(ids) else ""
