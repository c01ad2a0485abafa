"""GPUs on three real servers over one PostgreSQL: written and read on all, linearizably.

Watches and providers move between them, and one of them may die.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.shared.cli_runner import Outcome, execute
from support.shared.linearizability import Operation, check
from support.shared.postgres_server import PostgresServer
from support.shared.rough_network import Roughness, RoughNetwork, rough_network
from support.shared.server_process import running_server
from support.shared.waiting_server import WaitingServer, patient

from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2, gpu_pb2_grpc, provider_pb2, provider_pb2_grpc

LEASE_SECONDS = 10.0
ONLY = (
    "--only",
    os.environ.get("STANDBY_DOMAINS", "gpus"),
    "--set",
    f"gpus.lease_seconds={LEASE_SECONDS}",
)
DEADLINE_SECONDS = 60.0
GPUS = ("gpu-0", "gpu-1")
PROVIDERS = "nvidia.device.v1alpha1.ProviderService"
WRITES = 10
"""Of each writer, one for each GPU at each server."""
BEAT_SECONDS = 0.5
T = TypeVar("T")

UNGATED = """
import os
from fleetplane.kernel.store.notifiers.notifier import CommitNotifier
from fleetplane.kernel.store.servers.leader_lease import ReadIndex

confirm, wake = ReadIndex.confirm, CommitNotifier._wake

async def ungated(self):
    if not os.path.exists({path!r}):
        await confirm(self)

def unheard(self, number):
    if not os.path.exists({path!r}):
        wake(self, number)

