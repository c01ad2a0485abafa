"""Loading a REST server: reads by h2load, writes by callers that each wait for their answer."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Sequence

from bench.http2 import DATA, END_HEADERS, END_STREAM, HEADERS, Connection, Crowd, crowd
from bench.http2 import framed as frame
from bench.servers import Server
from bench.unary import CONNECTIONS, STREAMS, WARM_UP_SECONDS, Served, once_warm

_RATE = re.compile(r"finished in [^,]+, ([0-9.]+) req/s")
_CODES = re.compile(r"status codes: (\d+) 2xx, (\d+) 3xx, (\d+) 4xx, (\d+) 5xx")
METHODS = {"GET": b"\x82", "POST": b"\x83"}
"""As HPACK's static table has them; others are written out."""


# Reads.


def reads(server: Server, path: str, token: str, seconds: float) -> Served:
    """What it does once warm; raises if an answer was not 2xx."""
    return once_warm(server, lambda length: _h2load(server, path, token, length), seconds)


def _h2load(server: Server, path: str, token: str, seconds: float) -> tuple[float, int]:
    done = subprocess.run(
        [
            "h2load",
            "--threads",
            "1",
            "--clients",
            str(CONNECTIONS),
            "--max-concurrent-streams",
            str(STREAMS),
            "--duration",
            f"{round(seconds * 1000)}ms",
            "--header",
            f"authorization: Bearer {token}",
            f"http://{server.authority}{path}",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    rate, codes = _RATE.search(done.stdout), _CODES.search(done.stdout)
    if done.returncode or rate is None or codes is None:
        raise RuntimeError(f"h2load failed: {done.stdout}{done.stderr}")
    good, *others = (int(count) for count in codes.groups())
    if any(others):
        raise RuntimeError(f"not every request succeeded:\n{done.stdout}")
    return float(rate[1]), good


# Writes.


def _integer(value: int) -> bytes:
    """HPACK's, with a prefix of seven bits."""
    if value < 127:
        return bytes([value])
    value, made = value - 127, b"\x7f"
    while value >= 128:
        value, made = value >> 7, made + bytes([value & 127 | 128])
    return made + bytes([value])


def _text(value: str) -> bytes:
    return _integer(len(value)) + value.encode()


def _field(name: str, value: str) -> bytes:
    return b"\x00" + _text(name) + _text(value)


class RestConnection(Connection):
    """Tells its owner of each whole answer."""

    __slots__ = ()

    def ask(self, method: str, path: str, body: bytes, token: str) -> int:
        """Send a whole request; returns its stream."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        head = (
            (METHODS.get(method) or b"\x02" + _text(method))
            + b"\x86\x04"
            + _text(path)
            + b"\x01"
            + _text(self._authority)
            + _field("authorization", f"Bearer {token}")
            + _field("content-type", "application/json")
        )
        self.socket.sendall(frame(HEADERS, END_HEADERS, stream, head) + frame(DATA, END_STREAM, stream, body))
        return stream

    def _frame(self, kind: int, flags: int, stream: bytes, payload: bytes) -> None:
        if kind not in (DATA, HEADERS):
            super()._frame(kind, flags, stream, payload)
            return
        number = int.from_bytes(stream, "big")
        if kind == DATA and payload:
            self._carry[number] = self._carry.pop(number, b"") + payload
        if flags & END_STREAM:
            self._on_message(self, number, self._carry.pop(number, b""))


Turn = Callable[[int, int], tuple[str, str, bytes]]
"""From a caller and its turn to method, path and body of its next request."""


class Callers:
    """Each waits for its answer before it asks again."""

    def __init__(self, turn: Turn, token: str) -> None:
        self._turn = turn
        self._token = token
        self._by_stream: dict[tuple[int, int], int] = {}
        self._turns: dict[int, int] = {}
        self.answers = 0

    def begin(self, connection: Connection, caller: int) -> None:
        assert isinstance(connection, RestConnection)
        self._turns[caller] = turn = self._turns.get(caller, 0) + 1
        stream = connection.ask(*self._turn(caller, turn), self._token)
        self._by_stream[id(connection), stream] = caller

    def answered(self, connection: Connection, stream: int, body: bytes) -> None:
        if not body.startswith(b"{") or body.startswith(b'{"error"'):
            raise RuntimeError(f"not every request succeeded: {body[:300]!r}")
        self.answers += 1
        self.begin(connection, self._by_stream.pop((id(connection), stream)))

    def go_on(self, people: Crowd, seconds: float) -> None:
        """For so long, and until one was answered."""
        begun, before = time.perf_counter(), self.answers
        people.until(lambda: time.perf_counter() - begun >= seconds and self.answers > before)


def writes(server: Server, turn: Turn, token: str, *, callers: int, seconds: float) -> Served:
    """Answers per second to so many callers, over eight connections."""
    asking = Callers(turn, token)
    with crowd(server) as people:
        held: Sequence[Connection] = [
            people.connect(asking.answered, RestConnection) for _ in range(min(CONNECTIONS, callers))
        ]
        for caller in range(callers):
            asking.begin(held[caller % len(held)], caller)
        asking.go_on(people, min(seconds, WARM_UP_SECONDS))
        before, cpu, begun = asking.answers, server.cpu_seconds(), time.perf_counter()
        asking.go_on(people, seconds)
        answers, elapsed = asking.answers - before, time.perf_counter() - begun
        cpu_us = (server.cpu_seconds() - cpu) / answers * 1e6
    return Served(rate=answers / elapsed, cpu_us=cpu_us)
