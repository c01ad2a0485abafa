"""DNS providers for tests: one that writes to the authority's test DNS, one that speaks like PowerDNS."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from support.proxies.pebble_lab import Pebble

API_KEY = "changeme"


class ZoneFile:
    """TXT records by name, shown by the test DNS server."""

    def __init__(self, pebble: Pebble) -> None:
        self._pebble = pebble
        self._records: dict[str, list[str]] = {}
        self._lock = threading.Lock()
        self.writes = 0

    def texts(self, name: str) -> list[str]:
        return list(self._records.get(name.rstrip("."), []))

    def replace(self, name: str, values: list[str]) -> None:
        with self._lock:
            host = name.rstrip(".")
            self.writes += 1
            self._records[host] = list(values)
            self._pebble.tell_dns("clear-txt", host=f"{host}.")
            for value in values:
                self._pebble.tell_dns("set-txt", host=f"{host}.", value=value)

    def names(self) -> list[str]:
        return [name for name, values in self._records.items() if values]


class PlainDns:
    """The smallest provider there can be."""

    def __init__(self, zone: ZoneFile) -> None:
        self._zone = zone

    async def present(self, name: str, value: str) -> None:
        self._zone.replace(name, [*(one for one in self._zone.texts(name) if one != value), value])

    async def clear(self, name: str, value: str) -> None:
        self._zone.replace(name, [one for one in self._zone.texts(name) if one != value])


@contextmanager
def powerdns(zone: ZoneFile, domain: str) -> Iterator[Mapping[str, str]]:
    """As much of PowerDNS's API as its clients use for TXT records; yields the client's options."""
    place = f"/api/v1/servers/localhost/zones/{domain}."

    class Handler(BaseHTTPRequestHandler):
        def _answer(self, status: int, body: Any) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _refused(self) -> bool:
            self._body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if self.headers.get("X-API-Key") != API_KEY:
                self._answer(401, {"error": "Unauthorized"})
                return True
            if self.path != place:
                self._answer(404, {"error": f"Could not find domain '{self.path}'"})
                return True
            return False

        def do_GET(self) -> None:
            if self._refused():
                return
            rrsets = [
                {
                    "name": f"{name}.",
                    "type": "TXT",
                    "ttl": 60,
                    "records": [{"content": f'"{text}"', "disabled": False} for text in zone.texts(name)],
                }
                for name in zone.names()
            ]
            self._answer(200, {"name": f"{domain}.", "kind": "Native", "rrsets": rrsets})

        def do_PATCH(self) -> None:
            if self._refused():
                return
            for rrset in json.loads(self._body)["rrsets"]:
                texts = [record["content"].strip('"') for record in rrset["records"]]
                zone.replace(rrset["name"], texts if rrset["changetype"] == "REPLACE" else [])
            self._answer(200, {})

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield {"pdns_server": f"http://127.0.0.1:{server.server_port}", "auth_token": API_KEY}
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
