"""Checking in with the server as the version that runs, and getting ready for the one that is ordered.

Runs beside an agent's session, over its connection; an agent that was not started by the launcher has none.
A check-in is the hello of a version: the first one that the server answers confirms a trial. An order is
obeyed only if a trusted key signed it for this very check-in. What goes wrong is noted in the release folder
and told with the next check-in; the same order is not tried twice.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from fleetplane import __version__
from fleetplane.gen.fleetplane.fleet.v1 import releases_pb2 as pb
from fleetplane.gen.fleetplane.fleet.v1 import releases_pb2_grpc
from fleetplane.kernel import release_documents as documents
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    FailedPrecondition,
    FleetplaneError,
    IntegrityError,
    InvalidArgument,
    ResourceExhausted,
)
from fleetplane.kernel.release_documents import FileEntry, ReleaseManifest, UpgradeOrder
from fleetplane.kernel.unbroken import run_to_completion
from fleetplane.node.connection import Metadata
from fleetplane.node.link import words
from fleetplane.node.short_lived import call_elsewhere
from fleetplane.node.tasks import in_thread
from fleetplane.node.upgrade import installing, launcher
from fleetplane.node.upgrade.folder import ReleaseFolder, UpgradeFailure, version_of
from fleetplane.node.upgrade.installing import check_floor, planned, this_machine
from fleetplane.node.upgrade.launch import Launch

CALL_SECONDS: Final = 20.0
FETCH_SECONDS: Final = 3600.0
"""For one file: 64 MB at 150 kbit/s; what is there is kept when a connection breaks."""
RETRY_SECONDS: Final = 5.0
"""After a check-in that failed, while the connection lasts."""
SHORTEST_SECONDS: Final = 0.2
LONGEST_SECONDS: Final = 3600.0
"""Between check-ins, whatever the server says."""
TRIAL_LIMIT_SECONDS: Final = 3600.0
REASON_LIMIT: Final = 500
SPACE_FACTOR: Final = 5
"""Free space that a release needs, as a multiple of its files: they are kept until they are unpacked."""


class _UpgradeServer:
    """The server's part, as one connection offers it."""

    def __init__(self, stub: Any, metadata: Metadata) -> None:
        self._stub = stub
        self._metadata = metadata

    async def check_in(self, request: pb.CheckInRequest) -> pb.CheckInResponse:
        answer: pb.CheckInResponse = await self._stub.CheckIn(
            request, timeout=CALL_SECONDS, metadata=tuple(self._metadata())
        )
        return answer

    def fetch(self, sha256: str, offset: int) -> grpc.aio.UnaryStreamCall[pb.FetchRequest, pb.FetchChunk]:
        call: grpc.aio.UnaryStreamCall[pb.FetchRequest, pb.FetchChunk] = self._stub.Fetch(
            pb.FetchRequest(sha256=sha256, offset=offset),
            timeout=FETCH_SECONDS,
            metadata=tuple(self._metadata()),
        )
        return call


