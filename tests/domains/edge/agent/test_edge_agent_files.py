"""The file tools on a real file system: bounds, and paths that try to lead elsewhere."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from fleetplane.domains.edge.agent.commands.judge import Judge, RefusedCommand
from fleetplane.domains.edge.agent.config import document as config
from fleetplane.domains.edge.agent.config.document import DaemonConfig
from fleetplane.domains.edge.agent.tools import files, registry
from fleetplane.domains.edge.agent.tools.contract import (
    BadArguments,
    CommandOutcomeReport,
    ErrorKind,
    PermittedCall,
    ProgramStream,
    Tool,
    ToolFailed,
)
from fleetplane.domains.edge.wire.protobuf_types import struct_of
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.node import safe_open

TOOLS = registry.load(())


async def call(tool: str, path: Path, **arguments: object) -> tuple[CommandOutcomeReport, bytes]:
    """As permitted, of exactly this path."""
    heard = bytearray()

    async def emit(channel: ProgramStream, data: bytes) -> None:
        heard.extend(data)

    found: Tool = TOOLS[tool]
    given = {"path": str(path), **arguments}
    found.claims(given)
    outcome = await found.run(
        PermittedCall(
            arguments=given, paths={str(path): path}, environment={}, emit=emit, output_limit_bytes=1 << 30
        )
    )
    return outcome, bytes(heard)


async def test_a_file_is_read_in_pieces_any_byte_included(tmp_path: Path) -> None:
    content = os.urandom(100_000)
    (tmp_path / "f").write_bytes(content)
    outcome, heard = await call("fs.read", tmp_path / "f")
    assert heard == content
    assert outcome.structured is not None
    assert (outcome.structured["size"], outcome.structured["end"]) == (100_000, True)
    outcome, heard = await call("fs.read", tmp_path / "f", offset=10.0, length=5.0)
    assert heard == content[10:15]
    assert outcome.structured is not None
    assert outcome.structured["end"] is False


async def test_pipes_devices_and_folders_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        async with asyncio.timeout(60):
            with pytest.raises(ToolFailed, match=r"ordinary file|directory"):
                await call("fs.read", path)


async def test_a_folder_is_listed_with_links_as_links(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").symlink_to("/etc/passwd")
    (tmp_path / "c").mkdir()
    outcome, _ = await call("fs.list", tmp_path)
    assert outcome.structured is not None
    entries = outcome.structured["entries"]
    assert isinstance(entries, list)
    assert [(entry["name"], entry["kind"]) for entry in entries] == [
        ("a", "file"),
        ("b", "link"),
        ("c", "folder"),
    ]


async def test_a_long_list_is_cut_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ENTRIES_LIMIT", 3)
    for number in range(5):
        (tmp_path / str(number)).touch()
    outcome, _ = await call("fs.list", tmp_path)
    assert outcome.structured is not None
    assert (outcome.structured["total"], outcome.structured["complete"]) == (5, False)


async def test_a_file_is_written_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "f"
    await call("fs.write", path, content="one")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("one", 0o644)
    path.chmod(0o600)
    await call("fs.write", path, content_base64=base64.b64encode(b"\0\xff").decode())
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"\0\xff", 0o600)
    await call("fs.write", path, content="", mode="0640")
    assert path.stat().st_mode & 0o777 == 0o640
    with pytest.raises(ToolFailed, match="there already"):
        await call("fs.write", path, content="x", overwrite=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]


async def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ToolFailed):
        await call("fs.write", tmp_path / "nowhere" / "f", content="x")
    (tmp_path / "d").mkdir()
    with pytest.raises(ToolFailed, match="ordinary"):
        await call("fs.write", tmp_path / "d", content="x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["d"]


@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [
        ("fs.read", {"path": "f"}, "absolute"),
        ("fs.read", {"path": "/f", "length": 2**21}, "length"),
        ("fs.read", {"path": "/f", "offset": -1}, "offset"),
        ("fs.read", {"path": "/f", "offset": 1.5}, "whole"),
        ("fs.read", {"path": "/f", "lenght": 1}, "lenght"),
        ("fs.read", {"path": "/a\0b"}, "zero byte"),
        ("fs.read", {}, "path: is missing"),
        ("fs.write", {"path": "/f"}, "content"),
        ("fs.write", {"path": "/f", "content": "a", "content_base64": "YQ=="}, "not both"),
        ("fs.write", {"path": "/f", "content_base64": "!"}, "base64"),
        ("fs.write", {"path": "/f", "content": "x" * (files.WRITE_LIMIT_BYTES + 1)}, "more than"),
        ("fs.write", {"path": "/f", "content": "", "mode": "4755"}, "mode"),
        ("cmd.run", {}, "command: is missing"),
        ("cmd.run", {"command": " "}, "empty"),
        ("cmd.run", {"command": "./here"}, "absolute"),
        ("cmd.run", {"command": "ls", "args": "-l"}, "no list"),
        ("cmd.run", {"command": "ls", "args": [1]}, r"args\[0\]"),
        ("cmd.run", {"command": "ls", "env": {"A=B": "c"}}, "variable"),
        ("cmd.run", {"command": "ls", "timeout_secs": "5"}, "timeout_secs"),
        ("cmd.run", {"command": "ls", "timeout_secs": float("nan")}, "timeout_secs"),
        ("cmd.run", {"command": "ls", "shell": True}, "shell"),
    ],
)
def test_bad_arguments_are_named(tool: str, arguments: Mapping[str, object], words: str) -> None:
    with pytest.raises(BadArguments, match=words):
        TOOLS[tool].claims(arguments)


# Paths that try to lead elsewhere.


def judge(
    tmp_path: Path, *, allow: str = "", mounts: tuple[str, ...] = ("/",), protected: tuple[Path, ...] = ()
) -> Judge:
    document = {
        "spec": {
            "security_contexts": [
                {
                    "name": "c",
                    "capabilities": [
                        {"tool_pattern": "*", "path_allowlist": [allow or str(tmp_path / "allowed")]}
                    ],
                }
            ]
        }
    }
    import msgspec

    found = msgspec.convert(config.merge(document), DaemonConfig)
    return Judge(
        config=found,
        owner=found,
        tools=TOOLS,
        tenant="t",
        server_key=b"",
        tolerate_unsigned=False,
        mount_points=(mounts,),
        protected=protected,
    )


def ask(path: Path | str, tool: str = "fs.read") -> pb.InvokeTool:
    return pb.InvokeTool(
        command_id="1",
        security_context_name="c",
        tool_name=tool,
        args=struct_of({"path": str(path)}),
        seal_envelope=pb.SealEnvelope(user_security_token="a.b.c", tenant_id="t", security_context_name="c"),
    )


@pytest.fixture
def places(tmp_path: Path) -> Path:
    (tmp_path / "allowed" / "inner").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "f").write_text("secret")
    (tmp_path / "allowed" / "out").symlink_to(tmp_path / "secret")
    (tmp_path / "allowed" / "file").symlink_to(tmp_path / "secret" / "f")
    (tmp_path / "allowed" / "in").symlink_to(tmp_path / "allowed" / "inner")
    (tmp_path / "way").symlink_to(tmp_path / "allowed")
    return tmp_path


@pytest.mark.parametrize(
    "path",
    [
        "secret/f",
        "allowed/../secret/f",
        "allowed/inner/../../secret/f",
        "allowed/out/f",
        "allowed/file",
        "allowed/out/../secret/f",
        "allowedx",
        "allowed/in/../../secret/f",
    ],
)
def test_no_way_leads_out_of_what_is_allowed(places: Path, path: str) -> None:
    with pytest.raises(RefusedCommand) as refused:
        judge(places).judge(ask(f"{places}/{path}"))
    assert refused.value.kind is ErrorKind.POLICY_VIOLATION


@pytest.mark.parametrize(
    "path", ["allowed", "allowed/inner", "allowed/in/new", "way/inner", "secret/../allowed/x"]
)
def test_ways_that_end_within_are_taken_to_where_they_end(places: Path, path: str) -> None:
    job = judge(places).judge(ask(f"{places}/{path}"))
    (resolved,) = job.paths.values()
    assert resolved.is_relative_to(places / "allowed")
    assert resolved == resolved.resolve()


def test_a_list_may_name_a_link(places: Path) -> None:
    job = judge(places, allow=str(places / "way")).judge(ask(places / "allowed" / "inner"))
    assert list(job.paths.values()) == [places / "allowed" / "inner"]


def test_mount_points_and_the_daemons_own_folder_bound_every_context(places: Path) -> None:
    with pytest.raises(RefusedCommand, match="mount points"):
        judge(places, mounts=(str(places / "secret"),)).judge(ask(places / "allowed"))
    with pytest.raises(RefusedCommand, match="belongs to the daemon"):
        judge(places, protected=(places / "allowed" / "inner",)).judge(
            ask(places / "allowed" / "in" / "node.key")
        )


async def test_a_link_that_appears_after_the_judgement_is_not_followed(places: Path) -> None:
    judged = places / "allowed" / "inner" / "f"
    judged.write_text("harmless")
    judge(places).judge(ask(judged))
    judged.unlink()
    (places / "allowed" / "inner").rmdir()
    (places / "allowed" / "inner").symlink_to(places / "secret")
    for tool, arguments in (("fs.read", {}), ("fs.write", {"content": "x"})):
        with pytest.raises(ToolFailed):
            await call(tool, judged, **arguments)
    with pytest.raises(ToolFailed):
        await call("fs.list", judged.parent)
    assert (places / "secret" / "f").read_text() == "secret"


def test_only_resolved_paths_are_opened() -> None:
    for path in (Path("relative"), Path("/tmp/../etc")):
        with pytest.raises(OSError, match="not resolved"), safe_open.folder(path):
            pass
