"""A join token as a person carries it from the server to a board.

It holds a secret, and the fingerprint of the authority that the board should find at the other
end: a board that has nothing else can thus tell the right server from a wrong one before it says
anything. Shared by both sides; knows neither stores nor sockets.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass

from fleetplane.kernel.errors import InvalidArgument

PREFIX = "fpb_"
SECRET_BYTES = 32
LIMIT = 256
"""Of the whole text, in characters."""
_TEXT = re.compile(r"fpb_([A-Za-z0-9_-]{43})\.([0-9a-f]{64})")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinTokenText:
    secret: str
    ca_fingerprint: str
    """SHA-256 of the authority's certificate in DER, in hexadecimal."""

    def __str__(self) -> str:
        return f"{PREFIX}{self.secret}.{self.ca_fingerprint}"

    def __repr__(self) -> str:
        return f"<JoinTokenText ca={self.ca_fingerprint[:16]}>"


def make(random_bytes: bytes, ca_fingerprint: str) -> JoinTokenText:
    secret = base64.urlsafe_b64encode(random_bytes).rstrip(b"=").decode()
    return JoinTokenText(secret=secret, ca_fingerprint=ca_fingerprint)


def parse(text: str) -> JoinTokenText:
    found = _TEXT.fullmatch(text.strip()) if len(text) <= LIMIT else None
    if found is None:
        raise InvalidArgument(
            "this is no join token", field="join_token", hint=f"it begins with {PREFIX} and has one dot"
        )
    return JoinTokenText(secret=found[1], ca_fingerprint=found[2])
