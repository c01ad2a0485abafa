"""Configuration documents for tests: the smallest that is valid, and the one users are shown."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from fleetplane.domains.instances.configuration import (
    ConfigurationInvalid,
    DocumentProblem,
    InstancesDocument,
    parse,
)
from fleetplane.domains.instances.configuration.schema import PROVIDERS

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "instances" / "config.jsonc"

_PORTS = {"health_addr": 8990, "election_addr": 8991, "registration_addr": 8992, "operator_addr": 8993}

SMALLEST: dict[str, Any] = {
    "cluster": {"id": "lab", "secrets": {"provider": "memory"}},
    "shard": {
        "id": "local-a",
        "infra": {"provider": "local", "region": "here", "zone": "here-a"},
        "bind": {name: f"127.0.0.1:{port}" for name, port in {**_PORTS, "agent_addr": 8994}.items()},
        "advertise": {name: f"127.0.0.1:{port}" for name, port in {**_PORTS, "agent_addr": 8994}.items()},
    },
    "templates": {"worker": {"kind": "knd", "arch": "amd64"}},
}


def document(**changes: Any) -> dict[str, Any]:
    """The smallest document, with values put at dotted paths: `shard__expiry={...}`, or removed by None."""
    made = copy.deepcopy(SMALLEST)
    for path, value in changes.items():
        *parents, last = path.split("__")
        holder = made
        for parent in parents:
            holder = holder.setdefault(parent, {})
        if value is None:
            del holder[last]
        else:
            holder[last] = value
    return made


def configuration(**changes: Any) -> InstancesDocument:
    """As a server reads it whose settings name its provider: any that documents know will do."""
    return parse(json.dumps(document(**changes)), name="test.jsonc", providers=PROVIDERS)


def example() -> InstancesDocument:
    return parse(EXAMPLE.read_bytes(), name=EXAMPLE.name)


def problems(text: str | dict[str, Any]) -> tuple[DocumentProblem, ...]:
    """What is wrong with a document; fails the test when nothing is."""
    with pytest.raises(ConfigurationInvalid) as caught:
        parse(text if isinstance(text, str) else json.dumps(text), name="test.jsonc")
    return caught.value.problems


def complaints(**changes: Any) -> dict[str, str]:
    """The problems of the smallest document with changes: messages by path."""
    return {problem.path: problem.message for problem in problems(document(**changes))}
