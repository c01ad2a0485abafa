"""A real OpenID provider in a process of its own, and a browser that signs in there.

python -m support.shared.openid_process
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx

DEADLINE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenIDProcess:
    issuer: str

    def person(self, subject: str, **claims: Any) -> None:
        """Whom the provider knows, and what it says of them."""
        answer = httpx.put(f"{self.issuer}/users/{subject}", json=claims, timeout=DEADLINE_SECONDS)
        assert answer.status_code == 204, answer.text

    def approve(self, browser: httpx.Client, authorisation: str, subject: str) -> str:
        """Sign in at the provider as its page does it; where it sends the browser back to."""
        assert browser.get(authorisation).status_code == 200
        answer = browser.post(authorisation, data={"sub": subject})
        assert answer.status_code == 302, answer.text
        return urljoin(authorisation, answer.headers["location"])


@contextmanager
def openid_process() -> Iterator[OpenIDProcess]:
    """Listening; killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "support.shared.openid_process"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "AUTHLIB_INSECURE_TRANSPORT": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = json.loads(process.stdout.readline())["port"]
        yield OpenIDProcess(issuer=f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait(DEADLINE_SECONDS)
        if process.stdout is not None:
            process.stdout.close()


def _serve() -> None:
    import oidc_provider_mock
    from werkzeug.serving import make_server

    server = make_server("127.0.0.1", 0, oidc_provider_mock.app(require_nonce=True), threaded=True)
    print(json.dumps({"port": server.server_port}), flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _serve()
