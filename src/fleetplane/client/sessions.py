"""Logins of people: an access token that ends soon, and a refresh token that is good once.

The context file holds both. Whoever finds the access token near its end trades the refresh token for the next
pair, while no other command does: a refresh token that is shown twice ends the login.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fleetplane.client.calls import PREFIX, Request
from fleetplane.client.contexts import Context, ContextFile
from fleetplane.client.places import Endpoint
from fleetplane.client.requests import mapping
from fleetplane.client.transport import Transport
from fleetplane.kernel.errors import FleetplaneError, IntegrityError, PermissionDenied, Unauthenticated

PEOPLE = f"{PREFIX}/people"
PAUSE_LIMIT_SECONDS = 60.0
"""Between two questions, whatever a server asks for."""
EARLY_SECONDS = 60.0
"""Before its end, an access token is replaced: a call that begins now must not fail on its way."""


def logged_in(context: Context, account: str, password: str, *, seconds: float) -> Context:
    """The context with the tokens of a login."""
    body = {"name": account, "password": password}
    return _with_tokens(context, _asked(context, "login", body, seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedInBrowser:
    """A login that waits for somebody to approve it in a browser."""

    address: str
    """The page where that is done."""
    user_code: str
    device_code: str = field(repr=False)
    ends_at: float
    """When nobody can approve it any more, in seconds of the monotonic clock."""
    interval_seconds: float


def asked_in_browser(context: Context, *, client: str, seconds: float) -> AskedInBrowser:
    """Ask for a login that somebody approves in a browser; `client` is what they are told about who asks."""
    told = mapping(_asked(context, "device", {"client": client}, seconds))
    try:
        return AskedInBrowser(
            address=context.server + str(told["verificationPathComplete"]),
            user_code=str(told["userCode"]),
            device_code=str(told["deviceCode"]),
            ends_at=time.monotonic() + float(told["expiresInSeconds"]),
            interval_seconds=float(told["intervalSeconds"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"the server's answer is no offer of a login: {error!r}") from error


def approved(
    context: Context,
    asked: AskedInBrowser,
    *,
    seconds: float,
    pause: Callable[[float], object] = time.sleep,
) -> Context:
    """Wait until it is approved; the context with the tokens of the login."""
    while time.monotonic() < asked.ends_at:
        told = mapping(_asked(context, "device/token", {"deviceCode": asked.device_code}, seconds))
        match told.get("status"):
            case "approved":
                return _with_tokens(context, told.get("tokens"))
            case "denied":
                raise PermissionDenied("the login was refused in the browser")
            case "pending" | "slow_down":
                pause(min(float(told.get("intervalSeconds") or asked.interval_seconds), PAUSE_LIMIT_SECONDS))
            case _:
                break
    raise Unauthenticated("nobody approved the login in time", hint="run it again and open the address")


def fresh(name: str, file: ContextFile, *, seconds: float) -> Context:
    """The context with an access token that lasts; the file is changed if it had to be replaced."""
    held = file.read().get(name)
    if not held.refresh_token or held.expires_at - time.time() > EARLY_SECONDS:
        return held
    with file.changing() as contexts:
        held = contexts.get(name)
        if held.expires_at - time.time() > EARLY_SECONDS:  # another command was faster
            return held
        try:
            told = _asked(held, "refresh", {"refreshToken": held.refresh_token}, seconds)
        except FleetplaneError as error:
            if error.http_status not in (400, 401, 403):
                raise
            raise Unauthenticated(
                f"the login of context {name} has ended: {error.message}",
                hint=f"`fleetplane login {held.server} --name {name} --account …` (or --oidc) opens another",
            ) from error
        renewed = _with_tokens(held, told)
        file.write(contexts.with_context(renewed))
    return renewed


def _asked(context: Context, what: str, body: Any, seconds: float) -> Any:
    with Transport(Endpoint(server=context.server, ca_pem=context.ca_pem, timeout=seconds)) as transport:
        return transport.send(Request(method="POST", path=f"{PEOPLE}/{what}", body=body)).content()


def _with_tokens(context: Context, told: Any) -> Context:
    found = mapping(told)
    try:
        return replace(
            context,
            token=str(found["accessToken"]),
            refresh_token=str(found["refreshToken"]),
            expires_at=int(time.time() + float(found["expiresInSeconds"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"the server's answer is no login: {error!r}") from error
