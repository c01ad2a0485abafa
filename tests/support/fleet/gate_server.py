"""A process that answers as Prometheus and as a webhook; run by tests, which read its port from its output.

What it answers stands in the question: the expression of a query, or the path of a webhook.
"""

from __future__ import annotations

import gzip
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

SERIES = {"metric": {"job": "web"}, "value": [1_700_000_000.0, "0.25"]}
ANSWERS = {
    "rate": {"resultType": "vector", "result": [SERIES]},
    "two": {"resultType": "vector", "result": [SERIES, SERIES]},
    "none": {"resultType": "vector", "result": []},
    "scalar": {"resultType": "scalar", "result": [1_700_000_000.0, "7"]},
    "nan": {"resultType": "vector", "result": [{"metric": {}, "value": [0, "NaN"]}]},
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        given = parse_qs(parts.query)
        expression = given.get("query", [""])[0]
        if parts.path != "/base/api/v1/query" or self.headers.get("authorization") != "Bearer secret":
            self._answer(404, {})
        elif expression.startswith("increase["):
            # Of before, when less was so; and the window is the one that was asked for.
            before = float(given["time"][0]) < float(expression.rpartition(" ")[2])
            value = "0.1" if before else "0.4"
            samples = [{"metric": {}, "value": [0, value]}] if "[300s]" in expression else []
            self._answer(200, {"status": "success", "data": {"resultType": "vector", "result": samples}})
        elif expression in ANSWERS:
            self._answer(200, {"status": "success", "data": ANSWERS[expression]})
        else:
            self._answer(400, {"status": "error", "error": "parse error"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        match self.path:
            case "/passed":
                self._answer(200, {"passed": body["wave"] == 2 and body["targets"] == ["a", "b"]})
            case "/value":
                self._answer(200, {"value": body["moved"]})
            case "/large":
                self._answer(200, {"value": 1, "more": "x" * 100_000})
            case "/packed":  # a hundred megabytes of a number, in a hundred kilobytes
                self._answer(200, b'{"value": 1' + b"0" * 10 + b" " * 100_000_000 + b"}", packed=True)
            case "/elsewhere":
                self._answer(307, {}, location="/passed")
            case _:
                self._answer(500, {})

    def _answer(self, status: int, content: object, location: str = "", *, packed: bool = False) -> None:
        body = gzip.compress(content) if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        if packed:
            self.send_header("content-encoding", "gzip")
        self.send_header("content-length", str(len(body)))
        if location:
            self.send_header("location", location)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        """Nothing."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Path(sys.argv[1]).write_text(str(server.server_port))
    server.serve_forever()
