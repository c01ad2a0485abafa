"""What a real NGINX gives away: only files inside document roots, and only to requests for its hosts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.proxies.nginx_rig import Rig, host, state_folder, web_folder
from support.shared.free_ports import free_port

from fleetplane.domains.proxies.agent.nginx import releases
from fleetplane.domains.proxies.agent.nginx.confirmation import VersionState
from fleetplane.domains.proxies.nginx import checks
from fleetplane.domains.proxies.nginx import hosts as rendering
from fleetplane.domains.proxies.nginx.paths import PathPolicy
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb

SECRET = "the agent's credential"


@pytest.fixture
def rig() -> Iterator[Rig]:
    with state_folder() as folder:
        web = web_folder(folder)
        (web / "site").mkdir(parents=True)
        (web / "site" / "index.html").write_text("a page")
        outside = web.with_name(f"{web.name}-backup")
        outside.mkdir()
        try:
            (outside / "secret").write_text(SECRET)
            (folder / "credential").write_text(SECRET)
            for one in (web, web / "site", outside):
                one.chmod(0o755)
            yield Rig(folder)
        finally:
            (outside / "secret").unlink()
            outside.rmdir()


@asynccontextmanager
async def serving(rig: Rig, *hosts: pb.VirtualHost, **update: Any) -> AsyncIterator[None]:
    applier = rig.applier()
    await applier.open()
    outcome = await applier.apply(pb.ConfigUpdate(version=1, virtual_hosts=hosts, **update), rig.report)
    assert outcome.state is VersionState.SUCCESS, outcome.error
    yield


async def ask(port: int, path: str, name: str = "a.test") -> tuple[int, str]:
    """As typed: nothing is taken out of the path on the way."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    said = f"Host: {name}\r\n" if name else ""
    writer.write(f"GET {path} HTTP/1.0\r\n{said}\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return (int(head.split()[1]) if head else 0), body.decode(errors="replace")


def up(folder: Path) -> str:
    """Enough to leave any folder."""
    return "/.." * len(folder.parts)


@pytest.mark.parametrize(
    ("pattern", "replacement", "path"),
    [
        ("^/x/(.)b(.)/(.*)$", "/$1$2/$3", "/x/.b./{sibling}/secret"),
        ("^/x/(.*)$", "$1", "/x/-backup/secret"),
        ("^/x(.*)$", "/site/$1", "/x../../{sibling}/secret"),
        ("^/x/(.)b(.)/(.)b(.)/(.*)$", "/$1$2/$3$4/$5", "/x/.b./.b./proc/self/environ"),
    ],
)
async def test_a_rewrite_does_not_lead_out_of_the_document_root(
    rig: Rig, pattern: str, replacement: str, path: str
) -> None:
    port, web = free_port(), web_folder(rig.paths.state)
    rule = pb.RewriteRule(pattern=pattern, replacement=replacement, flag="break")
    location = pb.Location(path="/", root=str(web), rewrite_rules=[rule])
    async with serving(rig, host(port, location)):
        status, body = await ask(port, path.format(sibling=f"{web.name}-backup"))
        assert status in (400, 404)
        assert SECRET not in body
        assert (await ask(port, "/site/index.html")) == (200, "a page")


async def test_without_the_guard_the_same_rewrite_reads_other_files(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack is real: what keeps it out is the guard, not NGINX."""
    monkeypatch.setattr(rendering, "GUARD", "")
    port, web = free_port(), web_folder(rig.paths.state)
    rule = pb.RewriteRule(pattern="^/x/(.)b(.)/(.*)$", replacement="/$1$2/$3", flag="break")
    async with serving(rig, host(port, pb.Location(path="/", root=str(web), rewrite_rules=[rule]))):
        assert await ask(port, f"/x/.b./{web.name}-backup/secret") == (200, SECRET)


async def test_a_literal_way_up_is_stopped_by_the_guard_too(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "climbs", lambda _: False)
    port, web = free_port(), web_folder(rig.paths.state)
    rule = pb.RewriteRule(pattern="^", replacement=f"{up(web)}/etc/hostname", flag="break")
    async with serving(rig, host(port, pb.Location(path="/", root=str(web), rewrite_rules=[rule]))):
        assert (await ask(port, "/"))[0] in (400, 404)


async def test_a_symbolic_link_inside_a_document_root_is_not_followed(rig: Rig) -> None:
    port, web = free_port(), web_folder(rig.paths.state)
    (web / "site" / "link").symlink_to("/proc/self/environ")
    (web / "site" / "folder").symlink_to("/etc")
    async with serving(rig, host(port, pb.Location(path="/", root=str(web / "site")))):
        assert await ask(port, "/index.html") == (200, "a page")
        for path in ("/link", "/folder/hostname", "/folder/passwd"):
            assert (await ask(port, path))[0] in (403, 404), path


async def test_an_alias_is_not_left_sideways(rig: Rig) -> None:
    port, web = free_port(), web_folder(rig.paths.state)
    aliased = pb.Location(path="/files/", custom_directives={"alias": str(web)})
    async with serving(rig, host(port, aliased)):
        assert await ask(port, "/files/site/index.html") == (200, "a page")
        for path in ("/files../secret", "/files/-backup/secret", "/files-backup/secret", "/files/../secret"):
            status, body = await ask(port, path)
            assert (status, SECRET in body) == (404, False), path


@pytest.mark.parametrize("name", ["b.test", "127.0.0.1", "", "a.test.evil", "_", "a.test:1"])
async def test_a_request_for_no_virtual_host_is_refused_on_plain_ports(rig: Rig, name: str) -> None:
    port, other, web = free_port(), free_port(), web_folder(rig.paths.state)
    location = pb.Location(path="/", root=str(web / "site"))
    async with serving(rig, host(port, location), host(other, location, identity="h2", name="b.test")):
        status, body = await ask(port, "/index.html", name)
        assert (status, "a page" in body) == ((200, True) if name == "a.test:1" else (421, False))


async def test_a_catch_all_host_is_somebodys_own_decision(rig: Rig) -> None:
    port, web = free_port(), web_folder(rig.paths.state)
    location = pb.Location(path="/", root=str(web / "site"))
    async with serving(rig, host(port, location, name="_")):
        assert await ask(port, "/index.html", "any.test") == (200, "a page")


async def test_a_root_that_is_a_link_to_elsewhere_is_refused(rig: Rig) -> None:
    web = web_folder(rig.paths.state)
    (web / "elsewhere").symlink_to("/etc")
    applier = rig.applier()
    await applier.open()
    update = pb.ConfigUpdate(
        version=1, virtual_hosts=[host(free_port(), pb.Location(path="/", root=str(web / "elsewhere")))]
    )
    outcome = await applier.apply(update, rig.report)
    assert outcome.state is VersionState.FAILED
    assert "/etc" in outcome.error


async def test_an_agent_that_is_brought_up_to_date_writes_what_is_in_service_anew(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an older agent let through does not stay in service with a newer one; the rest does."""
    port, web = free_port(), web_folder(rig.paths.state)
    bad = host(port, pb.Location(path="/", root="/etc"), name="bad.test")
    good = host(port, pb.Location(path="/", root=str(web / "site")), identity="h2", name="good.test")
    with monkeypatch.context() as older:
        older.setattr(PathPolicy, "fault", lambda *_: "")
        older.setattr(releases, "RENDERING", 1)
        async with serving(rig, bad, good):
            assert (await ask(port, "/hostname", "bad.test"))[0] == 200
    newer = rig.applier()
    await newer.open()
    assert newer.live is not None
    assert list(newer.live.manifest.set_aside) == ["virtual_host/h1"]
    assert (await ask(port, "/hostname", "bad.test"))[0] == 421
    assert await ask(port, "/index.html", "good.test") == (200, "a page")
    workers = await rig.workers()
    await rig.applier().open()
    assert rig.nginx.workers() == workers, "once is enough"


async def test_an_operators_header_does_not_cancel_an_administrators(rig: Rig) -> None:
    """NGINX forgets every header of the host where a location has one of its own; the agent repeats them."""
    port, web = free_port(), web_folder(rig.paths.state)
    own = [pb.Header(name="X-Own", value="1", always=True)]
    virtual = host(port, pb.Location(path="/", root=str(web / "site"), custom_headers=own))
    virtual.custom_directives["add_header"] = "X-Frame-Options DENY always"
    async with serving(rig, virtual):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /index.html HTTP/1.0\r\nHost: a.test\r\n\r\n")
        head = (await reader.read()).partition(b"\r\n\r\n")[0].lower()
        writer.close()
        assert b"x-own: 1" in head
        assert b"x-frame-options: deny" in head
