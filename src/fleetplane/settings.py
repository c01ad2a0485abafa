"""Every setting, its default and its environment variable, read once.

Three sources, each stronger than the one before: the TOML file, the environment, the flags.
A setting at `[section] key` is `FLEETPLANE_SECTION__KEY` in the environment (two underscores
between levels, one within a name) and `--set section.key=value` as a flag. A key that nobody
knows is an error that names the nearest known one: a misspelt limit must not pass for a limit.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec

from fleetplane.kernel.errors import SettingsError
from fleetplane.sections.base import Section, one_of
from fleetplane.sections.domains import (
    BoardSettings,
    EdgeSettings,
    GpuSettings,
    InstanceSettings,
    ProxySettings,
)
from fleetplane.sections.listeners import ListenersSettings
from fleetplane.sections.process import (
    IdentitySettings,
    LogSettings,
    ShutdownSettings,
    StoreSection,
    TelemetrySettings,
)

PREFIX = "FLEETPLANE_"
CLIENT_VARIABLES = frozenset({"FLEETPLANE_DEVICE_API", "FLEETPLANE_SERVER", "FLEETPLANE_TOKEN"})
"""Variables of the command line's clients, which share our prefix."""

DOMAINS = ("gpus", "instances", "proxies", "boards", "edge")


class Settings(Section, frozen=True):
    data_dir: str = "./fleetplane-data"
    only: tuple[str, ...] = ()
    """Domains to run; all when empty."""
    ready_file: str = ""
    """Written once all listeners accept."""
    log: LogSettings = LogSettings()
    shutdown: ShutdownSettings = ShutdownSettings()
    store: StoreSection = StoreSection()
    telemetry: TelemetrySettings = TelemetrySettings()
    identity: IdentitySettings = IdentitySettings()
    listeners: ListenersSettings = ListenersSettings()
    gpus: GpuSettings = GpuSettings()
    instances: InstanceSettings = InstanceSettings()
    proxies: ProxySettings = ProxySettings()
    boards: BoardSettings = BoardSettings()
    edge: EdgeSettings = EdgeSettings()

    def __post_init__(self) -> None:
        for name in self.only:
            one_of("only", name, DOMAINS)
        if not self.data_dir:
            raise SettingsError("data_dir: must not be empty")

    @property
    def state_directory(self) -> Path:
        """The data directory, wherever the process may go."""
        return Path(self.data_dir).absolute()

    @property
    def inherited(self) -> Mapping[str, str]:
        """The environment that helpers of this process may be started with: none of our own settings."""
        return {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.only)) or DOMAINS


def load(
    *,
    config: Path | None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Settings:
    """The settings of this process. `flags` maps dotted keys to values; None values are absent."""
    merged: dict[str, Any] = {}
    if config is not None:
        _overlay(merged, _from_file(config), source=str(config))
    _overlay(
        merged, _from_environment(os.environ if environment is None else environment), source="environment"
    )
    given = {key: value for key, value in (flags or {}).items() if value is not None}
    _overlay(merged, _from_flags(given), source="flags")
    try:
        return msgspec.convert(merged, Settings, strict=False)
    except msgspec.ValidationError as error:
        where = str(error).replace("$.", "").replace(" - at `", " (at ").replace("`", "") + ")"
        raise SettingsError(f"bad setting: {where}") from error


def assignments(texts: Sequence[str]) -> dict[str, str]:
    """`section.key=value` flags as a mapping."""
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise SettingsError(f"--set {text!r}: expected section.key=value")
        pairs[key.strip()] = value
    return pairs


def known_keys(section: type[Section] = Settings, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting's dotted key and type."""
    for field in msgspec.structs.fields(section):
        key = f"{path}{field.encode_name}"
        if isinstance(field.type, type) and issubclass(field.type, Section):
            yield from known_keys(field.type, f"{key}.")
        else:
            yield key, field.type


def _from_file(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not TOML: {error}") from error
    return dict(_flatten(document))


def _flatten(document: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if isinstance(value, dict) and (value or _is_section(f"{path}{key}.")):
            yield from _flatten(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _is_section(path: str) -> bool:
    return any(key.startswith(path) for key, _ in known_keys())


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    by_variable = {
        PREFIX + key.upper().replace(".", "__").replace("-", "_"): (key, kind) for key, kind in known_keys()
    }
    found = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable in CLIENT_VARIABLES:
            continue
        if variable not in by_variable:
            raise SettingsError(_unknown("environment variable", variable, by_variable))
        key, kind = by_variable[variable]
        found[key] = _parse(text, kind)
    return found


def _from_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    kinds = dict(known_keys())
    return {
        key: _parse(value, kinds.get(key, str)) if isinstance(value, str) else value
        for key, value in flags.items()
    }


def _parse(text: str, kind: Any) -> Any:
    """Text as its setting's type wants it; msgspec turns the scalars into numbers and booleans."""
    if get_origin(kind) is tuple and get_args(kind)[1:] == (...,):
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def _overlay(merged: dict[str, Any], values: Mapping[str, Any], *, source: str) -> None:
    known = dict(known_keys())
    for key, value in values.items():
        if key not in known:
            raise SettingsError(_unknown(f"{source}: setting", key, known))
        *path, last = key.split(".")
        table = merged
        for name in path:
            table = table.setdefault(name, {})
        table[last] = value


def _unknown(what: str, key: str, known: Mapping[str, Any]) -> str:
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
    return f"{what} {key!r} is not known; did you mean {nearest!r}?"
