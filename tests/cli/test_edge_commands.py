"""`fleetplane edge` and `fleetplane tokens` against a real server with daemons: words and exit codes.

As processes where it matters that they are, such as for exit codes and what a terminal shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pty
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest import mock

import grpc
import pytest
import yaml
from support.edge.edge_company import at_work, ours_at_work
from support.edge.edge_identity_rig import Machine
from support.edge.edge_site import Rest, Site, a_tenant, site, until
from support.edge.shipped_daemon import ShippedDaemon
from support.shared.cli_runner import COMMAND, Outcome, execute

from fleetplane.cli.main import run
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2_grpc

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("FLEETPLANE_", "AEGIS_"))}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("cli") / "data") as here:
        yield here


@pytest.fixture
async def rest(house: Site) -> AsyncIterator[Rest]:
    async with house.rest(a_tenant()) as opened:
        yield opened


class Shell:
    """The command line on the server's own machine, for one tenant."""

    def __init__(self, house: Site, tenant: str) -> None:
        self.environment = CLEAN | {
            "FLEETPLANE_DATA_DIR": str(house.data_dir),
            "AEGIS_EFFECTIVE_TENANT": tenant,
        }

    async def __call__(self, *words: str, **more: str) -> Outcome:
        return await asyncio.to_thread(execute, *words, environment=self.environment | more)

    async def edge(self, *words: str, **more: str) -> Outcome:
        """In this process, which costs a tenth; a thread of its own lets the daemons go on meanwhile."""

        def call() -> Outcome:
            out, err = io.StringIO(), io.StringIO()
            with (
                mock.patch.dict(os.environ, self.environment | more),
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
            ):
                code = run(("edge", *words))
            return Outcome(code=code, out=out.getvalue(), err=err.getvalue())

        return await asyncio.to_thread(call)

    async def drawn(self, *words: str) -> tuple[int, str]:
        """The same in a terminal: its code and everything that it drew."""
        mine, theirs = pty.openpty()
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            "edge",
            *words,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=self.environment | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"},
        )
        os.close(theirs)
        reading = asyncio.create_task(asyncio.to_thread(_read_all, mine))
        async with asyncio.timeout(60):
            code = await process.wait()
            return code, await reading


def _read_all(descriptor: int) -> str:
    found = b""
    try:
        while chunk := os.read(descriptor, 65_536):
            found += chunk
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(descriptor)
    return found.decode()


@pytest.fixture
def shell(house: Site, rest: Rest) -> Shell:
    return Shell(house, rest.tenant)


@asynccontextmanager
async def two(house: Site, rest: Rest) -> AsyncIterator[tuple[ShippedDaemon, ShippedDaemon]]:
    async with at_work(house, rest, name="one") as first, at_work(house, rest, name="two") as second:
        yield first, second


# Daemons.


async def test_a_token_is_printed_alone_and_listed_daemons_in_every_format(
    house: Site, rest: Rest, shell: Shell
) -> None:
    empty = await shell.edge("ls")
    assert empty.out == ""
    assert empty.err.startswith("no daemons; `fleetplane edge token` invites one (tenant ")
    made = await shell("edge", "token", "--name", "box", "--ttl", "5m")
    assert made.code == 0
    assert len(made.out.split()) == 1
    assert "fleetplane agent edge enroll" in made.err
    daemon = await ShippedDaemon.enroll(house.edge, made.out.strip(), heartbeat_seconds=1)
    async with daemon.running():
        await rest.connected(daemon.node_id)
        assert (await shell.edge("tag", "add", daemon.node_id, "prod", "eu")).out == "prod,eu\n"
        assert (await shell.edge("tag", "rm", daemon.node_id, "eu")).out == "prod\n"
        assert (await shell.edge("rename", daemon.node_id, "renamed")).code == 0
        table = await shell.edge("ls", "--tag", "prod", "--connected")
        assert table.out.split()[:6] == ["NODE", "NAME", "STATUS", "SYSTEM", "TAGS", "HEARD"]
        assert table.out.splitlines()[1].split()[:5] == [
            daemon.node_id,
            "renamed",
            "Connected",
            "linux/x86_64",
            "prod",
        ]
        (host,) = json.loads((await shell.edge("ls", "-o", "json")).out)
        assert (host["node_id"], host["tags"]) == (daemon.node_id, ["prod"])
        (again,) = yaml.safe_load((await shell.edge("ls", "-o", "yaml")).out)
        assert again["capabilities"] == host["capabilities"]
        assert json.loads((await shell.edge("ls", "--disconnected", "-o", "json")).out) == []


