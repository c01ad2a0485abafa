from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from fleetplane.domains.proxies.acme.dns_provider import DnsProvider, DnsZones, read_zones
from fleetplane.kernel.errors import SettingsError


def written(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "zones.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_zones_are_read_and_their_credentials_not_shown(tmp_path: Path) -> None:
    text = '["example.com"]\nprovider = "cloudflare"\nworkspaces = "w1, w2"\nauth_token = "changeme"\n'
    zones = read_zones(written(tmp_path, text))
    assert zones["example.com"].provider == "cloudflare"
    assert zones["example.com"].options == {"auth_token": "changeme"}
    assert "changeme" not in repr(zones)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('["a.test"]\nauth_token = "x"', "must name its provider"),
        ('["a.test"]\nprovider = 1', "table of texts"),
        ('provider = "x"', "table of texts"),
        ("[", "not TOML"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        read_zones(written(tmp_path, text))


def test_a_file_that_others_can_read_or_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="can be read by others"):
        read_zones(written(tmp_path, "", 0o640))
    with pytest.raises(SettingsError, match="cannot read"):
        read_zones(tmp_path / "none.toml")


def test_a_zone_says_whose_it_is(tmp_path: Path) -> None:
    table = '["example.com"]\nprovider = "cloudflare"\n'
    named = read_zones(written(tmp_path, table + 'workspaces = "w1, w2"\n'))["example.com"]
    assert named.workspaces == frozenset({"w1", "w2"})
    assert read_zones(written(tmp_path, table + 'workspaces = "*"\n'))["example.com"].workspaces is None
    for missing in ("", 'workspaces = " , "\n'):
        with pytest.raises(SettingsError, match="must name its workspaces in `workspaces`"):
            read_zones(written(tmp_path, table + missing))


def test_a_zone_proves_nothing_for_a_workspace_that_it_is_not_of() -> None:
    provider = cast("DnsProvider", object())
    zones = DnsZones({"Example.com.": provider, "open.test": provider}, {"example.com": frozenset({"w1"})})

    assert zones.allows("*.shop.EXAMPLE.com", "w1")
    assert not zones.allows("*.shop.example.com", "w2")
    assert not zones.allows("example.com", "")
    assert zones.allows("a.open.test", "w2")
    assert not zones.allows("elsewhere.test", "w1")
