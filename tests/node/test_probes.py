"""Whether the agent works, for whoever asks over HTTP."""

from __future__ import annotations

import asyncio

import pytest
import structlog
from support.instances.instance_server_double import until

from fleetplane.kernel.errors import SettingsError
from fleetplane.node import probes
from fleetplane.node.probes import Probes, split_address


async def asked(port: int, request: bytes = b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n") -> tuple[str, bytes]:
    """The status line and the body; both empty if it hung up."""
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        try:
            answer = await reader.read()
        except ConnectionResetError:
            answer = b""
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0].decode(), body


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        (b"POST / HTTP/1.1\r\n\r\n", "HTTP/1.1 405 Method Not Allowed"),
        (b"x" * (probes.HEAD_LIMIT_BYTES + 1) + b"\r\n\r\n", ""),
        (b"\r\n\r\n", "HTTP/1.1 405 Method Not Allowed"),
        (b"GET / HTTP/1.1\r\n\r\n", "HTTP/1.1 404 Not Found"),
    ],
)
async def test_what_is_no_question_gets_no_answer(request_: bytes, line: str) -> None:
    answers = Probes("127.0.0.1:0", lambda: True)
    task = asyncio.create_task(answers.run(structlog.get_logger()))
    try:
        await until(lambda: answers.port)
        assert (await asked(answers.port, request_))[0] == line
        assert (await asked(answers.port))[0] == "HTTP/1.1 200 OK", "the next one is served"
    finally:
        task.cancel()


@pytest.mark.parametrize(
    ("address", "parts"),
    [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:80", ("::1", 80)), (":8080", ("", 8080))],
)
def test_an_address_is_a_host_and_a_port(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize("address", ["x", "host:", "host:http", "host:65536"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(SettingsError):
        split_address(address)
