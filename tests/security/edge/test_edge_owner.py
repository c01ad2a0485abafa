"""What a server, or somebody who may configure through it, can make a node do against its owner's word."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.edge.edge_daemon_rig import configure, edge_section, enrolled, running
from support.edge.edge_server_double import EdgeServerDouble, edge_server, until

from fleetplane.domains.edge.agent.config import layers
from fleetplane.domains.edge.agent.config.document import DaemonConfig, decode
from fleetplane.domains.edge.agent.identity.enrolment import first_document
from fleetplane.domains.edge.agent.identity.state_folder import StateFolder
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.kernel.errors import SettingsError
from fleetplane.node import variables

NODE = "11111111-2222-4333-8444-555555555555"
EVERYTHING = {"tool_pattern": "*"}
CODE = (
    "BASH_ENV",
    "ENV",
    "PATH",
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "LD_AUDIT",
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "PYTHONHOME",
    "IFS",
    "PERL5LIB",
    "PERL5OPT",
    "RUBYOPT",
    "NODE_OPTIONS",
    "JAVA_TOOL_OPTIONS",
    "GIT_SSH_COMMAND",
    "BASH_FUNC_ls%%",
    "SHELLOPTS",
    "PS4",
    "PROMPT_COMMAND",
    "GCONV_PATH",
    "LESSOPEN",
    "GLIBC_TUNABLES",
)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EdgeServerDouble]:
    async with edge_server(tmp_path / "server") as double:
        yield double


@pytest.fixture
async def state(tmp_path: Path, server: EdgeServerDouble) -> StateFolder:
    return await enrolled(tmp_path / "node", server)


def _contexts(*capabilities: dict[str, Any], name: str = "zaru-free", **more: Any) -> dict[str, Any]:
    return {"spec": {"security_contexts": [{"name": name, "capabilities": list(capabilities), **more}]}}


def _push(server: EdgeServerDouble, version: str, delta: dict[str, Any]) -> None:
    config = pb.PushConfig(config_delta=json.dumps(delta).encode(), version=version)
    server.send(pb.EdgeCommand(push_config=config))


def _owner(**edge: Any) -> DaemonConfig:
    made = first_document(node_id=NODE, tenant="acme", endpoint="relay:443", labels={}, minimal=False)
    made["spec"]["cluster"]["edge"] |= edge  # type: ignore[index]
    return decode(made, "owner")


# The ceiling.


async def test_a_pushed_context_permits_nothing_that_the_owners_does_not(
    server: EdgeServerDouble, state: StateFolder, tmp_path: Path
) -> None:
    listing = {"tool_pattern": "fs.list", "path_allowlist": ["/usr"]}
    configure(state, _contexts(listing, deny_list=["cmd.run"]))
    mark = tmp_path / "mark"
    async with running(state):
        await until(lambda: server.hellos)
        _push(server, "v1", _contexts(EVERYTHING))
        await until(lambda: server.statuses("v1"))
        ran = await server.outcome("cmd.run", {"command": "touch", "args": [str(mark)]})
        assert (ran.code, mark.exists()) == ("policy_violation", False)
        assert (await server.outcome("fs.list", {"path": "/etc"})).code == "policy_violation"
        assert (await server.outcome("fs.list", {"path": "/usr"})).outcome == "ok"
        _push(server, "v2", _contexts(EVERYTHING, name="of-the-servers-making"))
        await until(lambda: server.statuses("v2"))
        unknown = await server.outcome("cmd.run", {"command": "true"}, context="of-the-servers-making")
        assert unknown.code == "security_context_not_found"
    before = len(server.hellos)
    async with running(state):  # and it is so after a restart
        await until(lambda: len(server.hellos) > before)
        _push(server, "v3", _contexts(EVERYTHING))
        await until(lambda: server.statuses("v3"))
        assert (await server.outcome("cmd.run", {"command": "true"})).code == "policy_violation"


async def test_a_pushed_context_takes_away(server: EdgeServerDouble, state: StateFolder) -> None:
    async with running(state):
        await until(lambda: server.hellos)
        _push(server, "v1", _contexts({"tool_pattern": "cmd.run", "command_allowlist": ["true"]}))
        await until(lambda: server.statuses("v1"))
        assert (await server.outcome("cmd.run", {"command": "true"})).outcome == "ok"
        assert (await server.outcome("cmd.run", {"command": "id"})).code == "policy_violation"


@pytest.mark.parametrize("key", ["max_concurrent_commands", "output_limit_bytes"])
def test_a_pushed_limit_counts_only_if_it_is_lower(key: str) -> None:
    owner = _owner(**{key: 100})
    for said, in_force in ((1000, 100), (10, 10)):
        found = layers.narrowed(owner, edge_section(**{key: said}), "pushed")
        assert getattr(found.edge, key) == in_force


async def test_pushed_mount_points_lead_nowhere_new(server: EdgeServerDouble, state: StateFolder) -> None:
    configure(state, edge_section(capabilities={"mount_points": ["/usr"]}))
    async with running(state):
        await until(lambda: server.hellos)
        _push(server, "v1", edge_section(capabilities={"mount_points": ["/"]}))
        await until(lambda: server.statuses("v1"))
        assert (await server.outcome("fs.list", {"path": "/etc"})).code == "policy_violation"
        assert (await server.outcome("fs.list", {"path": "/usr"})).outcome == "ok"


@pytest.mark.parametrize(
    "edge",
    [
        {"environment": {"SITE": "x"}},
        {"limits": {"processes": 10**6}},
        {"server_proof": "tolerated"},
        {"pin_security_contexts": True},
        {"tenant_id": "rival"},
    ],
)
def test_what_is_the_owners_alone_cannot_be_pushed(edge: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        layers.check_pushed(edge_section(**edge), {}, pinned_contexts=False)
    found = layers.narrowed(_owner(), edge_section(**edge), "pushed")
    assert found.edge == _owner().edge  # and would not be read


# Variables.


async def test_no_variable_makes_a_permitted_program_run_another(
    server: EdgeServerDouble, state: StateFolder, tmp_path: Path
) -> None:
    """As it was done: `ldd` is a script of bash, and bash reads the file that BASH_ENV names."""
    script, mark = tmp_path / "evil.sh", tmp_path / "mark"
    script.write_text(f"touch {mark}\n")
    limited = {"tool_pattern": "cmd.run", "command_allowlist": ["ldd"], "env_allowlist": ["*"]}
    configure(state, _contexts(limited))
    call = {"command": "ldd", "args": ["/bin/sh"]}
    async with running(state):
        await until(lambda: server.hellos)
        _push(server, "v1", edge_section(environment={"BASH_ENV": str(script)}))
        await until(lambda: server.statuses("v1") == ["config-refused"])
        assert (await server.outcome("cmd.run", call)).outcome == "ok"
        told = await server.outcome("cmd.run", call | {"env": {"BASH_ENV": str(script)}})
        assert told.code == "policy_violation"
    assert not mark.exists()


@pytest.mark.parametrize("name", CODE)
def test_a_variable_that_chooses_code_is_allowed_by_nothing(name: str) -> None:
    assert not variables.allowed(name, ("*", name, f"{name[:2]}*"))


@pytest.mark.parametrize("name", ["PATH", "BASH_ENV", "LD_PRELOAD", "PYTHONPATH"])
def test_nor_can_the_owner_ask_for_it(name: str) -> None:
    with pytest.raises(SettingsError, match="chooses code"):
        _owner(environment={name: "x"})
    made = first_document(node_id=NODE, tenant="acme", endpoint="relay:443", labels={}, minimal=True)
    made["spec"] |= _contexts({"tool_pattern": "cmd.run", "env_allowlist": [name]})["spec"]
    with pytest.raises(SettingsError, match="chooses code"):
        decode(made, "owner")


@pytest.mark.parametrize(
    ("name", "patterns", "allowed"),
    [
        ("LC_ALL", variables.SAFE, True),
        ("MODE", variables.SAFE, False),
        ("APP_MODE", ("APP_*",), True),
        ("HTTPS_PROXY", ("*",), False),
        ("HTTPS_PROXY", ("HTTPS_PROXY",), True),
        ("HOME", ("*",), False),
    ],
)
def test_names_are_allowed_one_by_one_or_by_a_prefix_that_steers_nothing(
    name: str, patterns: tuple[str, ...], allowed: bool
) -> None:
    assert variables.allowed(name, patterns) is allowed
