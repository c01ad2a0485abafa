"""Shapes of the API that say the same as stored structs, in camelCase, and values from one to the other.

Pure. Where a stored spec is what operators write, field by field, its shape is made from it: nothing that the
spec has can be forgotten, and the inverse is there as well. Fields that hold ids are renamed and hold names.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Mapping
from typing import Any, Union, get_args, get_origin

import msgspec

Refer = Mapping[str, Callable[[str], str]]
"""By the name of a field of the shape: from an id to a name, or back."""


class Mirror:
    """Makes the shapes of one domain."""

    def __init__(
        self,
        prefix: str,
        *,
        renamed: Mapping[tuple[type, str], str] | None = None,
        without: Mapping[type, Collection[str]] | None = None,
    ) -> None:
        """`prefix` begins the names of the shapes. `without` are fields that are not shown."""
        self._prefix = prefix
        self._renamed = dict(renamed or {})
        self._without = dict(without or {})
        self._shapes: dict[type, type[msgspec.Struct]] = {}
        self._stored: dict[type, type] = {}

    def __repr__(self) -> str:
        return f"<Mirror {self._prefix} {len(self._shapes)}>"

    def shape(self, stored: type) -> type[msgspec.Struct]:
        """The shape of a stored struct; the same at every call."""
        if stored not in self._shapes:
            self._shapes[stored] = made = self._make(stored)
            self._stored[made] = stored
        return self._shapes[stored]

    def _make(self, stored: type) -> type[msgspec.Struct]:
        fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
        for one in self._fields(stored):
            name, kind = self._name(stored, one.name), self._type(one.type)
            if one.default is not msgspec.NODEFAULT:
                fields.append((name, kind, _defaulted(self.shown(one.default))))
            elif one.default_factory is not msgspec.NODEFAULT:
                fields.append((name, kind, msgspec.field(default_factory=one.default_factory)))
            else:
                fields.append((name, kind))
        config = stored.__struct_config__  # type: ignore[attr-defined]
        return msgspec.defstruct(
            self._prefix + stored.__name__,
            fields,
            namespace={"__doc__": stored.__doc__} if stored.__doc__ else None,
            frozen=True,
            kw_only=True,
            rename="camel",
            forbid_unknown_fields=True,
            tag_field=config.tag_field,
            tag=config.tag,
            module=__name__,
        )

    def _fields(self, stored: type) -> list[msgspec.structs.FieldInfo]:
        hidden = self._without.get(stored, ())
        return [one for one in msgspec.structs.fields(stored) if one.name not in hidden]

    def _name(self, stored: type, field: str) -> str:
        return self._renamed.get((stored, field), field)

    def _type(self, kind: Any) -> Any:
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self.shape(kind)
        origin, inner = get_origin(kind), tuple(self._type(one) for one in get_args(kind))
        if origin in (Union, types.UnionType):
            return Union[inner]  # noqa: UP007  # of types that are known at run time only
        if origin in (tuple, dict, list):
            return origin[inner]
        return kind

    def shown(self, value: Any, refer: Refer | None = None) -> Any:
        """A stored value as its shape."""
        if isinstance(value, msgspec.Struct):
            stored = type(value)
            made = {
                name: self.shown(_referred(getattr(value, one.name), name, refer), refer)
                for one in self._fields(stored)
                for name in (self._name(stored, one.name),)
            }
            return self.shape(stored)(**made)
        return _through(value, lambda one: self.shown(one, refer))

    def stored(self, value: Any, refer: Refer | None = None, **hidden: Any) -> Any:
        """The inverse of `shown`; what is not shown is `hidden`, or has its default."""
        if isinstance(value, msgspec.Struct):
            stored = self._stored[type(value)]
            made = {
                one.name: self.stored(_referred(getattr(value, name), name, refer), refer)
                for one in self._fields(stored)
                for name in (self._name(stored, one.name),)
            }
            return stored(**made, **hidden)
        return _through(value, lambda one: self.stored(one, refer))


def _referred(value: Any, field: str, refer: Refer | None) -> Any:
    resolve = (refer or {}).get(field)
    if resolve is None or not value:
        return value
    return tuple(map(resolve, value)) if isinstance(value, tuple | list) else resolve(value)


def _through(value: Any, each: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(map(each, value))
    if isinstance(value, dict):
        return {key: each(one) for key, one in value.items()}
    return value


def _defaulted(value: Any) -> Any:
    """A default as structs take it: what could be changed is made anew for each."""
    if isinstance(value, dict | list):
        kept = value
        return msgspec.field(default_factory=lambda: type(kept)(kept))
    return value