class Upgrader:
    """One for an agent's whole life."""

    def __init__(self, launch: Launch, *, clock: Clock, log: Callable[[], Any], name: str = "") -> None:
        """`name` says who asks where no credential does; `log` is asked once logging is set up."""
        self._launch = launch
        self._clock = clock
        self._make_log = log
        self._name = name
        self.root = Path(launch.root)
        """Where versions lie."""
        self._folder = ReleaseFolder(self.root)
        self._trial = launch.trial
        self._stopping = False
        self._turn = asyncio.Lock()  # guards: one check-in at a time, also on two connections
        self.ready = asyncio.Event()
        """Another version is to be tried: the agent should end, and have itself started anew."""

    def __repr__(self) -> str:
        return f"<Upgrader {__version__} ready={self.ready.is_set()}>"

    def relaunch(self) -> None:
        """Start anew if another version is to be tried; else return. Nothing may be open any more."""
        if self.ready.is_set() and not self._stopping:
            self._launch.again()

    def stop(self) -> None:
        """The agent is asked to end: it does, whatever is ready."""
        self._stopping = True

    async def follow(self, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        """Check in over a connection for as long as it lasts. Raises nothing but cancellation."""
        self._log = self._make_log()
        await in_thread(self._folder.make)
        server = _UpgradeServer(releases_pb2_grpc.AgentReleasesStub(channel), metadata)
        while not self.ready.is_set():
            pause = RETRY_SECONDS
            try:
                async with self._turn:
                    pause = await self._check_in(server)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    self._log.info("upgrade_not_offered")
                    return  # by this server; the next connection may be to another
                self._log.debug("check_in_failed", error=words(error))
            except (FleetplaneError, OSError) as error:
                self._log.warning("upgrade_failed", error=str(error))
            # In this order, so that a pause which is no number is the longest.
            await self._clock.sleep(max(SHORTEST_SECONDS, min(LONGEST_SECONDS, pause)))

    async def _check_in(self, server: _UpgradeServer) -> float:
        """Seconds until the next one."""
        launch, folder = self._launch, self._folder
        nonce = self._clock.token_bytes(documents.NONCE_BYTES)
        request = await in_thread(lambda: _hello(launch, folder, self._name, nonce))
        answer = await server.check_in(request)
        if self._trial:
            await in_thread(lambda: folder.confirm(self._trial, launch.release))
            self._log.info("upgrade_confirmed", version=__version__)
            self._trial = ""
            return SHORTEST_SECONDS
        if _trial_is_open(folder):
            return answer.next_seconds
        if not answer.order:
            await in_thread(lambda: folder.prune(launch.release))
            return answer.next_seconds
        return await self._carry_out(server, answer, nonce)

    async def _carry_out(self, server: _UpgradeServer, answer: pb.CheckInResponse, nonce: bytes) -> float:
        folder = self._folder
        attempted = _unverified(answer.order)
        try:
            order, manifest = await _elsewhere(
                installing.verified,
                self._launch.keys,
                answer.order,
                answer.order_signature,
                answer.manifest,
                answer.manifest_signature,
            )
            if order.nonce != nonce.hex():
                raise InvalidArgument("the order answers another check-in")
            attempted = order
            if (failure := folder.failure()) is not None and _is_same(failure, order):
                return answer.next_seconds  # tried before
            candidate = await self._candidate(server, answer, order, manifest)
            await run_to_completion(self._get_ready(candidate, order))
        except (FleetplaneError, OSError) as error:
            reason = str(error)[:REASON_LIMIT]
            self._log.warning("upgrade_refused", version=attempted.version, reason=reason)
            failed = UpgradeFailure(version=attempted.version, attempt=attempted.attempt, reason=reason)
            if failed == folder.failure():
                return answer.next_seconds
            await in_thread(lambda: folder.fail(failed))
        return SHORTEST_SECONDS

    async def _get_ready(self, candidate: str, order: UpgradeOrder) -> None:
        """Order the trial and ask for the new start: with one alone, nothing would ever be tried."""
        await in_thread(
            lambda: self._folder.begin_trial(
                trial=self._clock.token_bytes(8).hex(),
                candidate=candidate,
                version=order.version,
                attempt=order.attempt,
                seconds=min(max(order.seconds, 1.0), TRIAL_LIMIT_SECONDS),
            )
        )
        self._log.info("upgrade_ready", version=order.version)
        self.ready.set()

    async def _candidate(
        self,
        server: _UpgradeServer,
        answer: pb.CheckInResponse,
        order: UpgradeOrder,
        manifest: ReleaseManifest | None,
    ) -> str:
        """The name of the version that is ordered, once it lies here; empty for the installed one."""
        launch, folder = self._launch, self._folder
        if manifest is None:
            return await in_thread(lambda: _kept(launch, folder, order.version))
        wheels = planned(order, manifest, floor=folder.floor(), machine=this_machine())
        entries = {entry.name: entry for entry in manifest.files}
        wanted = [entries[wheel.file] for wheel in wheels]
        _check_space(folder, sum(entry.size for entry in wanted))
        if not launcher.is_installed(folder.place(manifest.version, order.manifest)):
            for entry in wanted:
                await self._fetch(server, entry)
        name: str = await _elsewhere(
            installing.install, folder.root, launch.keys, answer.manifest, answer.manifest_signature, wheels
        )
        return name

    async def _fetch(self, server: _UpgradeServer, entry: FileEntry) -> None:
        """A file, from where an earlier download of it ended."""
        path = self._folder.downloads / entry.sha256
        there = path.stat().st_size if path.exists() else 0
        if there > entry.size:
            path.unlink()
            there = 0
        if there < entry.size:
            call = server.fetch(entry.sha256, there)
            with path.open("ab") as file:
                async for chunk in call:
                    there += len(chunk.content)
                    if there > entry.size:
                        call.cancel()
                        break
                    file.write(chunk.content)
        try:
            await in_thread(lambda: installing.check_file(path, entry.sha256, entry.size))
        except IntegrityError:
            path.unlink(missing_ok=True)  # what is wrong is not resumed
            raise


def _hello(launch: Launch, folder: ReleaseFolder, name: str, nonce: bytes) -> pb.CheckInRequest:
    machine = this_machine()
    kept = {version_of(one) for one in folder.installed()} | {launch.installed}
    request = pb.CheckInRequest(
        name=name,
        version=__version__,
        kept=sorted(kept - {"", __version__}),
        can_upgrade=True,
        python="{}.{}".format(*machine.python),
        platform=str(machine).partition(" ")[2],
        nonce=nonce,
    )
    failure = folder.failure()
    if failure is not None:
        request.failed.CopyFrom(
            pb.FailedUpgrade(version=failure.version, attempt=failure.attempt, reason=failure.reason)
        )
    return request


def _trial_is_open(folder: ReleaseFolder) -> bool:
    """Whether the launcher still has to note how a trial ended, which takes it a moment."""
    return (folder.root / "trial.json").exists()


def _kept(launch: Launch, folder: ReleaseFolder, version: str) -> str:
    check_floor(version, floor=folder.floor(), ignores_floor=False)
    if version == launch.installed:
        return ""
    name = folder.find(version)
    if name is None:
        raise FailedPrecondition(f"version {version} is not kept here any more")
    return name


def _unverified(document: bytes) -> UpgradeOrder:
    """For the report of a refusal only."""
    try:
        return documents.decode(document, UpgradeOrder)
    except InvalidArgument:
        return UpgradeOrder(agent="", nonce="", version="", manifest="", attempt=0, seconds=0.0)


def _is_same(failure: UpgradeFailure, order: UpgradeOrder) -> bool:
    return (failure.version, failure.attempt) == (order.version, order.attempt)


def _check_space(folder: ReleaseFolder, size: int) -> None:
    free = shutil.disk_usage(folder.root).free
    if free < size * SPACE_FACTOR:
        raise ResourceExhausted(f"{folder.root} has {free} bytes free, {size * SPACE_FACTOR} are needed")


async def _elsewhere(function: Callable[..., Any], *arguments: Any) -> Any:
    return await in_thread(lambda: call_elsewhere(function, *arguments))
