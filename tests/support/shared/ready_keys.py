"""RSA keys that are made once and given out in turn: making one takes a fifth of a second of a processor."""

from __future__ import annotations

import threading
from typing import Any

from cryptography.hazmat.primitives.asymmetric import rsa

KEYS = 6
"""More than any test has at the same time that must not be the same: two in each of three servers."""
_generate = rsa.generate_private_key


class ReadyKeys:
    """Stands in for `rsa.generate_private_key`."""

    def __init__(self) -> None:
        self._made: list[rsa.RSAPrivateKey] = []
        self._next = 0
        self._one_at_a_time = threading.Lock()

    def fill(self) -> None:
        for _ in range(KEYS):
            self.generate(65537, 2048)

    def skip(self, number: int) -> None:
        """Let those who come next begin later in the row."""
        self._next += number

    def generate(self, public_exponent: int, key_size: int, backend: Any = None) -> rsa.RSAPrivateKey:
        if (public_exponent, key_size) != (65537, 2048):
            return _generate(public_exponent, key_size, backend)
        with self._one_at_a_time:
            if len(self._made) < KEYS:
                self._made.append(_generate(public_exponent, key_size, backend))
                return self._made[-1]
            self._next += 1
            return self._made[self._next % KEYS]
