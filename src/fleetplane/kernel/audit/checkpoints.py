"""Checkpoints of the audit chain: signed, and to be kept where its server cannot reach.

A checkpoint names an entry and its hash, and so everything before it. Whoever holds one can tell later
whether the chain still has that entry: also after somebody who had the server, its database and its
master key has written another past. The signing key is derived from the master key; its public half may
be told to anybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fleetplane.kernel.audit.chain import Head
from fleetplane.kernel.errors import IntegrityError, InvalidArgument

PURPOSE = b"fleetplane audit checkpoint 1\0"
"""What is signed begins with it, so that the signature is good for nothing else."""
LINE_LIMIT = 4096


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    lineage: str
    seq: int
    hash: str
    """Of that entry, in hexadecimal."""
    revision: int
    at_ns: int


class CheckpointLine(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint as it is kept: one line of JSON."""

    checkpoint: Checkpoint
    key: str
    signature: str


_ENCODER = msgspec.json.Encoder()
_LINES = msgspec.json.Decoder(CheckpointLine)


class CheckpointSigner:
    def __init__(self, seed: bytes) -> None:
        self._private = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = self._private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    def __repr__(self) -> str:
        return f"<CheckpointSigner {self.public.hex()[:16]}>"

    def sign(self, lineage: str, head: Head, at_ns: int) -> bytes:
        """One line, without its end."""
        made = Checkpoint(
            lineage=lineage, seq=head.seq, hash=head.hash.hex(), revision=head.revision, at_ns=at_ns
        )
        signature = self._private.sign(PURPOSE + _ENCODER.encode(made))
        return _ENCODER.encode(
            CheckpointLine(checkpoint=made, key=self.public.hex(), signature=signature.hex())
        )


def read(line: bytes | str, public: bytes) -> Checkpoint:
    """What a line says, if this key signed it."""
    try:
        if len(line) > LINE_LIMIT:
            raise ValueError("too long")
        found = _LINES.decode(line)
        signature = bytes.fromhex(found.signature)
        Ed25519PublicKey.from_public_bytes(public).verify(
            signature, PURPOSE + _ENCODER.encode(found.checkpoint)
        )
    except (msgspec.MsgspecError, UnicodeError, ValueError) as error:
        raise IntegrityError(f"a checkpoint cannot be read: {error}") from error
    except InvalidSignature as error:
        raise IntegrityError(
            f"the checkpoint of entry {found.checkpoint.seq} was not signed by this server's key"
        ) from error
    return found.checkpoint


def read_all(lines: Iterable[bytes], public: bytes) -> Iterator[Checkpoint]:
    """The checkpoints that a caller kept and gives back, one a line."""
    for index, line in enumerate(lines):
        try:
            if line.strip():
                yield read(line.strip(), public)
        except IntegrityError as error:
            raise InvalidArgument(error.message, field=f"anchors.{index}") from error
