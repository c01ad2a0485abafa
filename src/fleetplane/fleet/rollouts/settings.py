"""The table `[rollouts]`: what gates may ask outside of the server."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from fleetplane.kernel.access import EVERYWHERE, covers
from fleetplane.kernel.errors import SettingsError
from fleetplane.sections.base import SettingsSection, at_least

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?")
_SCOPE = re.compile(r"[a-z]{1,32}(?:/[^/\s=*]{1,128}){0,11}")
EVERY_SCOPE = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusSource:
    """A Prometheus server, and with which token it is asked."""

    url: str
    token_file: str = ""


class RolloutSettings(SettingsSection, frozen=True):
    prometheus_url: str = ""
    """The Prometheus server that gates may query, such as `https://prometheus.example/path`; empty: none."""
    prometheus_token_file: str = ""
    """A file with the bearer token for it; read at each query. Empty: none is sent."""
    prometheus_scopes: tuple[str, ...] = ()
    """Whose rollouts may query it: scopes such as `tenant/acme` with all below, or `*` for every one."""
    prometheus_sources: tuple[str, ...] = ()
    """`SCOPE=URL [TOKEN_FILE]`: another server and its own token, for rollouts at and below a scope."""
    webhook_origins: tuple[str, ...] = ()
    """Where webhooks of gates may lie, such as `https://checks.example:8443`; no others are called."""
    probes: tuple[str, ...] = ()
    """`NAME=COMMAND`: commands that gates may have run on targets, each by its name and no others."""
    gate_timeout_seconds: float = 5.0
    """How long an answer may take; without one, a gate is not passed."""

    def __post_init__(self) -> None:
        if self.prometheus_url:
            check_http_url("rollouts.prometheus_url", self.prometheus_url)
        _ = self._prometheus
        for one in self.webhook_origins:
            if origin_of(check_http_url("rollouts.webhook_origins", one)) != one.rstrip("/").lower():
                raise SettingsError(
                    f"rollouts.webhook_origins: {one!r} is not scheme, host and port alone, "
                    "such as https://checks.example:8443"
                )
        _ = self.commands
        at_least("rollouts.gate_timeout_seconds", self.gate_timeout_seconds, 0.1)

    def prometheus_for(self, scope: str) -> PrometheusSource | None:
        """The server that rollouts of a scope may query: that of the nearest scope which has one."""
        found = [(len(at), source) for at, source in self._prometheus.items() if covers(at, scope)]
        return max(found, key=lambda one: one[0])[1] if found else None

    @property
    def _prometheus(self) -> Mapping[str, PrometheusSource]:
        """Servers by the scope at and below which they may be queried."""
        found: dict[str, PrometheusSource] = {}
        shared = PrometheusSource(url=self.prometheus_url, token_file=self.prometheus_token_file)
        for text in self.prometheus_scopes:
            at = _scope("rollouts.prometheus_scopes", text)
            if not self.prometheus_url:
                raise SettingsError("rollouts.prometheus_scopes: there is no rollouts.prometheus_url")
            found[at] = shared
        for text in self.prometheus_sources:
            key, (scope, _, rest) = "rollouts.prometheus_sources", text.partition("=")
            words, at = rest.split(), _scope(key, scope)
            if len(words) not in (1, 2) or at in found:
                raise SettingsError(
                    f"{key}: {text!r} is not SCOPE=URL [TOKEN_FILE] with a scope that has no other server"
                )
            found[at] = PrometheusSource(
                url=check_http_url(key, words[0]), token_file=words[1] if len(words) > 1 else ""
            )
        return found

    @property
    def commands(self) -> Mapping[str, tuple[str, ...]]:
        """The probes by name, as a program and its arguments."""
        found: dict[str, tuple[str, ...]] = {}
        for text in self.probes:
            name, _, command = text.partition("=")
            try:
                words = tuple(shlex.split(command))
            except ValueError:
                words = ()
            if _NAME.fullmatch(name) is None or not words or name in found:
                raise SettingsError(
                    f"rollouts.probes: {text!r} is not NAME=COMMAND, such as ready=/usr/bin/check --fast"
                )
            found[name] = words
        return found


def _scope(key: str, text: str) -> str:
    """A scope as it is stored, or everywhere for `*`."""
    if text == EVERY_SCOPE:
        return EVERYWHERE
    if _SCOPE.fullmatch(text) is None:
        raise SettingsError(f"{key}: {text!r} is not a scope such as tenant/acme, nor * for every one")
    return text


def check_http_url(key: str, url: str) -> str:
    """Refuse what is not an address of HTTP without credentials in it."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise SettingsError(f"{key}: {url!r} is not an address: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise SettingsError(f"{key}: {url!r} is not an http or https address")
    if parts.username is not None or parts.password is not None or parts.fragment or parts.query:
        raise SettingsError(f"{key}: {url!r} must have neither credentials, a query nor a fragment")
    return url


def origin_of(url: str) -> str:
    """Scheme, host and port of an address, in one spelling: without the port where it is the usual one."""
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    host = f"[{host}]" if ":" in host else host
    usual = {"http": 80, "https": 443}.get(parts.scheme)
    port = "" if parts.port in (None, usual) else f":{parts.port}"
    return f"{parts.scheme}://{host}{port}"