ReadIndex.confirm, CommitNotifier._wake = ungated, unheard
"""
"""A defect that can be put into a server that runs: reads come from memory as it is, which is behind
because the bell is not heard either."""


class Server:
    """What the device API of one server answers; UNAVAILABLE is tried again, as clients do."""

    def __init__(self, name: str, socket: Path) -> None:
        self.name = name
        self.channel = grpc.insecure_channel(f"unix:{socket}")
        self.gpus: Any = gpu_pb2_grpc.GpuServiceStub(self.channel)
        self.provider: Any = provider_pb2_grpc.ProviderServiceStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)
        self.kill: Callable[[], object] = lambda: None

    def read(self, gpu: str) -> Any:
        """What the GPU's condition says; None if it is not answered now."""
        try:
            found = self.gpus.GetGpu(gpu_pb2.GetGpuRequest(name=gpu), timeout=DEADLINE_SECONDS).gpu
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE, error
            return None
        return {one.type: one.message for one in found.status.conditions}.get("Ready", "")

    def write(self, gpu: str, message: str) -> int:
        condition = gpu_pb2.Condition(type="Ready", status="True", reason="Test", message=message)
        request = provider_pb2.UpdateGpuConditionRequest(name=gpu, provider_id="p", condition=condition)
        version: int = self.call(self.provider.UpdateGpuCondition, request).resource_version
        return version

    def call(self, method: Any, request: Any) -> Any:
        """The answer. UNAVAILABLE means that nothing was done: the server was not up to date."""
        return again(partial(_answered, method, request))

    def says(self, gpu: str) -> list[tuple[str, str]]:
        """Status and reason of its conditions."""
        found = self.call(self.gpus.GetGpu, gpu_pb2.GetGpuRequest(name=gpu)).gpu
        return [(one.status, one.reason) for one in found.status.conditions]

    def watch(self, after: int | None) -> Any:
        options = gpu_pb2.ListOptions(resource_version="" if after is None else str(after))
        return self.gpus.WatchGpus(gpu_pb2.WatchGpusRequest(opts=options), timeout=DEADLINE_SECONDS)

    def told(self, after: int | None, wanted: Callable[[Any], bool]) -> Any:
        """The first event that is wanted, over as many watches as it takes; none is told to list again."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            try:
                for event in self.watch(after):
                    version = int(event.object.metadata.resource_version)
                    assert after is None or version > after
                    if wanted(event):
                        return event
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE, error
            assert time.monotonic() < deadline

    def is_active(self) -> bool:
        """False while it opens its listeners anew, too."""
        try:
            return self.status("") == "SERVING"
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE, error
            return False

    def status(self, service: str) -> str:
        answer = self.health.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE_SECONDS)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _answered(method: Any, request: Any) -> Any:
    try:
        return method(request, timeout=DEADLINE_SECONDS)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.UNAVAILABLE, error
        return None


def again(ask: Callable[[], T | None]) -> T:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while (found := ask()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@contextmanager
def servers(tmp_path: Path, postgres: PostgresServer, more: str = "") -> Iterator[list[Server]]:
    """One that is active, and two that stand by."""
    environment = {
        **patient(reads=True, more=more, folder=tmp_path),
        "FLEETPLANE_STORE__URL": postgres.database(),
        "FLEETPLANE_IDENTITY__MASTER_KEY": base64.b64encode(secrets.token_bytes(32)).decode(),
    }
    with ExitStack() as stack:
        first = stack.enter_context(running_server(tmp_path / "one", *ONLY, environment=environment))
        standing_by = [
            stack.enter_context(WaitingServer(tmp_path / name, environment, *ONLY))
            for name in ("two", "three")
        ]
        for one in standing_by:
            one.until(partial(_serves, one))
        found = [Server(name, tmp_path / name / "d.sock") for name in ("one", "two", "three")]
        for server in found:
            stack.callback(server.channel.close)
        found[0].kill = first.process.kill
        yield found


@pytest.mark.timeout(600)
async def test_a_standby_that_the_database_does_not_answer_refuses_reads_and_ends_watches(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    environment = {
        **patient(),
        "FLEETPLANE_STORE__URL": postgres.database(),
        "FLEETPLANE_IDENTITY__MASTER_KEY": base64.b64encode(secrets.token_bytes(32)).decode(),
    }
    direct = f"127.0.0.1:{postgres.port}"
    async with rough_network(direct) as network:
        with running_server(tmp_path / "one", *ONLY, environment=environment):
            active = Server("one", tmp_path / "one" / "d.sock")
            active.call(active.provider.RegisterGpu, provider_pb2.RegisterGpuRequest(name="gpu-0"))
            environment["FLEETPLANE_STORE__URL"] = environment["FLEETPLANE_STORE__URL"].replace(
                direct, network.address
            )
            with WaitingServer(tmp_path / "two", environment, *ONLY) as two:
                standby = Server("two", tmp_path / "two" / "d.sock")
                try:
                    await asyncio.to_thread(two.until, partial(_serves, two))
                    await asyncio.to_thread(_cut_off, network, asyncio.get_running_loop(), active, standby)
                finally:
                    standby.channel.close()
                    active.channel.close()


def _cut_off(network: RoughNetwork, loop: asyncio.AbstractEventLoop, active: Server, standby: Server) -> None:
    assert again(partial(standby.read, "gpu-0")) == ""
    watch = again(partial(_begun, standby))
    network.roughness = Roughness(stall=1.0, stall_seconds=3600.0)
    # Nobody is told what was true before this, for more than a moment; and then the watch ends.
    active.write("gpu-0", "unheard")
    ended = None
    try:
        for event in watch:
            assert event.object.metadata.name == "gpu-0"
    except grpc.RpcError as error:
        ended = error
    assert ended is not None
    assert ended.code() is grpc.StatusCode.UNAVAILABLE
    # Refused, whether its listener is still open or not.
    assert standby.read("gpu-0") in (None, "unheard")
    network.roughness = Roughness()
    loop.call_soon_threadsafe(network.cut_all)
    assert again(partial(standby.read, "gpu-0")) == "unheard"


def _begun(server: Server) -> Any:
    """A watch that has told what there is; None if it is refused now."""
    watch = server.watch(None)
    try:
        assert next(watch).type == "ADDED"
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.UNAVAILABLE, error
        return None
    return watch


def _serves(server: WaitingServer) -> bool:
    return "standby.reads_served" in server.told()


def history(writers: list[Server], readers: list[Server], numbers: Iterator[int]) -> list[Operation]:
    """What clients see who write and read the same GPUs at the same time, one at each server and GPU."""
    found: list[Operation] = []
    ready = threading.Barrier(len(GPUS) * len(writers) + len(readers))
    written: list[str] = []

    def write(writer: Server, gpu: str) -> None:
        ready.wait(DEADLINE_SECONDS)
        for _ in range(WRITES):
            value, began = str(next(numbers)), time.monotonic()
            writer.write(gpu, value)
            found.append(
                Operation(
                    register=gpu,
                    kind="write",
                    value=value,
                    began=began,
                    ended=time.monotonic(),
                    where=writer.name,
                )
            )
        written.append(gpu)

    def read(server: Server) -> None:
        ready.wait(DEADLINE_SECONDS)
        # Until nobody writes any more, and once after that.
        last = False
        while True:
            done = len(written) == len(GPUS) * len(writers)
            for gpu in GPUS:
                began = time.monotonic()
                value = again(partial(server.read, gpu)) if last else server.read(gpu)
                ended = time.monotonic()
                if value is not None:
                    found.append(
                        Operation(
                            register=gpu,
                            kind="read",
                            value=value,
                            began=began,
                            ended=ended,
                            where=server.name,
                        )
                    )
            if last:
                return
            last = done

    with ThreadPoolExecutor(len(GPUS) * len(writers) + len(readers)) as pool:
        tasks = [pool.submit(write, one, gpu) for one in writers for gpu in GPUS]
        tasks += [pool.submit(read, one) for one in readers]
        for task in tasks:
            task.result(2 * DEADLINE_SECONDS)
    return found


@pytest.mark.timeout(900)
def test_gpus_are_written_and_read_linearizably_on_every_server(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    defect = tmp_path / "ungated"
    with servers(tmp_path, postgres, UNGATED.format(path=str(defect))) as (one, two, three):
        for gpu in GPUS:
            one.call(one.provider.RegisterGpu, provider_pb2.RegisterGpuRequest(name=gpu))
        numbers = itertools.count(1)
        for gpu in GPUS:
            one.write(gpu, "0")
        begun = [Operation(register=gpu, kind="write", value="0", began=0, ended=0) for gpu in GPUS]
        everyone = [one, two, three]
        seen = [*begun, *history(everyone, everyone, numbers)]
        assert {(each.where, each.kind) for each in seen} == {
            *((server.name, kind) for server in everyone for kind in ("read", "write")),
            ("", "write"),
        }
        verdict = check(seen)
        assert verdict.linearizable, str(verdict)
        _finds_a_stale_read(seen)
        _written_anywhere(one, two, three)
        _owner(tmp_path / "one", tmp_path / "two")
        _watches(one, two, three)
        # The same servers without the gate: the checker finds what clients then see.
        defect.touch()
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            begun = [replace(each, value=again(partial(one.read, each.register))) for each in begun]
            if not check([*begun, *history([one], [two, three], numbers)]).linearizable:
                break
            assert time.monotonic() < deadline
        defect.unlink()
        _providers(one, two, three)


def _finds_a_stale_read(seen: list[Operation]) -> None:
    """One read of a standby, late in the history, is given the value from its beginning."""
    late = max((each for each in seen if each.where == "three"), key=lambda each: each.began)
    stale = replace(late, value="0")
    verdict = check([stale if each is late else each for each in seen])
    assert not verdict.linearizable
    assert stale in verdict.stuck


def _written_anywhere(one: Server, two: Server, three: Server) -> None:
    """GPUs come and go on whichever server; versions decide everywhere; health says what is served."""
    made = two.call(
        two.gpus.CreateGpu, gpu_pb2.CreateGpuRequest(gpu=gpu_pb2.Gpu(metadata={"name": "made"}, spec={}))
    )
    assert made.created
    assert not one.call(
        one.gpus.CreateGpu, gpu_pb2.CreateGpuRequest(gpu=gpu_pb2.Gpu(metadata={"name": "made"}, spec={}))
    ).created
    status = gpu_pb2.GpuStatus(recommended_action="reset")
    version = made.gpu.metadata.resource_version
    request = gpu_pb2.ReplaceGpuStatusRequest(name="made", status=status, resource_version=version)
    three.call(three.gpus.UpdateGpuStatus, request)
    for server in (one, two, three):
        with pytest.raises(AssertionError) as refused:
            server.call(server.gpus.UpdateGpuStatus, request)
        assert "ABORTED" in str(refused.value)
    two.call(two.gpus.DeleteGpu, gpu_pb2.DeleteGpuRequest(name="made"))
    with pytest.raises(AssertionError) as refused:
        three.call(three.gpus.DeleteGpu, gpu_pb2.DeleteGpuRequest(name="made"))
    assert "NOT_FOUND" in str(refused.value)
    for service in ("fleetplane.reads", PROVIDERS, "nvidia.device.v1alpha1.GpuService"):
        again(lambda service=service: True if two.status(service) == "SERVING" else None)  # type: ignore[misc]
        assert one.status(service) == "SERVING"
    assert (one.status(""), two.status("")) == ("SERVING", "NOT_SERVING")
    listed = again(lambda: _listed(two))
    assert [gpu.metadata.name for gpu in listed] == list(GPUS)


def _providers(one: Server, two: Server, three: Server) -> None:
    """A provider that calls every server in turn is alive, also when the active one is killed; one that is
    silent is so on all."""
    beats = provider_pb2.HeartbeatRequest(provider_id="p")
    condition = gpu_pb2.Condition(type="Fan", status="True", reason="Turns")
    two.call(
        two.provider.UpdateGpuCondition,
        provider_pb2.UpdateGpuConditionRequest(name="gpu-1", provider_id="quiet", condition=condition),
    )
    three.call(three.provider.Heartbeat, provider_pb2.HeartbeatRequest(provider_id="quiet"))
    alive, stop, heard = [one, two, three], threading.Event(), itertools.count()

    def beat() -> int:
        turn = 0
        while not stop.is_set():
            server = alive[turn % len(alive)]
            # One that was killed is passed over, as a balancer would.
            if _beaten(server, beats):
                next(heard)
            turn += 1
            time.sleep(BEAT_SECONDS)
        return turn

    silent, speaks = ("Unknown", "ProviderSilent"), ("True", "Test")
    with ThreadPoolExecutor(1) as pool:
        beating = pool.submit(beat)
        try:
            deadline = time.monotonic() + 2 * DEADLINE_SECONDS
            while not all(server.says("gpu-1") == [speaks, silent] for server in (one, two, three)):
                assert all(server.says("gpu-1")[0] == speaks for server in (one, two, three))
                assert time.monotonic() < deadline
                time.sleep(0.2)
            two.call(two.provider.Heartbeat, provider_pb2.HeartbeatRequest(provider_id="quiet"))
            assert [server.says("gpu-1") for server in (one, two, three)] == [[speaks, ("True", "Turns")]] * 3
            version = three.write("gpu-0", "before")
            one.kill()
            left = [two, three]
            deadline = time.monotonic() + 2 * DEADLINE_SECONDS
            while not any(server.is_active() for server in left):
                assert time.monotonic() < deadline
                time.sleep(0.2)
            # Everything that is said of GPUs since then is what its provider said.
            for server in left:
                assert server.says("gpu-0") == [speaks]
                found = server.call(server.gpus.GetGpu, gpu_pb2.GetGpuRequest(name="gpu-0")).gpu
                assert int(found.metadata.resource_version) == version
        finally:
            stop.set()
        assert beating.result(DEADLINE_SECONDS) > 3
    assert next(heard) > 3


def _beaten(server: Server, request: Any) -> bool:
    try:
        return bool(server.provider.Heartbeat(request, timeout=DEADLINE_SECONDS).acknowledged)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.UNAVAILABLE, error
        return False


def _owner(active: Path, standby: Path) -> None:
    """The owner's socket is open on a standby: tokens are listed and revoked there, too."""

    def done(data: Path, *verb: str) -> Outcome | None:
        found = execute("tokens", *verb, "--data-dir", str(data))
        return found if found.code == 0 else None

    again(lambda: done(active, "create", "seen", "--role", "gpus.viewer"))
    assert "seen" in again(lambda: done(standby, "list")).out
    again(lambda: done(standby, "revoke", "seen"))
    assert "seen" not in again(lambda: done(active, "list")).out


