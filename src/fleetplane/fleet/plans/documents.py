"""Documents as JSON values: merge patches (RFC 7396), and the difference of two, field by field.

Pure. Knows nothing of resources: an object's spec is a document here, and so are its labels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Step = str | int
"""One step of a path: the key of an object or the index of a list."""

DEPTH_LIMIT = 64
"""Of a document that is compared: ours are less than ten levels deep, and every level is a call."""
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class FieldChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One field that differs. `old` is absent of a field that is new, `new` of one that goes."""

    path: tuple[Step, ...]
    old: Any = msgspec.UNSET
    new: Any = msgspec.UNSET

    @property
    def field(self) -> str:
        """The path as people write it, such as `spec.locations[0].path`."""
        return spelled(self.path)


def spelled(path: Iterable[Step]) -> str:
    """A path as people write it; keys that are no plain words are quoted."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif _PLAIN.fullmatch(step):
            text += f".{step}" if text else step
        else:
            text += f"[{msgspec.json.encode(step).decode()}]"
    return text


def merge_patch(target: Json, patch: Json) -> Json:
    """`target` with a merge patch applied, as RFC 7396 says; neither is changed.

    Objects are merged key by key, null removes a key, and everything else replaces what was there.
    """
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


def difference(old: Json, new: Json) -> list[FieldChange]:
    """What leads from one document to another, field by field, in the order of the keys.

    Lists of the same length are compared element by element; of different lengths they differ as a whole.
    """
    return list(_differing(old, new, ()))


def _differing(old: Json, new: Json, path: tuple[Step, ...]) -> Iterator[FieldChange]:
    if len(path) < DEPTH_LIMIT:
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _of_objects(old, new, path)
            return
        if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
            for index, (one, other) in enumerate(zip(old, new, strict=True)):
                yield from _differing(one, other, (*path, index))
            return
    if not same(old, new):
        yield FieldChange(path=path, old=old, new=new)


def _of_objects(
    old: Mapping[str, Json], new: Mapping[str, Json], path: tuple[Step, ...]
) -> Iterator[FieldChange]:
    for key in sorted(old.keys() | new.keys()):
        here = (*path, key)
        if key not in new:
            yield FieldChange(path=here, old=old[key])
        elif key not in old:
            yield FieldChange(path=here, new=new[key])
        else:
            yield from _differing(old[key], new[key], here)


def same(one: Json, other: Json) -> bool:
    """Whether two documents say the same. True is not 1, and 1 is 1.0 as in JSON."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def applied(document: Json, changes: Sequence[FieldChange]) -> Json:
    """The document after the changes; the opposite of `difference`. The document itself is not changed."""
    for change in changes:
        document = _applied(document, change.path, change.new)
    return document


def _applied(document: Json, path: Sequence[Step], new: Json | msgspec.UnsetType) -> Json:
    if not path:
        return cast("Json", new)
    first, rest = path[0], path[1:]
    if isinstance(first, int):
        copied = list(cast("list[Json]", document))
        copied[first] = _applied(copied[first], rest, new)
        return copied
    changed = dict(cast("dict[str, Json]", document))
    if not rest and new is msgspec.UNSET:
        changed.pop(first, None)
    else:
        changed[first] = _applied(changed.get(first), rest, new)
    return changed
