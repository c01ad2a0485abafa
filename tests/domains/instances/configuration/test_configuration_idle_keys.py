"""What stands in a document without effect is told, and what the server would refuse is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.instances.configuration_samples import SMALLEST, complaints, document

from fleetplane.domains.instances.configuration import check
from fleetplane.domains.instances.configuration.idle_keys import ANY, IDLE

BALANCER = {
    "provider": "aws",
    "target_groups": [{"arn": "a", "listener_port": 1, "target_port": 2, "proxy_port": 3}],
}


def warned(**changes: Any) -> dict[str, str]:
    found = check(json.dumps(document(**changes)), name="test.jsonc").warnings
    return {problem.path: problem.message for problem in found}


ALWAYS = {"cluster.secrets", "shard.bind", "shard.advertise.health_addr", "shard.advertise.election_addr"}
"""Every document must have these."""


def test_only_what_stands_there_is_warned_of() -> None:
    assert set(warned(groups={"acme": {"web": {"template": "worker"}}})) == ALWAYS


@pytest.mark.parametrize(
    ("changes", "path", "word"),
    [
        ({"cluster__storage": {"provider": "file"}}, "cluster.storage", "instances.storage"),
        ({"cluster__leader_election": {}}, "cluster.leader_election", "elected"),
        ({"shard__leader_election": {}}, "shard.leader_election", "elected"),
        ({"shard__shutdown_timeout": "5s"}, "shard.shutdown_timeout", "shutdown.grace_seconds"),
        ({"shard__error_exit_jitter": {}}, "shard.error_exit_jitter", "ends the server"),
        (
            {"shard__garbage_collection": {"interval": "1m"}},
            "shard.garbage_collection.interval",
            "when it is due",
        ),
        ({"server": {"files": {}}}, "server.files", "no files"),
        ({"tunnels": {}}, "tunnels", "not run"),
        ({"templates__worker__size": 3}, "templates.worker.size", "has none"),
        ({"load_balancers": {"www": BALANCER}}, "load_balancers.www.target_groups[0].proxy_port", "traffic"),
        ({}, "templates.worker", "for no tenant"),
    ],
)
def test_each_key_without_effect_says_what_decides_instead(
    changes: dict[str, Any], path: str, word: str
) -> None:
    assert word in warned(**changes)[path]


def test_the_table_names_keys_that_documents_have() -> None:
    schema = Path(check.__code__.co_filename).with_name("schema.py").read_text()
    for pattern in IDLE:
        for part in pattern:
            assert part == ANY or re.search(rf"\b{part}\b", schema), part


@pytest.mark.parametrize("provider", ["google", "tmux", "proxmox", "azure"])
def test_a_provider_that_is_not_installed_is_refused(provider: str) -> None:
    infra = {**SMALLEST["shard"]["infra"], "provider": provider}
    [(path, message)] = complaints(shard__infra=infra, cluster__secrets={"provider": "memory"}).items()
    assert path == "shard.infra.provider"
    assert provider in message
    assert "aws, local, mock" in message
