"""The domain of people and programs, in every server: tokens, accounts, bindings and sessions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

from prometheus_client.registry import Collector

from fleetplane.domains.blueprint import Blueprint, Kernel, Service
from fleetplane.fleet.people import own_accounts, rights, token_sessions
from fleetplane.fleet.people.account_kind import FAMILY
from fleetplane.fleet.people.attempts.shared_failures import LOGIN_FAILURES
from fleetplane.fleet.people.console_sessions import ConsoleSessions
from fleetplane.fleet.people.devices.grants import DEVICE_GRANT
from fleetplane.fleet.people.devices.routes import DeviceRoutes
from fleetplane.fleet.people.directory import LoginDirectory
from fleetplane.fleet.people.openid.routes import OpenIDRoutes
from fleetplane.fleet.people.openid.used import USED_SIGN_IN
from fleetplane.fleet.people.own_accounts import OwnAccounts
from fleetplane.fleet.people.rest.parts import PeopleGate, PeopleParts
from fleetplane.fleet.people.rest.table import people_table
from fleetplane.fleet.people.rights import Rights
from fleetplane.fleet.people.token_sessions import TokenSessions
from fleetplane.fleet.people.tokens_service import OperatorsService
from fleetplane.fleet.resources import scopes
from fleetplane.fleet.resources.catalogue import Catalogue
from fleetplane.gen.fleetplane.admin.v1 import operators_pb2
from fleetplane.kernel.access import Grant, Permission, Role
from fleetplane.kernel.errors import InvalidArgument, SettingsError
from fleetplane.kernel.identity.bindings import Bindings, BindingSpec
from fleetplane.rpc import Authentication, Authenticator, Needs, service_rows
from fleetplane.sections.openid import OpenIDSettings
from fleetplane.web.apis import problems
from fleetplane.web.ops import Mount
from fleetplane.web.rest.family import FamilyErrors, FamilyText, RestFamily

LISTENER = "admin"
MANAGE = Permission("operators.manage")

_SERVICE = operators_pb2.DESCRIPTOR.services_by_name["OperatorsAdmin"]

ERRORS = FamilyErrors(
    envelope=problems.problem,
    shape=problems.ProblemDetails,
    content_type=problems.CONTENT_TYPE,
    rejected="400",
    conditional=False,
)
BLUEPRINT = Blueprint(
    name="operators",
    kinds=(*own_accounts.KINDS, *token_sessions.KINDS, DEVICE_GRANT, USED_SIGN_IN, LOGIN_FAILURES),
    methods=tuple(
        service_rows(
            _SERVICE,
            MANAGE,
            listener=LISTENER,
            authentication=Authentication.LOCAL,
            reads=("ListTokens", "GetRevocationUptake"),
            needs=Needs.WRITES,
        )
    ),
    grants={Role("local"): (Grant(permission=MANAGE),), **rights.GRANTS},
    operator_roles=tuple(rights.GRANTS),
)


def _settled(settings: OpenIDSettings, held: Rights) -> Iterator[BindingSpec]:
    """What the settings give to groups; raises `SettingsError` for roles and scopes that do not exist."""
    for one in settings.group_roles():
        if one.role not in held.roles:
            known = ", ".join(sorted(held.roles))
            raise SettingsError(f"oidc.roles: there is no role {one.role!r}; there are {known}")
        try:
            scope = scopes.parsed(one.scope)
        except InvalidArgument as error:
            raise SettingsError(f"oidc.roles: {error.message}", hint=error.advice) from error
        yield BindingSpec(subject=f"group/{one.group}", role=one.role, scope=scope, created_by="oidc.roles")


class OperatorsDomain:
    def __init__(
        self,
        kernel: Kernel,
        *,
        held: Rights,
        catalogue: Catalogue | None = None,
        version: str = "",
        openid: OpenIDSettings | None = None,
    ) -> None:
        """`held` says what roles, of whichever domain, allow; `catalogue` what the resource API has."""
        openid = openid or OpenIDSettings()
        store, door = kernel.store, kernel.door
        self._operators = kernel.operators
        self._bindings = bindings = Bindings(store)
        sessions = TokenSessions(door, store, kernel.master, kernel.clock)
        self._service = OperatorsService(
            kernel.operators,
            roles=held.roles,
            lists=kernel.revocation_lists,
            bindings=bindings,
            link=sessions.link,
        )
        held.table.require_built_in(held.permissions)
        self._logins = own_accounts.logins_of(store, kernel.master, kernel.clock)
        door.accept(FAMILY, partial(own_accounts.recogniser, self._logins))
        door.directories.add(
            LoginDirectory(
                FAMILY,
                store,
                own_accounts.RULES,
                self._logins,
                shown=lambda account: account.name,
                vouched_by=own_accounts.vouched_by,
            )
        )
        door.directories.add(sessions)
        accounts = OwnAccounts(store, kernel.master, kernel.clock, self._logins, door.linked)
        self._console = ConsoleSessions(door, accounts, self._logins, sessions)
        self._openid = OpenIDRoutes(
            openid,
            store=store,
            master=kernel.master,
            clock=kernel.clock,
            accounts=accounts,
            sessions=self._console,
        )
        door.settled = tuple(_settled(openid, held))
        self._kernel = kernel
        parts = PeopleParts(
            door=door,
            rights=held,
            bindings=bindings,
            operators=kernel.operators,
            accounts=accounts,
            logins=self._logins,
        )
        devices = DeviceRoutes(parts, store, kernel.clock)
        more = chain(self._console.routes(), self._openid.routes(), devices.routes())
        permission_of = partial(rights.permission_of, catalogue or Catalogue(()))
        self._family = RestFamily(
            kernel,
            people_table(parts, permission_of, tuple(more)),
            PeopleGate(door),
            domain="people",
            errors=ERRORS,
            sweeps=(
                self._logins.sweep,
                sessions.sweep,
                self._sweep_tokens,
                devices.grants.sweep,
                self._openid.sweep,
            ),
            text=FamilyText(
                title="Fleetplane people",
                version=version,
                description="Who somebody is, and what they may do: accounts, tokens, bindings, sessions.",
                summary="REST: accounts, tokens, roles at scopes, sessions",
            ),
        )
        self.services: Sequence[Service] = (
            Service(listener=LISTENER, descriptor=_SERVICE, servicer=self._service),
        )
        self.authenticators: Mapping[str, Mapping[Authentication, Authenticator]] = {}
        self.server_names: Sequence[str] = ()
        self.collectors: Sequence[Collector] = ()
        self.notices: Sequence[str] = ()

    @property
    def routes(self) -> Sequence[Mount]:
        return self._family.mounts

    async def _sweep_tokens(self) -> None:
        """Tokens end with the place that they were made for; what was bound to them goes too."""
        actor = own_accounts.POLICY.actor
        for name in await self._operators.tokens.sweep(actor=actor):
            await self._bindings.forget(f"token/{name}", actor=actor)

    async def prepare_here(self) -> None:
        """Load what recognises sessions."""
        await self._operators.offer_sessions()
        await self._logins.load()
        await self._console.load(self._kernel.store, self._kernel.master, self._kernel.clock)

    async def take_over(self) -> None:
        await self._operators.tokens.adopt()
        await self._family.take_over()

    async def run_here(self) -> None:
        """Nothing: the active server sweeps."""

    def opened(self, addresses: Mapping[str, Sequence[str]]) -> None:
        self._service.web_addresses = tuple(addresses.get("web", ()))
        self._openid.opened(self._service.web_addresses)

    async def run_active(self) -> None:
        await self._family.run_active()

    def drain(self) -> None:
        pass
