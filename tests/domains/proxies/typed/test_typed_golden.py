"""What typed options become, line by line. A change of these files is a change of what is served.

To write them anew: `python tests/domains/proxies/typed/test_typed_golden.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetplane.domains.proxies import wire
from fleetplane.domains.proxies.kinds.records import CertificatePart, UpstreamSpec, VirtualHostSpec
from fleetplane.domains.proxies.nginx.rendering import render
from fleetplane.domains.proxies.nginx.site import Binary, Paths, Site
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb

GOLDEN = Path(__file__).parent / "golden"
MODULES = ("http_ssl", "http_v2", "http_realip", "http_auth_request")
SECURE = {"listen_port": 443, "ssl_enabled": True, "ssl_certificate_id": "c1"}

HOSTS: dict[str, dict[str, Any]] = {
    "tls": {
        **SECURE,
        "tls": {
            "force_https": True,
            "hsts": {"include_subdomains": True},
            "profile": "intermediate",
            "client_certificates": {"authority_id": "c2"},
            "ocsp_stapling": True,
        },
        "listening": {"ipv6": False, "proxy_protocol_from": ["10.0.0.0/8", "fd00::/8"]},
        "locations": [{"path": "/", "proxy_pass": "http://10.0.0.1:8080"}],
    },
    "access": {
        "access": {
            "rules": [
                {"action": "deny", "network": "10.0.0.1"},
                {"action": "allow", "network": "10.0.0.0/8"},
            ],
            "banned": ["192.0.2.0/24"],
            "users": [{"name": "ann", "password_hash": "$6$salt$hash"}],
            "realm": "Staff",
            "satisfy": "any",
            "forward_auth": {
                "preset": "authelia",
                "url": "http://auth:9091",
                "sign_in_url": "https://l.test",
            },
            "rate_limits": [{"rate": 10, "burst": 5}, {"rate": 60, "per": "minute", "key": "cookie:sid"}],
            "connection_limits": [{"connections": 3, "key": "header:X-Key", "status": 503}],
        },
        "locations": [
            {"path": "/", "proxy_pass": "http://10.0.0.1:8080"},
            {"path": "/open/", "proxy_pass": "http://10.0.0.1:8080", "access": {}},
        ],
    },
    "content": {
        "content": {
            "headers": [
                {"action": "set", "name": "X-A", "value": "$host"},
                {"action": "remove", "name": "X-B"},
                {"action": "set", "name": "host", "value": "inner", "direction": "request"},
            ],
            "cors": {"origins": ["https://a.test"], "expose": ["X-A"]},
            "max_body_bytes": 1048576,
            "timeouts": {
                "connect": 1,
                "read": 2,
                "send": 3,
                "client_body": 4,
                "client_send": 5,
                "keepalive": 0,
            },
            "compression": {"level": 5, "brotli": True},
        },
        "pages": {
            "redirects": [
                {"path": "/old", "to": "/new"},
                {"path": "/a.b", "to": "https://x.test/c", "match": "prefix", "status": 301},
                {"path": "^/u/([0-9]+)", "to": "/users/$1", "match": "regex"},
            ],
            "errors": [{"statuses": [404], "body": "no $page"}],
            "maintenance": {"allowed": ["10.0.0.0/8", "fd00::/8"], "body": "soon"},
        },
        "locations": [
            {"path": "/", "proxy_pass": "http://10.0.0.1:8080", "content": {"buffering": False}},
            {"path": "/app/", "root": "/var/www/app", "content": {"fallback": "/app/index.html"}},
            {"path": "= /ping", "respond": {"body": "pong", "content_type": "text/plain"}},
            {"path": "= /go", "respond": {"status": 302, "to": "https://x.test/"}},
        ],
    },
    "kept": {
        "cache": {"max_mb": 10, "inactive": 60, "generation": 2},
        "logging": {"leave_out": ["user_agent"], "add": ["ssl_protocol"], "sample_percent": 10},
        "locations": [
            {
                "path": "/",
                "upstream_id": "u1",
                "canaries": {"to": [{"upstream_id": "u2", "percent": 5}], "key": "cookie:sid"},
                "cache": {
                    "rules": [{"seconds": 60, "statuses": [200, 301]}, {"seconds": 1}],
                    "bypass": ["arg:x"],
                },
            },
            {
                "path": "/dns/",
                "proxy_pass": "http://app.internal:8080",
                "resolver": {"addresses": ["10.0.0.53"], "valid": 5},
            },
            {"path": "/rpc/", "upstream_id": "u3"},
        ],
    },
    "tls-modern": {**SECURE, "tls": {"profile": "modern"}},
}

UPSTREAMS: dict[str, dict[str, Any]] = {
    "u1": {
        "servers": [
            {"address": "10.0.0.1:1", "draining": True},
            {"address": "a.test:2", "max_connections": 3},
        ],
        "protocol": "https",
        "tls": {"name": "in.test", "authority_id": "c2", "client_certificate_id": "c1"},
        "balancing": {"method": "sticky_cookie"},
        "keepalive_connections": 4,
        "keepalive": {"requests": 10, "timeout": 30},
        "retries": {"on": ["error", "http_503"], "tries": 2, "timeout": 5, "non_idempotent": True},
    },
    "u2": {"servers": [{"address": "10.0.0.2:1"}], "protocol": "https", "tls": {"verify": False}},
    "u3": {
        "servers": [{"address": "10.0.0.3:1"}],
        "protocol": "grpc",
        "balancing": {"method": "hash", "key": "header:X-User"},
        "retries": {"on": []},
    },
}


def text(given: dict[str, Any], upstreams: dict[str, Any] | None = None) -> str:
    spec = msgspec.convert(
        {"name": "n", "server_name": "a.test", "listen_port": 80, **given}, VirtualHostSpec
    )
    authority = CertificatePart(
        domain="ca", fingerprint="", chain_pem="PEM of the authority", expires_at_ns=0
    )
    groups = {
        name: msgspec.convert({"name": name, "algorithm": "round_robin", **one}, UpstreamSpec)
        for name, one in (upstreams or {}).items()
    }
    update = pb.ConfigUpdate.FromString(wire.candidate({"h1": spec}, groups, {}, {"c2": authority}))
    update.certificates["c1"].CopyFrom(
        pb.Certificate(id="c1", certificate_pem="chain", private_key_pem="key")
    )
    binary = Binary(path=Path("/usr/sbin/nginx"), version=(1, 22, 1), modules=frozenset(MODULES))
    site = Site(paths=Paths(state=Path("/s")), binary=binary, acme_responder="10.9.9.9:80")
    files = render(update, site, release="1-1").files
    shown = sorted(name for name in files if name not in ("nginx.conf", "certs/c1.pem", "certs/c1.key"))
    if "upstream_id" not in str(given):
        shown = [name for name in shown if "upstream-" not in name]
    return "".join(f"# {name}\n{files[name].content.decode()}\n" for name in shown)


@pytest.mark.parametrize("name", HOSTS)
def test_typed_options_are_rendered_as_they_are_kept(name: str) -> None:
    assert text(HOSTS[name], UPSTREAMS) == (GOLDEN / f"{name}.conf").read_text()


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for one, options in HOSTS.items():
        (GOLDEN / f"{one}.conf").write_text(text(options, UPSTREAMS))
