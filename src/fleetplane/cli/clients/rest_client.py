"""A server's REST API as the command line uses it.

Whoever may open the server's own socket is its owner: everything of the web listener is there too. Anyone
else brings a token, and says where the server is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import click

from fleetplane.cli.output import working
from fleetplane.cli.parameters import DURATION, owner_flags
from fleetplane.client.places import CALL_SECONDS, Endpoint, Place, resolve
from fleetplane.kernel import errors
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument, Unavailable

if TYPE_CHECKING:
    import httpx

__all__ = ("Place", "RestClient", "connect", "rest_options")

F = TypeVar("F", bound=Callable[..., Any])

FINDINGS_SHOWN = 5
"""Of one answer: more do not fit on a screen, and most follow from the first."""
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


def rest_options(command: F) -> F:
    """The options that say which server, and as whom; a command takes them as `Place(**where)`."""
    for option in (
        click.option(
            "--timeout",
            type=DURATION,
            default=CALL_SECONDS,
            show_default="30s",
            help="How long to wait for an answer.",
        ),
        click.option(
            "--ca",
            type=click.Path(path_type=Path, dir_okay=False),
            help="CA certificates that the server's certificate is verified against, in PEM.",
        ),
        click.option(
            "--token-file",
            type=click.Path(path_type=Path, dir_okay=False),
            help="File with the token. Default: $FLEETPLANE_TOKEN.",
        ),
        click.option("--token", default="", hidden=True),
        click.option(
            "--server",
            metavar="URL",
            default="",
            help="URL of another server's web listener; needs a token.  [env var: FLEETPLANE_SERVER]",
        ),
        *owner_flags(),
    ):
        command = option(command)
    return command


class RestClient:
    def __init__(self, endpoint: Endpoint, *, headers: Mapping[str, str]) -> None:
        import httpx

        from fleetplane.client.trust import trusting

        self._where = str(endpoint)
        trust = trusting(endpoint.ca_pem) if endpoint.ca_pem else True
        uds = None if endpoint.socket is None else str(endpoint.socket)
        credential = {"authorization": f"Bearer {endpoint.token}"} if endpoint.token else {}
        try:
            self._http = httpx.Client(
                base_url=endpoint.server or "http://localhost",
                headers={**credential, **headers},
                timeout=endpoint.timeout,
                transport=httpx.HTTPTransport(uds=uds, verify=trust, trust_env=False),
                trust_env=False,
            )
        except httpx.InvalidURL as error:
            raise InvalidArgument(f"{endpoint} is no address of a server: {error}") from error

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
        timeout_seconds: float | None = None,
    ) -> Any:
        """The answer's content; raises what the server refused with.

        `timeout_seconds` is for what takes longer than other calls.
        """
        options: dict[str, Any] = {} if timeout_seconds is None else {"timeout": timeout_seconds}
        with working(f"waiting for {self._where}"), _reaching(self._where):
            answer = self._http.request(
                method, path, json=body, params=_parameters(query), headers=headers, **options
            )
        _check(answer)
        return answer.json() if answer.content else None

    @contextlib.contextmanager
    def events(
        self, method: str, path: str, *, body: object = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[Iterator[tuple[str, str, str]]]:
        """Server-sent events as (mark, kind, data), for as long as they come."""
        import httpx

        with (
            _reaching(self._where),
            self._http.stream(
                method,
                path,
                json=body,
                headers={"accept": "text/event-stream", **(headers or {})},
                timeout=httpx.Timeout(CALL_SECONDS, read=60.0),
            ) as answer,
        ):
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
        from fleetplane.client.trust import refusal_in

        if (refused := refusal_in(error, where)) is not None:
            raise refused from error
        raise Unavailable(
            f"{where} cannot be reached: {error}", hint="is `fleetplane server` running there?"
        ) from error


def _findings(details: object) -> Iterator[str]:
    """What is wrong with which field, as far as the server says it."""
    for one in details[:FINDINGS_SHOWN] if isinstance(details, list) else ():
        if isinstance(one, dict) and isinstance(one.get("message"), str):
            yield f"{one.get('field')}: {one['message']}" if one.get("field") else one["message"]


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
        "; ".join([message, *_findings(told.get("details"))]),
        details={"cause": str(cause)} if cause else None,
        hint=hint if isinstance(hint, str) else None,
    )


def connect(place: Place, *, headers: Mapping[str, str] | None = None) -> RestClient:
    """A client for the server that `place` names; as its owner, at its socket, if it is here."""
    return RestClient(resolve(place), headers=headers or {})
