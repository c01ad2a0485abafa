"""What a resource is.

A resource is addressed by kind, scope and name, and carries labels, a spec (what should be),
a status (what is), conditions (single findings about it) and the counters that the store
keeps. This module decides how these are shaped, bounded and encoded; it does not know any
domain's fields, nor where resources are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar, cast

import msgspec

from fleetplane.kernel.errors import IntegrityError, InvalidArgument
from fleetplane.kernel.sealing import Sealer

KIND_LIMIT_BYTES = 64
SCOPE_LIMIT_BYTES = 1024
NAME_LIMIT_BYTES = 1024
"""A device name may be 253 characters of any script: 253 * 4 bytes of UTF-8, rounded up."""
LABELS_LIMIT = 64
LABEL_LIMIT_BYTES = 256
"""Of a label's key, and of its value."""
BODY_LIMIT_BYTES = 1024 * 1024
"""Of one resource as it is stored."""

SpecT = TypeVar("SpecT")
StatusT = TypeVar("StatusT")


class Nothing(msgspec.Struct, frozen=True):
    """The spec or status of a kind that has none."""


class Key(NamedTuple):
    """The address of a resource."""

    kind: str
    scope: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.scope}/{self.name}" if self.scope else f"{self.kind} {self.name}"


class Condition(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One finding about a resource, such as `Ready=False`."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    changed_at_ns: int | None = None
    """When `status` last changed, in nanoseconds since the epoch; None if unknown."""
    writer: str = ""


class Resource(msgspec.Struct, Generic[SpecT, StatusT], frozen=True, kw_only=True, gc=False):
    """One version of one resource. Shared by all readers: never change what hangs below it."""

    kind: str
    scope: str
    name: str
    uid: str
    """Of this incarnation: a resource deleted and made again has another one."""
    labels: dict[str, str]
    spec: SpecT
    status: StatusT | None
    conditions: tuple[Condition, ...]
    revision: int
    """Of the last change."""
    created_revision: int
    """Of this incarnation's first write."""
    generation: int
    """Counts the changes of `spec`, from 1."""
    created_at_ns: int
    updated_at_ns: int

    @property
    def key(self) -> Key:
        return Key(self.kind, self.scope, self.name)


@dataclass(frozen=True)
class Kind(Generic[SpecT, StatusT]):
    """A kind of resource: its name and the types of its spec and status."""

    name: str
    spec: type[SpecT]
    status: type[StatusT]
    is_logged: bool = True
    """Whether the log has the content of each change, else only what was changed: for what is large and never
    changes, so that it is stored once. A watch that resumes from the log is then told of what is still
    there, and a deletion has no spec."""
    since_level: int = 1
    """The level of the store from which on it may be written; see `store/servers/level.py`."""
    is_secret: bool = False
    """Whether spec, status and conditions may hold secrets: they are sealed wherever they are stored."""
    sealer: Sealer | None = field(default=None, repr=False, compare=False)
    """Of the store that reads this kind; None in the declaration, and where a store has no key."""

    def key(self, scope: str, name: str) -> Key:
        return Key(self.name, scope, name)

    def decode(self, body: bytes) -> Resource[SpecT, StatusT]:
        try:
            if self.sealer is not None:
                found = _BARE.decode(body)
                if isinstance(found.spec, bytes):  # else it was written before its kind was sealed
                    content = self.sealer.open(found.spec, found.kind, found.scope, found.name, found.uid)
                    return cast("Resource[SpecT, StatusT]", self._unsealed(found, content))
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeError, TypeError) as error:  # TypeError: not even bytes any more
            raise IntegrityError(f"a stored {self.name} cannot be read: {error}") from error

    def decode_logged(self, body: bytes) -> AnyResource:
        """From the log: without spec and status if this kind is not logged."""
        if self.is_logged:
            return self.decode(body)
        try:
            return _BARE.decode(body)
        except (msgspec.MsgspecError, UnicodeError, TypeError) as error:
            raise IntegrityError(f"a logged {self.name} cannot be read: {error}") from error

    def _unsealed(self, found: AnyResource, content: bytes) -> AnyResource:
        spec, status, conditions = self._content.decode(content)
        return msgspec.structs.replace(found, spec=spec, status=status, conditions=conditions)

    @cached_property
    def _content(self) -> msgspec.msgpack.Decoder[tuple[SpecT, StatusT | None, tuple[Condition, ...]]]:
        made = tuple[self.spec, self.status | None, tuple[Condition, ...]]  # type: ignore[name-defined]
        return msgspec.msgpack.Decoder(made)

    @cached_property
    def _decoder(self) -> msgspec.msgpack.Decoder[Resource[SpecT, StatusT]]:
        # The types are values here, so the generic is built by subscription at run time.
        made = Resource[self.spec, self.status]  # type: ignore[name-defined]
        return cast("msgspec.msgpack.Decoder[Resource[SpecT, StatusT]]", msgspec.msgpack.Decoder(made))


AnyKind = Kind[Any, Any]
AnyResource = Resource[Any, Any]
"""For the kernel's own rooms, which hold every kind side by side."""

_ENCODER = msgspec.msgpack.Encoder()
_BARE = msgspec.msgpack.Decoder(Resource[Any, Any])


def bare(resource: AnyResource) -> AnyResource:
    """What is logged of a kind that is not: which resource, and when."""
    return msgspec.structs.replace(resource, spec=None, status=None, labels={}, conditions=())


def encode(resource: AnyResource, sealer: Sealer | None = None) -> bytes:
    """A resource as stored: MessagePack with field names, so that fields may be added later.

    With a sealer, the spec is replaced by spec, status and conditions, sealed.
    """
    try:
        body = _ENCODER.encode(resource)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"{resource.key} cannot be encoded: {error}") from error
    if len(body) > BODY_LIMIT_BYTES:
        raise InvalidArgument(f"{resource.key} takes {len(body)} bytes, more than {BODY_LIMIT_BYTES}")
    if sealer is None:
        return body
    content = _ENCODER.encode((resource.spec, resource.status, resource.conditions))
    sealed = sealer.seal(content, *resource.key, resource.uid)
    return _ENCODER.encode(msgspec.structs.replace(resource, spec=sealed, status=None, conditions=()))


def check_key(key: Key) -> None:
    """Refuse an address that could not be stored or told apart."""
    check_text("kind", key.kind, KIND_LIMIT_BYTES)
    check_text("scope", key.scope, SCOPE_LIMIT_BYTES, may_be_empty=True)
    check_text("name", key.name, NAME_LIMIT_BYTES)


def check_labels(labels: Mapping[str, str]) -> None:
    if len(labels) > LABELS_LIMIT:
        raise InvalidArgument(f"{len(labels)} labels, more than {LABELS_LIMIT}", field="labels")
    for name, value in labels.items():
        check_text("labels", name, LABEL_LIMIT_BYTES)
        check_text("labels", value, LABEL_LIMIT_BYTES, may_be_empty=True)


def check_text(field: str, text: str, limit_bytes: int, *, may_be_empty: bool = False) -> None:
    if not text and not may_be_empty:
        raise InvalidArgument(f"{field} must not be empty", field=field)
    if "\0" in text:
        raise InvalidArgument(f"{field} must not contain NUL", field=field)
    # A character takes at most four bytes, so short ASCII text needs no encoding to be measured.
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{field} is not valid Unicode text", field=field) from error
    if size > limit_bytes:
        raise InvalidArgument(f"{field} takes {size} bytes, more than {limit_bytes}", field=field)
