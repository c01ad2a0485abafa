"""Answers of agents that only whoever asked can read: sealed to a key that was made for one question.

X25519 between that key and one of the answer's own, HKDF-SHA256, ChaCha20-Poly1305. Each key seals once, so
the nonce is constant. Libraries are loaded when they are needed: an agent does this in a process that ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

PUBLIC_BYTES: Final = 32
_PURPOSE: Final = b"fleetplane/proxies/sealed-answer/1"
_NONCE: Final = bytes(12)


class Opener:
    """The key of one question."""

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._key = X25519PrivateKey.generate()
        self.public = self._key.public_key().public_bytes_raw()

    def __repr__(self) -> str:
        return "<Opener>"

    def opened(self, sealed: bytes) -> bytes:
        """Raises ValueError for what was not sealed to this key."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

        try:
            other = X25519PublicKey.from_public_bytes(sealed[:PUBLIC_BYTES])
            secret = self._key.exchange(other)
            return _cipher(secret, self.public, sealed[:PUBLIC_BYTES]).decrypt(
                _NONCE, sealed[PUBLIC_BYTES:], None
            )
        except InvalidTag as error:
            raise ValueError("the answer is not sealed to this question") from error


def seal(content: bytes, to: bytes) -> bytes:
    """Seal an answer to the public key of its question; raises ValueError for what is no such key."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    own = X25519PrivateKey.generate()
    public = own.public_key().public_bytes_raw()
    secret = own.exchange(X25519PublicKey.from_public_bytes(to))
    return public + _cipher(secret, to, public).encrypt(_NONCE, content, None)


def seal_pair(chain: str, key: str, to: bytes) -> bytes:
    """Seal a certificate with its key; raises ValueError for a key that is not the certificate's.

    A configuration can name any key of its machine beside a certificate.
    """
    import msgspec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509 import load_pem_x509_certificates

    try:
        is_pair = (
            load_pem_x509_certificates(chain.encode())[0].public_key()
            == load_pem_private_key(key.encode(), None).public_key()
        )
    except (ValueError, TypeError) as error:  # without what the library says of a key
        raise ValueError("the certificate or its key cannot be read") from error
    if not is_pair:
        raise ValueError("the key is another certificate's")
    return seal(msgspec.json.encode({"certificate": chain, "private_key": key}), to)


def _cipher(secret: bytes, question: bytes, answer: bytes) -> ChaCha20Poly1305:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    derived = HKDF(hashes.SHA256(), length=32, salt=question + answer, info=_PURPOSE).derive(secret)
    return ChaCha20Poly1305(derived)
