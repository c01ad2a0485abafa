"""REST: organisations, their members, their audit log, and workspaces."""

from __future__ import annotations

from collections.abc import Sequence

from fleetplane.domains.proxies import audit as audit_trail
from fleetplane.domains.proxies.access import ADMINISTER, OWN, READ, Access
from fleetplane.domains.proxies.audit import AuditPage, AuditQuery, AuditTrail
from fleetplane.domains.proxies.kinds.records import (
    MEMBERSHIP,
    ORGANIZATION,
    WORKSPACE,
    OrganizationSpec,
    WorkspaceSpec,
    organization_of,
)
from fleetplane.domains.proxies.kinds.values import OrganizationRole
from fleetplane.domains.proxies.rest import bodies as requests
from fleetplane.domains.proxies.rest import views
from fleetplane.domains.proxies.rest.common import (
    CREATED,
    NO_CONTENT,
    PAGING,
    WINDOW,
    ProxyCall,
    actor,
    changes,
    created,
    done,
    if_match,
    shown,
)
from fleetplane.domains.proxies.tenancy.members import Members
from fleetplane.domains.proxies.tenancy.organizations import TenancyPlaces
from fleetplane.domains.proxies.tenancy.quotas import Quotas
from fleetplane.domains.proxies.tenancy.users import Users
from fleetplane.kernel.errors import PermissionDenied
from fleetplane.kernel.store import Store
from fleetplane.web.rest import bodies
from fleetplane.web.rest.pages import Listing, in_order, listing, number, paging
from fleetplane.web.rest.problems import Code, Problem, Rejected
from fleetplane.web.rest.routes import Answer, Query, Route, RouteGroup

_ORGANIZATIONS = RouteGroup("Organizations")
_WORKSPACES = RouteGroup("Workspaces")
_MEMBERS = RouteGroup("Members")
_ONE = "/organizations/{organization_id}"


