"""Every setting, its default and its environment variable, read once.

Three sources, each stronger than the one before: the TOML file, the environment, the flags.
A setting at `[section] key` is `FLEETPLANE_SECTION__KEY` in the environment (two underscores
between levels, one within a name) and `--set section.key=value` as a flag. A key that nobody
knows is an error that names the nearest known one: a misspelt limit must not pass for a limit.
"""

from __future__ import annotations

import difflib
import socket
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import msgspec
from msgspec import defstruct

from fleetplane import environment as process
from fleetplane.domains import discovery
from fleetplane.domains.declaration import load as load_reference
from fleetplane.environment import PREFIX
from fleetplane.fleet.rollouts.settings import RolloutSettings
from fleetplane.kernel.errors import SettingsError
from fleetplane.sections.base import (
    ListenerSettings,
    ListenersSettings,
    SettingsSection,
    is_secret,
    is_secret_file,
)
from fleetplane.sections.openid import OpenIDSettings
from fleetplane.sections.process import (
    AuditSection,
    BusSection,
    IdentitySettings,
    LogSettings,
    MetricsSettings,
    ReleasesSettings,
    ShutdownSettings,
    StoreSection,
    TelemetrySettings,
)

S = TypeVar("S", bound=SettingsSection)

SECRET_FILE_BYTES = 4096
"""An address with a password and several hosts is some hundreds."""

CLIENT_VARIABLES = frozenset(
    {
        "FLEETPLANE_AGENT_LAUNCH",
        "FLEETPLANE_CONTEXT",
        "FLEETPLANE_CONTEXTS",
        "FLEETPLANE_SERVER",
        "FLEETPLANE_TOKEN",
    }
)
"""Variables of the command line's clients, which share our prefix; domains declare further ones."""


class Settings(SettingsSection, frozen=True):
    """The server's own settings. `schema` adds a table for each domain and listener that is installed."""

    data_dir: str = "./fleetplane-data"
    only: tuple[str, ...] = ()
    """Domains to run; all when empty."""
    ready_file: str = ""
    """Written once all listeners accept."""
    log: LogSettings = LogSettings()
    shutdown: ShutdownSettings = ShutdownSettings()
    store: StoreSection = StoreSection()
    bus: BusSection = BusSection()
    audit: AuditSection = AuditSection()
    telemetry: TelemetrySettings = TelemetrySettings()
    identity: IdentitySettings = IdentitySettings()
    oidc: OpenIDSettings = OpenIDSettings()
    rollouts: RolloutSettings = RolloutSettings()
    metrics: MetricsSettings = MetricsSettings()
    releases: ReleasesSettings = ReleasesSettings()
    listeners: ListenersSettings = ListenersSettings()

    def __post_init__(self) -> None:
        for name in self.only:
            discovery.installed().named(name)
        if not self.data_dir:
            raise SettingsError("data_dir: must not be empty")

    @property
    def state_directory(self) -> Path:
        """The data directory, wherever the process may go."""
        return Path(self.data_dir).absolute()

    @property
    def server_name(self) -> str:
        """The name of this server among those that share a database."""
        return self.store.server or f"{socket.gethostname()}:{self.state_directory}"

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.only)) or domain_names()

    def section(self, domain: str) -> SettingsSection:
        """The table of a domain."""
        found = getattr(self, _field(domain))
        assert isinstance(found, SettingsSection)
        return found

    def of(self, kind: type[S]) -> S:
        """The table of that type."""
        for name in self.__struct_fields__:
            if isinstance(found := getattr(self, name), kind):
                return found
        raise LookupError(f"no installed domain declares {kind.__name__}")

    def listener(self, name: str) -> ListenerSettings:
        """The table of a listener."""
        found = getattr(self.listeners, _field(name))
        assert isinstance(found, ListenerSettings)
        return found


def domain_names() -> tuple[str, ...]:
    """The installed domains, in order."""
    return tuple(declaration.name for declaration in discovery.installed().declarations)


