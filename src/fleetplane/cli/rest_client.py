"""A server's REST API as the command line uses it.

Whoever may open the server's own socket is its owner, and gets a short-lived token there for each
command; anyone else brings a token that the owner made, and says where the server is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import click

from fleetplane.cli.parameters import DURATION
from fleetplane.kernel import errors
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument, Unavailable

if TYPE_CHECKING:
    import httpx

CALL_SECONDS = 30.0
SESSION_SECONDS = 4 * 3600.0
"""A command may follow something for as long as this before it has to come back."""
F = TypeVar("F", bound=Callable[..., Any])

_BY_STATUS: Mapping[int, type[FleetplaneError]] = {
    400: errors.InvalidArgument,
    401: errors.Unauthenticated,
    403: errors.PermissionDenied,
    404: errors.NotFound,
    409: errors.FailedPrecondition,
    412: errors.Conflict,
    422: errors.InvalidArgument,
    429: errors.ResourceExhausted,
    503: errors.Unavailable,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which server, and as whom."""

    data_dir: Path
    server: str = ""
    token: str = ""
    token_file: Path | None = None
    ca: Path | None = None
    timeout: float = CALL_SECONDS


def rest_options(command: F) -> F:
    """The options that say which server, and as whom; a command takes them as `Place(**where)`."""
    for option in (
        click.option(
            "--timeout", type=DURATION, default=CALL_SECONDS, show_default="30s",
            help="How long to wait for an answer.",
        ),
        click.option(
            "--ca", type=click.Path(path_type=Path, dir_okay=False),
            help="Whom to trust as the server, in PEM.",
        ),
        click.option(
            "--token-file", type=click.Path(path_type=Path, dir_okay=False),
            help="A file with a token; else $FLEETPLANE_TOKEN.",
        ),
        click.option("--token", default="", envvar="FLEETPLANE_TOKEN", hidden=True),
        click.option(
            "--server", metavar="URL", default="", envvar="FLEETPLANE_SERVER", show_envvar=True,
            help="The web listener of a server elsewhere; needs a token.",
        ),
        click.option(
            "--data-dir", type=click.Path(path_type=Path), default=Path("./fleetplane-data"),
            show_default=True, envvar="FLEETPLANE_DATA_DIR", show_envvar=True,
            help="Of a server on this machine, as whose owner to act.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


class RestClient:
    def __init__(
        self, base_url: str, token: str, *, headers: Mapping[str, str], ca: Path | None, seconds: float
    ) -> None:
        import httpx

        self._base_url = base_url
        try:
            self._http = httpx.Client(
                base_url=base_url, headers={"authorization": f"Bearer {token}", **headers}, timeout=seconds,
                verify=_trust(ca) if ca is not None else True, trust_env=False,
            )  # fmt: skip
        except httpx.InvalidURL as error:
            raise InvalidArgument(f"{base_url} is no address of a server: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def call(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        query: Mapping[str, str] | list[tuple[str, str]] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The answer's content; raises what the server refused with."""
        with _reaching(self._base_url):
            answer = self._http.request(method, path, json=body, params=_parameters(query), headers=headers)
        _check(answer)
        return answer.json() if answer.content else None

    @contextlib.contextmanager
    def events(
        self, method: str, path: str, *, body: object = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[Iterator[tuple[str, str, str]]]:
        """Server-sent events as (mark, kind, data), for as long as they come."""
        import httpx

        with _reaching(self._base_url), self._http.stream(
            method, path, json=body, headers={"accept": "text/event-stream", **(headers or {})},
            timeout=httpx.Timeout(CALL_SECONDS, read=60.0),
        ) as answer:  # fmt: skip
            if answer.status_code >= 400:
                answer.read()
                _check(answer)
            yield _events(answer.iter_lines())


def _parameters(query: Mapping[str, str] | list[tuple[str, str]] | None) -> httpx.QueryParams | None:
    import httpx

    pairs = list(query.items()) if isinstance(query, Mapping) else query
    return httpx.QueryParams(tuple(pairs)) if pairs else None


def _events(lines: Iterator[str]) -> Iterator[tuple[str, str, str]]:
    mark, kind, data = "", "", []
    for line in lines:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "id":
                mark = value
            case "event":
                kind = value
            case "data":
                data.append(value)
        if not line and data:
            yield mark, kind, "\n".join(data)
            kind, data = "", []


@contextlib.contextmanager
def _reaching(where: str) -> Iterator[None]:
    import httpx

    try:
        yield
    except httpx.TimeoutException as error:
        raise TimeoutError(f"{where} did not answer in time") from error
    except httpx.HTTPError as error:
        raise Unavailable(
            f"{where} cannot be reached: {error}", hint="is `fleetplane server` running there?"
        ) from error


def _check(answer: httpx.Response) -> None:
    if answer.status_code < 400:
        return
    try:
        content = answer.json()
        told = content["error"] if isinstance(content["error"], dict) else content
        message = str(content.get("message") or told.get("message"))
    except (ValueError, KeyError, AttributeError, TypeError):
        told, message = {}, f"the server answered {answer.status_code}"
    kind = _BY_STATUS.get(answer.status_code, FleetplaneError)
    cause, hint = told.get("cause"), told.get("hint")
    raise kind(
        message,
        details={"cause": str(cause)} if cause else None,
        hint=hint if isinstance(hint, str) else None,
    )


def _trust(ca: Path) -> Any:
    import ssl

    try:
        return ssl.create_default_context(cafile=str(ca))
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument(f"{ca} holds no certificates: {error}") from error


def connect(
    place: Place, *, roles: Sequence[str], tenant: str = "", headers: Mapping[str, str] | None = None
) -> RestClient:
    """A client for the server that `place` names; as its owner, with these roles, if it is here."""
    token = _given_token(place)
    server = place.server
    if not token:
        if server:
            raise InvalidArgument(
                "a server elsewhere wants a token", hint="set FLEETPLANE_TOKEN, or give --token-file"
            )
        token, server = _session(place, roles, tenant)
    elif not server:
        raise InvalidArgument("with a token, say whose: --server URL")
    return RestClient(server, token, headers=headers or {}, ca=place.ca, seconds=place.timeout)


def _given_token(place: Place) -> str:
    if place.token_file is None:
        return place.token.strip()
    try:
        return place.token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"cannot read {place.token_file}: {error}") from error


def _session(place: Place, roles: Sequence[str], tenant: str) -> tuple[str, str]:
    from fleetplane.cli.operators_client import OperatorsClient
    from fleetplane.gen.fleetplane.admin.v1 import operators_pb2 as pb

    with OperatorsClient(place.data_dir, call_seconds=place.timeout) as owner:
        answer = owner.call(
            "OpenSession", pb.OpenSessionRequest(roles=roles, tenant=tenant, life_seconds=SESSION_SECONDS)
        )
    if not answer.web_addresses:
        raise Unavailable("the server has no web listener")
    return answer.token, answer.web_addresses[0]
