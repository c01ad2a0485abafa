"""Everything the messages can say is rendered, and a real NGINX does what they say."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.proxies.nginx_rig import Rig, backend, binary, host, saying, upstream, web_folder
from support.shared.free_ports import free_port
from support.shared.throwaway_ca import ThrowawayCa

from fleetplane.domains.proxies import wire
from fleetplane.domains.proxies.agent.nginx.confirmation import VersionState
from fleetplane.domains.proxies.kinds.records import VirtualHostSpec
from fleetplane.domains.proxies.kinds.values import Location
from fleetplane.domains.proxies.nginx.blocks import Unrenderable
from fleetplane.domains.proxies.nginx.rendering import render
from fleetplane.domains.proxies.nginx.site import Binary, Paths, Site
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.errors import SettingsError


def site(**options: Any) -> Site:
    return Site(paths=Paths(state=Path("/s")), binary=binary(), addresses=("127.0.0.1",), **options)


def text(update: pb.ConfigUpdate, *, down: Any = None, **options: Any) -> str:
    rendered = render(update, site(**options), release="1-1", down=down)
    return "\n".join(file.content.decode() for file in rendered.files.values())


def certificate(folder: Path, ca: ThrowawayCa) -> pb.Certificate:
    folder.mkdir(exist_ok=True, parents=True)
    chain, key = ca.server(folder)
    return pb.Certificate(
        id="cert-1", domain="a.test", certificate_pem=chain.read_text(), private_key_pem=key.read_text()
    )


def secure(port: int, *locations: pb.Location, **options: Any) -> pb.VirtualHost:
    return pb.VirtualHost(
        id="h1",
        name="h1",
        server_name="a.test localhost",
        listen_port=port,
        ssl_enabled=True,
        ssl_certificate_id="cert-1",
        locations=locations,
        **options,
    )


# What NGINX is told.


def test_an_upstream_says_all_that_its_message_says() -> None:
    group = pb.Upstream(
        id="u1",
        algorithm=pb.LEAST_CONNECTIONS,
        keepalive_connections=16,
        servers=[
            pb.UpstreamServer(address="10.0.0.1:80", weight=3, max_fails=2, fail_timeout_seconds=9),
            pb.UpstreamServer(address="[::1]:81", backup=True, max_fails=3, fail_timeout_seconds=30),
            pb.UpstreamServer(address="host.test:82", down=True),
            pb.UpstreamServer(address="10.0.0.4:83"),
        ],
    )
    said = text(pb.ConfigUpdate(upstreams=[group]), down={"u1": frozenset({"10.0.0.4:83"})})
    lines = [line.strip() for line in said.split("upstream fp_u1 {")[1].splitlines()]
    assert lines[1:8] == [
        "zone fp_u1 64k;",
        "least_conn;",
        "server 10.0.0.1:80 weight=3 max_fails=2 fail_timeout=9s;",
        'server "[::1]:81" weight=1 max_fails=3 fail_timeout=30s backup;',
        "server host.test:82 weight=1 max_fails=0 fail_timeout=0s down;",
        "server 10.0.0.4:83 weight=1 max_fails=0 fail_timeout=0s down;",
        "keepalive 16;",
    ]


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [(pb.IP_HASH, "ip_hash;"), (pb.ROUND_ROBIN, ""), (pb.WEIGHTED_ROUND_ROBIN, "")],
)
def test_each_way_of_balancing_has_its_word(algorithm: pb.LoadBalanceAlgorithm, words: str) -> None:
    said = text(pb.ConfigUpdate(upstreams=[upstream("a:1", algorithm=algorithm)]))
    found = re.findall(r"ip_hash;|least_conn;", said)
    assert found == ([words] if words else [])


def test_global_directives_go_where_nginx_wants_them() -> None:
    directives = {"worker_processes": "3", "worker_connections": "99", "client_max_body_size": "4m"}
    settings = pb.GlobalSettings(nginx_directives=directives, env_vars={"TZ": "UTC"})
    said = text(pb.ConfigUpdate(global_settings=settings))
    main, _, rest = said.partition("events {")
    events, _, http = rest.partition("}")
    assert "worker_processes 3;" in main
    assert main.count("worker_processes") == 1
    assert "env TZ=UTC;" in main
    assert events.strip() == "worker_connections 99;"
    assert "client_max_body_size 4m;" in http


def test_a_redirect_of_a_whole_host_spares_the_challenge() -> None:
    virtual = host(80, pb.Location(path="/api", proxy_pass="http://127.0.0.1:1"))
    virtual.custom_directives["return"] = "301 https://$host$request_uri"
    said = text(pb.ConfigUpdate(virtual_hosts=[virtual]), acme_responder="127.0.0.1:5002")
    assert "proxy_pass http://127.0.0.1:5002;" in said
    server = said.split("server_name a.test")[1]
    assert not re.search(r"^    return", server, re.MULTILINE), "at the server's level it would come first"
    assert server.count("return 301") == 2


@pytest.mark.parametrize("modifier", ["", "^~ "])
def test_a_host_that_answers_challenges_itself_does_so(modifier: str) -> None:
    own = pb.Location(path=f"{modifier}/.well-known/acme-challenge/", root="/var/www/challenges")
    said = text(pb.ConfigUpdate(virtual_hosts=[host(80, own)]), acme_responder="127.0.0.1:5002")
    server = said.split("server_name a.test")[1].split("\nserver {")[0]
    locations = re.findall(r"^ +location .*acme-challenge", server, re.MULTILINE)
    assert len(locations) == 1, "NGINX refuses a second location for one prefix"
    assert 'root "${fleetplane_inside}/var/www/challenges";' in server


@pytest.mark.parametrize(
    "update",
    [
        pb.ConfigUpdate(virtual_hosts=[host(80, name="a;b")]),
        pb.ConfigUpdate(virtual_hosts=[host(80, name="~^x")]),
        pb.ConfigUpdate(virtual_hosts=[host(0)]),
        pb.ConfigUpdate(virtual_hosts=[host(80), host(80, identity="h2")]),
        pb.ConfigUpdate(virtual_hosts=[host(80, identity="../x")]),
        pb.ConfigUpdate(virtual_hosts=[host(80, pb.Location(path="/", upstream_id="none"))]),
        pb.ConfigUpdate(virtual_hosts=[host(80, pb.Location(path="x"))]),
        pb.ConfigUpdate(virtual_hosts=[host(80, pb.Location(path="/", root="/$x"))]),
        pb.ConfigUpdate(virtual_hosts=[host(80, pb.Location(path="/", proxy_pass="http://unix:/x"))]),
        pb.ConfigUpdate(virtual_hosts=[host(80, pb.Location(path="/", proxy_pass="ftp://x"))]),
        pb.ConfigUpdate(
            virtual_hosts=[
                host(80, pb.Location(path="/", rewrite_rules=[pb.RewriteRule(pattern="x", flag="evil")]))
            ]
        ),
        pb.ConfigUpdate(
            virtual_hosts=[host(80, pb.Location(path="/", custom_headers=[pb.Header(name="a b")]))]
        ),
        pb.ConfigUpdate(virtual_hosts=[secure(443)]),
        pb.ConfigUpdate(upstreams=[upstream("unix:/x")]),
        pb.ConfigUpdate(upstreams=[upstream("a:1;")]),
        pb.ConfigUpdate(global_settings=pb.GlobalSettings(env_vars={"LD_PRELOAD": "/x.so"})),
        pb.ConfigUpdate(global_settings=pb.GlobalSettings(env_vars={"NXMESH_ACME_RESPONDER": "x;y"})),
        pb.ConfigUpdate(certificates={"../../x": pb.Certificate()}),
    ],
)
def test_what_makes_no_sense_is_refused_before_nginx_sees_it(update: pb.ConfigUpdate) -> None:
    with pytest.raises(Unrenderable):
        text(update)


def test_a_newer_nginx_is_told_in_its_own_words() -> None:
    newer = Binary(path=Path("n"), version=(1, 27, 0), modules=frozenset({"http_v2", "http_v3", "http_ssl"}))
    update = pb.ConfigUpdate(
        virtual_hosts=[secure(443, http2_enabled=True, http3_enabled=True)],
        certificates={"cert-1": pb.Certificate(id="cert-1")},
    )
    rendered = render(update, dataclasses.replace(site(), binary=newer), release="1-1")
    said = rendered.files["conf.d/host-h1.conf"].content.decode()
    assert "http2 on;" in said
    assert "listen 127.0.0.1:443 quic;" in said
    assert rendered.notes == ()


def test_a_state_directory_too_deep_for_a_socket_is_refused_at_once() -> None:
    with pytest.raises(SettingsError):
        Paths(state=Path("/" + "x" * 100))


# What NGINX does.


async def test_tls_http2_headers_rewrites_and_files_are_served(rig: Rig, tmp_path: Path) -> None:
    ca, port, plain = ThrowawayCa(), free_port(), free_port()
    public = web_folder(rig.paths.state)
    public.mkdir()
    (public / "page.html").write_text("a page")
    async with backend("b") as behind:
        group = upstream(behind.address, keepalive_connections=4)
        update = pb.ConfigUpdate(
            version=1,
            certificates={"cert-1": certificate(tmp_path / "c", ca)},
            upstreams=[group],
            virtual_hosts=[
                secure(
                    port,
                    pb.Location(
                        path="/api/",
                        upstream_id="u1",
                        custom_headers=[
                            pb.Header(name="X-Forwarded-Proto", value="$scheme-own"),
                            pb.Header(name="X-Seen", value="yes", always=True),
                        ],
                        rewrite_rules=[
                            pb.RewriteRule(pattern="^/api/(.*)$", replacement="/v2/$1", flag="break")
                        ],
                    ),
                    pb.Location(path="= /health", proxy_pass=f"http://{behind.address}/status"),
                    pb.Location(path="/", root=str(public), index="page.html"),
                    http2_enabled=True,
                    http3_enabled=True,
                ),
                host(
                    plain,
                    pb.Location(
                        path="/",
                        rewrite_rules=[
                            pb.RewriteRule(pattern="^/old$", replacement="/new", flag="permanent"),
                            pb.RewriteRule(pattern="^/tmp$", replacement="/new", flag="redirect"),
                        ],
                        custom_directives={"return": "200 $fleetplane_host"},
                    ),
                    identity="h2",
                ),
            ],
        )
        applier = rig.applier()
        await applier.open()
        outcome = await applier.apply(update, rig.report)
        assert outcome.state is VersionState.SUCCESS, outcome.error
        assert applier.live is not None
        assert set(applier.live.manifest.notes) == {"http3_left_out"}

        trust = ssl.create_default_context(cadata=ca.pem.decode())
        async with httpx.AsyncClient(verify=trust) as client:
            base = f"https://localhost:{port}"
            answer = await client.get(f"{base}/api/things")
            assert (answer.text, answer.headers["x-seen"]) == ("b", "yes")
            asked = behind.requests[-1]
            assert asked.startswith("GET /v2/things HTTP/1.1")
            assert "X-Forwarded-Proto: https-own" in asked
            assert "X-Real-IP: 127.0.0.1" in asked
            assert "Host: localhost" in asked
            assert (await client.get(f"{base}/health")).text == "b"
            assert behind.requests[-1].startswith("GET /status ")
            assert (await client.get(base)).text == "a page"
            there = {"host": "a.test"}
            moved = await client.get(f"http://127.0.0.1:{plain}/old", headers=there)
            assert (moved.status_code, moved.headers["location"]) == (301, f"http://a.test:{plain}/new")
            assert (await client.get(f"http://127.0.0.1:{plain}/tmp", headers=there)).status_code == 302
            assert (await client.get(f"http://127.0.0.1:{plain}/x", headers=there)).text == "h2"
        assert _negotiated(port, trust) == "h2"
        with pytest.raises(ssl.SSLError):
            _negotiated(port, trust, name="nobody.test")


def _negotiated(port: int, trust: ssl.SSLContext, *, name: str = "localhost") -> str | None:
    import socket

    trust.set_alpn_protocols(["h2", "http/1.1"])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as raw,
        trust.wrap_socket(raw, server_hostname=name) as wrapped,
    ):
        return wrapped.selected_alpn_protocol()


async def test_a_challenge_is_answered_by_the_responder_even_where_all_else_is_redirected(
    folder: Path,
) -> None:
    port = free_port()
    async with backend("the token") as responder:
        rig = Rig(folder, ports={80: port}, acme_responder=responder.address)
        applier = rig.applier()
        await applier.open()
        virtual = host(80)
        virtual.custom_directives["return"] = "301 https://$host$request_uri"
        for version, update in enumerate([pb.ConfigUpdate(), pb.ConfigUpdate(virtual_hosts=[virtual])], 1):
            update.version = version
            assert (await applier.apply(update, rig.report)).state is VersionState.SUCCESS
            base, there = f"http://127.0.0.1:{port}", {"host": "a.test"}
            async with httpx.AsyncClient() as client:  # a worker of before may end a connection of before
                answer = await client.get(f"{base}/.well-known/acme-challenge/x", headers=there)
                assert answer.text == "the token"
                other = await client.get(f"{base}/else", headers=there)
                assert other.status_code == (421 if version == 1 else 301)


@pytest.mark.parametrize("streaming", [True, False])
async def test_server_sent_events_pass_as_they_come_where_that_is_asked_for(
    rig: Rig, streaming: bool
) -> None:
    port, go_on = free_port(), asyncio.Event()

    async def events(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        writer.write(b"data: first\n\n")
        await writer.drain()
        await go_on.wait()
        writer.write(b"data: second\n\n")
        writer.close()

    source = await asyncio.start_server(events, "127.0.0.1", 0)
    address = f"127.0.0.1:{source.sockets[0].getsockname()[1]}"
    location = Location(path="/", proxy_pass=f"http://{address}", streaming=streaming)
    spec = VirtualHostSpec(name="n", server_name="a.test", listen_port=port, locations=(location,))
    sent = pb.ConfigUpdate.FromString(wire.candidate({"h1": spec}, {}, {}))
    sent.version = 1
    applier = rig.applier()
    await applier.open()
    assert (await applier.apply(sent, rig.report)).state is VersionState.SUCCESS
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n")
    try:
        async with asyncio.timeout(60.0 if streaming else 1.0):
            early = await reader.readuntil(b"data: first\n\n")
    except TimeoutError:
        early = b""
    go_on.set()
    rest = await reader.read()
    writer.close()
    source.close()
    assert (b"first" in early) is streaming
    assert b"second" in rest


async def test_a_name_that_is_given_twice_never_reaches_nginx_as_a_mere_warning(rig: Rig) -> None:
    applier = rig.applier()
    await applier.open()
    update = saying(1, free_port())
    update.virtual_hosts.append(update.virtual_hosts[0])
    update.virtual_hosts[1].id = "h2"
    outcome = await applier.apply(update, rig.report)
    assert outcome.state is VersionState.SUCCESS
    assert list(outcome.set_aside) == ["virtual_host/h2"]
    assert "conflicting server name" in outcome.set_aside["virtual_host/h2"]
