"""Policies for rollouts, as people write them in files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

FILE_LIMIT = 64 * 1024
"""Characters: a hundred gates take a tenth of it."""
VALUES_LIMIT = 10_000


def policy_of(path: Path | None) -> dict[str, Any] | None:
    """The policy of a file in YAML or JSON, with the names that the fleet's own API has."""
    if path is None:
        return None
    import yaml

    try:
        if not path.is_file():
            raise click.UsageError(f"{path} is not a file")
        with path.open(encoding="utf-8") as file:
            text = file.read(FILE_LIMIT + 1)
        found = yaml.safe_load(text) if len(text) <= FILE_LIMIT else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise click.UsageError(f"{path} cannot be read: {error}") from None
    if len(text) > FILE_LIMIT or _is_large(found):
        raise click.UsageError(f"{path} is not a policy: it is too long")
    if not isinstance(found, dict):
        raise click.UsageError(f"{path} is not a policy: it has no fields")
    waves = found.get("waves", [])
    return found | ({"waves": [str(one) for one in waves]} if isinstance(waves, list) and waves else {})


def _is_large(found: Any) -> bool:
    """Whether it has more values than any policy; what stands there by reference counts each time."""
    seen, left = 0, [found]
    while left and seen <= VALUES_LIMIT:
        one = left.pop()
        seen += 1
        left += one.values() if isinstance(one, Mapping) else one if isinstance(one, list) else ()
    return seen > VALUES_LIMIT


def read_policy(path: Path) -> Mapping[str, Any]:
    """The same with the names that the resource API has."""
    found: Mapping[str, Any] = camel(policy_of(path))
    return found


def camel(value: Any) -> Any:
    """Names of fields as `maxFailures` instead of `max_failures`, at every depth."""
    if isinstance(value, Mapping):
        return {
            re.sub(r"_([a-z])", lambda found: found[1].upper(), str(key)): camel(one)
            for key, one in value.items()
        }
    return [camel(one) for one in value] if isinstance(value, list) else value
