"""Key pairs that are made here on request and whose private halves never leave.

A pair that exists is used again: certificates were issued for it.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Final

from fleetplane.domains.instances.rules import files as file_rules
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.files import write_durably
from fleetplane.node.certificates import (
    PrivateKey,
    load_private_key,
    private_pem,
    public_bytes,
    public_pem,
)

KEYS_LIMIT: Final = 256
"""Of one request; a machine needs a handful."""


def check_names(names: list[str]) -> None:
    """Refuse a request that reaches outside the folder, before any key is made."""
    if len(names) > KEYS_LIMIT:
        raise InvalidArgument(f"{len(names)} keys were asked for; {KEYS_LIMIT} is the limit")
    for name in names:
        words = file_rules.name_complaint(name)
        if words is not None:
            raise InvalidArgument(f"no key can be called {name!r}: {words}", field="key_names")


class KeyFolder:
    """All methods block on the disk."""

    def __init__(self, folder: Path, *, mode: int) -> None:
        self._folder = folder
        self._mode = mode

    def __repr__(self) -> str:
        return f"<KeyFolder {self._folder}>"

    def public_keys(self, names: list[str]) -> dict[str, bytes]:
        """The public half for every name, as base64 of its DER form; pairs that lack are made."""
        check_names(names)
        return {name: base64.b64encode(public_bytes(self._pair(name))) for name in names}

    def _pair(self, name: str) -> PrivateKey:
        place = self._folder / f"{name}.key"
        try:
            key = load_private_key(place.read_bytes(), place)
        except FileNotFoundError:
            from cryptography.hazmat.primitives.asymmetric import ed25519

            key = ed25519.Ed25519PrivateKey.generate()
            # The private half first: a public half without it would be announced and useless.
            write_durably(place, private_pem(key), mode=self._mode)
        public = self._folder / f"{name}.pub"
        if not public.exists() or public.read_bytes() != public_pem(key):
            write_durably(public, public_pem(key), mode=self._mode)
        return key
