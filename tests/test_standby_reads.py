"""A server that stands by answers reads and watches of the resource API, as new as the active one's."""

from __future__ import annotations

import base64
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from support.shared.cli_runner import execute
from support.shared.free_ports import free_port
from support.shared.postgres_server import PostgresServer
from support.shared.server_process import START_SECONDS, ServerProcess, running_server
from support.shared.waiting_server import WaitingServer, patient

from fleetplane.gen.nvidia.device.v1alpha1 import provider_pb2, provider_pb2_grpc

ONLY = ("--only", os.environ.get("STANDBY_DOMAINS", "gpus"))
DEADLINE_SECONDS = 60.0


def register(server: ServerProcess, *names: str) -> None:
    with grpc.insecure_channel(server.socket) as channel:
        stub = provider_pb2_grpc.ProviderServiceStub(channel)
        for name in names:
            stub.RegisterGpu(provider_pb2.RegisterGpuRequest(name=name), timeout=DEADLINE_SECONDS)


def token(data: Path, name: str, *, role: str = "gpus.viewer") -> str:
    made = execute("tokens", "create", name, "--role", role, "--data-dir", str(data))
    assert made.code == 0, made.err
    return made.out.strip().splitlines()[-1]


class Reader:
    """Somebody with a token, at one server; asks again while the server cannot say that it is up to date."""

    def __init__(self, web: str, bearer: str) -> None:
        self.http = httpx.Client(
            base_url=web, headers={"authorization": f"Bearer {bearer}"}, timeout=DEADLINE_SECONDS
        )

    def get(self, path: str) -> httpx.Response:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            with suppress(httpx.TransportError):
                answer = self.http.get(path)
                if answer.status_code != 503 or time.monotonic() > deadline:
                    return answer
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def names(self) -> list[str]:
        answer = self.get("/apis/v1/gpus")
        assert answer.status_code == 200, answer.text
        return [item["metadata"]["name"] for item in answer.json()["items"]]

    def told(self, name: str, after: int) -> tuple[str, int]:
        """The first event about a GPU after a revision, over as many connections as it takes; its id."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            with (
                suppress(httpx.TransportError),
                self.http.stream("GET", f"/apis/v1/watch?of=gpus&after={after}") as stream,
            ):
                for kind, mark, found in events(stream.iter_lines()):
                    assert mark >= after
                    if kind != "bookmark" and found["metadata"]["name"] == name:
                        return kind, mark
            assert time.monotonic() < deadline
            time.sleep(0.1)


def events(lines: Iterator[str]) -> Iterator[tuple[str, int, Any]]:
    """Type, id and content of each event of a stream."""
    kind, mark, data = "", 0, ""
    for line in lines:
        if line.startswith("event:"):
            kind = line.removeprefix("event:").strip()
        elif line.startswith("id:"):
            mark = int(line.removeprefix("id:"))
        elif line.startswith("data:"):
            data += line.removeprefix("data:")
        elif not line and kind:
            yield kind, mark, json.loads(data or "{}")
            kind, data = "", ""


@pytest.mark.timeout(600)
def test_reads_on_a_standby_are_as_new_as_those_on_the_active_server(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    environment = {
        **patient(reads=True),
        "FLEETPLANE_STORE__URL": postgres.database(),
        "FLEETPLANE_IDENTITY__MASTER_KEY": base64.b64encode(secrets.token_bytes(32)).decode(),
    }
    with running_server(tmp_path / "one", *ONLY, environment=environment) as one:
        first = token(tmp_path / "one", "first")
        register(one, "gpu-0")
        web = f"127.0.0.1:{free_port()}"
        at = ("--set", f"listeners.web.addresses={web}")
        everything = token(tmp_path / "one", "everything", role="viewer")
        with ExitStack() as begun:
            two = _begin_under_a_watch(
                Reader(one.web, everything),
                lambda: begun.enter_context(WaitingServer(tmp_path / "two", environment, *ONLY, *at)),
            )
            two.until(lambda: "standby.reads_served" in two.told())
            reader = Reader(f"http://{web}", first)
            try:
                _reads(one, reader, tmp_path / "one")
                _refusals(reader)
                _families(tmp_path / "one", tmp_path / "two")
                _servers(Reader(f"http://{web}", everything))
                cursor = _watch(one, reader)
                one.process.kill()
                one.process.wait(START_SECONDS)
                two.until(lambda: two.is_ready, START_SECONDS)
                active = Reader(two.server().web, first)
                try:
                    register(two.server(), "gpu-new")
                    assert "gpu-new" in active.names()
                    assert active.http.get("/readyz").text == "ok\n"
                    # A watch goes on here where it was elsewhere, with what it has not seen.
                    assert active.told("gpu-new", cursor)[0] == "added"
                    _successor(Reader(two.server().web, everything))
                finally:
                    active.http.close()
            finally:
                reader.http.close()


def _begin_under_a_watch(active: Reader, begin: Callable[[], WaitingServer]) -> WaitingServer:
    """A server that begins is told to whoever watches the active one, and known to whoever asks it then."""
    two = None
    with active.http, active.http.stream("GET", "/apis/v1/watch?of=servers") as stream:
        for kind, _, found in events(stream.iter_lines()):
            if kind == "bookmark" and two is None:
                two = begin()
            elif kind in {"added", "modified"} and not found["status"]["answers"]:
                assert two is not None, "it was told before it began"
                assert found["status"]["state"] == "standby"
                if found["status"]["fresh"]:  # it may be late for a while, which is told as well
                    break
        assert two is not None
        listed = {
            one["status"]["answers"]: one["status"] for one in active.get("/apis/v1/servers").json()["items"]
        }
    assert (listed[True]["state"], listed[True]["agents"], listed[True]["term"] > 0) == ("active", 0, True)
    assert (listed[False]["state"], listed[False]["boot"], listed[False]["agents"]) == ("standby", 1, 0)
    assert listed[False]["version"] == listed[True]["version"]
    assert listed[False]["database"] == listed[True]["database"]
    assert listed[True]["database"]["engine"] == "postgresql"
    assert listed[True]["database"]["sizeBytes"] > 1_000_000
    return two


def _servers(standby: Reader) -> None:
    """The one that stands by tells of the active one what the database knows."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    with standby.http:
        while True:  # until it has looked since the active one has said something of itself
            found = standby.get("/apis/v1/servers").json()["items"]
            told = {one["status"]["answers"]: one["status"] for one in found}
            if len(told) == 2 and told[False]["controllers"] and told[False]["bus"]["connected"]:
                break
            assert time.monotonic() < deadline, told
            time.sleep(0.1)
    assert (told[True]["state"], told[True]["writable"], told[True]["controllers"]) == ("standby", False, 0)
    assert (told[False]["state"], told[False]["writable"], told[False]["agents"]) == ("active", True, 0)
    assert told[False]["bus"]["kind"] == told[True]["bus"]["kind"] == "notify"


