"""Requests over TLS, or over the owner's socket, one at a time: with the standard library alone.

How fast a command line starts decides here: an HTTP library of the comfortable sort takes longer to load than
everything else that `fleetplane get` does together.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from fleetplane import __version__
from fleetplane.client.calls import ANSWER_LIMIT_BYTES, EVENT_LIMIT_BYTES, JSON, Request, Response, refusal
from fleetplane.client.places import Endpoint
from fleetplane.client.trust import refusal as untrusted
from fleetplane.client.trust import trusting
from fleetplane.kernel.errors import IntegrityError, InvalidArgument, Unavailable

QUIET_SECONDS = 90.0
"""A watch that says nothing for so long is opened anew; nothing is lost by it."""
AGENT = f"fleetplane/{__version__}"
REFUSAL_LIMIT_BYTES = 1024 * 1024


class _SocketConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        try:
            self.sock.connect(str(self._path))
        except OSError:
            self.sock.close()
            self.sock = None
            raise


class Transport:
    """One caller's connection to one server; a context manager."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._trust = trusting(endpoint.ca_pem) if endpoint.server.startswith("https:") else None
        self._connection: http.client.HTTPConnection | None = None

    def __repr__(self) -> str:
        return f"<Transport {self.endpoint}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def send(self, request: Request) -> Response:
        """The whole answer to a request. What only reads is tried again once if a kept connection ended."""
        kept = self._connection is not None
        try:
            return self._sent(request)
        except Unavailable:
            if not kept or not request.is_repeatable:
                raise
        return self._sent(request)

    def _sent(self, request: Request) -> Response:
        with self._reaching():
            if self._connection is None:
                self._connection = self._opened(self.endpoint.timeout)
            answer = self._begun(self._connection, request)
            body = answer.read(ANSWER_LIMIT_BYTES + 1)
            if len(body) > ANSWER_LIMIT_BYTES:
                raise IntegrityError(f"{self.endpoint} answers with more than {ANSWER_LIMIT_BYTES} bytes")
            if answer.will_close:
                self.close()
            return Response(status=answer.status, headers=_headers(answer), body=body)

    @contextlib.contextmanager
    def lines(self, request: Request, *, until: float | None = None) -> Iterator[Iterator[str]]:
        """The lines of an answer that goes on, on a connection of its own; raises what the server refused.

        Reading ends with `TimeoutError` at the moment `until` of the monotonic clock.
        """
        with self._reaching():
            connection = self._opened(self.endpoint.timeout)
        try:
            with self._reaching():
                connection.connect()
                plain: socket.socket = connection.sock
                answer = self._begun(connection, request)
                if answer.status >= 400:
                    body = answer.read(REFUSAL_LIMIT_BYTES)
                    raise refusal(Response(status=answer.status, headers=_headers(answer), body=body))
            yield self._read(answer, plain, until)
        finally:
            connection.close()

    def _read(
        self, answer: http.client.HTTPResponse, plain: socket.socket, until: float | None
    ) -> Iterator[str]:
        while True:
            left = QUIET_SECONDS if until is None else min(QUIET_SECONDS, until - time.monotonic())
            with self._reaching():
                if left <= 0:
                    raise TimeoutError
                plain.settimeout(left)
                line = answer.readline(EVENT_LIMIT_BYTES + 1)
            if not line:
                return
            if len(line) > EVENT_LIMIT_BYTES:
                raise IntegrityError(f"{self.endpoint} sends a line of more than {EVENT_LIMIT_BYTES} bytes")
            yield line.decode("utf-8", errors="replace").rstrip("\r\n")

    def _opened(self, seconds: float) -> http.client.HTTPConnection:
        endpoint = self.endpoint
        if endpoint.socket is not None:
            return _SocketConnection(endpoint.socket, seconds)
        try:
            parts = urlsplit(endpoint.server)
            host, port = parts.hostname or "", parts.port
        except ValueError as error:
            raise InvalidArgument(f"{endpoint.server} is no address of a server: {error}") from error
        if not host or parts.scheme not in ("http", "https"):
            raise InvalidArgument(f"{endpoint.server} is no address of a server", hint="https://HOST[:PORT]")
        if self._trust is None:
            return http.client.HTTPConnection(host, port, timeout=seconds)
        return http.client.HTTPSConnection(host, port, timeout=seconds, context=self._trust)

    def _begun(self, connection: http.client.HTTPConnection, request: Request) -> http.client.HTTPResponse:
        headers = {"accept": JSON, "user-agent": AGENT, **request.headers}
        if self.endpoint.token:
            headers["authorization"] = f"Bearer {self.endpoint.token}"
        content = request.content
        if content is not None:
            headers.setdefault("content-type", JSON)
        connection.request(request.method, request.target, body=content, headers=headers)
        return connection.getresponse()

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except ssl.SSLCertVerificationError as error:
            self.close()
            raise untrusted(self.endpoint.server, error) from error
        except TimeoutError as error:
            self.close()
            raise TimeoutError(f"{self.endpoint} did not answer in time") from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise Unavailable(
                f"{self.endpoint} cannot be reached: {error or type(error).__name__}",
                hint="is `fleetplane server` running there?",
            ) from error


def _headers(answer: http.client.HTTPResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in answer.getheaders()}
