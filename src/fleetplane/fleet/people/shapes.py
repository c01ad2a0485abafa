"""What REST about people takes and answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec


class PeopleShape(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Fields in camelCase, times as RFC 3339 text."""


class PeopleBody(msgspec.Struct, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """A body that somebody sends."""


class ShownRole(PeopleShape, frozen=True):
    role: str
    scope: str
    origin: str
    """What gave it: a binding, a membership, the token itself."""


class WhoAmI(PeopleShape, frozen=True):
    name: str
    """As audits have it."""
    subject: str
    """As bindings name it."""
    roles: Sequence[ShownRole]


class MayI(PeopleShape, frozen=True):
    allowed: bool
    permission: str
    scope: str
    because: Sequence[ShownRole]
    """Every role that gives it; empty if none does."""


class ShownBinding(PeopleShape, frozen=True):
    id: str
    subject: str
    role: str
    scope: str
    created_by: str
    created_at: str


class BindingList(PeopleShape, frozen=True):
    items: Sequence[ShownBinding]


class BindingBody(PeopleBody):
    subject: str
    role: str
    scope: str


class ShownToken(PeopleShape, frozen=True):
    name: str
    roles: Sequence[str]
    scope: str
    created_at: str
    expires_at: str | None
    token: str = ""
    """The token itself; only in the answer to the request that made it."""


class TokenList(PeopleShape, frozen=True):
    items: Sequence[ShownToken]


class TokenBody(PeopleBody):
    name: str
    roles: list[str]
    scope: str
    expires_in_seconds: int
    """Every token that is made here ends; at most ten years."""


class ShownAccount(PeopleShape, frozen=True):
    subject: str
    name: str
    directory: str
    """Whose API made it: people, proxies or boards."""
    active: bool
    roles: Sequence[ShownRole]
    """What it holds: what is bound to it, and what domains give to the user that the person is there."""
    vouched_by: str = ""
    """Issuer and subject of the identity provider that vouches for its owner; empty for a password."""
    users: Mapping[str, str] = {}
    """By domain, the id of the user that the person is there."""


class AccountList(PeopleShape, frozen=True):
    items: Sequence[ShownAccount]


class AccountBody(PeopleBody):
    name: str
    password: str
    display_name: str = ""
    email: str = ""


class AccountPatch(PeopleBody):
    password: str | None = None
    display_name: str | None = None
    email: str | None = None
    disabled: bool | None = None


class ShownSession(PeopleShape, frozen=True):
    id: str
    directory: str
    subject: str
    name: str
    expires_at: str


class SessionList(PeopleShape, frozen=True):
    items: Sequence[ShownSession]


class LoginBody(PeopleBody):
    name: str
    password: str


class RefreshBody(PeopleBody):
    refresh_token: str


class LoginTokens(PeopleShape, frozen=True):
    access_token: str
    refresh_token: str
    expires_in_seconds: int
    token_type: str = "Bearer"  # noqa: S105  # a kind


class LinkBody(PeopleBody):
    code: str
    """Of a link such as `fleetplane open` prints."""


class ConsoleSession(PeopleShape, frozen=True):
    name: str
    csrf_token: str
    """To be sent as `X-CSRF-Token` with every request that changes something."""


class OpenIDProvider(PeopleShape, frozen=True):
    enabled: bool
    name: str
    """What people call it."""
    login: str
    """Where a browser is sent to sign in."""


class DeviceBody(PeopleBody):
    client: str = ""
    """What asks, in words for whoever approves it: a program and its machine."""


class DeviceAsked(PeopleShape, frozen=True):
    device_code: str
    """The program's own; never shown."""
    user_code: str
    verification_path: str
    """The page of this server where the user code is approved."""
    verification_path_complete: str
    """The same, with the code filled in."""
    expires_in_seconds: int
    interval_seconds: int
    """How long to wait before asking, and between two questions."""


class DevicePollBody(PeopleBody):
    device_code: str


class DeviceLogin(PeopleShape, frozen=True):
    status: str
    """`pending`, `slow_down`, `approved`, `denied` or `expired`."""
    interval_seconds: int = 5
    tokens: LoginTokens | None = None
    """Once it is approved."""


class DeviceRequest(PeopleShape, frozen=True):
    user_code: str
    client: str
    """What the program calls itself; nobody vouches for it."""
    address: str
    """Where it asks from."""
    asked_at: str


class DeviceDecision(PeopleBody):
    approve: bool
