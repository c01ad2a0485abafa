"""The scope tree: paths that people name, and the scopes under which domains store things.

    /                               the installation          everything
    /tenants/acme                   a tenant                  `tenant/acme`, the organisation with that slug
    /tenants/acme/groups/web        a place in it             `tenant/acme/group/web`
    /tenants/default                what had no tenant        boards lie here

One path may stand for scopes of several domains; each domain says what a path means to it (`ScopePlaces`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from fleetplane.fleet.resources.scopes import ROOT
from fleetplane.kernel.access import EVERYWHERE

_PLACES = {"clusters": "cluster", "groups": "group", "workspaces": "workspace"}
"""What a tenant is divided into, and the word for one in stored scopes."""
_PLURALS = {one: many for many, one in _PLACES.items()}


class ScopePlaces(Protocol):
    """What paths of the tree mean to one domain."""

    def stored(self, tenant: str, place: str, name: str) -> Iterable[str]:
        """The stored scopes of a tenant (`place` is empty) or of a place in it, such as `groups`, `web`."""
        ...

    def path(self, scope: str) -> str | None:
        """The path of exactly this stored scope of the domain; None for any other."""
        ...


class ScopeTree:
    """Translates between paths and stored scopes."""

    def __init__(self) -> None:
        self._places: list[ScopePlaces] = []

    def add(self, places: ScopePlaces) -> None:
        self._places.append(places)

    def stored(self, path: str) -> tuple[str, ...]:
        """Every stored scope that a path stands for."""
        if path == ROOT:
            return (EVERYWHERE,)
        _, _, tenant, *rest = path.split("/")
        place, name = rest or ("", "")
        own = f"tenant/{tenant}" + (f"/{_PLACES[place]}/{name}" if place else "")
        return (own, *(scope for one in self._places for scope in one.stored(tenant, place, name)))

    def path(self, scope: str) -> str | None:
        """The path of exactly this stored scope; None where the tree has none for it.

        Never that of a wider scope: what is held at one daemon must not be read as held at its tenant.
        """
        if scope == EVERYWHERE:
            return ROOT
        for one in self._places:
            if (found := one.path(scope)) is not None:
                return found
        parts = scope.split("/")
        if parts[0] != "tenant" or len(parts) not in (2, 4):
            return None
        if len(parts) == 2:
            return f"/tenants/{parts[1]}"
        return f"/tenants/{parts[1]}/{_PLURALS[parts[2]]}/{parts[3]}" if parts[2] in _PLURALS else None
