"""What streams become, line by line. A change of these files is a change of what is served.

To write them anew: `python tests/domains/proxies/streams/test_stream_golden.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetplane.domains.proxies import wire
from fleetplane.domains.proxies.kinds.records import StreamSpec, UpstreamSpec, VirtualHostSpec
from fleetplane.domains.proxies.nginx.context import PartUnrenderable
from fleetplane.domains.proxies.nginx.rendering import render
from fleetplane.domains.proxies.nginx.site import Binary, Paths, Site
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb

GOLDEN = Path(__file__).parent / "golden"
MODULES = ("http_ssl", "stream", "stream_ssl_preread")
UPSTREAMS: dict[str, dict[str, Any]] = {
    "u1": {
        "servers": [
            {"address": "10.0.0.1:1", "weight": 2, "max_connections": 9},
            {"address": "b.test:1", "backup": True},
        ],
        "algorithm": "least_connections",
        "retries": {"on": ["error"], "tries": 2, "timeout": 5},
    },
    "u2": {"servers": [{"address": "10.0.0.2:1", "draining": True}], "algorithm": "ip_hash"},
    "u3": {"servers": [{"address": "10.0.0.3:1"}], "balancing": {"method": "random"}},
}
STREAMS: dict[str, dict[str, dict[str, Any]]] = {
    "tcp": {
        "s1": {
            "upstream_id": "u1",
            "send_proxy_protocol": True,
            "rules": [{"action": "allow", "network": "10.0.0.0/8"}, {"action": "deny", "network": "all"}],
            "limits": {
                "connections": 5,
                "download_bytes_per_second": 1000,
                "upload_bytes_per_second": 2000,
            },
            "timeouts": {"connect": 3, "idle": 600},
        },
    },
    "sni": {
        "s1": {
            "listen_port": 443,
            "upstream_id": "u2",
            "routes": [
                {"names": ["A.test", "*.a.test"], "upstream_id": "u1"},
                {"names": [".b.test"], "upstream_id": "u3"},
            ],
            "log": False,
        },
        "s2": {"listen_port": 8443, "routes": [{"names": ["only.test"], "upstream_id": "u3"}]},
    },
    "udp": {"s1": {"protocol": "udp", "upstream_id": "u3", "responses": 1}, "s2": {"upstream_id": "u3"}},
}
BINARY = Binary(
    path=Path("/usr/sbin/nginx"),
    version=(1, 22, 1),
    modules=frozenset(MODULES),
    stream_module=Path("/usr/lib/nginx/modules/ngx_stream_module.so"),
)


def update_of(streams: dict[str, dict[str, Any]], hosts: dict[str, Any] | None = None) -> pb.ConfigUpdate:
    base = {"name": "n", "listen_port": 5432}
    groups = {
        name: msgspec.convert({"name": name, "algorithm": "round_robin", **one}, UpstreamSpec)
        for name, one in UPSTREAMS.items()
    }
    made = {name: msgspec.convert({**base, **one}, StreamSpec) for name, one in streams.items()}
    served = {name: msgspec.convert(one, VirtualHostSpec) for name, one in (hosts or {}).items()}
    return pb.ConfigUpdate.FromString(wire.candidate(served, groups, {}, streams=made))


def text(streams: dict[str, dict[str, Any]]) -> str:
    site = Site(paths=Paths(state=Path("/s")), binary=BINARY)
    files = render(update_of(streams), site, release="1-1").files
    main = files["nginx.conf"].content.decode()
    first, last = main.partition(";")[0] + ";\n", main[main.index("\nstream {") :]
    shown = sorted(name for name in files if name.startswith("stream.d/"))
    return "".join(
        f"# {name}\n{content}\n"
        for name, content in [
            ("nginx.conf", first + last),
            *((name, files[name].content.decode()) for name in shown),
        ]
    )


@pytest.mark.parametrize("name", STREAMS)
def test_streams_are_rendered_as_they_are_kept(name: str) -> None:
    assert text(STREAMS[name]) == (GOLDEN / f"{name}.conf").read_text()


def test_without_streams_nothing_is_said_about_them() -> None:
    site = Site(paths=Paths(state=Path("/s")), binary=BINARY)
    files = render(update_of({}), site, release="1-1").files
    main = files["nginx.conf"].content.decode()
    assert "load_module" not in main
    assert "\nstream {" not in main
    assert not [name for name in files if name.startswith("stream.d/")]
    assert "conf.d/upstream-u1.conf" in files


def test_a_group_that_only_streams_mention_is_written_for_them_alone() -> None:
    site = Site(paths=Paths(state=Path("/s")), binary=BINARY)
    host = {"name": "h", "server_name": "h.test", "listen_port": 80}
    place = [{"path": "/", "upstream_id": "u2"}]
    update = update_of(
        {"s1": {"upstream_id": "u1"}, "s2": {"upstream_id": "u2", "listen_port": 2}},
        {"h": {**host, "locations": place}},
    )
    files = render(update, site, release="1-1").files
    written = {name for name in files if "upstream-" in name}
    assert written == {
        "stream.d/upstream-u1.conf",
        "stream.d/upstream-u2.conf",
        "conf.d/upstream-u2.conf",
        "conf.d/upstream-u3.conf",
    }


@pytest.mark.parametrize(
    ("streams", "modules", "part", "words"),
    [
        ({"s1": {"upstream_id": "gone"}}, MODULES, "stream/s1", "missing"),
        ({"s1": {"upstream_id": "u1", "listen_port": 80}}, MODULES, "stream/s1", "virtual host h"),
        ({"s1": {"upstream_id": "u1"}, "s2": {"upstream_id": "u1"}}, MODULES, "stream/s2", "stream 'n'"),
        ({"s1": {"upstream_id": "u1"}}, ("http_ssl",), "stream/s1", "no stream module"),
        (
            {"s1": {"routes": [{"names": ["a.test"], "upstream_id": "u1"}]}},
            ("stream",),
            "stream/s1",
            "TLS handshake",
        ),
        (
            {"s1": {"upstream_id": "u1", "rules": [{"action": "deny", "network": "x; y"}]}},
            MODULES,
            "stream/s1",
            "",
        ),
    ],
)
def test_what_cannot_be_served_is_the_fault_of_its_part(
    streams: dict[str, Any], modules: tuple[str, ...], part: str, words: str
) -> None:
    binary = Binary(path=Path("/n"), version=(1, 22, 1), modules=frozenset(modules))
    site = Site(paths=Paths(state=Path("/s")), binary=binary)
    host = {"name": "h", "server_name": "h.test", "listen_port": 80}
    with pytest.raises(PartUnrenderable) as refused:
        render(update_of(streams, {"h": host}), site, release="1-1")
    assert (refused.value.part, words in refused.value.message) == (part, True)


def test_an_option_that_the_agent_does_not_know_is_refused() -> None:
    update = update_of({"s1": {"upstream_id": "u1"}})
    update.streams[0].options = update.streams[0].options[:-1] + ',"newer":true}'
    with pytest.raises(PartUnrenderable, match="does not know an option of the stream"):
        render(update, Site(paths=Paths(state=Path("/s")), binary=BINARY), release="1-1")


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for one, options in STREAMS.items():
        (GOLDEN / f"{one}.conf").write_text(text(options))