async def test_workers_are_let_in_listed_and_drained_and_what_concerns_all_tenants_is_set(
    house: Site, rest: Rest, shell: Shell, tmp_path: Path
) -> None:
    made = json.loads(
        (
            await shell(
                "edge", "worker", "token", "--role", "hybrid", "--serves", rest.tenant, "--output", "json"
            )
        ).out
    )
    async with grpc.aio.insecure_channel(house.edge) as channel:
        worker = Machine(
            cluster_pb2_grpc.NodeClusterServiceStub(channel),
            role=pb.NODE_ROLE_HYBRID,
            node_id=made["node_id"],
        )
        await worker.join(enrolment_token=made["token"])
        registered = pb.RegisterNodeInner(node_id=worker.node_id, capabilities=pb.NodeCapabilities())
        await worker.stub.RegisterNode(pb.RegisterNodeRequest(envelope=worker.sealed(registered)))
        shown = (await shell("edge", "worker", "ls")).out
        assert (worker.node_id in shown, "hybrid" in shown, rest.tenant in shown) == (True, True, True)
        assert (await shell("edge", "worker", "drain", worker.node_id)).code == 0
        beat = pb.NodeHeartbeatInner(node_id=worker.node_id, status=pb.NODE_STATUS_ACTIVE)
        told = await worker.stub.Heartbeat(pb.NodeHeartbeatRequest(envelope=worker.sealed(beat)))
        assert [command.drain.drain for command in told.pending_commands] == [True]
        assert (await shell("edge", "worker", "resume", worker.node_id)).code == 0
        assert (await shell("edge", "worker", "drain", "nobody")).code == 4
    document = tmp_path / "all.yaml"
    document.write_text("spec: {cluster: {heartbeat_interval_secs: 20}}\n")
    assert (await shell("edge", "config", "set", str(document), "--global")).code == 0
    try:
        shown = yaml.safe_load((await shell("edge", "config", "show", "--global")).out)
        assert shown["layer"]["spec"]["cluster"]["heartbeat_interval_secs"] == 20
        merged = yaml.safe_load((await shell.edge("config", "show")).out)["merged"]
        assert merged["spec"]["cluster"]["heartbeat_interval_secs"] == 20
    finally:
        assert (await shell("edge", "config", "unset", "--global")).code == 0
    async with at_work(house, rest) as daemon:
        assert (await shell("edge", "revoke-tenant", rest.tenant)).code == 130  # it asks, and nobody answers
        gone = await shell("edge", "revoke-tenant", rest.tenant, "--yes")
        assert (gone.code, gone.err) == (0, "1 revoked\n")
        await until(lambda: daemon.refusals)
    with_tenant = {"FLEETPLANE_TOKEN": house.token(tenant=rest.tenant), "FLEETPLANE_SERVER": house.server.web}
    assert (await shell("edge", "worker", "ls", **with_tenant)).code == 5


async def test_tokens_are_listed_and_withdrawn_and_a_revoked_daemon_is_readmitted(
    house: Site, rest: Rest, shell: Shell
) -> None:
    async with at_work(house, rest) as daemon:
        made = json.loads((await shell.edge("token", "--name", "spare", "--output", "json")).out)
        listed = await shell.edge("tokens")
        assert (made["token_id"] in listed.out, "a new node" in listed.out) == (True, True)
        assert (await shell.edge("withdraw", made["token_id"])).code == 0
        (row,) = [
            one
            for one in json.loads((await shell.edge("tokens", "--output", "json")).out)
            if one["token_id"] == made["token_id"]
        ]
        assert row["state"] == "revoked"
        assert (await shell.edge("token", "--node", daemon.node_id)).code == 6
        assert (await shell.edge("token", "--replace")).code == 2
        assert (await shell.edge("token", "--node", daemon.node_id, "--replace")).code == 0
        assert (await shell.edge("readmit", daemon.node_id)).code == 6
        assert (await shell.edge("revoke", daemon.node_id, "--yes")).code == 0
        assert (await shell.edge("token", "--node", daemon.node_id, "--replace")).code == 6
        back = await shell.edge("readmit", daemon.node_id)
        assert (back.code, f"--node {daemon.node_id}" in back.err) == (0, True)
        token = (await shell.edge("token", "--node", daemon.node_id)).out.strip()
        again = await ShippedDaemon.enroll(house.edge, token, node_id=daemon.node_id)
        assert (await rest.host(again.node_id))["status"] == "Disconnected"


def test_a_server_that_answers_in_the_shipped_shapes_does_not_break_our_command_line(tmp_path: Path) -> None:
    with site(tmp_path / "data", "--set", "edge.shipped_shapes=true") as here:

        async def all_verbs() -> None:
            tenant = a_tenant()
            shell = Shell(here, tenant)
            documented = {"x-aegis-shapes": "documented"}
            async with here.rest(tenant) as rest:
                rest.http.headers.update(documented)
                async with at_work(here, rest) as daemon:
                    made = await shell.edge("group", "create", "all", "--selector", "os=linux")
                    assert made.code == 0, made.err
                    for words in (
                        ("ls",),
                        ("group", "ls"),
                        ("preview", "--target", "all"),
                        ("runs",),
                        ("tokens",),
                        ("run", "--target", f"@{daemon.node_id}", "true"),
                        ("tag", "add", daemon.node_id, "x"),
                        ("config", "show"),
                        ("token",),
                    ):
                        told = await shell.edge(*words)
                        assert (told.code, "Traceback" in told.err) == (0, False), (words, told.err)

        asyncio.run(all_verbs())


