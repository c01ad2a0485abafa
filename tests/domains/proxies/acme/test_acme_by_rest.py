"""A certificate asked for over REST, of a server process that answers the authority itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from support.proxies.pebble_lab import Pebble
from support.shared.server_process import running_server

PASSWORD = "correct horse battery"
DEADLINE_SECONDS = 60.0


@contextmanager
def served(folder: Path, pebble: Pebble, **settings: str) -> Iterator[tuple[httpx.Client, str]]:
    """A client that is logged in, and a workspace's path."""
    wanted = {
        "proxies.challenge_listen": f"127.0.0.1:{pebble.http_port}",
        "proxies.acme_directory": pebble.directory_url,
        "proxies.acme_ca_file": str(pebble.ca_file),
        **{f"proxies.{name}": value for name, value in settings.items()},
    }
    arguments = [part for name, value in wanted.items() for part in ("--set", f"{name}={value}")]
    with (
        running_server(folder, "--only", "proxies", *arguments, admin_password=PASSWORD) as server,
        httpx.Client(base_url=f"{server.web}/v1", trust_env=False) as client,
    ):
        login = client.post(
            "/auth/login", json={"email": "admin@fleetplane.local", "password": PASSWORD}
        ).json()
        client.headers["Authorization"] = f"Bearer {login['access_token']}"
        place = client.post("/organizations", json={"name": "Acme", "slug": "acme"}).json()["id"]
        made = client.post(f"/organizations/{place}/workspaces", json={"name": "P", "slug": "p"}).json()
        yield client, f"/workspaces/{made['id']}"


def settled(client: httpx.Client, certificate: str) -> Any:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        found = client.get(f"/certificates/{certificate}").json()
        if found["status"] in ("active", "failed"):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_a_certificate_requested_over_rest_becomes_active(tmp_path: Path, authority: Pebble) -> None:
    with served(tmp_path, authority, acme_terms_agreed="true") as (client, place):
        asked = client.post(f"{place}/certificates", json={"domain": "rest.example.test"})
        assert (asked.status_code, asked.json()["status"]) == (201, "pending")
        found = settled(client, asked.json()["id"])
        assert found["status"] == "active", found
        assert found["expires_at"] > found["issued_at"]
        assert "key" not in str(found).lower()
        nothing = f"http://127.0.0.1:{authority.http_port}/v1/auth/me"
        assert client.get(nothing).text == "no such challenge\n", "that listener knows challenges only"

        revoked = client.post(f"/certificates/{found['id']}/revoke", json={"reason": "key_compromise"})
        assert (revoked.status_code, revoked.json()["status"]) == (200, "revoked")
        wild = client.post(f"{place}/certificates", json={"domain": "*.example.test"})
        assert wild.status_code == 422, "no zone is set up"
        own = client.post(f"{place}/certificates", json={"domain": "dev.test", "provider": "selfsigned"})
        assert settled(client, own.json()["id"])["status"] == "active"


def test_without_agreement_to_the_terms_the_reason_is_told(tmp_path: Path, authority: Pebble) -> None:
    with served(tmp_path, authority) as (client, place):
        asked = client.post(f"{place}/certificates", json={"domain": "terms.example.test"})
        found = settled(client, asked.json()["id"])
        assert found["status"] == "failed"
        assert "proxies.acme_terms_agreed" in found["error"]
