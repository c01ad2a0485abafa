"""Bodies of answers that others give us, in bounds: what counts is what memory they take.

A compressed answer of a kilobyte may be a gigabyte once it is read, and a library that decompresses it shows
a whole piece of it at once. So none is asked for (`IDENTITY`), and one that comes all the same is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx

IDENTITY: Mapping[str, str] = {"accept-encoding": "identity"}
"""Headers of a question whose answer is read by `bounded_body`."""


async def bounded_body(answer: httpx.Response, *, limit_bytes: int) -> bytes:
    """The body of a streamed answer; raises `ValueError` if it is compressed or too long."""
    encoding = answer.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise ValueError(f"has the content encoding {encoding[:40]!r}, which was not asked for")
    body = bytearray()
    async for chunk in answer.aiter_raw():
        body += chunk
        if len(body) > limit_bytes:
            raise ValueError(f"is longer than {limit_bytes} bytes")
    return bytes(body)
