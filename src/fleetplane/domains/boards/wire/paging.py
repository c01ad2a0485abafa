"""Pages by number, as the original services count them: from 1, with a size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

PAGE_DEFAULT = 50
PAGE_LIMIT = 1000

T = TypeVar("T")


def page_of(found: Sequence[T], *, page: int, page_size: int) -> Sequence[T]:
    """What is below 1 is taken for the first page, and for the usual size."""
    size = min(page_size, PAGE_LIMIT) if page_size > 0 else PAGE_DEFAULT
    start = (max(page, 1) - 1) * size
    return found[start : start + size]
