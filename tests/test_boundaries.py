"""No failure in handling one caller's, agent's or object's data ends the server."""

from __future__ import annotations

import ast
import asyncio
import base64
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.shared.server_process import command

import fleetplane
from fleetplane import settings
from fleetplane.kernel import boundary
from fleetplane.kernel.boundary import Boundary, Work
from fleetplane.kernel.clock import Backoff
from fleetplane.server import root

SECONDS = 60.0
PACKAGE = Path(fleetplane.__file__).parent
ELSEWHERE = re.compile(r"(agents|cli|client|gen|node|sim|domains/\w+/(agent|cli))/")
"""What servers do not run."""

# What begins tasks beside a `Boundary`, and why a failure in it ends no server, or has to.
PLAIN = {
    "server/assembly.build": "before the server serves",
    "domains/boards/calls/channels.NodeLinks._end": "closes a connection that nobody uses any more",
    "domains/boards/provisioning/ssh.SshConnection.run": "ends one command on one board",
    "domains/instances/controllers/plan_steps.PlanExecution.carry_out": "within one pass of a reconciler",
    "domains/instances/controllers/provider_switch.Infrastructure.run": "begun again, with a new provider",
    "domains/instances/providers/local/provider.LocalProvider.close": "the provider ends",
    "fleet/streams/host.StreamHost.serve": "ends one stream",
    "fleet/streams/silence.SilenceWatch._sleep": "timers",
    "server/front.Front.drain": "the server ends",
    "kernel/presence/last_seen.answered": "is told to the one who asks",
    "kernel/reconcile/reconciler.Reconciler._pause": "a timer",
    "kernel/reconcile/reconciler.Reconciler._work": "passes note their failures themselves",
    "kernel/reconcile/reconciler.Reconciler.run": "a lost lease ends all of its work; what runs it is kept",
    "kernel/store/notifiers/notifier.CommitNotifier._use": "is gathered; the line is opened again",
    "kernel/store/lineage.kept": "kept",
    "kernel/store/servers/leader_lease.ReadIndex.confirm": "is told to those who wait",
    "kernel/store/servers/replica._beside": "serving, which reports its own failures, and the bell",
    "kernel/store/store.Store.led": "kept",
    "kernel/store/store.Store.written": "the writer and the seat: their failure has to end the server",
    "kernel/store/store.first": "the same",
    "kernel/telemetry/postgres/engine.PostgresTelemetry.open": "kept",
    "kernel/telemetry/telemetry.Telemetry.open": "kept",
    "server/front.Presenting._step_or": "timers",
    "rpc/listening/listeners.Listener._run": "a listener; each of its calls fails alone",
    "web/sockets/conversation.Conversation.__init__": "a type",
    "web/sockets/conversation.Conversation.beside": "ends one socket",
    "web/sockets/conversation.Conversation.serve": "ends one socket",
}


def begun_in(source: Path) -> Iterator[str]:
    """Where a module begins tasks, by function."""

    def walk(node: ast.AST, path: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            inner = path
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                inner = f"{path}.{child.name}"
            if isinstance(child, ast.Attribute) and child.attr in ("TaskGroup", "create_task"):
                yield inner
            yield from walk(child, inner)

    module = source.relative_to(PACKAGE).with_suffix("").as_posix()
    yield from walk(ast.parse(source.read_text()), module)


def test_what_servers_begin_is_within_a_boundary_or_said_here_why_not() -> None:
    found = {
        place
        for source in sorted(PACKAGE.rglob("*.py"))
        if not ELSEWHERE.match(source.relative_to(PACKAGE).as_posix()) and source.stem != "boundary"
        for place in begun_in(source)
    }
    assert found == set(PLAIN)
    essential = [
        place.relative_to(PACKAGE).as_posix()
        for place in PACKAGE.rglob("*.py")
        if ".essential(" in place.read_text()
    ]
    assert essential == ["server/serving.py"], "the store's writer alone"


# Every child, one by one.


class Child:
    """What a server keeps doing under one name; fails when a test says so."""

    def __init__(self) -> None:
        self.begun = 0
        self.hit: asyncio.Future[None] | None = None
        self.had_nothing_to_do = False

    async def do(self, begin: Work) -> None:
        self.begun += 1
        self.hit = hit = asyncio.get_running_loop().create_future()
        running = asyncio.ensure_future(begin())
        try:
            await asyncio.wait({running, hit}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise RecursionError("injected")
            await running
            self.had_nothing_to_do = True
        finally:
            if self.hit is hit:
                self.hit = None
            running.cancel()
            await asyncio.wait({running})


@pytest.mark.parametrize("shared", [False, True])
async def test_each_thing_that_a_server_keeps_doing_fails_alone_and_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, shared: bool
) -> None:
    children: dict[str, Child] = {}
    failed: list[str] = []
    stop, ready = asyncio.Event(), asyncio.Future[dict[str, list[str]]]()
    keep = Boundary.keep

    def kept(self: Boundary, work: str, begin: Work, about: object = "") -> asyncio.Task[None]:
        child = children.setdefault(work, Child())
        return keep(self, work, lambda: child.do(begin), about)

    monkeypatch.setattr(Boundary, "keep", kept)
    monkeypatch.setattr(boundary, "BACKOFF", Backoff(first_seconds=0.001, ceiling_seconds=0.001))
    monkeypatch.setattr(root, "_stop_on_signals", lambda: stop)

    async def use(addresses: dict[str, list[str]]) -> None:
        web = next(one for one in addresses["web"] if one.startswith("http"))
        async with httpx.AsyncClient(base_url=web, verify=False) as http:
            for name in sorted(children):
                child = children[name]
                while child.hit is None and not child.had_nothing_to_do:
                    await asyncio.sleep(0.001)
                if child.hit is None:
                    continue
                before = child.begun
                child.hit.set_result(None)
                failed.append(name)
                while child.begun == before:
                    assert not serving.done(), name
                    await asyncio.sleep(0.001)
                assert (await http.get("/readyz")).status_code == 200, name
            counted = (await http.get("/metrics")).text
        for name in failed:
            assert f'fleetplane_contained_failures_total{{work="{name}"}} ' in counted

    async with asyncio.timeout(SECONDS):
        places = (one.partition("=") for one in command(tmp_path) if one.startswith("listeners."))
        flags = {"data_dir": str(tmp_path), **{name: addresses for name, _, addresses in places}}
        if shared:
            flags["store.url"] = request.getfixturevalue("postgres").database()
            flags["only"] = "boards,edge,gpus,proxies"  # instances want an object store then
            flags["identity.master_key"] = base64.b64encode(secrets.token_bytes(32)).decode()
        found = settings.load(config=None, environment={}, flags=flags)
        serving = asyncio.ensure_future(
            root.serve(found, announce=lambda addresses, _: ready.set_result(addresses))
        )
        ends: set[asyncio.Future[Any]] = {serving, ready}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        try:
            if serving.done():
                await serving
            await use(ready.result())
        finally:
            stop.set()
            await serving
    assert len(failed) > 40
