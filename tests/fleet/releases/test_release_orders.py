"""Releases in the store, what agents are told, and what an agent makes of it: both sides, one process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec
import pytest
import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.fleet.releases_kit import tiny_wheel
from support.kernel.leaving import being_written

import fleetplane
from fleetplane.fleet.releases.agents_service import DomainReleases
from fleetplane.fleet.releases.check_in import AgentCard, CheckInPolicy, CheckIns
from fleetplane.fleet.releases.records import AGENT_VERSION, KINDS, AgentHello, ReleaseKey
from fleetplane.fleet.releases.releases import NewRelease, Releases
from fleetplane.fleet.releases.resource import ReleaseCollector
from fleetplane.fleet.releases.shelf import Shelf
from fleetplane.fleet.releases.subject import AgentVersions
from fleetplane.fleet.rollouts.rules.passes import ACTOR
from fleetplane.gen.fleetplane.fleet.v1 import releases_pb2 as pb
from fleetplane.gen.fleetplane.fleet.v1 import releases_pb2_grpc
from fleetplane.kernel import release_documents as documents
from fleetplane.kernel.audit.chain import ChainEntry
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import (
    AlreadyExists,
    FailedPrecondition,
    FleetplaneError,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.node.connection import no_metadata
from fleetplane.node.upgrade import launcher, upgrader
from fleetplane.node.upgrade.folder import ReleaseFolder
from fleetplane.node.upgrade.launch import Launch
from fleetplane.node.upgrade.upgrader import Upgrader

OWN = fleetplane.__version__
SCOPE, AGENT = "agents/edge", "node-1"
SECONDS = 60.0


class Register:
    """Everybody is one agent."""

    def __init__(self) -> None:
        self.known = True

    def recognise(self, _context: object, _name: str) -> str:
        return AGENT

    def card(self, agent: str) -> AgentCard | None:
        return AgentCard(title=f"title of {agent}", labels={"ring": "canary"}) if self.known else None


class Site:
    def __init__(self, store: Store, folder: Path) -> None:
        self.folder = folder
        self.store = store
        self.clock = SystemClock()
        self.key = ReleaseKey(Ed25519PrivateKey.generate())
        self.releases = Releases(store, self.clock, Shelf(folder / "shelf"), self.key)
        self.register = Register()
        policy = CheckInPolicy(every_seconds=0.2, hello_seconds=60.0)
        self.check_ins = CheckIns(store, self.clock, self.releases, {"edge": self.register}, policy)
        self.subject = AgentVersions(store, self.check_ins)

    async def add(self, *wheels: Path, **more: Any) -> str:
        async def pieces() -> AsyncIterator[tuple[str, bytes]]:
            for wheel in wheels:
                yield wheel.name, b""
                content = wheel.read_bytes()
                for at in range(0, len(content), 1000):
                    yield "", content[at : at + 1000]

        return (await self.releases.add(NewRelease(actor="ada", **more), pieces())).name

    async def add_tiny(self, version: str, files: dict[str, bytes] | None = None, **more: Any) -> str:
        return await self.add(tiny_wheel(self.folder, version, files), **more)

    async def hear(self, version: str = OWN, **more: Any) -> pb.CheckInResponse:
        request = pb.CheckInRequest(version=version, can_upgrade=True, nonce=bytes(16), **more)
        return await self.check_ins.hear("edge", AGENT, request)

    async def want(self, version: str) -> None:
        await self.subject.steer(SCOPE, {AGENT: version}, rollout="r1")

    @property
    def shelved(self) -> int:
        return len(list(self.releases.shelf.root.iterdir()))


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    settings = StoreSettings(path=tmp_path / "s.db")
    async with Store.open(settings, kinds=KINDS, clock=SystemClock()) as store:
        yield Site(store, tmp_path)


# The store of releases.


async def test_a_release_is_kept_with_its_files_and_a_signature_and_deleted_with_them(site: Site) -> None:
    assert await site.add_tiny("2.0", notes="fixes") == "2.0"
    release = site.releases.get("2.0")
    (entry,) = release.spec.files
    pieces = [piece async for piece in site.releases.shelf.read(entry.sha256, 100)]

    assert b"".join(pieces) == (site.folder / entry.name).read_bytes()[100:]
    assert site.releases.has_file(entry.sha256)
    manifest = documents.decode(release.spec.manifest, documents.ReleaseManifest)
    assert (manifest.version, manifest.files) == ("2.0", (entry,))
    with pytest.raises(AlreadyExists, match=r"there is a release 2\.0 already"):
        await site.add_tiny("2.0")
    assert site.shelved == 1
    await site.releases.delete("2.0", actor="ada")
    assert site.shelved == 0
    with pytest.raises(NotFound):
        site.releases.get("2.0")


async def test_a_release_that_is_stored_after_its_sender_left_has_its_files(site: Site) -> None:
    adding = asyncio.create_task(site.add_tiny("2.0"))
    await being_written(site.store)
    assert adding.cancel()
    await asyncio.gather(adding, return_exceptions=True)
    (entry,) = site.releases.get("2.0").spec.files
    assert site.releases.shelf.path(entry.sha256).exists()


async def test_a_release_that_agents_are_just_being_told_to_run_is_not_deleted(site: Site) -> None:
    await site.add_tiny("2.0")
    await site.hear()
    wanting = asyncio.create_task(site.want("2.0"))
    await asyncio.sleep(0)  # queued, and not yet to be read
    with pytest.raises(FailedPrecondition, match="are to run version"):
        await site.releases.delete("2.0", actor="ada")
    await wanting


async def test_what_agents_would_refuse_is_not_taken_and_leaves_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdist = site.folder / "fleetplane_agent-2.0.tar.gz"
    sdist.write_bytes(b"x")
    lying = tiny_wheel(site.folder, "3.0").rename(site.folder / "fleetplane_agent-2.0-py3-none-any.whl")
    other = site.folder / "thing-1.0-py3-none-any.whl"
    other.write_bytes(lying.read_bytes())
    broken = site.folder / "broken-1.0-py3-none-any.whl"
    broken.write_bytes(b"no zip")
    empty = site.folder / "empty-1.0-py3-none-any.whl"
    empty.touch()
    tries: list[tuple[Callable[[], Awaitable[str]], type[FleetplaneError], str]] = [
        (lambda: site.add(sdist), InvalidArgument, "is not the name of a wheel"),
        (lambda: site.add(lying), InvalidArgument, r"is of version 3\.0 inside"),
        (lambda: site.add(other), InvalidArgument, "one version of fleetplane_agent, not of 0"),
        (lambda: site.add(lying, lying), InvalidArgument, "is there twice"),
        (lambda: site.add(broken), InvalidArgument, "is not a wheel"),
        (lambda: site.add(empty), InvalidArgument, "is empty"),
        (lambda: site.add_tiny("2.0", floor="2.1"), InvalidArgument, "is newer than the release"),
        (lambda: site.add_tiny("2.0", floor="new"), InvalidArgument, "is not a version"),
        (lambda: site.add_tiny("2.0", hello_seconds=0.5), InvalidArgument, "must be between 1 and 3600"),
    ]
    for make, kind, words in tries:
        with pytest.raises(kind, match=words):
            await make()
    monkeypatch.setattr("fleetplane.fleet.releases.shelf.WHEEL_LIMIT_BYTES", 500)
    with pytest.raises(ResourceExhausted, match="is larger than 500 bytes"):
        await site.add_tiny("2.0", {"fleetplane/large.py": bytes(5000)})
    assert site.releases.list() == []
    assert not site.releases.shelf.root.exists() or site.shelved == 0


async def test_the_shelf_hands_out_nothing_but_its_files(site: Site) -> None:
    await site.add_tiny("2.0")
    for name in ("../s.db", "s.db", "", "0" * 63, "0" * 64 + "/"):
        with pytest.raises(InvalidArgument, match="is not a SHA-256 digest"):
            site.releases.shelf.path(name)
    with pytest.raises(NotFound):
        _ = [piece async for piece in site.releases.shelf.read("0" * 64, 0)]


# What agents are told.


async def test_an_agent_is_told_a_version_only_when_a_rollout_wants_it(site: Site) -> None:
    await site.add_tiny("99.0", hello_seconds=7.0)
    assert not (await site.hear()).order
    await site.want("99.0")
    answer = await site.hear()
    order = documents.decode(answer.order, documents.UpgradeOrder)

    assert (order.version, order.nonce, order.attempt, order.seconds) == ("99.0", "00" * 16, 1, 7.0)
    assert documents.digest(answer.manifest) == order.manifest
    with pytest.raises(FailedPrecondition, match=r"agents are to run version 99\.0"):
        await site.releases.delete("99.0", actor="ada")
    assert not (await site.hear("99.0")).order
    fact = site.subject.targets(SCOPE)[AGENT]
    assert (fact.version, fact.online, fact.title, fact.labels) == (
        "99.0", True, f"title of {AGENT}", {"ring": "canary"},
    )  # fmt: skip


async def test_an_agent_that_failed_is_asked_again_only_under_another_number(site: Site) -> None:
    await site.add_tiny("99.0")
    await site.hear()
    await site.want("99.0")
    failed = pb.FailedUpgrade(version="99.0", attempt=1, reason="it did not say hello within 60 s")

    assert not (await site.hear(failed=failed)).order
    fact = site.subject.targets(SCOPE)[AGENT]
    assert (fact.error, fact.error_version) == ("it did not say hello within 60 s", "99.0")
    assert site.check_ins.failures["edge"] == 1
    await site.want("99.0")  # said again, as after a restart of the server
    assert not (await site.hear(failed=failed)).order
    await site.subject.again(SCOPE, [AGENT])
    assert documents.decode((await site.hear(failed=failed)).order, documents.UpgradeOrder).attempt == 2
    assert site.subject.targets(SCOPE)[AGENT].error == ""


async def test_a_settled_version_is_for_whoever_comes_later_too(site: Site) -> None:
    await site.add_tiny("99.0")
    await site.hear()
    assert site.subject.waiting(SCOPE) == "99.0"
    await site.want("99.0")
    await site.subject.settle(SCOPE, "99.0", rollout="r1", held=False)

    assert site.subject.default(SCOPE) == "99.0"
    assert site.subject.waiting(SCOPE) == ""
    late = await site.check_ins.hear(
        "edge", "node-2", pb.CheckInRequest(version=OWN, can_upgrade=True, nonce=bytes(16))
    )
    assert documents.decode(late.order, documents.UpgradeOrder).version == "99.0"


async def test_a_version_is_a_release_or_one_that_an_agent_has(site: Site) -> None:
    await site.hear(kept=["0.0.9"])
    assert [site.subject.version(SCOPE, text) for text in (OWN, "0.0.9")] == [OWN, "0.0.9"]
    for text, kind in (("5.0", NotFound), ("newest", NotFound), ("x", InvalidArgument)):
        with pytest.raises(kind):
            site.subject.version(SCOPE, text)
    with pytest.raises(NotFound, match="there are no agents of 'nowhere'"):
        site.subject.scope("nowhere")
    assert site.subject.scope("edge") == site.subject.scope("agents/edge") == SCOPE


async def test_what_is_no_check_in_is_refused_and_who_is_gone_is_forgotten(site: Site) -> None:
    wrongs: tuple[dict[str, Any], ...] = (
        {"nonce": b"short"},
        {"version": "../x"},
        {"kept": ["1.0"] * 17},
        {"kept": ["/"]},
    )
    for wrong in wrongs:
        given: dict[str, Any] = {"version": OWN, "nonce": bytes(16), **wrong}
        with pytest.raises(InvalidArgument):
            await site.check_ins.hear("edge", AGENT, pb.CheckInRequest(**given))
    await site.hear()
    assert await site.check_ins.sweep() == 0
    site.register.known = False
    assert site.subject.targets(SCOPE) == {}
    assert await site.check_ins.sweep() == 1
    assert not site.store.list(AGENT_VERSION)


async def test_figures_and_the_audit_log_tell_who_runs_what_and_who_did_it(site: Site) -> None:
    await site.add_tiny("99.0")
    await site.hear()
    await site.want("99.0")
    await site.hear(failed=pb.FailedUpgrade(version="99.0", attempt=1, reason="no"))
    collected = ReleaseCollector(site.store, site.check_ins).collect()
    figures = {
        sample.name: (sample.labels, sample.value)
        for metric in collected
        for sample in metric.samples
        if not sample.name.endswith("_created")
    }

    assert figures["fleetplane_releases"] == ({}, 1)
    assert figures["fleetplane_agents_running"] == ({"domain": "edge", "version": OWN}, 1)
    assert figures["fleetplane_releases_check_ins_total"] == ({"domain": "edge"}, 2)
    assert figures["fleetplane_releases_failures_total"] == ({"domain": "edge"}, 1)
    entries = []
    for seq in range(1, site.store.audit_head().seq + 1):
        row = await site.store.audit_row(seq)
        assert row is not None
        entry = msgspec.json.decode(row.entry, type=ChainEntry)
        entries.append((entry.action, entry.actor))
    assert ("releases.added", "ada") in entries
    assert ("releases.wanted.r1", ACTOR) in entries
    assert ("releases.checked_in", f"agent/edge/{AGENT}") in entries


# What an agent makes of it.


class Servicer(DomainReleases):
    """The real one, with somebody in between."""

    def __init__(self, site: Site) -> None:
        super().__init__(site.check_ins, "edge", site.register)
        self.replay: pb.CheckInResponse | None = None
        self.last: pb.CheckInResponse | None = None
        self.cut_after: int | None = None
        self.offsets: list[int] = []

    async def CheckIn(self, request: pb.CheckInRequest, context: Any) -> pb.CheckInResponse:
        answer = await super().CheckIn(request, context)
        if answer.order:
            self.last = answer
        return self.replay if self.replay is not None and answer.order else answer

    async def Fetch(self, request: pb.FetchRequest, context: Any) -> AsyncIterator[pb.FetchChunk]:
        self.offsets.append(request.offset)
        async for chunk in super().Fetch(request, context):
            if self.cut_after is not None:
                yield pb.FetchChunk(content=chunk.content[: self.cut_after])
                self.cut_after = None
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut off")
            yield chunk


class Node:
    def __init__(self, site: Site, servicer: Servicer, key: str = "") -> None:
        self.site, self.servicer = site, servicer
        self.root = site.folder / "node"
        launch = Launch(
            root=str(self.root), keys=(key or site.key.text,), launcher="", arguments=(), installed=OWN
        )
        self.upgrader = Upgrader(launch, clock=SystemClock(), log=structlog.get_logger)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        server = grpc.aio.server()
        releases_pb2_grpc.add_AgentReleasesServicer_to_server(self.servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(SECONDS):
                following = asyncio.create_task(self.upgrader.follow(channel, no_metadata))
                try:
                    yield
                finally:
                    following.cancel()
                    await asyncio.wait([following])
        finally:
            await server.stop(None)

    async def said(self) -> AgentHello:
        """What the agent said last; waits until it said that something failed."""
        while True:
            found = self.site.store.get(AGENT_VERSION, SCOPE, AGENT)
            if found is not None and found.status is not None and found.status.failed_reason:
                return found.status
            await asyncio.sleep(0.05)

    @property
    def trial(self) -> dict[str, Any] | None:
        return launcher.read(self.root / "trial.json")


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process for each verification would take most of the time; agents as processes have them."""

    async def here(function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.to_thread(function, *arguments)

    monkeypatch.setattr(upgrader, "_elsewhere", here)
    monkeypatch.setattr(upgrader, "RETRY_SECONDS", 0.2)


async def test_a_download_that_broke_off_goes_on_where_it_was(site: Site) -> None:
    await site.add_tiny("99.0", {"fleetplane/part.py": b"#" * 50_000})
    await site.hear()
    await site.want("99.0")
    servicer = Servicer(site)
    servicer.cut_after = 1000
    node = Node(site, servicer)
    async with node.connected():
        await node.upgrader.ready.wait()

    assert servicer.offsets == [0, 1000]
    assert node.trial is not None
    assert (node.trial["version"], node.trial["attempt"], node.trial["started"]) == ("99.0", 1, False)
    assert (node.root / "versions" / node.trial["candidate"] / "fleetplane/part.py").is_file()


async def test_a_connection_that_ends_while_a_trial_is_ordered_does_not_keep_it_from_being_made(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.add_tiny("99.0")
    await site.hear()
    await site.want("99.0")
    begun, written = threading.Event(), threading.Event()
    order_trial = ReleaseFolder.begin_trial

    def slowly(folder: ReleaseFolder, **trial: Any) -> None:
        begun.set()
        assert written.wait(SECONDS)
        order_trial(folder, **trial)

    monkeypatch.setattr(ReleaseFolder, "begin_trial", slowly)
    node = Node(site, Servicer(site))
    async with node.connected():
        assert await asyncio.to_thread(begun.wait, SECONDS)
        asyncio.get_running_loop().call_soon(written.set)  # after the cancellation, which is next

    assert node.trial is not None
    assert node.upgrader.ready.is_set()


async def test_an_order_that_was_recorded_earlier_is_refused(site: Site) -> None:
    await site.add_tiny("99.0")
    await site.hear()
    await site.want("99.0")
    servicer = Servicer(site)
    servicer.replay = await site.hear()  # signed, whole, and for another check-in
    node = Node(site, servicer)
    async with node.connected():
        said = await node.said()

    assert (said.failed_version, said.failed_reason) == ("99.0", "the order answers another check-in")
    assert node.trial is None
    assert servicer.offsets == []


async def test_what_another_key_signed_is_refused_before_anything_is_fetched(site: Site) -> None:
    await site.add_tiny("99.0")
    await site.hear()
    await site.want("99.0")
    other = ReleaseKey(Ed25519PrivateKey.generate())
    node = Node(site, Servicer(site), key=other.text)
    async with node.connected():
        said = await node.said()

    assert "not signed with a release key that this agent trusts" in said.failed_reason
    assert (node.trial, node.servicer.offsets) == (None, [])


@pytest.mark.parametrize("told", [False, True])
async def test_nothing_below_the_floor_is_installed_unless_the_release_says_so(
    site: Site, told: bool
) -> None:
    await site.add_tiny("98.0", ignores_floor=told)
    await site.hear()
    await site.want("98.0")
    node = Node(site, Servicer(site))
    node.root.mkdir()
    launcher.write(node.root / "floor.json", '{"version": "98.5"}')
    async with node.connected():
        if told:
            await node.upgrader.ready.wait()
            assert node.trial is not None
        else:
            said = await node.said()
            assert "older than 98.5, below which this agent installs nothing" in said.failed_reason
            assert node.trial is None


async def test_a_release_for_other_machines_is_refused(site: Site) -> None:
    wheel = tiny_wheel(site.folder, "99.0")
    await site.add(wheel.rename(site.folder / "fleetplane_agent-99.0-cp39-cp39-win_amd64.whl"))
    await site.hear()
    await site.want("99.0")
    node = Node(site, Servicer(site))
    async with node.connected():
        said = await node.said()

    assert "the release has no wheel of fleetplane_agent for python-3." in said.failed_reason
    assert (node.trial, node.servicer.offsets) == (None, [])
