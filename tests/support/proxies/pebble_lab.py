"""A real ACME authority and its DNS, from Debian's packages, on free ports of this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from support.shared.free_ports import free_port
from support.shared.throwaway_ca import ThrowawayCa

from fleetplane.domains.proxies.acme import authority
from fleetplane.domains.proxies.acme.orders import AuthorityOptions

START_SECONDS = 60.0
NONCES_REFUSED_PERCENT = 5
"""For no reason, as authorities may. Eight in a row end an order: once in 10^10 requests, at this rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pebble:
    directory_url: str
    management: str
    ca_file: Path
    http_port: int
    """Where the authority comes for HTTP-01."""
    dns_port: int
    dns_management: str
    eab_key_id: str = ""
    eab_hmac_key: str = ""
    """What we show to an authority that wants a customer's account."""

    @property
    def options(self) -> AuthorityOptions:
        return AuthorityOptions(
            directory_url=self.directory_url,
            ca_file=str(self.ca_file),
            terms_agreed=True,
            contact_email="ops@example.test",
            eab_key_id=self.eab_key_id,
            eab_hmac_key=self.eab_hmac_key,
        )

    def tell_dns(self, verb: str, **body: Any) -> None:
        request = urllib.request.Request(
            f"{self.dns_management}/{verb}", data=json.dumps(body).encode(), method="POST"
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()

    def suggest_renewal(self, chain_pem: str, answer: str) -> None:
        """What it says from now on when it is asked when to renew a certificate, in these very words."""
        body = {"Certificate": chain_pem, "ARIResponse": answer}
        self._managed("set-renewal-info/", json.dumps(body).encode())

    def root_pem(self) -> str:
        return self._managed("roots/0")

    def status_of(self, serial: int) -> str:
        """`Valid` or `Revoked`, in the authority's own books."""
        found = json.loads(self._managed(f"cert-status-by-serial/{serial:x}"))
        return str(found["Status"])

    def _managed(self, path: str, body: bytes | None = None) -> str:
        import ssl

        context = ssl.create_default_context(cafile=str(self.ca_file))
        asked = f"{self.management}/{path}"
        with urllib.request.urlopen(asked, data=body, timeout=60, context=context) as answer:
            return str(answer.read().decode())


@contextmanager
def running(log: Path, *command: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment}
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=60)


def _answers(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{process.args!r} did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.02)
        else:
            return


@contextmanager
def pebble(
    folder: Path, *, authorizations_reused_percent: int = 0, customers: dict[str, str] | None = None
) -> Iterator[Pebble]:
    """`authorizations_reused_percent`: how often the authority wants no proof of what it saw proved.

    `customers` are the keys of those that it takes accounts from, by their ids; None: from everybody.
    """
    dns, dns_management, api, management, http = (free_port() for _ in range(5))
    ca = ThrowawayCa(name="for the authority's own web server")
    certificate, key = ca.server(folder)
    ca_file = folder / "ca.pem"
    ca_file.write_bytes(ca.pem)
    config = folder / "pebble.json"
    settings = {
        "listenAddress": f"127.0.0.1:{api}",
        "managementListenAddress": f"127.0.0.1:{management}",
        "certificate": str(certificate),
        "privateKey": str(key),
        "httpPort": http,
        "tlsPort": free_port(),
        "ocspResponderURL": "",
        "externalAccountBindingRequired": customers is not None,
        "externalAccountMACKeys": customers or {},
    }
    config.write_text(json.dumps({"pebble": settings}))
    with ExitStack() as stack:
        # How long it takes to answer says something about the machine.
        stack.enter_context(patch.object(authority, "REQUEST_SECONDS", 60))
        log = folder / "dns.log"
        process = stack.enter_context(
            running(
                log,
                "pebble-challtestsrv",
                "-defaultIPv4",
                "127.0.0.1",
                "-defaultIPv6",
                "",
                "-dns01",
                f"127.0.0.1:{dns}",
                "-http01",
                "",
                "-https01",
                "",
                "-tlsalpn01",
                "",
                "-management",
                f"127.0.0.1:{dns_management}",
            )
        )
        _answers(dns_management, process, log)
        log = folder / "pebble.log"
        process = stack.enter_context(
            running(
                log,
                os.environ.get("PEBBLE", "pebble"),
                "-config",
                str(config),
                "-dnsserver",
                f"127.0.0.1:{dns}",
                "-strict",
                PEBBLE_VA_NOSLEEP="1",
                PEBBLE_WFE_NONCEREJECT=str(NONCES_REFUSED_PERCENT),
                PEBBLE_AUTHZREUSE=str(authorizations_reused_percent),
            )
        )
        _answers(api, process, log)
        _answers(management, process, log)
        yield Pebble(
            directory_url=f"https://127.0.0.1:{api}/dir",
            management=f"https://127.0.0.1:{management}",
            ca_file=ca_file,
            http_port=http,
            dns_port=dns,
            dns_management=f"http://127.0.0.1:{dns_management}",
        )
