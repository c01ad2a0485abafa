"""What a domain declares before anything of it is loaded.

A declaration is texts and references by name. Importing one loads the standard library only, because every
`fleetplane --help` reads all of them; what a reference names is loaded when it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal


def load(reference: str) -> Any:
    """The object that `module:attribute` names."""
    module, _, attribute = reference.partition(":")
    return getattr(import_module(module), attribute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """A command of `fleetplane`, or of `fleetplane agent`."""

    name: str
    target: str
    """`module:attribute` of a click command."""
    help: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """How `fleetplane run` reaches agents of a domain."""

    kinds: Sequence[str]
    """Words for what is named after `--on`: names of resources that have agents, and their short names."""
    target: str
    """`module:attribute` of a function from `cli.running.fleet_run.FleetRun` to an exit code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """How a listener is reached. What ends in `_setting` names a field of the listener's own settings."""

    tls: Literal["always", "never", "setting"]
    """`setting`: as the boolean `tls` of the listener's settings says."""
    client_certificates: Literal["none", "optional", "required"] = "none"
    tokens_setting: str = ""
    """A boolean that makes client certificates optional, for callers who show a token instead."""
    tls13_only: bool = False
    """Refuse TLS 1.2 handshakes: the documented protocol is TLS 1.3."""
    plaintext_setting: str = ""
    """A boolean that permits plain text beyond this machine; without one, plain text stays on it."""
    unix_mode_setting: str = ""
    """The octal file mode of its Unix sockets."""
    default_socket: str = ""
    """What the address `unix:` stands for, where the server runs as root; else a file of the same name in the
    data directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    name: str
    """In settings (`listeners.NAME`) and in the ready file."""
    settings: str
    """`module:attribute` of a subclass of `sections.listeners.ListenerSettings`."""
    transport: Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """One domain: found through the entry-point group `fleetplane.domains`."""

    name: str
    """Of its table in the settings, and in `--only`."""
    summary: str
    order: int = 100
    """Where it stands in lists; equal ones by name."""
    settings: str
    """`module:attribute` of a subclass of `sections.base.Section`."""
    server: str
    """`module:attribute` of a `domains.blueprint.Blueprint`; loaded for enabled domains only."""
    build: str
    """`module:attribute` of a `domains.blueprint.Build`: the running domain, from its settings."""
    listeners: Sequence[Listener] = ()
    verbs: Sequence[Verb] = ()
    agents: Sequence[Verb] = ()
    runners: Sequence[Runner] = ()
    client_variables: Sequence[str] = ()
    """Environment variables of its clients and agents that begin with `FLEETPLANE_` and are no settings of
    the server. A name that ends in `*` stands for all that begin so."""
    explain_key: str = ""
    """`module:attribute` of a function of a key, the server's place and a format: what `explain KEY` does
    without a domain. For the one domain that had this before `explain` named domains."""
