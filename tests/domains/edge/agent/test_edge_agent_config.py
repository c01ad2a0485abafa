"""The daemon's configuration: layers, rules, what may be pushed, and words that name the key."""

from __future__ import annotations

import copy
import hashlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import structlog
import yaml

from fleetplane.domains.edge.agent.config import document as config
from fleetplane.domains.edge.agent.config.layers import DaemonConfiguration
from fleetplane.domains.edge.agent.identity import enrolment
from fleetplane.domains.edge.agent.identity.state_folder import StateFolder
from fleetplane.kernel.errors import SettingsError

NODE = "11111111-2222-4333-8444-555555555555"


def document() -> dict[str, Any]:
    return copy.deepcopy(
        enrolment.first_document(
            node_id=NODE, tenant="u-1", endpoint="relay:443", labels={"a": "b"}, minimal=False
        )
    )


class SlowFolder(StateFolder):
    """Writes what was pushed only when told."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reached, self.go = threading.Event(), threading.Event()

    def write(self, path: Path, content: bytes) -> None:
        if path == self.pushed:
            self.reached.set()
            assert self.go.wait(60)
        super().write(path, content)


def configuration(folder: Path, **changes: Any) -> DaemonConfiguration:
    state = StateFolder(folder)
    state.make()
    state.store_document(yaml.safe_dump(config.merge(document(), changes)).encode())
    made = DaemonConfiguration(state, user_config=folder / "user.yaml", log=structlog.get_logger())
    made.load()
    return made


def test_what_enrolment_writes_can_be_read_again() -> None:
    read = config.decode(config.parse(enrolment.render(document()), "f"), "f")
    assert (read.spec.node.id, read.edge.tenant_id, read.endpoint) == (NODE, "u-1", "relay:443")
    assert read.edge.stream_reconnect_backoff_secs == (1, 2, 5, 15, 60)
    assert [context.name for context in read.spec.security_contexts] == list(enrolment.CONTEXT_NAMES)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("kind", "Pod", "kind: is 'Pod'"),
        ("spec.cluster.role", "worker", "spec.cluster.role"),
        ("spec.cluster.edge", None, "spec.cluster.edge: is missing"),
        (
            "spec.cluster.heartbeat_interval_secs",
            "often",
            "spec.cluster.heartbeat_interval_secs: Expected float",
        ),
        ("spec.cluster.heartbeat_interval_secs", 3601, "is not between 0 and 3600"),
        ("spec.cluster.cluster_grpc_port", 50057, "spec.cluster.cluster_grpc_port"),
        ("spec.cluster.controller.endpoint", " ", "spec.cluster.controller.endpoint"),
        (
            "spec.cluster.edge.stream_reconnect_backoff_secs",
            [0],
            "spec.cluster.edge.stream_reconnect_backoff_secs",
        ),
        (
            "spec.cluster.edge.stream_reconnect_backoff_secs",
            [],
            "spec.cluster.edge.stream_reconnect_backoff_secs",
        ),
        ("spec.cluster.edge.max_concurrent_commands", 0, "max_concurrent_commands"),
        ("spec.cluster.edge.capabilities.custom_labels", {"a": 1}, "custom_labels"),
        ("spec.node.id", "me", "spec.node.id: is 'me' and no UUID"),
        ("spec.security_contexts", [{"name": "a"}, {"name": "a"}], "names one context twice"),
        ("spec.security_contexts", [{"name": "a", "deny": ["x"]}], "security_contexts[0]"),
        (
            "spec.security_contexts",
            [{"name": "a", "capabilities": [{"tool_pattern": "*", "paths": []}]}],
            "unknown field",
        ),
    ],
)
def test_a_wrong_value_is_named_by_its_key(path: str, value: object, words: str) -> None:
    changed = document()
    *above, last = path.split(".")
    place = changed
    for key in above:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    with pytest.raises(SettingsError) as caught:
        config.decode(changed, "here.yaml")
    assert "here.yaml" in caught.value.message
    assert words in caught.value.message


def test_keys_of_other_programs_are_left_alone() -> None:
    changed = config.merge(document(), {"spec": {"llm_providers": [1], "cluster": {"edge": {"proxy": {}}}}})
    assert config.decode(changed, "f").edge.tenant_id == "u-1"


def test_sections_may_stand_at_the_top() -> None:
    spec = document()["spec"]
    assert config.decode(config.parse(yaml.safe_dump(spec).encode(), "f"), "f").endpoint == "relay:443"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"- a\n- b\n", "no object"),
        (b"a: &x [1]\nb: *x\n", "aliases"),
        (b"a: [", "cannot be read"),
        (b"!!python/object/apply:os.system ['true']", "cannot be read"),
        (json.dumps(["[" * 5]).encode(), "no object"),
        (b'{"a":' * 40 + b"1" + b"}" * 40, "nested"),
        (b"x" * (config.DOCUMENT_LIMIT_BYTES + 1), "more than"),
    ],
)
def test_documents_that_are_none_or_too_much_are_refused(text: bytes, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        config.parse(text, "f")


def test_later_layers_win_key_by_key_and_lists_as_a_whole() -> None:
    merged = config.merge({"a": {"x": 1, "y": [1, 2]}}, {"a": {"y": [3]}, "b": 1}, {"a": {"z": 2}})
    assert merged == {"a": {"x": 1, "y": [3], "z": 2}, "b": 1}


def test_what_is_pushed_goes_on_top_and_survives_a_restart(tmp_path: Path) -> None:
    (tmp_path / "user.yaml").write_text(
        "cluster: {heartbeat_interval_secs: 7, edge: {max_concurrent_commands: 3}}"
    )
    made = configuration(tmp_path, spec={"cluster": {"heartbeat_interval_secs": 20}})
    assert (made.current.heartbeat_seconds, made.current.edge.max_concurrent_commands) == (20, 3)
    delta = b'{"spec":{"cluster":{"heartbeat_interval_secs":5}}}'
    made.push(hashlib.sha256(delta).hexdigest(), delta)
    assert made.current.heartbeat_seconds == 5
    again = DaemonConfiguration(StateFolder(tmp_path), user_config=None, log=structlog.get_logger())
    again.load()
    assert again.current.heartbeat_seconds == 5
    assert again.version == hashlib.sha256(delta).hexdigest()


def test_a_newer_push_replaces_the_one_before_as_a_whole(tmp_path: Path) -> None:
    made = configuration(tmp_path)
    made.push("v1", b"cluster: {heartbeat_interval_secs: 5}")
    made.push("v2", b"cluster: {edge: {max_concurrent_commands: 2}}")
    assert (made.current.heartbeat_seconds, made.current.edge.max_concurrent_commands) == (30, 2)


@pytest.mark.parametrize(
    ("delta", "words"),
    [
        (b'{"spec":{"node":{"id":"22222222-2222-4333-8444-555555555555"}}}', "spec.node"),
        (b'{"spec":{"cluster":{"controller":{"endpoint":"evil:443"}}}}', "spec.cluster.controller"),
        (b'{"spec":{"cluster":{"edge":{"tenant_id":"u-2"}}}}', "tenant_id"),
        (b'{"spec":{"cluster":{"edge":{"server_proof":"tolerated"}}}}', "server_proof"),
        (b'{"spec":{"cluster":{"edge":{"environment":{"BASH_ENV":"/tmp/x"}}}}}', "environment"),
        (b'{"spec":{"cluster":{"edge":{"limits":{"processes":100000}}}}}', "limits"),
        (b'{"spec":{"cluster":{"node_keypair_path":"/tmp/k"}}}', "node_keypair_path"),
        (b'{"spec":{"cluster":{"heartbeat_interval_secs":-1}}}', "heartbeat_interval_secs"),
        (b'{"spec":{"security_contexts":[{"name":"a","deny":[]}]}}', "deny"),
        (b"nonsense", "no object"),
    ],
)
def test_a_push_that_does_not_fit_changes_nothing(tmp_path: Path, delta: bytes, words: str) -> None:
    made = configuration(tmp_path)
    made.push("good", b'{"spec":{"cluster":{"heartbeat_interval_secs":5}}}')
    with pytest.raises(SettingsError, match=words):
        made.push("bad", delta)
    made.load()
    assert (made.version, made.current.heartbeat_seconds) == ("good", 5)


def test_a_push_may_repeat_what_is_so_already(tmp_path: Path) -> None:
    made = configuration(tmp_path)
    made.push("v", b'{"spec":{"cluster":{"role":"edge","controller":{"endpoint":"relay:443"}}}}')
    assert made.version == "v"


def test_a_version_that_is_a_digest_must_be_the_right_one(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="digest"):
        configuration(tmp_path).push("0" * 64, b"{}")


def test_an_owner_may_keep_the_contexts_to_himself(tmp_path: Path) -> None:
    delta = b'{"spec":{"security_contexts":[{"name":"open","capabilities":[{"tool_pattern":"*"}]}]}}'
    pinned = configuration(tmp_path / "a", spec={"cluster": {"edge": {"pin_security_contexts": True}}})
    with pytest.raises(SettingsError, match="security_contexts"):
        pinned.push("v", delta)
    free = configuration(tmp_path / "b")
    free.push("v", delta)
    assert free.owner.context("open") is None  # which is the ceiling


def test_the_owner_goes_before_a_push_that_no_longer_fits(tmp_path: Path) -> None:
    made = configuration(tmp_path)
    made.push("v", b'{"spec":{"security_contexts":[{"name":"pushed"}]}}')
    StateFolder(tmp_path).store_document(
        yaml.safe_dump(
            config.merge(document(), {"spec": {"cluster": {"edge": {"pin_security_contexts": True}}}})
        ).encode()
    )
    made.load()
    assert made.version == ""
    assert made.current.context("pushed") is None


def test_what_the_owner_changes_while_a_pushed_layer_is_written_counts_with_it(tmp_path: Path) -> None:
    state = SlowFolder(tmp_path)
    state.store_document(yaml.safe_dump(document()).encode())
    made = DaemonConfiguration(state, user_config=None, log=structlog.get_logger())
    made.load()
    with ThreadPoolExecutor() as threads:
        pushing = threads.submit(made.push, "v", b'{"spec":{"cluster":{"heartbeat_interval_secs":5}}}')
        assert state.reached.wait(60)
        changes = {"spec": {"cluster": {"edge": {"max_concurrent_commands": 2}}}}
        state.store_document(yaml.safe_dump(config.merge(document(), changes)).encode())
        loading = threads.submit(made.load)
        wait([loading], timeout=0.2)
        state.go.set()
        for one in (pushing, loading):
            one.result(60)
    assert made.current.edge.max_concurrent_commands == 2
    assert (made.version, made.current.heartbeat_seconds) == ("v", 5)
