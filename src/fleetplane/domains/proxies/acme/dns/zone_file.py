"""Which DNS provider has which zone: a TOML file of its own, because it holds credentials.

    ["example.com"]
    provider = "cloudflare"
    workspaces = "ID, ID"
    auth_token = "..."

`workspaces` are the ids of those that may get certificates for names in the zone; "*" stands for
all, and has to be said. What else stands beside `provider` is what dns-lexicon calls that provider's options.
"""

from __future__ import annotations

import importlib.util
import stat
import tomllib
from pathlib import Path

from fleetplane.domains.proxies.acme.assembly import ZoneOptions
from fleetplane.kernel.errors import SettingsError


def read_zones(path: Path) -> dict[str, ZoneOptions]:
    """The zones in `path`; refused where the library that speaks to DNS providers is not installed."""
    if importlib.util.find_spec("lexicon") is None:
        raise SettingsError(
            "proxies.dns_zones_file: DNS providers are spoken to through dns-lexicon, which is not installed",
            hint="pip install 'fleetplane[dns]'",
        )
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"proxies.dns_zones_file: cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"proxies.dns_zones_file: {path} is not TOML: {error}") from error
    if mode & 0o077:
        raise SettingsError(
            f"proxies.dns_zones_file: {path} can be read by others (mode {mode:04o})",
            hint=f"chmod 600 {path}",
        )
    return {zone: _options(path, zone, table) for zone, table in document.items()}


def _options(path: Path, zone: str, table: object) -> ZoneOptions:
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise SettingsError(f'{path}: "{zone}" must be a table of texts')
    options = dict(table)
    provider = options.pop("provider", "")
    if not provider:
        raise SettingsError(f'{path}: "{zone}" must name its provider')
    allowed = frozenset(filter(None, (part.strip() for part in options.pop("workspaces", "").split(","))))
    if not allowed:
        raise SettingsError(
            f'{path}: "{zone}" must name its workspaces in `workspaces`',
            hint='workspaces = "*" means everyone',
        )
    return ZoneOptions(provider=provider, options=options, workspaces=None if "*" in allowed else allowed)
