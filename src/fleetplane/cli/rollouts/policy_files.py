"""Policies for rollouts, as people write them in files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click


def policy_of(path: Path | None) -> dict[str, Any] | None:
    """The policy of a file in YAML or JSON, with the names that the fleet's own API has."""
    if path is None:
        return None
    import yaml

    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise click.UsageError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise click.UsageError(f"{path} is not a policy: it has no fields")
    waves = found.get("waves", [])
    return found | ({"waves": [str(one) for one in waves]} if isinstance(waves, list) and waves else {})


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