class PlaceRoutes:
    def __init__(
        self,
        store: Store,
        access: Access,
        users: Users,
        places: TenancyPlaces,
        members: Members,
        trail: AuditTrail,
        quotas: Quotas,
        *,
        anyone_may_found: bool,
    ) -> None:
        self._store = store
        self._access = access
        self._users = users
        self._places = places
        self._members = members
        self._trail = trail
        self._quotas = quotas
        self._anyone_may_found = anyone_may_found

    def routes(self) -> Sequence[Route]:
        return (*self._organization_routes(), *self._member_routes(), *self._workspace_routes())

    def _organization_routes(self) -> Sequence[Route]:
        return (
            _ORGANIZATIONS.get("/organizations", self.organizations, query=PAGING),
            _ORGANIZATIONS.post(
                "/organizations",
                self.create_organization,
                body=requests.CreatePlace,
                status=CREATED,
                recheck=self._may_found,
            ),
            _ORGANIZATIONS.get(_ONE, self.organization, READ),
            _ORGANIZATIONS.patch(_ONE, self.update_organization, ADMINISTER, body=requests.UpdatePlace),
            _ORGANIZATIONS.delete(_ONE, self.delete_organization, OWN, status=NO_CONTENT),
            _ORGANIZATIONS.get(f"{_ONE}/quotas", self.quotas, READ),
            _ORGANIZATIONS.get(
                f"{_ONE}/audit-log",
                self.audit_log,
                ADMINISTER,
                query=(
                    *WINDOW,
                    Query(name="actor", summary="A user's or token's id"),
                    Query(name="action", summary="Such as virtual_host.update"),
                    Query(name="resource_type", summary="Such as virtual_host"),
                    Query(
                        name="limit",
                        summary="Maximum number of rows",
                        kind="integer",
                        default=100,
                        low=1,
                        high=1000,
                    ),
                    Query(name="cursor", summary="`next_cursor` of the previous page"),
                ),
            ),
        )

    def _member_routes(self) -> Sequence[Route]:
        one = f"{_ONE}/members/{{user_id}}"
        return (
            _MEMBERS.get(f"{_ONE}/members", self.members, READ, query=PAGING),
            _MEMBERS.post(
                f"{_ONE}/members", self.add_member, ADMINISTER, body=requests.AddMember, status=CREATED
            ),
            _MEMBERS.get("/invitations", self.invitations, query=PAGING),
            _MEMBERS.post(
                "/invitations/accept",
                self.accept_invitation,
                body=requests.AnswerInvitation,
                status=NO_CONTENT,
            ),
            _MEMBERS.post(
                "/invitations/decline",
                self.decline_invitation,
                body=requests.AnswerInvitation,
                status=NO_CONTENT,
            ),
            _MEMBERS.patch(one, self.change_member, ADMINISTER, body=requests.ChangeMember),
            _MEMBERS.delete(one, self.remove_member, ADMINISTER, status=NO_CONTENT),
        )

    def _workspace_routes(self) -> Sequence[Route]:
        one = "/workspaces/{workspace_id}"
        return (
            _WORKSPACES.get(f"{_ONE}/workspaces", self.workspaces, READ, query=PAGING),
            _WORKSPACES.post(
                f"{_ONE}/workspaces",
                self.create_workspace,
                ADMINISTER,
                body=requests.CreatePlace,
                status=CREATED,
            ),
            _WORKSPACES.get(one, self.workspace, READ),
            _WORKSPACES.patch(one, self.update_workspace, ADMINISTER, body=requests.UpdatePlace),
            _WORKSPACES.delete(one, self.delete_workspace, ADMINISTER, status=NO_CONTENT),
        )

    # Organisations.

    async def organizations(self, call: ProxyCall) -> Answer[Listing[views.OrganizationView]]:
        """List the caller's organizations."""
        mine = [
            organization
            for organization in in_order(self._store.list(ORGANIZATION))
            if self._access.role_in(call.caller, organization.name) is not None
        ]
        return Answer(content=listing(mine, paging(call.query), views.organization))

    async def create_organization(self, call: ProxyCall) -> Answer[views.OrganizationView]:
        """Create an organization, owned by the caller."""
        body: requests.CreatePlace = call.body
        self._may_found(call)
        spec = OrganizationSpec(name=body.name, slug=body.slug)
        answer = call.answering(lambda made: created(views.organization(made), made, "organizations"))
        return answer(await self._places.create_organization(spec, owner=call.caller.user, actor=actor(call)))

    def _may_found(self, call: ProxyCall) -> None:
        found_own = self._anyone_may_found and bool(call.caller.user)
        if call.caller.role is not None or not (found_own or call.caller.is_system_admin):
            raise PermissionDenied(
                "only a system administrator may create organizations here",
                hint="set proxies.open_organizations = true to let every user",
            )

    async def organization(self, call: ProxyCall) -> Answer[views.OrganizationView]:
        """Get an organization."""
        found = self._places.organization(call.path["organization_id"])
        return shown(views.organization(found), found)

    async def update_organization(self, call: ProxyCall) -> Answer[views.OrganizationView]:
        """Change an organization."""
        updated = await self._places.update_organization(
            call.path["organization_id"], changes(call.body), if_match=if_match(call), actor=actor(call)
        )
        return shown(views.organization(updated), updated)

    async def quotas(self, call: ProxyCall) -> Answer[list[views.QuotaView]]:
        """Get an organization's usage and quotas."""
        return Answer(
            content=[
                views.QuotaView(
                    quota=one.quota.name,
                    used=one.used,
                    limit=one.quota.limit,
                    setting=one.quota.setting,
                    workspace_id=one.workspace or None,
                )
                for one in self._quotas.usage(call.path["organization_id"])
            ]
        )

    async def delete_organization(self, call: ProxyCall) -> Answer[None]:
        """Delete an empty organization."""
        await self._places.delete_organization(
            call.path["organization_id"], if_match=if_match(call), actor=actor(call)
        )
        return done()

    async def audit_log(self, call: ProxyCall) -> Answer[AuditPage]:
        """List audit entries, newest first."""
        problems: list[Problem] = []
        limit = number(
            call.query, "limit", audit_trail.LIMIT, low=1, high=audit_trail.LIMIT_HIGH, problems=problems
        )
        before = number(call.query, "cursor", 0, low=1, high=10**12, problems=problems)
        if problems:
            raise Rejected(*problems)
        query = AuditQuery(
            scope=call.scope,
            limit=limit,
            before=before or None,
            from_ns=bodies.parsed(call.query["from"], field="from") if "from" in call.query else 0,
            to_ns=bodies.parsed(call.query["to"], field="to") if "to" in call.query else None,
            actor=call.query.get("actor", ""),
            action=call.query.get("action", ""),
            resource_type=call.query.get("resource_type", ""),
        )
        return Answer(content=await self._trail.page(query))

    # Members.

    def _role(self, call: ProxyCall) -> OrganizationRole:
        role = self._access.role_in(call.caller, call.path["organization_id"])
        assert role is not None, "the caller was admitted"
        return role

    async def members(self, call: ProxyCall) -> Answer[Listing[views.MemberView]]:
        """List members."""
        found = in_order(self._store.list(MEMBERSHIP, call.scope))
        return Answer(
            content=listing(
                found, paging(call.query), lambda one: views.member(one, self._users.find(one.name))
            )
        )

    async def add_member(self, call: ProxyCall) -> Answer[views.MemberView]:
        """Invite a user; system administrators add them without an invitation."""
        body: requests.AddMember = call.body
        user = await self._users.invited(body.email)
        if user is None:
            raise Rejected(
                Problem(field="email", message="There is no such user", code=Code.UNKNOWN_REFERENCE)
            )
        answer = call.answering(lambda made: Answer(content=views.member(made, user)))
        return answer(
            await self._members.add(
                call.path["organization_id"],
                user.name,
                body.role,
                by=self._role(call),
                # Who made the account, or runs the server, need not ask its user.
                consented=call.caller.is_system_admin,
                actor=actor(call),
            )
        )

    async def invitations(self, call: ProxyCall) -> Answer[Listing[views.InvitationView]]:
        """List the caller's invitations."""
        mine = self._members.invitations(call.caller.user) if call.caller.user else []
        return Answer(
            content=listing(
                in_order(mine),
                paging(call.query),
                lambda one: views.invitation(one, self._places.organization(organization_of(one.scope))),
            )
        )

    async def accept_invitation(self, call: ProxyCall) -> Answer[None]:
        """Accept an invitation."""
        return await self._answer_invitation(call, accept=True)

    async def decline_invitation(self, call: ProxyCall) -> Answer[None]:
        """Decline an invitation."""
        return await self._answer_invitation(call, accept=False)

    async def _answer_invitation(self, call: ProxyCall, *, accept: bool) -> Answer[None]:
        body: requests.AnswerInvitation = call.body
        if not call.caller.user:
            raise PermissionDenied("an API token cannot answer for a user")
        await self._members.answer(body.organization_id, call.caller.user, accept=accept, actor=actor(call))
        return done()

    async def change_member(self, call: ProxyCall) -> Answer[views.MemberView]:
        """Change a member's role."""
        body: requests.ChangeMember = call.body
        changed = await self._members.change(
            call.path["organization_id"],
            call.path["user_id"],
            body.role,
            by=self._role(call),
            actor=actor(call),
        )
        return Answer(content=views.member(changed, self._users.find(changed.name)))

    async def remove_member(self, call: ProxyCall) -> Answer[None]:
        """Remove a member."""
        await self._members.remove(
            call.path["organization_id"], call.path["user_id"], by=self._role(call), actor=actor(call)
        )
        return done()

    # Workspaces.

    async def workspaces(self, call: ProxyCall) -> Answer[Listing[views.WorkspaceView]]:
        """List workspaces."""
        found = in_order(self._store.list(WORKSPACE, call.scope))
        return Answer(content=listing(found, paging(call.query), views.workspace))

    async def create_workspace(self, call: ProxyCall) -> Answer[views.WorkspaceView]:
        """Create a workspace."""
        body: requests.CreatePlace = call.body
        spec = WorkspaceSpec(name=body.name, slug=body.slug)
        answer = call.answering(lambda made: created(views.workspace(made), made, "workspaces"))
        return answer(
            await self._places.create_workspace(call.path["organization_id"], spec, actor=actor(call))
        )

    async def workspace(self, call: ProxyCall) -> Answer[views.WorkspaceView]:
        """Get a workspace."""
        found = self._places.workspace(call.scope)
        return shown(views.workspace(found), found)

    async def update_workspace(self, call: ProxyCall) -> Answer[views.WorkspaceView]:
        """Change a workspace."""
        updated = await self._places.update_workspace(
            call.scope, changes(call.body), if_match=if_match(call), actor=actor(call)
        )
        return shown(views.workspace(updated), updated)

    async def delete_workspace(self, call: ProxyCall) -> Answer[None]:
        """Delete an empty workspace."""
        await self._places.delete_workspace(call.scope, if_match=if_match(call), actor=actor(call))
        return done()
