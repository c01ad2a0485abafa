"""What shapes of answers about boards have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec
from google.protobuf.message import Message as ProtoMessage
from msgspec import UNSET, UnsetType

from fleetplane.domains.boards.wire import message_json

V = TypeVar("V")


class BoardShape(msgspec.Struct, frozen=True, kw_only=True):
    """Part of an answer. Field order is the order on the wire."""


S = TypeVar("S", bound=BoardShape)


def spelled_as(message: ProtoMessage, shape: type[S], **further: object) -> S:
    """A message of gRPC as a shape that has its fields, with what REST adds to them."""
    return msgspec.convert({**message_json.plain(message), **further}, shape)


class Data(BoardShape, Generic[V], frozen=True, kw_only=True):
    """One thing, in its wrapping."""

    data: V


class Rows(BoardShape, Generic[V], frozen=True, kw_only=True):
    """One page of rows, with what a reader needs to ask for the next."""

    data: Sequence[V]
    count: int
    total: int
    limit: int
    offset: int


class Message(BoardShape, frozen=True, kw_only=True):
    message: str


class BoardError(BoardShape, frozen=True, kw_only=True):
    """Every refusal. Where boards are provisioned, `error` is the message and `code` names its kind."""

    error: str
    code: str | UnsetType = UNSET
    message: str
    request_id: str
    reason: str | UnsetType = UNSET
    field: str | UnsetType = UNSET
    hint: str | UnsetType = UNSET
    cause: str | UnsetType = UNSET
