"""What may be shown of a configuration that somebody else wrote, and what never leaves the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fleetplane.domains.proxies.agent.observing import configuration
from fleetplane.domains.proxies.agent.observing.configuration import (
    ObservedConfiguration,
    ReadingPolicy,
    StatusPage,
    read_configuration,
)
from fleetplane.domains.proxies.agent.observing.observed import BuiltPaths
from fleetplane.domains.proxies.agent.observing.origin import NginxOrigin, Origin, arguments_of, find
from fleetplane.domains.proxies.nginx import reading
from fleetplane.domains.proxies.nginx.blocks import Node

KEY = "-----BEGIN EC PRIVATE KEY-----\nMHcCAQ\n-----END EC PRIVATE KEY-----\n"


def looked_at(folder: Path, text: str, **files: str) -> ObservedConfiguration:
    own = folder / "nginx"
    own.mkdir(exist_ok=True)
    for name, content in files.items():
        (own / f"{name}.conf").write_text(content)
    (own / "nginx.conf").write_text(text)
    return read_configuration(own / "nginx.conf", ReadingPolicy(folders=()))[0]


def test_includes_are_followed_and_what_stands_out_is_found(tmp_path: Path) -> None:
    found = looked_at(
        tmp_path,
        "pid /run/x.pid; load_module modules/ngx_x.so; error_log /var/log/e.log; http { include [ab].conf; }",
        b="server { listen 8081 ssl; access_log syslog:server=[::1]; location /no { stub_status; } }",
        a="""server { listen *:8080; server_name ~x a.test; access_log /var/log/a.log combined;
             location = /st { stub_status; } }""",
    )
    assert [Path(one).name for one in found.files] == ["nginx.conf", "a.conf", "b.conf"]
    assert (found.pid, list(found.loaded), found.problems) == ("/run/x.pid", ["ngx_x"], [])
    assert found.ports == {8080, 8081}
    assert list(found.logs) == ["/var/log/e.log", "/var/log/a.log"]
    assert found.status_pages == [StatusPage(address="127.0.0.1:8080", host="a.test", path="/st")]
    other = looked_at(tmp_path, "http { include [ab].conf; }", a="server { }")
    assert other.digest != found.digest


def test_what_did_not_change_is_not_parsed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at(tmp_path, "http { include [ab].conf; }", a="server { }", b="bad")
    own, policy = tmp_path / "nginx", ReadingPolicy(folders=())
    first, known = read_configuration(own / "nginx.conf", policy)
    (own / "a.conf").write_text("server { listen 81; }")
    parsed: list[str] = []

    def read(text: str) -> list[Node]:
        parsed.append(text)
        return reading.read(text)

    monkeypatch.setattr(configuration, "read", read)
    second, known = read_configuration(own / "nginx.conf", policy, known)
    assert parsed == ["server { listen 81; }"]
    assert (second.problems, second.digest == first.digest) == (first.problems, False)
    (own / "nginx.conf").write_text("http { }")
    assert read_configuration(own / "nginx.conf", policy, known)[1].keys() == {str(own / "nginx.conf")}


def test_links_and_includes_that_lead_elsewhere_are_not_shown(tmp_path: Path) -> None:
    own, elsewhere = tmp_path / "nginx", tmp_path / "elsewhere"
    own.mkdir()
    elsewhere.mkdir()
    (elsewhere / "x.conf").write_text("secret on;")
    (own / "link.conf").symlink_to(elsewhere / "x.conf")
    (own / "folder").symlink_to(elsewhere)
    (own / "shadow").symlink_to("/etc/shadow")
    (own / "inner").mkdir()
    (own / "inner" / "y.conf").write_text("y on;")
    (own / "y.conf").symlink_to("inner/y.conf")
    text = "include link.conf folder/x.conf; include folder/*.conf; include folder/x.conf; include shadow;"
    text += "include /etc/shadow; include /etc/*; include ../elsewhere/x.conf; include y.conf;"
    text += "include /proc/self/environ;"
    found = looked_at(tmp_path, text)
    assert [Path(one).name for one in found.files] == ["nginx.conf", "y.conf"]
    assert "secret" not in str(found.files)
    outside = [one for one in found.problems if "outside" in one]
    assert len(outside) == len(found.problems) == 7


def test_keys_other_files_and_what_is_too_much_are_withheld(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configuration, "FILES_LIMIT", 6)
    os.mkfifo(tmp_path / "pipe")
    found = looked_at(
        tmp_path,
        "include ../nginx/*.conf; include pipe; include missing; include many/*;",
        key=KEY,
        data=f'ssl_certificate_key "data:{KEY}";',
        shadow="root:*:19000:0:99999:7:::\n",
        huge="a on;" * 300_000,
        loop="include loop.conf;",
        binary="\x00\x01",
    )
    assert [Path(one).name for one in found.files] == ["nginx.conf", "loop.conf"]
    told = " ".join(found.problems)
    assert "MHcCAQ" not in f"{found}"
    for words in ("private key", "not ended", "more than", "includes itself", "No such file", "control"):
        assert words in told
    many = tmp_path / "nginx" / "many"
    many.mkdir()
    for one in range(20):
        (many / f"{one}").write_text("a on;")
    assert len(looked_at(tmp_path, "include many/*;").files) == configuration.FILES_LIMIT


def test_certificates_are_known_with_their_keys_and_read_by_nobody(tmp_path: Path) -> None:
    found = looked_at(
        tmp_path,
        "http { ssl_certificate_key 0.key; ssl_certificate 0.pem; server { include [s].conf; }"
        " server { ssl_certificate 3.pem; } server { ssl_certificate_key 4.key; } }",
        s="ssl_certificate 1.pem;ssl_certificate 2.pem;ssl_certificate_key 1.key;ssl_certificate_key 2.key;",
    )
    assert found.certificates == {"0.pem": "0.key", "1.pem": "1.key", "2.pem": "2.key"}


def test_what_nginx_would_refuse_is_no_reason_to_fall_over(tmp_path: Path) -> None:
    status = "location /s { stub_status; }"
    found = looked_at(
        tmp_path,
        "pid /run/x.pid; http { include a.conf; server { listen 8080; include b.conf; } }",
        a=f"pid /dev/zero; server {{ listen {'9' * 5000}; {status} }} server {{ listen 70000; {status} }}",
        b=f"pid /dev/zero; {status}",
    )
    assert (found.pid, found.ports) == ("/run/x.pid", {80, 8080})
    assert found.status_pages == [StatusPage(address="127.0.0.1:8080", host="localhost", path="/s")]


def test_a_masters_title_tells_how_it_was_started() -> None:
    title = "nginx: master process /usr/sbin/nginx -g daemon on; master_process on; -c /etc/n.conf -q   "
    assert arguments_of(title) == (
        "/usr/sbin/nginx",
        "-g",
        "daemon on; master_process on;",
        "-c",
        "/etc/n.conf",
        "-q",
    )
    assert arguments_of("nginx: master process nginx") == ("nginx",)
    assert arguments_of("nginx: worker process") == arguments_of("python -c x") == ()


def test_the_running_nginx_is_the_one_of_its_configuration(tmp_path: Path) -> None:
    """Where its open files are not shown, it listens on what its configuration names and somebody has."""
    own = tmp_path / "42"
    own.mkdir()
    (own / "stat").write_text("42 (nginx) S 1 " + " ".join(str(one) for one in range(2, 40)))
    (own / "status").write_text("Name:\tnginx\nUid:\t0\t0\t0\t0\n")
    head, rest = "sl local_address rem_address st", "00:00 00:00 0 0 0"
    (tmp_path / "net").mkdir()
    sockets = (("0050", "0A"), ("01BB", "01"), ("0016", "0A"))
    lines = [f"0: 00000000:{port} 0:0 {state} {rest} 1" for port, state in sockets]
    (tmp_path / "net" / "tcp").write_text("\n".join([head, *lines]))
    six = f"0: 00000000000000000000000001000000:1F90 0:0 0A {rest} 2"
    (tmp_path / "net" / "tcp6").write_text(f"{head}\n{six}\n")
    pid = tmp_path / "nginx.pid"
    pid.write_text("42\n")

    def found(title: str, config: str) -> Origin | None:
        (own / "cmdline").write_bytes(title.encode() + b"\0")
        default = Path("/etc/nginx/nginx.conf")
        place = NginxOrigin(program=Path("/usr/sbin/nginx"), config=Path(config), default_config=default)
        return find(place, pid, {80, 443, 8080}, proc=tmp_path)

    origin = found("nginx: master process /usr/sbin/nginx", "/etc/nginx/nginx.conf")
    assert origin is not None
    assert (origin.listening, origin.arguments) == (("0.0.0.0:80", "[::1]:8080"), ())
    assert found("nginx: master process nginx -c /srv/n.conf", "/srv/n.conf") is not None
    assert found("nginx: master process nginx -p /srv -c n.conf", "/srv/n.conf") is not None
    assert found("nginx: master process nginx", "/srv/n.conf") is None
    assert found("nginx: master process nginx -c /srv/n.conf", "/etc/nginx/nginx.conf") is None
    assert found("nginx: worker process", "/etc/nginx/nginx.conf") is None


def test_a_program_tells_where_it_was_built_to_look() -> None:
    told = BuiltPaths.parse(
        "configure arguments: --prefix=/usr/share/nginx --conf-path=/etc/nginx/nginx.conf"
    )
    assert (told.config, told.pid) == (Path("/etc/nginx/nginx.conf"), Path("/usr/share/nginx/logs/nginx.pid"))
