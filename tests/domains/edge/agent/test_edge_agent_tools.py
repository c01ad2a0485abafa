"""Tools of installed packages: found by entry point, held to the same policy, and not trusted to be right."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from support.edge.edge_daemon_rig import configure, enrolled, running
from support.edge.edge_server_double import EdgeServerDouble, until

from fleetplane.domains.edge.agent.tools import registry
from fleetplane.domains.edge.agent.tools.contract import (
    BadArguments,
    Claims,
    CommandOutcomeReport,
    PermittedCall,
    ProgramStream,
    Tool,
)
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.kernel.errors import SettingsError


class Greeter:
    """As a package would offer it."""

    name = "hello.greet"

    def claims(self, arguments: Mapping[str, object]) -> Claims:
        match arguments.get("mood"):
            case "rude":
                raise BadArguments("mood: is rude", field="mood")
            case "broken":
                raise RuntimeError("no idea")
        return Claims(domains=(str(arguments.get("domain", "example.com")),))

    async def run(self, call: PermittedCall) -> CommandOutcomeReport:
        match call.arguments.get("mood"):
            case "failing":
                raise RuntimeError("oh no")
            case "late":
                raise TimeoutError("of its own")
            case "stubborn":
                await call.emit(ProgramStream.STDOUT, b"it begins\n")
                try:
                    await asyncio.sleep(300)
                finally:
                    await call.emit(ProgramStream.STDERR, b"tidied up\n")
        await call.emit(ProgramStream.STDOUT, b"good day\n")
        return CommandOutcomeReport(structured={"greeted": True})


class Impostor(Greeter):
    name = "cmd.run"


class NoTool: ...


def entry(name: str) -> EntryPoint:
    return EntryPoint(name="x", value=f"{__name__}:{name}", group=registry.GROUP)


def test_packages_offer_tools_and_cannot_take_a_name_that_is_given() -> None:
    assert set(registry.load([entry("Greeter"), entry("Greeter")])) == {
        "cmd.run",
        "fs.read",
        "fs.list",
        "fs.write",
        "hello.greet",
    }
    for name, words in (
        ("Impostor", "the daemon itself"),
        ("NoTool", "claims"),
        ("Missing", "cannot be loaded"),
    ):
        with pytest.raises(SettingsError, match=words):
            registry.load([entry(name)])


@pytest.mark.parametrize(
    ("arguments", "outcome", "code"),
    [
        ({}, "ok", ""),
        ({"domain": "api.example.com"}, "ok", ""),
        ({"domain": "evil.net"}, "error", "policy_violation"),
        ({"mood": "rude"}, "error", "invalid_arguments"),
        ({"mood": "broken"}, "error", "internal"),
        ({"mood": "failing"}, "error", "internal"),
        ({"mood": "late"}, "error", "internal"),
    ],
)
async def test_whatever_a_tool_does_the_daemon_goes_on(
    server: EdgeServerDouble, tmp_path: Path, arguments: dict[str, object], outcome: str, code: str
) -> None:
    state = await enrolled(tmp_path / "state", server)
    capability = {"tool_pattern": "hello.*", "domain_allowlist": ["example.com"]}
    configure(state, {"spec": {"security_contexts": [{"name": "zaru-free", "capabilities": [capability]}]}})
    greeter: Tool = Greeter()
    async with running(state, tools={greeter.name: greeter}):
        await until(lambda: server.hellos)
        found = await server.outcome("hello.greet", arguments)
        assert (found.outcome, found.code) == (outcome, code)
        again = await server.outcome("hello.greet", {})
        assert (again.outcome, again.structured) == ("ok", {"greeted": True})
    assert len(server.hellos) == 1


async def test_a_cancelled_tool_may_tidy_up_before_it_is_said_to_be_cancelled(
    server: EdgeServerDouble, tmp_path: Path
) -> None:
    state = await enrolled(tmp_path / "state", server)
    greeter: Tool = Greeter()
    async with running(state, tools={greeter.name: greeter}):
        await until(lambda: server.hellos)
        command_id = server.invoke("hello.greet", {"mood": "stubborn"})
        await until(lambda: server.output(command_id, "stdout"))
        server.send(pb.EdgeCommand(cancel=pb.Cancel(command_id=command_id)))
        await until(lambda: server.result(command_id) is not None)
    found = server.result(command_id)
    assert found is not None
    assert found.outcome == "cancelled"
    assert server.output(command_id, "stderr") == b"tidied up\n"