@cache
def schema() -> type[Settings]:
    """`Settings` with the tables of every installed domain."""
    declared = discovery.installed().declarations
    listeners = [_table(one.name, one.settings) for domain in declared for one in domain.listeners]
    tables = [_table(domain.name, domain.settings) for domain in declared]
    listening = _extended(ListenersSettings, listeners)
    fields = [("listeners", listening, msgspec.field(default=listening())), *tables]
    return _extended(Settings, fields)


def _extended(base: type[S], fields: Sequence[tuple[str, Any, Any]]) -> type[S]:
    """`base` with further fields."""
    built = defstruct(
        base.__name__, fields, bases=(base,), frozen=True, kw_only=True, forbid_unknown_fields=True
    )
    assert issubclass(built, base)
    return built


def _table(name: str, reference: str) -> tuple[str, Any, Any]:
    kind = load_reference(reference)
    return (_field(name), kind, msgspec.field(name=name, default=kind()))


def _field(name: str) -> str:
    return name.replace("-", "_")


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
        merged,
        _from_environment(process.current() if environment is None else environment),
        source="environment",
    )
    given = {key: value for key, value in (flags or {}).items() if value is not None}
    _overlay(merged, _from_flags(given), source="flags")
    _overlay(merged, _from_secret_files(merged), source="files")
    try:
        return msgspec.convert(merged, schema(), strict=False)
    except msgspec.ValidationError as error:
        where = str(error).replace("$.", "").replace(" - at `", " (at ").replace("`", "") + ")"
        raise SettingsError(f"bad setting: {where}") from error


def assignments(texts: Sequence[str]) -> dict[str, str]:
    """`section.key=value` flags as a mapping. Secrets are refused: arguments of a process are public."""
    secrets = {key for key, kind in known_keys() if is_secret(kind)}
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip()
        if key in secrets:
            raise SettingsError(
                f"--set {key}: is a secret, and every user of this machine can read a command line",
                hint=f"give it in the environment as {_variable(key)}, or in the file of --config",
            )
        if not equals:
            raise SettingsError(f"--set {text!r}: expected section.key=value")
        pairs[key] = value
    return pairs


def known_keys(section: type[SettingsSection] | None = None, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting's dotted key and type."""
    for field in msgspec.structs.fields(section or schema()):
        key = f"{path}{field.encode_name}"
        if isinstance(field.type, type) and issubclass(field.type, SettingsSection):
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


def _from_secret_files(merged: Mapping[str, Any]) -> dict[str, str]:
    """What is in the files that settings such as `store.url_file` name."""
    found = {}
    given = dict(_flatten(merged))
    for key, kind in known_keys():
        if not is_secret_file(kind) or not (path := given.get(key)):
            continue
        held = key.removesuffix("_file")
        if given.get(held):
            raise SettingsError(f"{key}: {held} is given, too; give one of them")
        try:
            with Path(str(path)).open("rb") as file:
                text = file.read(SECRET_FILE_BYTES + 1)
        except OSError as error:
            raise SettingsError(f"{key}: cannot read {path}: {error.strerror}") from error
        try:
            found[held] = text.decode().strip()
        except UnicodeDecodeError as error:
            raise SettingsError(f"{key}: {path} is not text") from error
        if not found[held] or len(text) > SECRET_FILE_BYTES:
            raise SettingsError(f"{key}: {path} is empty, or larger than {SECRET_FILE_BYTES} bytes")
    return found


def _flatten(document: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if isinstance(value, dict) and (value or _is_section(f"{path}{key}.")):
            yield from _flatten(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _is_section(path: str) -> bool:
    return any(key.startswith(path) for key, _ in known_keys())


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    by_variable = {_variable(key): (key, kind) for key, kind in known_keys()}
    others = [
        *CLIENT_VARIABLES,
        *(name for domain in discovery.installed().declarations for name in domain.client_variables),
    ]
    found = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or any(fnmatchcase(variable, name) for name in others):
            continue
        if variable not in by_variable:
            raise SettingsError(_unknown("environment variable", variable, by_variable))
        key, kind = by_variable[variable]
        found[key] = _parse(text, kind)
    return found


def _variable(key: str) -> str:
    return PREFIX + key.upper().replace(".", "__").replace("-", "_")


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