async def test_daemons_are_drained_resumed_and_revoked(house: Site, rest: Rest, shell: Shell) -> None:
    async with at_work(house, rest, name="box") as daemon:
        drained = await shell.edge("drain", daemon.node_id, "--grace", "1s")
        assert (drained.code, "wanted draining" in drained.err) == (0, True)
        assert (await shell.edge("run", "--target", "all", "--", "true")).code == 8
        assert (await shell.edge("resume", daemon.node_id)).code == 0
        unsure = await shell("edge", "revoke", daemon.node_id)
        assert unsure.code != 0  # nobody said yes
        assert (await shell.edge("revoke", daemon.node_id, "--yes")).code == 0
        assert (await rest.host(daemon.node_id))["status"] == "Revoked"
    assert (await shell.edge("tag", "add", "nosuch", "x")).code == 4


async def test_groups_are_made_changed_used_and_removed(house: Site, rest: Rest, shell: Shell) -> None:
    assert (await shell.edge("group", "ls")).err.startswith("no groups (tenant ")
    async with two(house, rest) as (first, second):
        made = await shell.edge("group", "create", "web", "--selector", "tags=web", "--pin", first.node_id)
        assert re.fullmatch(r"[0-9a-f-]{36}\n", made.out)
        assert (await shell.edge("group", "create", "web")).code == 6
        assert (await shell.edge("group", "set-pinned", "web", "--add", second.node_id)).code == 0
        (group,) = json.loads((await shell.edge("group", "ls", "-o", "json")).out)
        assert group["resolved_member_count"] == 2
        preview = await shell.edge("preview", "--target", "group:web")
        assert preview.out.count(" yes") == 2
        done = await shell.edge("run", "--target", "group:web", "--", "echo", "hi")
        assert (done.code, done.out.count("  hi\n")) == (0, 2)
        assert (await shell.edge("group", "rm", "web")).code == 0
        assert (await shell.edge("preview", "--target", "group:web")).code == 4


# Runs.


async def test_a_run_in_plain_lines_says_who_said_what_and_how_it_ended(
    house: Site, rest: Rest, shell: Shell
) -> None:
    async with two(house, rest) as (first, second):
        done = await shell.edge("run", "--target", "all", "--", "/bin/sh", "-c", "echo out; echo err >&2")
        assert done.code == 0
        assert sorted(done.out.splitlines()) == sorted(
            line
            for daemon in (first, second)
            for line in (f"{daemon.node_id[:8]}  out", f"{daemon.node_id[:8]}  ok exit=0")
        )
        assert f"{first.node_id[:8]}  err\n" in done.err
        assert done.err.endswith("complete: ok=2 err=0 timed_out=0 cancelled=0 not_started=0\n")
        assert "\x1b" not in done.out + done.err
        (one_run,) = json.loads((await shell.edge("runs", "-o", "json")).out)
        one = json.loads((await shell.edge("runs", one_run["fleet_command_id"], "-o", "json")).out)
        assert {node["stdout_tail"] for node in one["per_node"]} == {"out\n"}
        table = await shell.edge("runs", one_run["fleet_command_id"])
        assert table.out.splitlines()[0].split() == ["NODE", "OUTCOME", "EXIT", "TOOK", "WORDS"]
        assert "ok=2" in (await shell.edge("runs", "--tool", "cmd.run")).out
        assert (await shell.edge("runs", "nosuch")).code == 4


async def test_a_run_in_a_terminal_is_drawn_as_a_grid(house: Site, rest: Rest, shell: Shell) -> None:
    async with two(house, rest) as (first, second):
        code, drawn = await shell.drawn("run", "--target", "all", "--", "/bin/sh", "-c", "echo last words")
        assert code == 0
        assert "\x1b[" in drawn
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn)
        for daemon in (first, second):
            assert re.search(rf"{daemon.node_id} +✓ ok +last words", plain), plain
        assert "complete: ok=2" in plain


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--on-error", "continue", "--", "/bin/sh", "-c", "exit 3"), 1),
        (("--mode", "sideways", "--", "true"), 2),
        (("--args", "[1]"), 2),
        (("--arg", "novalue"), 2),
        (("--require-min", "3", "--", "true"), 3),
        (("--mode", "sequential", "--", "/bin/sh", "-c", "exit 3"), 7),
        (("--on-error", "stop-after=2", "--mode", "rolling=1", "--", "/bin/sh", "-c", "exit 3"), 1),
        (("--on-error", "continue", "--deadline", "1s", "--", "sleep", "30"), 124),
    ],
)
async def test_a_run_ends_with_the_code_of_what_became_of_it(
    house: Site, rest: Rest, shell: Shell, words: tuple[str, ...], code: int
) -> None:
    async with two(house, rest):
        done = await shell("edge", "run", "--target", "all", *words)
        assert done.code == code, done
        assert len(done.err.splitlines()) >= 1


