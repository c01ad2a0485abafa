"""Settings of the domain that cannot work are refused by name, before anything starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetplane.domains.proxies import build
from fleetplane.domains.proxies.acme.assembly import AcmeOptions
from fleetplane.domains.proxies.acme.orders import AuthorityOptions
from fleetplane.domains.proxies.rest.assembly import RestOptions
from fleetplane.domains.proxies.settings import ProxyAgentsSettings, ProxySettings
from fleetplane.kernel.errors import SettingsError

REST = RestOptions(version="1", admin_password="correct horse battery")
ACME = AcmeOptions(challenge_listen=("127.0.0.1:0", "[::1]:8996"), challenge_address="10.0.0.5:8996")


def check(rest: RestOptions = REST, acme: AcmeOptions = ACME, origins: tuple[str, ...] = ()) -> None:
    build.check(rest, acme, origins=origins)


def test_what_is_documented_is_accepted() -> None:
    check(origins=("https://ui.example.com", "http://localhost:3000", "http://[::1]:80", "*"))
    check(RestOptions(version="1"), AcmeOptions())


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"admin_password": "short"}, "proxies.admin_password: Must have at least 12 characters"),
        ({"admin_email": "nope"}, "proxies.admin_email: Not an e-mail address"),
    ],
)
def test_a_first_administrator_who_cannot_be_made_is_told_by_its_setting(
    given: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        check(rest=dataclasses.replace(REST, **given))
    assert refused.value.message == complaint


@pytest.mark.parametrize("address", ["bad", "host:", "host:0", "host:65536", "a b:80", "http://host:80"])
def test_an_address_for_challenges_that_agents_would_refuse_is_refused(address: str) -> None:
    with pytest.raises(SettingsError, match=r"proxies\.challenge_address: "):
        check(acme=AcmeOptions(challenge_address=address))


@pytest.mark.parametrize("address", ["xx", ":80", "127.0.0.1:65536", "127.0.0.1:http"])
def test_an_address_that_cannot_be_listened_on_is_refused_before_the_server_is_ready(address: str) -> None:
    with pytest.raises(SettingsError, match=r"proxies\.challenge_listen: "):
        check(acme=AcmeOptions(challenge_listen=(address,)))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"directory_url": "ftp://x"}, "acme_directory"),
        ({"directory_url": "https://"}, "acme_directory"),
        ({"ca_file": "/nonexistent.pem"}, "acme_ca_file"),
        ({"eab_key_id": "x"}, "acme_eab_key_id"),
        ({"eab_hmac_key": "x"}, "acme_eab_key_id"),
    ],
)
def test_an_authority_that_cannot_be_asked_is_refused(given: dict[str, str], name: str) -> None:
    with pytest.raises(SettingsError, match=rf"proxies\.{name}: "):
        check(acme=AcmeOptions(authority=AuthorityOptions(**given)))  # type: ignore[arg-type]


def test_the_authoritys_root_may_be_any_file(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").touch()
    check(acme=AcmeOptions(authority=AuthorityOptions(ca_file=str(tmp_path / "ca.pem"))))


@pytest.mark.parametrize("origin", ["nope", "https://x/path", "https://", "ui.example.com"])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(SettingsError, match=r"proxies\.event_origins: "):
        check(origins=(origin,))


def test_every_setting_is_documented() -> None:
    docs = Path(__file__).parents[3] / "docs"
    text = (docs / "proxies.md").read_text()
    names = [f"proxies.{field.encode_name}" for field in msgspec.structs.fields(ProxySettings)]
    names += [
        f"listeners.proxy-agents.{one.encode_name}" for one in msgspec.structs.fields(ProxyAgentsSettings)
    ]
    assert [name for name in names if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"event_sockets": 0}, "proxies.event_sockets"),
        ({"event_sockets_per_caller": 0}, "proxies.event_sockets_per_caller"),
        ({"event_patterns": 0}, "proxies.event_patterns"),
        ({"event_subscriptions": 0}, "proxies.event_subscriptions"),
        ({"cpu_warning_percent": 96.0}, "proxies.cpu_critical_percent"),
        ({"disk_warning_percent": -1.0}, "proxies.disk_warning_percent"),
        ({"critical_after_seconds": -1.0}, "proxies.critical_after_seconds"),
    ],
)
def test_limits_and_thresholds_that_make_no_sense_are_refused(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        ProxySettings(**given)
