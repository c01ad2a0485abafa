"""What an import found, and what became of each statement. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import msgspec

from fleetplane.domains.proxies.importing.reading import Statement
from fleetplane.domains.proxies.nginx import judging
from fleetplane.domains.proxies.nginx.table import DirectiveContext
from fleetplane.domains.proxies.rules import directives

FORMAT: Final = "fleetplane.proxies/1"
_UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_SIZES: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
LEFT_TO_AGENT: Final = frozenset(
    [
        "user",
        "pid",
        "error_log",
        "access_log",
        "log_format",
        "include",
        "worker_processes",
        "worker_rlimit_nofile",
        "events",
        "load_module",
        "types",
        "default_type",
        "sendfile",
        "tcp_nopush",
        "tcp_nodelay",
        "types_hash_max_size",
        "server_names_hash_bucket_size",
        "ssl_session_cache",
        "ssl_session_timeout",
        "ssl_session_tickets",
        "ssl_prefer_server_ciphers",
        "proxy_http_version",
        "log_not_found",
        "server_tokens",
    ]
)


class StatementOutcome(StrEnum):
    UNDERSTOOD = "understood"
    AGENT = "left to the agent"
    """Logs, users, temporary files: each agent has its own."""
    RAW = "kept raw"
    """An administrator has to confirm it."""
    REFUSED = "refused"
    MISSING = "certificate missing"
    """To be brought into the workspace before the import can be applied."""


class ImportLine(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one statement."""

    file: str
    line: int
    text: str
    outcome: StatementOutcome
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCertificate:
    id: str
    certificate: str
    """The path of its file; so for the key."""
    key: str
    domain: str
    """The first name that it is served for."""


@dataclass(slots=True)
class Imported:
    hosts: list[dict[str, Any]] = field(default_factory=list)
    upstreams: list[dict[str, Any]] = field(default_factory=list)
    streams: list[dict[str, Any]] = field(default_factory=list)
    certificates: list[FoundCertificate] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    report: list[ImportLine] = field(default_factory=list)

    def note(self, statement: Statement, outcome: StatementOutcome, why: str = "") -> None:
        self.report.append(
            ImportLine(
                file=statement.file, line=statement.line, text=statement.words[:200], outcome=outcome, why=why
            )
        )

    @property
    def has_raw(self) -> bool:
        return any(line.outcome is StatementOutcome.RAW for line in self.report)

    def bundle(self, certificates: dict[str, str], *, raw: bool) -> dict[str, Any]:
        """As the workspace imports it; `certificates` are the ids that the workspace gave them."""
        made: dict[str, Any] = {
            "format": FORMAT,
            "upstreams": self.upstreams,
            "virtual_hosts": [_placed(one, certificates, raw=raw) for one in self.hosts],
        }
        if self.streams:
            made["streams"] = self.streams
        if raw and self.settings:
            made["settings"] = {"nginx_directives": self.settings, "env_vars": {}}
        return made


def placed_by_name(
    certificates: Iterable[FoundCertificate], known: Mapping[str, str], chosen: Mapping[str, str]
) -> dict[str, str]:
    """The workspace's certificate for each that was found: as chosen for its file, else by its name.

    `known` has the ids of those that can be served, by their domains.
    """
    made = {}
    for one in certificates:
        wildcard = f"*.{one.domain.partition('.')[2]}"
        identity = chosen.get(one.certificate) or known.get(one.domain) or known.get(wildcard)
        if identity:
            made[one.id] = identity
    return made


def _placed(host: dict[str, Any], certificates: dict[str, str], *, raw: bool) -> dict[str, Any]:
    made = dict(host)
    if "ssl_certificate_id" in made:
        made["ssl_certificate_id"] = certificates[made["ssl_certificate_id"]]
    if not raw:
        made.pop("custom_directives", None)
        made["locations"] = [
            {name: value for name, value in one.items() if name != "custom_directives"}
            for one in made["locations"]
        ]
    return made


def keep_raw(
    one: Statement, kept: dict[str, str], contexts: Iterable[DirectiveContext], made: Imported
) -> StatementOutcome:
    """Keep a directive as raw text, if the allow-list has it and it stands alone; tell what became of it."""
    value = " ".join(_quoted(argument) for argument in one.arguments)
    why = ""
    if one.block is not None:
        why = "a block has no typed form here"
    elif judging.not_allowed(one.name, set(contexts)):
        why = "not on the list of what may be configured"
    elif one.name in kept and kept[one.name] != value:
        why = "raw text has one value for each directive"
    elif fault := directives.value_fault(value, name=one.name, contexts=set(contexts)):
        why = fault
    if why:
        made.note(one, StatementOutcome.REFUSED, why)
        return StatementOutcome.REFUSED
    kept[one.name] = value
    made.note(one, StatementOutcome.RAW)
    return StatementOutcome.RAW


def _quoted(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_./:=*^~$@%+,-]+", text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def seconds(text: str) -> int:
    found = re.fullmatch(r"([0-9]+)(ms|[smhd]?)", text)
    if found is None:
        raise ValueError(text)
    return max(1, int(found[1]) // 1000) if found[2] == "ms" else int(found[1]) * _UNITS[found[2]]


def bytes_of(text: str) -> int:
    found = re.fullmatch(r"([0-9]+)([kmgKMG]?)", text)
    if found is None:
        raise ValueError(text)
    return int(found[1]) * _SIZES[found[2].lower()]
