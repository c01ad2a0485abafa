"""`/apis/v1/people`: who somebody is, what they may do and why; accounts, tokens, bindings and sessions.

    GET    /whoami                           the caller, with every role and what gave it
    GET    /can-i?permission=|verb=&kind=    whether the caller may, and why
    POST   /login, /refresh, /logout         of accounts of this installation
    GET    /bindings   POST   DELETE /{id}   roles at scopes
    GET    /tokens     POST   DELETE /{name} programs
    GET    /accounts   POST   PATCH, DELETE /{name}
    GET    /sessions   DELETE /{id}          open logins, of whichever domain

What lies at a scope of which the caller may not know is not there.
"""

from __future__ import annotations

from collections.abc import Sequence

from fleetplane.fleet.people.rest.accounts import AccountRoutes
from fleetplane.fleet.people.rest.bindings import BindingRoutes
from fleetplane.fleet.people.rest.parts import PeopleParts
from fleetplane.fleet.people.rest.sessions import SessionRoutes
from fleetplane.fleet.people.rest.tokens import TokenRoutes
from fleetplane.fleet.people.rest.who import PermissionOf, WhoRoutes
from fleetplane.web.rest.routes import Route, RouteTable

PREFIX = "/apis/v1/people"


def people_table(parts: PeopleParts, permission_of: PermissionOf, more: Sequence[Route] = ()) -> RouteTable:
    """Every route about people; `more` are those of console sessions."""
    sessions = SessionRoutes(parts)
    return RouteTable(
        PREFIX,
        (
            *WhoRoutes(parts, permission_of).routes(),
            *sessions.login_routes(),
            *BindingRoutes(parts).routes(),
            *TokenRoutes(parts).routes(),
            *AccountRoutes(parts).routes(),
            *sessions.routes(),
            *more,
        ),
        strict_queries=True,
    )
