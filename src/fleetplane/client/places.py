"""Which server is meant: from what was said, the environment and the contexts, in that order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from fleetplane import environment
from fleetplane.client import local
from fleetplane.client.contexts import LOCAL, Context, ContextFile
from fleetplane.kernel.errors import InvalidArgument

CALL_SECONDS = 30.0
CONTEXT_VARIABLE, SERVER_VARIABLE, TOKEN_VARIABLE = (
    "FLEETPLANE_CONTEXT",
    "FLEETPLANE_SERVER",
    "FLEETPLANE_TOKEN",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which server, and as whom, as somebody said it. What is empty was not said."""

    context: str = ""
    data_dir: Path | None = None
    server: str = ""
    token: str = field(default="", repr=False)
    token_file: Path | None = None
    ca: Path | None = None
    timeout: float = CALL_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A server that can be called: by the owner's socket, or by URL with a token."""

    socket: Path | None = None
    server: str = ""
    token: str = field(default="", repr=False)
    ca_pem: str = field(default="", repr=False)
    context: str = ""
    """The context that it comes from; empty when an address or a data directory was given."""
    scope: str = ""
    timeout: float = CALL_SECONDS

    @property
    def is_local(self) -> bool:
        """Whether it is reached by its owner's socket."""
        return not self.server

    def __str__(self) -> str:
        return self.server or f"the server at {self.socket}"


def completed(place: Place, variables: Mapping[str, str]) -> Place:
    """The place with what the environment adds: who said nothing about which server means what is set there.

    `FLEETPLANE_CONTEXT`, `FLEETPLANE_SERVER` and `FLEETPLANE_DATA_DIR` say which server, in this order;
    `FLEETPLANE_TOKEN` says as whom, unless the owner's socket was named.
    """
    named = [bool(place.context), bool(place.server), place.data_dir is not None]
    if sum(named) > 1:
        raise InvalidArgument("--context, --server and --data-dir all say which server is meant; give one")
    token = place.token
    if not token and place.token_file is None and place.data_dir is None and place.context != LOCAL:
        token = variables.get(TOKEN_VARIABLE, "")
    place = replace(place, token=token)
    if any(named):
        return place
    if context := variables.get(CONTEXT_VARIABLE, ""):
        return replace(place, context=context)
    if server := variables.get(SERVER_VARIABLE, ""):
        return replace(place, server=server)
    if folder := variables.get(local.VARIABLE, ""):
        return replace(place, data_dir=Path(folder))
    return place


def context_of(place: Place, variables: Mapping[str, str]) -> Context | None:
    """The context that a completed place means; None when it names an address or a data directory.

    An address takes nothing from a context: a token is not shown to another server than its own.
    """
    if place.server or place.data_dir is not None:
        return None
    contexts = ContextFile.default(variables).read()
    return contexts.get(place.context or contexts.current)


def is_remote(place: Place) -> bool:
    """Whether the place is reached by URL and token, rather than by its owner's socket."""
    variables = environment.current()
    place = completed(place, variables)
    if place.server or place.token or place.token_file is not None:
        return True
    context = context_of(place, variables)
    return context is not None and not context.is_local


def owner_directory(place: Place) -> Path:
    """The data directory of the server whose owner asks; refuses a place that is elsewhere."""
    variables = environment.current()
    place = completed(place, variables)
    context = context_of(place, variables)
    if context is not None and not context.is_local:
        raise InvalidArgument(
            f"this is asked at the server's own socket, and {context.name} is elsewhere ({context.server})",
            hint=f"on the server's machine: --context {LOCAL}, or --data-dir",
        )
    return local.data_directory(place.data_dir)


def resolve(place: Place) -> Endpoint:
    """The endpoint of a place; raises when what was said does not make one."""
    variables = environment.current()
    place = completed(place, variables)
    token = given_token(place)
    ca_pem = _read(place.ca) if place.ca is not None else ""
    if place.server:
        if not token:
            raise InvalidArgument(
                "another server needs a token", hint="set FLEETPLANE_TOKEN, or give --token-file"
            )
        return Endpoint(server=place.server.rstrip("/"), token=token, ca_pem=ca_pem, timeout=place.timeout)
    context = context_of(place, variables)
    if context is None or context.is_local:
        if token:
            raise InvalidArgument("a token needs the address of its server: give --server URL")
        folder = local.data_directory(place.data_dir)
        name = "" if context is None else context.name
        return Endpoint(socket=local.socket_of(folder), context=name, timeout=place.timeout)
    if context.refresh_token and not token:
        from fleetplane.client.sessions import fresh

        context = fresh(context.name, ContextFile.default(variables), seconds=place.timeout)
    return Endpoint(
        server=context.server,
        token=token or context.token,
        ca_pem=ca_pem or context.ca_pem,
        context=context.name,
        scope=context.scope,
        timeout=place.timeout,
    )


def given_token(place: Place) -> str:
    """The token that was given, by value or by file; empty when none was."""
    if place.token_file is None:
        return place.token.strip()
    try:
        return place.token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"cannot read {place.token_file}: {error}") from error


def _read(ca: Path) -> str:
    try:
        return ca.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{ca} holds no certificates: {error}") from error
