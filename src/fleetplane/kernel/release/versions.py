"""Version numbers of releases, and their order. Pure."""

from __future__ import annotations

import re

from fleetplane.kernel.errors import InvalidArgument

VERSION_LIMIT = 64
"""Characters; a version is also the name of a folder."""
_VERSION = re.compile(
    r"(?P<numbers>[0-9]{1,9}(\.[0-9]{1,9}){0,3})((?P<stage>a|b|rc)(?P<stage_number>[0-9]{1,9}))?"
    r"(\.post(?P<post>[0-9]{1,9}))?(\.dev(?P<dev>[0-9]{1,9}))?"
)
_STAGES = {"a": 0, "b": 1, "rc": 2}
_FINAL = 3
NUMBERS = 4

VersionKey = tuple[tuple[int, ...], int, int, int, int, int]


def version_key(text: str, *, field: str = "version") -> VersionKey:
    """Sorts versions as Python's packaging does: `1.2.dev1` < `1.2a1` < `1.2rc1` < `1.2` < `1.2.post1`."""
    found = _VERSION.fullmatch(text) if len(text) <= VERSION_LIMIT else None
    if found is None:
        raise InvalidArgument(f"{text[:VERSION_LIMIT]!r} is not a version such as 1.4.2", field=field)
    numbers = [int(one) for one in found["numbers"].split(".")]
    padded = tuple(numbers + [0] * (NUMBERS - len(numbers)))
    stage = _STAGES.get(found["stage"] or "", _FINAL)
    post, dev = found["post"], found["dev"]
    if stage == _FINAL and dev is not None and post is None:
        stage = -1  # a development version comes before every stage of the same number
    return (
        padded,
        stage,
        int(found["stage_number"] or 0),
        -1 if post is None else int(post),
        1 if dev is None else 0,
        int(dev or 0),
    )


def is_older(one: str, other: str) -> bool:
    """Whether a version comes before another."""
    return version_key(one) < version_key(other)
