"""What an import leaves out must not have been what kept strangers away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleetplane.domains.proxies.importing.conversion import convert
from fleetplane.domains.proxies.importing.reading import read
from fleetplane.domains.proxies.importing.report import Imported, StatementOutcome

PASSED_ON = "proxy_pass http://127.0.0.1:9000;"
CLOSED = {"status": 503}


def imported(folder: Path, http: str) -> Imported:
    file = folder / "nginx.conf"
    file.write_text(f"events {{}}\nhttp {{\n{http}\n}}\n")
    return convert(read(file))


def server(inside: str, *, listen: str = "80", name: str = "a.example") -> str:
    return f"server {{ listen {listen}; server_name {name}; {inside} }}"


def location(inside: str, path: str = "/") -> str:
    return f"location {path} {{ {inside} {PASSED_ON} }}"


def served(made: Imported) -> list[dict[str, Any]]:
    """All locations, as the workspace is given them without raw text."""
    hosts = made.bundle({one.id: one.id for one in made.certificates}, raw=False)["virtual_hosts"]
    return [location for host in hosts for location in host["locations"]]


REFUSED = [
    "auth_jwt realm;",
    "modsecurity on;",
    "a_module_that_nobody_knows on;",
    "if ($http_x_token != abc) { return 403; }",
]
RAW = ["auth_request /who;", "satisfy any;", "secure_link $arg_md5;", "set_real_ip_from 10.0.0.0/8;"]


@pytest.mark.parametrize("guard", [*REFUSED, "limit_except GET { deny all; }"])
def test_a_location_is_not_served_without_what_may_guard_it(tmp_path: Path, guard: str) -> None:
    made = imported(tmp_path, server(location(guard)))
    assert served(made) == [{"path": "/", "respond": CLOSED}]


@pytest.mark.parametrize("guard", [*REFUSED, "internal;", "if ($blocked) { return 444; }"])
@pytest.mark.parametrize("around", ["server", "http"])
def test_a_server_is_not_served_without_what_may_guard_it(tmp_path: Path, guard: str, around: str) -> None:
    inside, outside = (guard, "") if around == "server" else ("", guard)
    made = imported(tmp_path, outside + server(inside + location("") + location("", "/b")))
    assert served(made) == [{"path": path, "respond": CLOSED} for path in ("/", "/b")]


@pytest.mark.parametrize("guard", [*RAW, "internal;", "proxy_ssl_verify on;"])
def test_a_guard_that_is_kept_raw_has_to_be_confirmed_and_comes_along(tmp_path: Path, guard: str) -> None:
    made = imported(tmp_path, server(location(guard)))
    assert made.has_raw, "nothing is applied before that is confirmed"
    (host,) = made.bundle({}, raw=True)["virtual_hosts"]
    name, _, value = guard.rstrip(";").partition(" ")
    assert host["locations"][0]["custom_directives"] == {name: value}


@pytest.mark.parametrize(
    "harmless",
    [
        "more_set_headers a;",
        "limit_req zone=one;",
        "expires 1d;",
        "if ($host = www.a.example) { return 301 https://a.example$request_uri; }",
    ],
)
def test_what_guards_nobody_closes_nothing(tmp_path: Path, harmless: str) -> None:
    made = imported(tmp_path, server(harmless + location("")))
    assert served(made) == [{"path": "/", "proxy_pass": "http://127.0.0.1:9000"}]


@pytest.mark.parametrize(
    "listen",
    [
        "127.0.0.1:8081",
        "127.0.0.1",
        "localhost:8081",
        "[::1]:8081",
        "10.0.0.1:80",
        "unix:/run/admin.sock",
        "80 proxy_protocol",
    ],
)
def test_what_listens_to_a_few_is_not_served_to_everybody(tmp_path: Path, listen: str) -> None:
    made = imported(tmp_path, server(location(""), listen=listen))
    assert made.hosts == []
    assert [line.text for line in made.report if line.outcome is StatementOutcome.REFUSED] == [
        f"listen {listen}",
        "server",
    ]
    here = convert(read(tmp_path / "nginx.conf"), ["127.0.0.1", "localhost", "::1", "10.0.0.1"])
    assert bool(here.hosts) == (not listen.startswith("unix:") and "proxy_protocol" not in listen)
    both = imported(tmp_path, server(f"listen 8090; listen [::]:8090; {location('')}", listen=listen))
    assert [host["listen_port"] for host in both.hosts] == [8090]


def test_a_host_of_names_by_pattern_does_not_become_everybodys(tmp_path: Path) -> None:
    assert imported(tmp_path, server(location(""), name=r"~^internal\.")).hosts == []
    (host,) = imported(tmp_path, server(location(""), name=r"a.example ~^internal\.")).hosts
    assert host["server_name"] == "a.example"