def _listed(server: Server) -> Any:
    try:
        return server.gpus.ListGpus(gpu_pb2.ListGpusRequest(), timeout=DEADLINE_SECONDS).gpu_list.items
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.UNAVAILABLE, error
        return None


def _watches(one: Server, two: Server, three: Server) -> None:
    """A watch begins at one server and goes on at the next, whichever of them is ahead."""
    first = two.told(None, lambda event: event.object.metadata.name == "gpu-1")
    assert first.type == "ADDED"
    # A version that the active server gave out a moment ago is none of the future for any other.
    version = one.write("gpu-0", "moved")
    seen = version
    for number, server in enumerate([two, three, one] * 3):
        one.write("gpu-0", f"moved-{number}")
        event = server.told(seen, lambda _: True)
        assert (event.type, event.object.metadata.name) == ("MODIFIED", "gpu-0")
        conditions = {each.type: each.message for each in event.object.status.conditions}
        assert conditions["Ready"] == f"moved-{number}"
        seen = int(event.object.metadata.resource_version)
    for server in (one, two):
        again(partial(_is_from_nowhere, server, seen + 1_000_000))


def _is_from_nowhere(server: Server, version: int) -> bool | None:
    """Whether a watch after a version that no server has given out is told to list again."""
    with pytest.raises(grpc.RpcError) as refused:
        next(iter(server.watch(version)))
    code = refused.value.code()
    assert code in (grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.UNAVAILABLE)
    return True if code is grpc.StatusCode.OUT_OF_RANGE else None
