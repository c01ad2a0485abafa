"""What a machine boots with, from wherever the document says it lies."""

from __future__ import annotations

import base64
import gzip
import hashlib
import http.server
import ssl
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import pytest
from support.instances.controller_rig import rig, wanted
from support.shared.throwaway_ca import ThrowawayCa

from fleetplane.domains.instances.content import downloads as module
from fleetplane.domains.instances.content.downloads import Downloads, checked, fetch_https, pinned, reachable
from fleetplane.domains.instances.content.user_data import unpacked
from fleetplane.domains.instances.providers.contract import CreateRequest
from fleetplane.kernel.errors import (
    FailedPrecondition,
    FleetplaneError,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from fleetplane.kernel.objects import LocalObjects
from fleetplane.sim.clock import VirtualClock

SCRIPT = b"#!/bin/sh\necho {{ .Instance.ID }} {{ .Nonce }}\n"


# Into a request


def booting(userdata: dict[str, Any], size: int = 1) -> dict[str, Any]:
    config = wanted(size)
    config["templates"]["worker"]["userdata"] = userdata
    return config


@pytest.mark.parametrize("encoding", ["plain", "base64", "gzip", "base64+gzip"])
async def test_however_it_is_written_it_is_unpacked_and_rendered(tmp_path: Path, encoding: str) -> None:
    packed = gzip.compress(SCRIPT) if "gzip" in encoding else SCRIPT
    packed = base64.encodebytes(packed) if "base64" in encoding else packed
    objects = LocalObjects(tmp_path / "objects")
    await objects.put("boot/worker.sh", packed)
    config = booting(
        {"source": "url", "encoding": encoding, "content": "storage:boot/{{ .Instance.Kind }}.sh"}
    )
    await objects.put("boot/wkr.sh", packed)
    made: list[CreateRequest] = []
    async with rig(tmp_path, booting({"content": "x"}, 0)) as place:
        place.provider.on_create = made.append
        await place.configure(config)
        await place.advance(1)
    [request] = made
    assert request.user_data == f"#!/bin/sh\necho {request.instance_id} {request.nonce}\n".encode()


async def test_inline_base64_is_what_it_holds(tmp_path: Path) -> None:
    made: list[CreateRequest] = []
    async with rig(tmp_path, wanted(0)) as place:
        place.provider.on_create = made.append
        await place.configure(booting({"encoding": "base64", "content": base64.b64encode(SCRIPT).decode()}))
        await place.advance(1)
    assert made[0].user_data.startswith(f"#!/bin/sh\necho {made[0].instance_id}".encode())


async def test_what_cannot_be_had_is_explained_and_tried_again(tmp_path: Path) -> None:
    async with rig(tmp_path, booting({"source": "url", "content": "storage:boot/worker.sh"})) as place:
        await place.advance(1)
        said = "user data: there is no object 'boot/worker.sh' in the storage"
        assert place.explained()["NOT_FOUND"] == said
        await place.objects.put("boot/worker.sh", SCRIPT)
        await place.advance(6)
        assert len(place.machines()) == 1


async def test_machines_that_may_be_taken_away_report_more_often(tmp_path: Path) -> None:
    made: list[CreateRequest] = []
    config = wanted(1, health_check_interval="60s")
    config["templates"]["worker"]["args"] = {"spot": True}
    config["templates"]["worker"]["userdata"] = {"content": "every {{ .Instance.ReportInterval }}"}
    async with rig(tmp_path, wanted(0, health_check_interval="60s")) as place:
        place.provider.on_create = made.append
        await place.configure(config)
        await place.advance(1)
        config["templates"]["worker"]["args"] = {}
        config["groups"]["acme"]["workers"]["size"] = 2
        await place.configure(config)
        await place.advance(1)
    assert (made[0].report_interval_seconds, made[0].user_data) == (10.0, b"every 10s")
    assert (made[1].report_interval_seconds, made[1].user_data) == (0.0, b"every 1m0s")


# Unpacking


@pytest.mark.parametrize(
    ("content", "coding", "complaint"),
    [
        (b"???", "base64", "not base64"),
        (b"plain", "gzip", "not gzip"),
        (gzip.compress(SCRIPT)[:-9], "gzip", "ends too early"),
        (gzip.compress(bytes(module.LIMIT_BYTES + 1)), "gzip", "more than 262144 bytes"),
    ],
    ids=["not base64", "not gzip", "cut off", "too much"],  # gzip writes the time: the bytes are no name
)
def test_what_is_not_as_its_encoding_says_is_refused(content: bytes, coding: str, complaint: str) -> None:
    with pytest.raises(FailedPrecondition, match=complaint):
        unpacked(content, coding)


# Which addresses are asked


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("http://example.com/x", "https://"),
        ("file:///etc/passwd", "https://"),
        ("ftp://example.com/x", "https://"),
        ("https:///x", "https://"),
        ("https://ada:secret@example.com/x", "name or password"),
        ("https://example.com:99999/x", "no address"),
    ],
)
def test_only_plain_https_is_asked(url: str, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        checked(url)


@pytest.mark.parametrize(
    ("address", "public", "named"),
    [
        ("93.184.216.34", True, True),
        ("2606:2800:220:1:248:1893:25c8:1946", True, True),
        ("10.0.0.8", False, True),
        ("127.0.0.1", False, True),
        ("::1", False, True),
        ("fd00::8", False, True),
        ("100.64.0.1", False, True),
        ("::ffff:10.0.0.8", False, True),
        ("169.254.169.254", False, False),
        ("::ffff:169.254.169.254", False, False),
        ("fe80::1%eth0", False, False),
        ("0.0.0.0", False, False),
        ("224.0.0.1", False, False),
        ("64:ff9b::5db8:d822", True, True),
        ("64:ff9b::a9fe:a9fe", False, False),
    ],
)
def test_private_addresses_must_be_named_and_link_local_ones_are_never_asked(
    address: str, public: bool, named: bool
) -> None:
    assert (reachable(address, private=False), reachable(address, private=True)) == (public, named)


def test_a_pin_is_a_whole_hash() -> None:
    digest = hashlib.sha256(SCRIPT).hexdigest()
    assert pinned(urlsplit(f"https://x/y#sha256={digest.upper()}")) == digest
    assert pinned(urlsplit("https://x/y")) == ""
    for wrong in ("md5=abc", "sha256=abc", "top"):
        with pytest.raises(InvalidArgument, match="64 hexadecimal"):
            pinned(urlsplit(f"https://x/y#{wrong}"))


# Keeping


class Server:
    """Stands in for the network."""

    def __init__(self) -> None:
        self.body: bytes | FleetplaneError = SCRIPT
        self.asked: list[str] = []

    def __call__(self, parts: SplitResult, _private: Collection[str]) -> bytes:
        self.asked.append(parts.geturl())
        if isinstance(self.body, FleetplaneError):
            raise self.body
        return self.body


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def found(tmp_path: Path, server: Server, clock: VirtualClock) -> Downloads:
    return Downloads(LocalObjects(tmp_path), clock, fetch=server)


async def test_an_answer_is_used_for_its_time(found: Downloads, server: Server, clock: VirtualClock) -> None:
    assert await found.get("https://x/boot") == SCRIPT
    await clock.advance(module.FRESH_SECONDS - 1)
    server.body = b"newer"
    assert await found.get("https://x/boot") == SCRIPT
    assert len(server.asked) == 1
    await clock.advance(2)
    assert await found.get("https://x/boot") == b"newer"


async def test_a_server_that_is_away_is_bridged_but_not_for_ever(
    found: Downloads, server: Server, clock: VirtualClock
) -> None:
    await found.get("https://x/boot")
    server.body = Unavailable("away")
    await clock.advance(module.FRESH_SECONDS)
    assert await found.get("https://x/boot") == SCRIPT
    await clock.advance(module.STALE_SECONDS)
    with pytest.raises(Unavailable, match="away"):
        await found.get("https://x/boot")


async def test_a_pinned_text_is_checked_and_then_kept(
    found: Downloads, server: Server, clock: VirtualClock
) -> None:
    url = f"https://x/boot#sha256={hashlib.sha256(SCRIPT).hexdigest()}"
    server.body = b"something else"
    with pytest.raises(FailedPrecondition, match="the document says"):
        await found.get(url)
    server.body = SCRIPT
    assert await found.get(url) == SCRIPT
    await clock.advance(10 * module.STALE_SECONDS)
    asked = len(server.asked)
    assert await found.get(url) == SCRIPT
    assert len(server.asked) == asked


async def test_only_so_many_are_kept(found: Downloads) -> None:
    for number in range(module.KEPT_LIMIT + 5):
        await found.get(f"https://x/{number}")
    assert len(found._kept) == module.KEPT_LIMIT


async def test_an_object_that_is_missing_or_too_large_is_refused(found: Downloads, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no object 'boot'"):
        await found.get("storage:boot")
    await LocalObjects(tmp_path).put("boot", bytes(module.LIMIT_BYTES + 1))
    with pytest.raises(FailedPrecondition, match="longer than"):
        await found.get("storage:boot")


# Over the network


class _Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        match self.path:
            case "/boot?x=1":
                self._answer(200, SCRIPT)
            case "/long":
                self._answer(200, bytes(module.LIMIT_BYTES + 1))
            case "/moved":
                self._answer(302, b"", Location="https://elsewhere/boot")
            case _:
                self._answer(404, b"")

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's
        pass


@contextmanager
def https_server(folder: Path) -> Iterator[tuple[str, Callable[..., bytes]]]:
    """An address on loopback, and a fetch that trusts its authority."""
    authority = ThrowawayCa()
    certificate, key = authority.server(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as listening:
        listening.socket = context.wrap_socket(listening.socket, server_side=True)
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        trusting = ssl.create_default_context(cadata=authority.pem.decode())
        try:
            yield f"https://localhost:{listening.server_port}", partial(fetch_https, context=trusting)
        finally:
            listening.shutdown()
            thread.join()


def test_a_named_host_is_asked_over_tls_and_answers_are_bounded(tmp_path: Path) -> None:
    with https_server(tmp_path) as (address, fetch):
        assert fetch(urlsplit(f"{address}/boot?x=1#sha256=0"), {"localhost"}) == SCRIPT
        with pytest.raises(FailedPrecondition, match="longer than"):
            fetch(urlsplit(f"{address}/long"), {"localhost"})
        with pytest.raises(Unavailable, match="redirects are not followed, name 'https://elsewhere/boot'"):
            fetch(urlsplit(f"{address}/moved"), {"localhost"})
        with pytest.raises(Unavailable, match="answered 404"):
            fetch(urlsplit(f"{address}/nothing"), {"localhost"})
        with pytest.raises(FailedPrecondition, match=r"localhost is at .*, which is not of the public"):
            fetch(urlsplit(f"{address}/boot?x=1"), ())
        with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
            fetch_https(urlsplit(f"{address}/boot?x=1"), {"localhost"})
