"""A server that dies once it has written something for a request with a key: nobody hears the answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fleetplane.kernel.store import Store
from fleetplane.web.rest import idempotency


class Crash(BaseException):
    """The end of a process, as far as a test in the same process can have it."""


@contextmanager
def lost_answer(store: Store) -> Iterator[None]:
    """The request inside is the last thing that the server does."""
    transact = store.transact

    async def dying(change: Any, **said: Any) -> Any:
        done = await transact(change, **said)
        if idempotency._COURSE.get() is not None:
            raise Crash
        return done

    store.transact = dying  # type: ignore[method-assign]
    try:
        with pytest.raises(Crash):
            yield
    finally:
        store.transact = transact  # type: ignore[method-assign]
