"""REST: access lists of a workspace."""

from __future__ import annotations

from collections.abc import Sequence

from fleetplane.domains.proxies.access import OPERATE, READ
from fleetplane.domains.proxies.kinds.records import ACCESS_LIST, AccessList
from fleetplane.domains.proxies.rest import bodies as requests
from fleetplane.domains.proxies.rest import views
from fleetplane.domains.proxies.rest.common import (
    CREATED,
    NO_CONTENT,
    PAGING,
    ProxyCall,
    actor,
    changes,
    created,
    done,
    if_match,
    shown,
)
from fleetplane.domains.proxies.serving.named import AccessLists
from fleetplane.kernel.store import Store
from fleetplane.web.rest.pages import Listing, in_order, listing, paging
from fleetplane.web.rest.routes import Answer, Route, RouteGroup

_ROUTES = RouteGroup("Access lists")


class AccessListRoutes:
    def __init__(self, store: Store, lists: AccessLists) -> None:
        self._store = store
        self._lists = lists

    def routes(self) -> Sequence[Route]:
        many, one = "/workspaces/{workspace_id}/access-lists", "/access-lists/{access_list_id}"
        return (
            _ROUTES.get(many, self.access_lists, READ, query=PAGING),
            _ROUTES.post(
                many, self.create_access_list, OPERATE, body=requests.CreateAccessList, status=CREATED
            ),
            _ROUTES.get(one, self.access_list, READ),
            _ROUTES.patch(one, self.update_access_list, OPERATE, body=requests.UpdateAccessList),
            _ROUTES.delete(one, self.delete_access_list, OPERATE, status=NO_CONTENT),
        )

    async def access_lists(self, call: ProxyCall) -> Answer[Listing[views.AccessListView]]:
        """List access lists."""
        found = in_order(self._store.list(ACCESS_LIST, call.scope))
        return Answer(content=listing(found, paging(call.query), views.access_list))

    async def create_access_list(self, call: ProxyCall) -> Answer[views.AccessListView]:
        """Create an access list."""
        body: requests.CreateAccessList = call.body
        answer = call.answering(self._created)
        return answer(await self._lists.create(call.scope, body.spec(), actor=actor(call)))

    def _created(self, made: AccessList) -> Answer[views.AccessListView]:
        return created(views.access_list(made), made, "access-lists")

    async def access_list(self, call: ProxyCall) -> Answer[views.AccessListView]:
        """Get an access list."""
        found = self._lists.get(call.scope, call.path["access_list_id"])
        return shown(views.access_list(found), found)

    async def update_access_list(self, call: ProxyCall) -> Answer[views.AccessListView]:
        """Change an access list; the hosts that refer to it follow."""
        updated = await self._lists.update(
            call.scope,
            call.path["access_list_id"],
            changes(call.body),
            if_match=if_match(call),
            actor=actor(call),
        )
        return shown(views.access_list(updated), updated)

    async def delete_access_list(self, call: ProxyCall) -> Answer[None]:
        """Delete an access list that no host refers to."""
        await self._lists.delete(
            call.scope, call.path["access_list_id"], if_match=if_match(call), actor=actor(call)
        )
        return done()
