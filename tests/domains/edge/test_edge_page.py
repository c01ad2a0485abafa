"""What `docs/edge.md` shows works as printed: commands, REST, a certificate for the name that is dialled."""

from __future__ import annotations

import os
import re
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from cryptography import x509
from support.shared.server_process import running_server

PAGE = Path(__file__).parents[3] / "docs" / "edge.md"
BIN = Path(sys.executable).parent
SECONDS = 120.0


def blocks() -> list[str]:
    """What a reader copies, in order; what goes on running is set apart on the page."""
    return re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


class Reader:
    """Someone at a terminal, in a folder of their own."""

    def __init__(self, home: Path, data: Path) -> None:
        self.home = home
        self.environment = {
            **os.environ,
            "HOME": str(home),
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "FLEETPLANE_DATA_DIR": str(data),
        }
        self._typed = "set -euo pipefail\n"

    def types(self, text: str) -> str:
        """What comes of it, with what was defined before."""
        done = subprocess.run(
            ["bash", "-c", self._typed + text],
            cwd=self.home,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def keeps(self, text: str) -> None:
        """Go on with these definitions in the same shell."""
        self._typed += text

    @contextmanager
    def leaves_running(self, *command: str) -> Iterator[None]:
        process = subprocess.Popen(command, cwd=self.home, env=self.environment, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            process.wait(SECONDS)

    def waits_until(self, state: str) -> None:
        deadline = time.monotonic() + SECONDS
        while f" {state} " not in self.types("fleetplane edge ls --tenant acme"):
            assert time.monotonic() < deadline


def test_the_page_can_be_followed_from_the_first_daemon_to_a_cancelled_run(tmp_path: Path) -> None:
    enrol, use, rest, follow, later, workers = blocks()
    with running_server(tmp_path / "data", "--only", "edge") as server:
        reader = Reader(tmp_path, server.log.parent)
        reader.types(enrol)
        assert reader.types(workers).count(".") == 1  # a token; nobody has come with it
        with reader.leaves_running("fleetplane", "agent", "edge", "run"):
            reader.waits_until("Connected")
            assert os.uname().release in reader.types(use)
            reader.types("fleetplane edge rename build-7 'shop 7/front' --tenant acme")
            reader.types("fleetplane edge drain 'shop 7/front' --tenant acme")
            reader.waits_until("Draining")
            reader.types("fleetplane edge resume 'shop 7/front' --tenant acme")
            reader.types("fleetplane edge rename 'shop 7/front' build-7 --tenant acme")
            reader.waits_until("Connected")

            rest = rest.replace("http://127.0.0.1:8080", server.web)
            assert " build-7 Connected\n" in reader.types(rest)
            token = reader.types("fleetplane tokens create again --role edge.admin --tenant acme").strip()
            opened = re.sub(r"^TOKEN=.*$", f"TOKEN={token}", rest.partition("\n\n")[0], flags=re.MULTILINE)
            reader.keeps(opened + "\n")

            told = reader.types(follow)
            assert re.findall(r"^event: (\w+)$", told, flags=re.MULTILINE) == [
                "fleet_started",
                "command_started",
                "command_progress",
                "command_result",
                "fleet_result",
            ]
            assert '"outcome": "cancelled"' in reader.types(later)


def test_a_certificate_of_our_own_holds_for_the_public_name_and_its_authority_is_given_out(
    tmp_path: Path,
) -> None:
    settings = ("listeners.edge.tls=true", "edge.public_endpoint=https://fleet.example.com:443")
    more = [part for setting in settings for part in ("--set", setting)]
    with running_server(tmp_path / "data", "--only", "edge", *more) as server:
        trust = httpx.get(f"{server.web}/v1/edge/ca.pem", timeout=60).text
        host, _, port = server.address("edge", "https://").removeprefix("https://").rpartition(":")
        shown = ssl.get_server_certificate((host, int(port)))
    authority = x509.load_pem_x509_certificate(trust.encode())
    certificate = x509.load_pem_x509_certificate(shown.encode())
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "fleet.example.com" in names.get_values_for_type(x509.DNSName)
