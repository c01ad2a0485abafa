"""Access options do on a real NGINX what they say."""

from __future__ import annotations

import asyncio
import os
import pwd
import stat
from pathlib import Path
from typing import Any

import msgspec
from support.proxies.nginx_rig import Backend, backend
from support.proxies.typed_rig import Site, typed_site

from fleetplane.domains.proxies.kinds.passwords import hashed, sealed
from fleetplane.domains.proxies.kinds.records import VirtualHostSpec


def host(name: str, address: str, **given: Any) -> VirtualHostSpec:
    location = {"path": "/", "proxy_pass": f"http://{address}", **given.pop("location", {})}
    body = {
        "name": name,
        "server_name": name,
        "listen_port": 80,
        "locations": [location, *given.pop("more", ())],
        **given,
    }
    return sealed(msgspec.convert(body, VirtualHostSpec))


def hosts(address: str, decider: str) -> dict[str, VirtualHostSpec]:
    users = [{"name": "ann", "password": "a pass:word é"}]
    closed = {"rules": [{"action": "deny", "network": "127.0.0.1"}, {"action": "allow", "network": "all"}]}
    listed = {"rules": [{"action": "allow", "network": "192.0.2.0/24"}]}
    open_path = {"path": "/open/", "proxy_pass": f"http://{address}", "access": {}}
    auth = {"url": f"http://{decider}/check", "response_headers": ["Remote-User"]}
    return {
        "h1": host("denied.test", address, access=closed, more=[open_path]),
        "h2": host("listed.test", address, access=listed),
        "h3": host("banned.test", address, access={"banned": ["127.0.0.0/8"]}),
        "h4": host("users.test", address, access={"users": users, "realm": "Staff $only"}),
        "h5": host("any.test", address, access={**closed, "users": users, "satisfy": "any"}),
        "h6": host("auth.test", address, access={"forward_auth": auth}),
        "h7": host(
            "signin.test",
            address,
            access={"forward_auth": {**auth, "sign_in_url": "https://login.test/in"}},
        ),
        "h8": host("rate.test", address, access={"rate_limits": [{"rate": 1, "per": "minute", "burst": 1}]}),
        "h9": host(
            "key.test",
            address,
            location={"access": {"rate_limits": [{"rate": 1, "per": "minute", "key": "header:X-Key"}]}},
        ),
        "h10": host("conn.test", address, access={"connection_limits": [{"connections": 1}]}),
    }


class Decider:
    """A service for forward authentication: lets in who knows the word."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            self.asked.append(head)
            status = "204 X\r\nRemote-User: ann" if "X-Word: sesame" in head else "401 X"
            writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


async def test_access_options_have_their_effect(tmp_path: Path) -> None:
    decider = Decider()
    service = await asyncio.start_server(decider.serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{service.sockets[0].getsockname()[1]}"
    async with service, backend("b") as behind, typed_site(tmp_path) as site:
        await site.serve(hosts(behind.address, address))
        await _addresses_and_passwords(site, behind)
        await _forward_authentication(site, behind, decider)
        await _limits(site, behind)
        _passwords_are_kept_from_others(site)


async def _addresses_and_passwords(site: Site, behind: Backend) -> None:
    async def status(name: str, path: str = "/", **headers: str) -> int:
        return (await site.ask(name, path, headers=headers)).status_code

    assert await status("denied.test") == 403
    assert await status("denied.test", "/open/x") == 200, "the location has its own, which is nothing"
    assert await status("listed.test") == 403, "who matches no rule is refused where any rule allows"
    assert await status("banned.test") == 403
    answer = await site.ask("users.test")
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, 'Basic realm="Staff $only"')
    right = "Basic YW5uOmEgcGFzczp3b3JkIMOp"
    assert await status("users.test", authorization=right) == 200
    assert await status("users.test", authorization="Basic YW5uOndyb25n") == 401
    assert await status("any.test", authorization=right) == 200, "the address is wrong, the password right"
    assert await status("any.test") == 401
    assert all("denied" not in one.split("\r\n")[0] for one in behind.requests)


async def _forward_authentication(site: Site, behind: Backend, decider: Decider) -> None:
    assert (await site.ask("auth.test", headers={"x-word": "guess"})).status_code == 401
    known = await site.ask("auth.test", "/p?q=1", headers={"X-Word": "sesame", "Remote-User": "forged"})
    assert known.status_code == 200
    assert "Remote-User: ann" in behind.requests[-1]
    assert "forged" not in behind.requests[-1]
    assert "X-Original-URL: http://auth.test/p?q=1" in decider.asked[-1]
    sent = await site.ask("signin.test", "/p?q=1")
    assert (sent.status_code, sent.headers["location"]) == (
        302,
        "https://login.test/in?rd=http://signin.test/p?q=1",
    )
    assert (await site.ask("auth.test", f"/.fleetplane/auth/{'0' * 12}")).status_code == 401


async def _limits(site: Site, behind: Backend) -> None:
    found = [(await site.ask("rate.test")).status_code for _ in range(4)]
    assert found == [200, 200, 429, 429]
    for key in ("one", "two"):
        found = [(await site.ask("key.test", headers={"X-Key": key})).status_code for _ in range(2)]
        assert found == [200, 429]
    reader, writer = await asyncio.open_connection("127.0.0.1", site.plain)
    writer.write(b"POST / HTTP/1.1\r\nHost: conn.test\r\nContent-Length: 10\r\nExpect: 100-continue\r\n\r\n")
    async with asyncio.timeout(60):  # from here on NGINX counts it
        assert b"100" in await reader.readline()
    assert (await site.ask("conn.test")).status_code == 429
    writer.close()
    await writer.wait_closed()


def _passwords_are_kept_from_others(site: Site) -> None:
    folder = site.rig.paths.users / site.applier.live.name  # type: ignore[union-attr]
    files = list(folder.iterdir())
    assert len(files) == 2
    for file in files:
        mode = file.stat()
        assert b"a pass" not in file.read_bytes()
        assert mode.st_mode & stat.S_IRWXO == 0, "others have no rights"
        if os.geteuid() == 0:
            worker = pwd.getpwnam(site.rig.site.worker_user.partition(":")[0])
            assert mode.st_gid == worker.pw_gid
            assert folder.stat().st_mode & stat.S_IRWXO == 0


def test_a_password_is_hashed_as_crypt_does_it() -> None:
    # From the test vectors of the algorithm's specification.
    assert hashed("Hello world!", "saltstring").startswith(
        "$6$saltstring$svn8UoSVapNtMuq1ukKS4tPQd8iKwSMHWjl/"
    )
    assert hashed("Hello world!", "saltstring").endswith("uesI68u4OTLiBFdcbYEdFCoEOfaS35inz1")
    assert hashed("same") != hashed("same"), "each has its own salt"
