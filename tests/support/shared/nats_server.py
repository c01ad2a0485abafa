"""A real NATS for tests: its own directory and port, gone with the test."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support.shared.free_ports import free_port

START_SECONDS = 60.0


class NatsServer:
    def __init__(self, folder: Path, config: str = "") -> None:
        """`config` is the text of its configuration, beside address and port."""
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._config = folder / f"nats-{self.port}.conf"
        self._config.write_text(f"listen: 127.0.0.1:{self.port}\n{config}\n")
        self._log = folder / f"nats-{self.port}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"<NatsServer {self.port}>"

    def start(self) -> None:
        program = shutil.which("nats-server") or "/usr/sbin/nats-server"
        with self._log.open("ab") as told:
            self._process = subprocess.Popen([program, "-c", self._config], stdout=told, stderr=told)
        deadline = time.monotonic() + START_SECONDS
        while not self._greets():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.02)

    def _greets(self) -> bool:
        with (
            suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), START_SECONDS) as connection,
        ):
            return connection.recv(4096).startswith(b"INFO ")
        return False

    def stop(self, how: signal.Signals = signal.SIGKILL) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGCONT)
                self._process.send_signal(how)
            self._process.wait(START_SECONDS)
            self._process = None

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def publish(self, subject: str, *messages: bytes, headers: bytes = b"") -> None:
        """As anybody who can reach it may; returns once it has taken them."""
        with socket.create_connection(("127.0.0.1", self.port), START_SECONDS) as connection:
            answers = connection.makefile("rb")
            info = json.loads(answers.readline().split(b" ", 1)[1])
            assert info["max_payload"] >= max(map(len, messages))
            connection.sendall(b'CONNECT {"verbose":false,"headers":true}\r\n')
            for message in messages:
                if headers:
                    sizes = f"{len(headers)} {len(headers) + len(message)}"
                    connection.sendall(f"HPUB {subject} {sizes}\r\n".encode() + headers + message + b"\r\n")
                else:
                    connection.sendall(f"PUB {subject} {len(message)}\r\n".encode() + message + b"\r\n")
            connection.sendall(b"PING\r\n")
            while (answer := answers.readline()).strip() != b"PONG":
                assert answer.startswith(b"INFO "), answer


@contextmanager
def running(folder: Path, config: str = "") -> Iterator[NatsServer]:
    server = NatsServer(folder, config)
    server.start()
    try:
        yield server
    finally:
        server.stop()
