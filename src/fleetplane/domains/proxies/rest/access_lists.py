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
from fleetplane.domains.proxies.serving.access_lists import AccessLists
from fleetplane.kernel.store import Store
from fleetplane.rpc import Needs
from fleetplane.web.rest.pages import Listing, in_order, listing, paging
from fleetplane.web.rest.routes import Answer, Route

_TAG = "Access lists"


class AccessListRoutes:
    def __init__(self, store: Store, lists: AccessLists) -> None:
        self._store = store
        self._lists = lists

    def routes(self) -> Sequence[Route]:
        many, one = "/workspaces/{workspace_id}/access-lists", "/access-lists/{access_list_id}"
        return (
            Route(
                method="GET",
                path=many,
                handler=self.access_lists,
                needs=Needs.STORE,
                summary="List access lists",
                tag=_TAG,
                permission=READ,
                answer=Listing[views.AccessListView],
                query=PAGING,
            ),
            Route(
                method="POST",
                path=many,
                handler=self.create_access_list,
                needs=Needs.WRITES,
                summary="Create an access list",
                tag=_TAG,
                permission=OPERATE,
                body=requests.CreateAccessList,
                answer=views.AccessListView,
                status=CREATED,
            ),
            Route(
                method="GET",
                path=one,
                handler=self.access_list,
                needs=Needs.STORE,
                summary="Get an access list",
                tag=_TAG,
                permission=READ,
                answer=views.AccessListView,
            ),
            Route(
                method="PATCH",
                path=one,
                handler=self.update_access_list,
                needs=Needs.WRITES,
                summary="Change an access list; the hosts that refer to it follow",
                tag=_TAG,
                permission=OPERATE,
                body=requests.UpdateAccessList,
                answer=views.AccessListView,
            ),
            Route(
                method="DELETE",
                path=one,
                handler=self.delete_access_list,
                needs=Needs.WRITES,
                summary="Delete an access list that no host refers to",
                tag=_TAG,
                permission=OPERATE,
                status=NO_CONTENT,
            ),
        )

    async def access_lists(self, call: ProxyCall) -> Answer[Listing[views.AccessListView]]:
        found = in_order(self._store.list(ACCESS_LIST, call.scope))
        return Answer(content=listing(found, paging(call.query), views.access_list))

    async def create_access_list(self, call: ProxyCall) -> Answer[views.AccessListView]:
        body: requests.CreateAccessList = call.body
        answer = call.answering(self._created)
        return answer(await self._lists.create(call.scope, body.spec(), actor=actor(call)))

    def _created(self, made: AccessList) -> Answer[views.AccessListView]:
        return created(views.access_list(made), made, "access-lists")

    async def access_list(self, call: ProxyCall) -> Answer[views.AccessListView]:
        found = self._lists.get(call.scope, call.path["access_list_id"])
        return shown(views.access_list(found), found)

    async def update_access_list(self, call: ProxyCall) -> Answer[views.AccessListView]:
        updated = await self._lists.update(
            call.scope,
            call.path["access_list_id"],
            changes(call.body),
            if_match=if_match(call),
            actor=actor(call),
        )
        return shown(views.access_list(updated), updated)

    async def delete_access_list(self, call: ProxyCall) -> Answer[None]:
        await self._lists.delete(
            call.scope, call.path["access_list_id"], if_match=if_match(call), actor=actor(call)
        )
        return done()
