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

from fleetplane.domains.gpus.rules import GpuPolicy, TransitionTimes
from fleetplane.domains.gpus.wire import SELECTABLE, Dialect
from fleetplane.kernel.errors import SettingsError

PREFIX = "FLEETPLANE_"
CLIENT_VARIABLES = frozenset({"FLEETPLANE_DEVICE_API", "FLEETPLANE_SERVER", "FLEETPLANE_TOKEN"})
"""Variables of the command line's clients, which share our prefix."""

DOMAINS = ("gpus", "instances", "proxies", "boards", "edge")
DEFAULT_SOCKET = Path("/var/run/device-api/device.sock")
DEFAULT_PLACE = "unix:"
"""An address that stands for the default socket: the system's for root, else in the data directory."""


def _one_of(key: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise SettingsError(f"{key}: {str(value)!r} is not one of {', '.join(choices)}")


def _at_least(key: str, value: float, minimum: float) -> None:
    if not value >= minimum:
        raise SettingsError(f"{key}: {value} is below {minimum}")


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the configuration file."""


class LogSettings(Section, frozen=True):
    level: str = "info"
    format: str = "text"

    def __post_init__(self) -> None:
        _one_of("log.level", self.level, ("debug", "info", "warning", "error"))
        _one_of("log.format", self.format, ("text", "json"))


class ShutdownSettings(Section, frozen=True):
    grace_seconds: float = 10.0
    """How long running calls may take to finish after SIGTERM."""

    def __post_init__(self) -> None:
        _at_least("shutdown.grace_seconds", self.grace_seconds, 0)


class StoreSection(Section, frozen=True):
    ring_events: int = 4096
    """Recent events kept in memory for watchers."""
    history_revisions: int = 100_000
    """Revisions from which a watch may resume; older ones are compacted."""
    group_limit: int = 256
    """Writes made durable together; 1 means one commit per write."""

    def __post_init__(self) -> None:
        _at_least("store.ring_events", self.ring_events, 1)
        _at_least("store.history_revisions", self.history_revisions, 1)
        _at_least("store.group_limit", self.group_limit, 1)


class TelemetrySettings(Section, frozen=True):
    """Of measurements and log lines; what is older, or too much, is deleted."""

    points_days: float = 35.0
    """A month can be looked at on its last day."""
    lines_days: float = 8.0
    size_mebibytes: int = 8192
    """Beyond it the oldest lines go first. About 20 million of 400 bytes."""

    def __post_init__(self) -> None:
        for name, least in (("points_days", 0.01), ("lines_days", 0.01), ("size_mebibytes", 1)):
            _at_least(f"telemetry.{name}", getattr(self, name), least)


class IdentitySettings(Section, frozen=True):
    master_key: str = ""
    """Base64 of 32 bytes. Empty: a 0600 file in the data directory, made at first start."""
    master_key_file: str = ""
    """Where that file is, when not in the data directory."""


class ListenerSettings(Section, frozen=True):
    addresses: tuple[str, ...] = ()
    """`host:port` (port 0 picks a free one) or `unix:///path`."""


class WebListenerSettings(ListenerSettings, frozen=True):
    addresses: tuple[str, ...] = ("127.0.0.1:8080",)


class DeviceApiSettings(ListenerSettings, frozen=True):
    addresses: tuple[str, ...] = (DEFAULT_PLACE, "127.0.0.1:50051")
    socket_mode: str = "0660"
    dialect: Dialect = Dialect.SUPERSET
    """Of the answers, when the caller's metadata asks for none."""
    allow_remote_plaintext: bool = False
    """Permit addresses beyond loopback. Anyone who can reach them can write GPU health."""

    def __post_init__(self) -> None:
        _one_of("listeners.device-api.dialect", self.dialect, SELECTABLE)
        try:
            valid = 0 <= int(self.socket_mode, 8) <= 0o777
        except ValueError:
            valid = False
        if not valid:
            raise SettingsError(
                f"listeners.device-api.socket_mode: {self.socket_mode!r} is no octal file mode"
            )


class RegistrationSettings(ListenerSettings, frozen=True):
    addresses: tuple[str, ...] = ("127.0.0.1:8992",)


class OperatorSettings(ListenerSettings, frozen=True):
    addresses: tuple[str, ...] = ("127.0.0.1:8993",)


class AgentSettings(ListenerSettings, frozen=True):
    addresses: tuple[str, ...] = ("127.0.0.1:8994",)


class ProxyAgentsSettings(ListenerSettings, frozen=True):
    addresses: tuple[str, ...] = ("127.0.0.1:8995",)
    tls: bool = True
    allow_plaintext: bool = False
    """Permit `tls = false`. Private keys of certificates travel on this listener."""

    def __post_init__(self) -> None:
        if not self.tls and not self.allow_plaintext:
            raise SettingsError(
                "listeners.proxy-agents.tls: private keys travel on this listener, and need TLS",
                hint="leave tls on, or set listeners.proxy-agents.allow_plaintext = true as well",
            )


class BoardsListenerSettings(ListenerSettings, frozen=True):
    addresses: tuple[str, ...] = ("127.0.0.1:9090",)


class PlainBoardsSettings(ListenerSettings, frozen=True):
    """For older agents and tools of boards that speak plain text and nothing else; closed unless given."""

    allow_remote: bool = False
    """Permit addresses beyond loopback. Whoever reaches them can say that it is any board."""


class EdgeListenerSettings(ListenerSettings, frozen=True):
    addresses: tuple[str, ...] = ("127.0.0.1:50056",)
    tls: bool = False
    """TLS of our own; without it, an ingress in front ends TLS and passes HTTP/2 on in clear text."""
    allow_remote_plaintext: bool = False
    """Permit addresses beyond loopback without TLS, where the way from the ingress is trusted."""
    connections: int = 0
    """Held at once, one for each daemon that comes by itself; 0: a share of what the process may open."""

    def __post_init__(self) -> None:
        _at_least("listeners.edge.connections", self.connections, 0)


class ListenersSettings(Section, frozen=True):
    web: WebListenerSettings = WebListenerSettings()
    registration: RegistrationSettings = RegistrationSettings()
    operator: OperatorSettings = OperatorSettings()
    agent: AgentSettings = AgentSettings()
    proxy_agents: ProxyAgentsSettings = msgspec.field(name="proxy-agents", default=ProxyAgentsSettings())
    boards: BoardsListenerSettings = BoardsListenerSettings()
    boards_plain: PlainBoardsSettings = msgspec.field(name="boards-plain", default=PlainBoardsSettings())
    edge: EdgeListenerSettings = EdgeListenerSettings()
    device_api: DeviceApiSettings = msgspec.field(name="device-api", default=DeviceApiSettings())


class GpuSettings(Section, frozen=True):
    lease_seconds: float = 30.0
    transition_times: TransitionTimes = TransitionTimes.STRICT
    max_gpus: int = 4096
    max_condition_types: int = 32
    max_providers: int = 256
    node: str = ""
    """This node's name in the metrics; the host's name when empty."""

    def __post_init__(self) -> None:
        _at_least("gpus.lease_seconds", self.lease_seconds, 0)
        for name in ("max_gpus", "max_condition_types", "max_providers"):
            _at_least(f"gpus.{name}", getattr(self, name), 1)

    def policy(self) -> GpuPolicy:
        return GpuPolicy(
            lease_seconds=self.lease_seconds,
            transition_times=self.transition_times,
            max_gpus=self.max_gpus,
            max_condition_types=self.max_condition_types,
            max_providers=self.max_providers,
        )


class InstanceSettings(Section, frozen=True):
    shard: str = "local"
    """Which document this server follows: `shard/{shard}/config.jsonc` in the object storage."""
    provider: str = ""
    """Overrides the document's infrastructure provider."""
    advertise: str = "config"
    """Tell agents the document's `advertise` addresses, or those of the `listeners`."""
    drain_on_scale_down: bool = True
    first_generation_tenants: tuple[str, ...] = ()
    """Tenants whose operators expect the first numbering of group events."""
    silence_share: float = 0.5
    """When more than this share of a group or tenant falls silent at once, nobody is drained; 1: never."""
    silence_window_seconds: float = 300.0
    """How far apart their last reports may lie to count as at once."""
    silence_hold_seconds: float = 900.0
    """How long they are left alone; after that they go one at a time."""
    machine: str = ""
    """The provider's id of the machine that the server runs on: the leader's address goes there."""
    userdata_hosts: tuple[str, ...] = ()
    """Hosts in private networks that user data may be fetched from."""
    storage: str = "file"
    directory: str = ""
    """Of the storage `file`; `objects` in the data directory when empty."""
    bucket: str = ""
    region: str = "us-east-1"
    endpoint: str = ""
    prefix: str = ""
    access_key_id: str = ""
    secret_access_key: str = ""

    def __post_init__(self) -> None:
        _at_least("instances.silence_share", self.silence_share, 0)
        _at_least("instances.silence_window_seconds", self.silence_window_seconds, 0)
        _at_least("instances.silence_hold_seconds", self.silence_hold_seconds, 0)
        _one_of("instances.storage", self.storage, ("file", "s3"))
        _one_of("instances.advertise", self.advertise, ("config", "listeners"))
        if self.storage == "s3" and not self.bucket:
            raise SettingsError("instances.bucket: must be given for the storage s3")


class ProxySettings(Section, frozen=True):
    admin_email: str = "admin@fleetplane.local"
    """Of the first administrator, who is made when there is no user yet."""
    admin_password: str = ""
    """Empty: from the file below; empty too: made up and shown once."""
    admin_password_file: str = ""
    open_organizations: bool = True
    """Whether every user may create organizations, or only system administrators."""
    requests_per_minute: int = 1000
    """Per caller."""
    heartbeat_seconds: int = 30
    """How often agents report; after three missed reports they are offline."""
    event_origins: tuple[str, ...] = ()
    """Web pages, beside our own, that may listen to events, such as `https://ui.example.com`."""
    acme_directory: str = "https://acme-v02.api.letsencrypt.org/directory"
    """The certificate authority; Let's Encrypt unless told otherwise."""
    acme_terms_agreed: bool = False
    """Whether you have agreed to its terms of service; nothing is ordered before."""
    acme_email: str = ""
    """Where the authority may write to."""
    acme_ca_file: str = ""
    """What vouches for the authority's own web server; the usual roots when empty."""
    acme_eab_key_id: str = ""
    acme_eab_hmac_key: str = ""
    """External account binding, for authorities that want a customer's account."""
    challenge_listen: tuple[str, ...] = ()
    """Addresses that answer challenges in plain HTTP, and nothing else; the web listener does it too."""
    challenge_address: str = ""
    """`host:port` where agents reach this server with challenges; empty: their own operators tell them."""
    dns_zones_file: str = ""
    """Which DNS provider has which zone, with its credentials, for wildcards."""

    def __post_init__(self) -> None:
        _at_least("proxies.requests_per_minute", self.requests_per_minute, 1)
        _at_least("proxies.heartbeat_seconds", self.heartbeat_seconds, 1)

    def first_password(self) -> str:
        if self.admin_password or not self.admin_password_file:
            return self.admin_password
        try:
            return Path(self.admin_password_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(
                f"proxies.admin_password_file: cannot read {self.admin_password_file}: {error}"
            ) from error


class EdgeSettings(Section, frozen=True):
    role: str = "controller"
    """What this server is to its daemons; a `worker` takes none."""
    public_endpoint: str = ""
    """`host:port` or URL at which daemons reach the listener `edge`; its first address when empty."""
    issuer: str = ""
    """Of enrollment tokens; made from the role when empty."""
    stale_seconds: float = 90.0
    """Without a heartbeat for this long, a connected daemon is unhealthy; they come every 30 s."""
    node_token_days: float = 30.0
    enrollment_token_seconds: float = 900.0
    overlap_seconds: float = 60.0
    """How long the former key of a daemon is still good for the stream it has open."""
    attests_per_minute: int = 5
    """Of new daemons, per address."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks whose `x-forwarded-for` says where a daemon really is."""
    skew_seconds: float = 300.0
    """How far a daemon's clock may be off."""
    strict: bool = False
    """Refuse signed events that do not say what they are about, and results whose content is not signed."""
    in_flight: int = 16
    """Commands a daemon has at once; daemons that work on one at a time get one."""
    deadline_seconds: float = 60.0
    """Of a command that says nothing else."""
    shipped_shapes: bool = False
    """Answer REST calls as the first command line expects it, unless the caller asks otherwise."""

    def __post_init__(self) -> None:
        _one_of("edge.role", self.role, ("controller", "hybrid", "relay-coordinator", "worker"))
        for name in ("stale_seconds", "in_flight", "deadline_seconds"):
            _at_least(f"edge.{name}", getattr(self, name), 1)
        for name in ("node_token_days", "overlap_seconds", "skew_seconds", "attests_per_minute"):
            _at_least(f"edge.{name}", getattr(self, name), 0)
        if not 1 <= self.enrollment_token_seconds <= 900:
            raise SettingsError(
                f"edge.enrollment_token_seconds: {self.enrollment_token_seconds:g} is not between 1 and 900"
            )


class BoardSettings(Section, frozen=True):
    heartbeat_seconds: float = 30.0
    """How often boards report; after three missed reports they are not ready, after ten unknown."""
    certificate_days: float = 30.0
    """Life of a board's certificate; boards renew them when a third is left."""
    agent_port: int = 9091
    """Where a board's agent listens if it did not say."""
    server_names: tuple[str, ...] = ()
    """Names and addresses at which boards dial this server, beside those it is bound to."""
    controller_id: str = ""
    """How this server is called among others; the machine's name when empty."""
    unprotected_pins: tuple[int, ...] = ()
    """Of the pins that are protected on every board (0 to 3, 14, 15), those that may be used; each board
    has to allow it too."""
    certificate_domains: tuple[str, ...] = ("pi-controller.local", "cluster.local")
    """Under which servers' names may be certified on request."""
    requests_per_minute: int = 1000
    """Per caller of REST."""

    def __post_init__(self) -> None:
        for name in ("heartbeat_seconds", "certificate_days", "agent_port", "requests_per_minute"):
            _at_least(f"boards.{name}", getattr(self, name), 1)


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
            _one_of("only", name, DOMAINS)
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