async def test_a_cancelled_run_ends_with_7_for_who_asked_for_the_documented_codes(
    house: Site, rest: Rest, shell: Shell, tmp_path: Path
) -> None:
    async with at_work(house, rest):
        script = f"touch {tmp_path}/begun; until [ -e {tmp_path}/enough ]; do sleep 0.1; done"
        words = ("--deadline", "2m", "--", "/bin/sh", "-c", script)
        codes = {"FLEETPLANE_EDGE_EXIT_CODES": "documented"}
        following = asyncio.create_task(shell("edge", "run", "--target", "all", *words, **codes))
        await until((tmp_path / "begun").exists)
        (begun,) = (await rest.get("/fleet/runs"))["items"]
        taken = await shell.edge("cancel", begun["fleet_command_id"])
        assert (taken.code, taken.err) == (0, "0 taken back, 1 told to stop; may finish\n")
        (tmp_path / "enough").touch()
        assert (await following).code == 7
        assert (await rest.run(begun["fleet_command_id"]))["summary"]["ok"] == 1  # it could not stop
        assert (await shell.edge("cancel", begun["fleet_command_id"])).err == "it was over already\n"


async def test_a_detached_run_prints_its_id_and_a_durable_one_waits(
    house: Site, rest: Rest, shell: Shell
) -> None:
    daemon = await house.shipped(rest)
    begun = await shell.edge("run", "--target", "all", "--deliver-by", "1m", "--detach", "--", "true")
    assert re.fullmatch(r"[0-9a-f-]{36}\n", begun.out)
    async with daemon.running():
        assert (await rest.ended(begun.out.strip()))["summary"]["ok"] == 1


async def test_keys_are_replaced_in_waves_by_daemons_that_know_how(
    house: Site, rest: Rest, shell: Shell, tmp_path: Path
) -> None:
    async with ours_at_work(house, rest, tmp_path / "ours") as node_id:
        done = await shell.edge("rotate", "--target", f"@{node_id}")
        assert done.code == 0, done
        assert (await rest.host(node_id))["key_version"] == 2
        assert (await shell.edge("run", "--target", "all", "--", "true")).code == 0
        async with at_work(house, rest):
            mixed = await shell.edge(
                "rotate", "--target", "all", "--mode", "rolling=1", "--on-error", "continue"
            )
            assert mixed.code == 7
            assert "edge.rotate_key" in mixed.out  # those in the field say that they do not know it


# Tokens, and from elsewhere.


async def test_tokens_let_others_act_from_elsewhere_as_far_as_their_roles_go(
    house: Site, rest: Rest, shell: Shell, tmp_path: Path
) -> None:
    name = f"ci-{rest.tenant}"
    role = ("--role", "aegis.edge.hosts.read", "--tenant", rest.tenant)
    made = await shell("tokens", "create", name, *role)
    token = made.out.strip()
    assert made.code == 0
    elsewhere = {
        "FLEETPLANE_TOKEN": token,
        "FLEETPLANE_SERVER": house.server.web,
        "FLEETPLANE_DATA_DIR": "/x",
    }
    assert (await shell.edge("ls", **elsewhere)).code == 0
    assert (await shell.edge("token", **elsewhere)).code == 5  # no such role
    assert (await shell.edge("ls", "--tenant", "umbrella", **elsewhere)).code == 5
    listed = json.loads((await shell("tokens", "list", "-o", "json")).out)
    (mine,) = [one for one in listed if one["name"] == name]
    assert (mine["roles"], mine["tenant"]) == (["aegis.edge.hosts.read"], rest.tenant)
    assert token not in json.dumps(listed)
    assert (await shell("tokens", "create", name, *role)).code != 0
    assert (await shell("tokens", "create", "odd", "--role", "nosuch")).code == 2
    assert (await shell("tokens", "revoke", name)).code == 0
    refused = await shell("edge", "ls", **elsewhere)
    assert (refused.code, len(refused.err.splitlines())) == (5, 1)
    nowhere = await shell.edge("ls", FLEETPLANE_DATA_DIR=str(tmp_path))
    assert (nowhere.code, "no server listens" in nowhere.err) == (8, True)
    assert (await shell.edge("ls", FLEETPLANE_SERVER=house.server.web)).code == 2