def _successor(active: Reader) -> None:
    """The one that took over under another term tells that the one before is gone, and since when."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    with active.http:
        while True:
            found = active.get("/apis/v1/servers").json()["items"]
            told = {one["status"]["answers"]: one["status"] for one in found}
            if len(told) == 2 and (told[True]["term"], told[False]["state"]) == (2, "gone"):
                break
            assert time.monotonic() < deadline, told
            time.sleep(0.1)
    assert told[False]["silentSince"] is not None
    assert not told[False]["fresh"]
    assert (told[True]["state"], told[True]["answers"]) == ("active", True)


def _reads(one: ServerProcess, reader: Reader, data: Path) -> None:
    """What was acknowledged there is true here at once, for tokens that are made and revoked too."""
    for number in range(3):
        register(one, f"gpu-{number}")
        assert f"gpu-{number}" in reader.names()
    second = Reader(str(reader.http.base_url), token(data, "second"))
    try:
        assert "gpu-2" in second.names()
        is_revoked, deadline = False, time.monotonic() + DEADLINE_SECONDS
        while second.get("/apis/v1/gpus").status_code != 401:
            assert time.monotonic() < deadline
            with (
                suppress(httpx.TransportError),
                second.http.stream("GET", "/apis/v1/watch?of=gpus") as stream,
            ):
                for kind, _, _ in events(stream.iter_lines()):
                    if kind == "bookmark" and not is_revoked:
                        _revoke(data, "second")
                        is_revoked, deadline = True, time.monotonic() + DEADLINE_SECONDS
                    assert time.monotonic() < deadline, "a watch goes on for a token that was revoked"
        assert is_revoked
    finally:
        second.http.close()


def _revoke(data: Path, name: str) -> None:
    gone = execute("tokens", "revoke", name, "--data-dir", str(data))
    assert gone.code == 0, gone.err


def _refusals(reader: Reader) -> None:
    """Everything else is refused, and says by whom it would be done."""
    assert reader.get("/readyz/reads").text == "ok\n"
    refused = reader.http.post("/v1/fleet/audit/verify", json={})
    assert (refused.status_code, "/one is active" in refused.text) == (503, True), refused.text
    elsewhere = reader.http.get("/nowhere")
    assert (elsewhere.status_code, "/one is active" in elsewhere.text) == (503, True)
    assert (reader.http.get("/readyz").status_code, reader.http.get("/readyz").text) == (503, "stands by\n")
    assert reader.http.get("/healthz").status_code == 200


ANSWERED = {
    "/apis/v1/people/whoami",
    "/apis/v1/people/tokens",
    "/apis/v1/people/oidc/callback",
    "/v1/fleet/freezes",
    "/v1/fleet/rollouts",
    "/apis/v1/gpus",
}


def _families(active: Path, standby: Path) -> None:
    """Of every REST family a standby answers what only reads the store, as the active server does."""
    answered, refused = set(), set()
    with owner(active) as one, owner(standby) as two:
        for path in two.get("/").json()["paths"]:
            document = one.get(path if path.endswith(".json") else f"{path}/openapi.json")
            if document.status_code != 200 or "paths" not in (described := document.json()):
                continue
            prefix = described["servers"][0]["url"]
            for below, methods in described["paths"].items():
                place = prefix + below
                if "get" not in methods or "{" in place or place.endswith("/watch"):
                    continue
                mine = again(two, place)
                if mine.status_code == 503:
                    assert "/one is active" in mine.text, mine.text
                    refused.add(place)
                    continue
                theirs = one.get(place)
                assert mine.status_code == theirs.status_code, place
                # The resource API tells of the server itself, too.
                assert prefix == "/apis/v1" or mine.content == theirs.content, place
                answered.add(place)
    assert answered >= ANSWERED, refused


def owner(data: Path) -> httpx.Client:
    transport = httpx.HTTPTransport(uds=str(data / "admin.sock"))
    headers = {"x-request-id": "compared"}
    return httpx.Client(
        transport=transport, base_url="http://owner", headers=headers, timeout=DEADLINE_SECONDS
    )


def again(client: httpx.Client, path: str) -> httpx.Response:
    """An answer, or a refusal that is not for want of knowledge."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        with suppress(httpx.TransportError):
            answer = client.get(path)
            if answer.status_code != 503 or "is active" in answer.text:
                return answer
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _watch(one: ServerProcess, reader: Reader) -> int:
    """A watch on the standby tells what is written on the active server; returns where it stands."""
    begun = int(reader.get("/apis/v1/gpus").json()["revision"])
    register(one, "gpu-watched")
    kind, mark = reader.told("gpu-watched", begun)
    assert (kind, mark > begun) == ("added", True)
    return mark
