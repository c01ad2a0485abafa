"""Passing operators' calls on to the server that holds the daemons' streams.

A controller beside a relay has the operators, the relay has the daemons. Who calls, and whether they may, is
decided here; the call then goes on in this server's own name, with the tenant that it is about and the name
of whom it is for. Answers and events come back as they are.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec
import structlog

from fleetplane.domains.edge.access import seeing
from fleetplane.domains.edge.rest.common import ON_BEHALF, SHAPES_HEADER, EdgeCall
from fleetplane.domains.edge.settings import EdgeSettings
from fleetplane.kernel import errors
from fleetplane.kernel.errors import FleetplaneError, SettingsError, Unavailable
from fleetplane.kernel.http_answers import IDENTITY, bounded_body
from fleetplane.web.rest.routes import Answer, Handler, Route, Stream
from fleetplane.web.streaming import EVENT_STREAM

if TYPE_CHECKING:
    import httpx

log = structlog.get_logger(__name__)

CALL_SECONDS, CONNECT_SECONDS = 10.0, 5.0
ANSWER_LIMIT_BYTES = 64 << 20
"""Of what is not followed: the results of a run are the longest."""
FOLLOW_SECONDS = 60.0
"""Seconds without an event of a followed run; one comes every 15 s."""
PASSED = ("accept", "user-agent", "idempotency-key", "last-event-id", SHAPES_HEADER)
RETURNED = ("x-fleet-command-id",)
_BY_STATUS: Mapping[int, type[FleetplaneError]] = {
    400: errors.InvalidArgument,
    404: errors.NotFound,
    409: errors.FailedPrecondition,
    429: errors.ResourceExhausted,
}


class Relay:
    """See `load`."""

    def __init__(self, settings: EdgeSettings, token: str) -> None:
        self._settings = settings
        self._token = token
        self._client: httpx.AsyncClient | None = None
        self.passed = 0

    def __repr__(self) -> str:
        return f"<Relay {self._settings.relay_coordinator_endpoint} passed={self.passed}>"

    @classmethod
    def load(cls, settings: EdgeSettings) -> Relay:
        """Blocking."""
        if not settings.relay_coordinator_endpoint.startswith(("https://", "http://")):
            raise SettingsError(
                f"edge.relay_coordinator_endpoint: {settings.relay_coordinator_endpoint!r} is no URL such as "
                f"https://relay.example.com:8080"
            )
        file = Path(settings.relay_coordinator_token_file)
        try:
            token = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"edge.relay_coordinator_token_file cannot be read: {error}") from error
        if not token:
            raise SettingsError(f"edge.relay_coordinator_token_file: {file} is empty")
        return cls(settings, token)

    def instead_of(self, prefix: str) -> Callable[[Route], Route]:
        """Routes whose calls go on to the same path of the relay."""
        return lambda route: replace(
            route,
            handler=self._handler(prefix, route),
            answer=route.answer_shape,
            shares_handler=True,
            begins_once=False,
        )

    def _handler(self, prefix: str, route: Route) -> Handler:
        async def pass_on(call: EdgeCall) -> Answer[Any] | Stream:
            path = prefix + re.sub(
                r"\{(\w+)\}", lambda found: quote(call.path[found[1]], safe=""), route.path
            )
            query = list(call.query.items())
            query += [(name, value) for name, values in call.many.items() for value in values]
            body = None if route.body is None else msgspec.json.encode(call.body)
            headers = {name: value for name in PASSED if (value := call.headers.get(name)) is not None}
            tenant = seeing(call.caller, call.headers)
            if (key := headers.get("idempotency-key")) is not None:
                # Keys are each caller's own, and all of ours have one name there.
                whose = f"{call.caller.name}\0{tenant or ''}\0{key}"
                headers["idempotency-key"] = hashlib.sha256(whose.encode()).hexdigest()
            return await self.pass_on(
                route.method,
                path,
                caller=call.caller.name,
                tenant=tenant,
                query=query,
                body=body,
                headers=headers,
            )

        return pass_on

    async def pass_on(
        self,
        method: str,
        path: str,
        *,
        caller: str,
        tenant: str | None,
        query: Sequence[tuple[str, str]] = (),
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer[Any] | Stream:
        import httpx

        self.passed += 1
        log.info("edge.passed_on", method=method, path=path, caller=caller, tenant=tenant)
        fields = {**(headers or {}), **IDENTITY, "authorization": f"Bearer {self._token}", ON_BEHALF: caller}
        if tenant is not None:
            fields["x-aegis-tenant"] = tenant
        if body is not None:
            fields["content-type"] = "application/json"
        async with AsyncExitStack() as held:
            try:
                request = self._http().build_request(
                    method, path, params=httpx.QueryParams(tuple(query)), content=body, headers=fields
                )
                answer = await self._http().send(request, stream=True)
                held.push_async_callback(answer.aclose)
                if answer.headers.get("content-type", "").startswith(EVENT_STREAM) and answer.is_success:
                    found = {name: answer.headers[name] for name in RETURNED if name in answer.headers}
                    return Stream(
                        chunks=_chunks(answer, held.pop_all()), content_type=EVENT_STREAM, headers=found
                    )
                content = await bounded_body(answer, limit_bytes=ANSWER_LIMIT_BYTES)
                return _answer(answer, msgspec.json.decode(content) if content else None)
            except httpx.HTTPError as error:
                raise self._unavailable(f"does not answer: {error!r}") from error
            except (ValueError, RecursionError, msgspec.MsgspecError) as error:
                raise self._unavailable(f"gives an answer that cannot be read: {error}") from error

    def _unavailable(self, why: str) -> Unavailable:
        return Unavailable(
            f"the relay {self._settings.relay_coordinator_endpoint} {why}",
            hint="see edge.relay_coordinator_endpoint",
        )

    def _http(self) -> httpx.AsyncClient:
        if self._client is None:
            import ssl

            import httpx

            trust = self._settings.relay_coordinator_ca_file
            self._client = httpx.AsyncClient(
                base_url=self._settings.relay_coordinator_endpoint,
                trust_env=False,
                verify=ssl.create_default_context(cafile=trust) if trust else True,
                timeout=httpx.Timeout(CALL_SECONDS, connect=CONNECT_SECONDS, read=FOLLOW_SECONDS),
            )
        return self._client

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()


async def _chunks(answer: httpx.Response, held: AsyncExitStack) -> AsyncGenerator[bytes]:
    import httpx

    async with held:
        try:
            async for chunk in answer.aiter_raw():
                yield chunk
        except httpx.HTTPError as error:
            log.warning("edge.relay_lost", error=repr(error))  # whoever follows comes back with its mark


def _answer(answer: httpx.Response, found: Any) -> Answer[Any]:
    if answer.is_success:
        headers = {name: answer.headers[name] for name in RETURNED if name in answer.headers}
        return Answer(content=found, headers=headers)
    told = found.get("error", {}) if isinstance(found, dict) else {}
    message = str(found.get("message") if isinstance(found, dict) else "") or f"answer {answer.status_code}"
    if answer.status_code in (401, 403):
        # Whoever called was let in here: it is our own token that the relay does not take.
        raise Unavailable(
            f"the relay does not take this server's token: {message}",
            hint="see edge.relay_coordinator_token_file",
        )
    kind = _BY_STATUS.get(answer.status_code, Unavailable)
    cause = told.get("cause")
    raise kind(message, details={"cause": str(cause)} if cause else None)
