"""A signed list of those who may no longer come in, for agents that accept callers themselves. Pure.

The server makes one whenever its revocations change and sends it with every heartbeat of an agent that does
not have it. Agents believe it by the authority that they joined, and never take an older one in its place.
Light: the node side loads this, and nothing of the store.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from fleetplane.kernel.errors import IntegrityError

PURPOSE: Final = "revocation-list"
ENTRIES_LIMIT: Final = 20_000
"""Of one list; serials have 40 digits, so it stays below a megabyte and well below a gRPC message's 4 MB."""
SIZE_LIMIT_BYTES: Final = 3 * 1024 * 1024


class RevocationList(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    """Grows with every list; an agent never goes back to a smaller one."""
    issued_at_ns: int
    complete: bool = True
    """False if there were too many entries: then only the server itself is to be let in."""
    serials: tuple[str, ...] = ()
    """Of certificates, in hexadecimal."""
    principals: tuple[str, ...] = ()


class SignedList(msgspec.Struct, frozen=True, kw_only=True):
    content: bytes
    signature: bytes


def signed_bytes(content: bytes) -> bytes:
    """What is signed: the purpose before the content, so that the signature is good for nothing else."""
    return f"fleetplane/{PURPOSE}\0".encode() + content


def packed(signed: SignedList) -> bytes:
    return msgspec.msgpack.encode(signed)


def opened(packed_list: bytes, authorities: Iterable[x509.Certificate]) -> RevocationList:
    """The list in these bytes if one of the authorities signed it; raises `IntegrityError` otherwise."""
    if len(packed_list) > SIZE_LIMIT_BYTES:
        raise IntegrityError(
            f"a revocation list has {SIZE_LIMIT_BYTES} bytes at most, not {len(packed_list)}"
        )
    try:
        signed = msgspec.msgpack.decode(packed_list, type=SignedList)
    except msgspec.DecodeError as error:
        raise IntegrityError(f"this is no revocation list: {error}") from error
    if not any(_has_signed(authority, signed) for authority in authorities):
        raise IntegrityError("the revocation list was not signed by an authority that is trusted here")
    try:
        return msgspec.msgpack.decode(signed.content, type=RevocationList)
    except msgspec.DecodeError as error:
        raise IntegrityError(f"the signed revocation list cannot be read: {error}") from error


def _has_signed(authority: x509.Certificate, signed: SignedList) -> bool:
    key, content = authority.public_key(), signed_bytes(signed.content)
    try:
        match key:
            case ec.EllipticCurvePublicKey():
                key.verify(signed.signature, content, ec.ECDSA(hashes.SHA256()))
            case ed25519.Ed25519PublicKey():
                key.verify(signed.signature, content)
            case _:
                return False
    except InvalidSignature:
        return False
    return True
