from __future__ import annotations

from pathlib import Path

import pytest

from fleetplane.domains.proxies.acme.zone_file import read_zones
from fleetplane.kernel.errors import SettingsError


def written(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "zones.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_zones_are_read_and_their_credentials_not_shown(tmp_path: Path) -> None:
    text = '["example.com"]\nprovider = "cloudflare"\nauth_token = "changeme"\n'
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
