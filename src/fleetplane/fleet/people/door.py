"""The door: who shows this credential, whichever family of tokens it is of.

Every surface asks here: REST of all families, `/apis/v1`, WebSockets, server-sent events and gRPC services
of operators. A credential is recognised by its form; each family of them knows its own and leaves the rest to
the others, so a token of one purpose never passes for one of another:

    operators   `fp_…` tokens of programs, and the signed short sessions of whoever owns the server's socket
    proxies     access tokens of people who logged in there (RS256), and API tokens of organisations
    boards      access tokens of people who logged in there (EdDSA)
    people      access tokens of people who logged in with their account's name (EdDSA), and console sessions

A domain that has users adds its family with `accept` when it is built, and with `profile_roles` what it
gives to the account behind a user: a person holds the same, whichever login they came by. The answer is the
same for all:

    principal = kernel.door.authenticate(token)            # or `of_header(authorization)`
    table.check(principal, permission, scope)              # `kernel.access.AccessTable`

`Principal.bindings` hold what was given at scopes. Code that knows one scope for each caller asks for
`principal.at(scope)`. Whoever is recognised is refused while a revocation names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from fleetplane.fleet.people.account_kind import SUBJECT_PREFIX
from fleetplane.fleet.people.directory import Directories
from fleetplane.fleet.people.linked_logins import LinkedLogins
from fleetplane.fleet.people.scopes import ScopeTree
from fleetplane.kernel.access import BUILT_IN_ROLES, EVERYWHERE, OWNER, Binding, Principal, Role
from fleetplane.kernel.errors import PermissionDenied, Unauthenticated
from fleetplane.kernel.identity.bindings import Bindings, BindingSpec
from fleetplane.kernel.identity.operators import Operators, bearer_of
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.web.rest import console

OPERATORS = "operators"
_PEOPLE = ("token/", "account/", "user/", "api-token/")
_ANOTHERS = frozenset({"unknown key", "algorithm"})
"""Causes with which a family's keys refuse what another family may have signed."""


def _nothing() -> Iterable[Binding]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """Whose credential it is."""

    name: str
    """The principal's, as audits and revocations know it."""
    subject: str
    """As bindings name it: unlike `name` never the same for two people."""
    family: str = ""
    """The family of logins that it is of; empty for programs."""
    roles: frozenset[Role] = frozenset()
    scope: str = EVERYWHERE
    """Where `roles` hold."""
    bindings: Callable[[], Iterable[Binding]] = _nothing
    """What the family itself gives at scopes; asked for only where it is needed."""
    groups: tuple[str, ...] = ()
    """Of an identity provider; what is bound to `group/NAME` is held by all of them."""
    caller: object = None
    """The same, as the family's own surfaces want it."""


def is_of_people(principal: Principal) -> bool:
    """Whether a principal is a person or a program, from whom roles can be taken, and not an agent."""
    return principal.name.startswith(_PEOPLE)


def origin_of(spec: BindingSpec) -> str:
    """A binding in words."""
    return f"{spec.subject} is bound to {spec.role} at {spec.scope}"


def _at_least(role: Role) -> frozenset[Role]:
    """A role, and those that include it."""
    higher = BUILT_IN_ROLES[BUILT_IN_ROLES.index(role) :] if role in BUILT_IN_ROLES else (role, OWNER)
    return frozenset(higher)


ProfileRoles = Callable[[str], Iterable[Binding]]
"""What a family gives to the account of this name."""
Recogniser = Callable[[str], Admitted | None]
"""Whose token it is, None for one of another family; raises `Unauthenticated` if it is bad or has ended."""


class Authenticators:
    """Tells who shows a credential; see the module's description."""

    def __init__(
        self, operators: Operators, revocations: Revocations, bindings: Bindings | None = None
    ) -> None:
        """Without `bindings` nobody holds more than their own family gives them."""
        self.tree = ScopeTree()
        """What paths of the scope tree mean; each domain adds its part."""
        self.directories = Directories()
        """Who can log in, and who has; each domain with users adds its own."""
        self.linked = LinkedLogins()
        """The logins of one person in every family."""
        self.profile_roles: dict[str, ProfileRoles] = {}
        """By family, what a domain gives to the account behind a user of its own."""
        self.console: Callable[[str], Admitted] | None = None
        """Whose console session a cookie is; raises `Unauthenticated`."""
        self.settled: tuple[BindingSpec, ...] = ()
        """What the settings give to groups of an identity provider, beside the bindings that are stored."""
        self._bindings = bindings
        self._revocations = revocations
        self._operators = operators
        self._families: dict[str, Recogniser] = {}

    def __repr__(self) -> str:
        return f"<Door {' '.join([*self._families, OPERATORS])}>"

    def accept(self, family: str, recognise: Recogniser) -> None:
        """Let tokens of a further family in, on every surface."""
        self._families[family] = recognise

    def authenticate(self, token: str) -> Principal:
        """The principal of a bearer token, with everything it holds; raises `Unauthenticated`."""
        return self.principal(self.recognise(token))

    def of_header(self, authorization: str | None) -> Principal:
        """The principal of an `Authorization` header; raises `Unauthenticated`."""
        return self.principal(self.recognise_header(authorization))

    def recognise_header(
        self, authorization: str | None, *, first: str = OPERATORS, unknown: Unauthenticated | None = None
    ) -> Admitted:
        """Who an `Authorization` header is of, before what they hold is looked up; see `recognise`.

        `Headers.credential` spells a console session the same way, with a scheme of its own: its value is no
        bearer token, and no bearer token is a session.
        """
        scheme, _, value = (authorization or "").strip().partition(" ")
        if scheme == console.SCHEME and self.console is not None:
            found = self.console(value)
            return self._unless_revoked(found)
        return self.recognise(bearer_of(authorization), first=first, unknown=unknown)

    def _unless_revoked(self, found: Admitted) -> Admitted:
        """Refuse a person who is revoked, under the name of this login or of the account."""
        self._revocations.check(principal=found.name)
        if found.subject != found.name:
            self._revocations.check(principal=found.subject)
        return found

    def principal(self, admitted: Admitted) -> Principal:
        """Everything that whoever was recognised holds."""
        return Principal(
            name=admitted.name,
            roles=admitted.roles,
            scope=admitted.scope,
            bindings=(*admitted.bindings(), *self._elsewhere(admitted), *self.given(admitted)),
        )

    def given(self, admitted: Admitted) -> tuple[Binding, ...]:
        """What whoever was recognised holds beside what their own family gives them, in stored scopes.

        It was bound to them or to a group of theirs, or other families give it to the same account.
        """
        return (*self._bound(admitted), *self.by_profiles(admitted.subject, besides=admitted.family))

    def by_profiles(self, subject: str, *, besides: str = "") -> Iterator[Binding]:
        """What families, all but one, give to an account."""
        if subject.startswith(SUBJECT_PREFIX):
            for family, roles in self.profile_roles.items():
                if family != besides:
                    yield from roles(subject.removeprefix(SUBJECT_PREFIX))

    def _bound(self, admitted: Admitted) -> tuple[Binding, ...]:
        if self._bindings is None:
            return ()
        groups = [f"group/{group}" for group in admitted.groups]
        stored = (one.spec for one in self._bindings.of((admitted.subject, *groups)))
        settled = (one for one in self.settled if one.subject in groups)
        return tuple(
            Binding(role=Role(spec.role), scope=scope, origin=origin_of(spec))
            for spec in (*stored, *settled)
            for scope in self.tree.stored(spec.scope)
        )

    def check_above(self, authorization: str | None, subject: str, *, family: str) -> None:
        """Refuse to set the password of one who holds more: whoever knows it can act as them.

        A domain's administrators manage its users, who may hold roles beyond the domain (`family`).
        """
        lacking = self._lacking(authorization, subject, family)
        if lacking is not None:
            caller, role, where = lacking
            raise PermissionDenied(
                f"{caller} may not set the password of one who is bound to {role} at {where}",
                hint="a password is set by its owner, or by one who holds the same roles",
            )

    def is_above(self, authorization: str | None, subject: str, *, family: str) -> bool:
        """Whether a caller may decide about all that a person is, and not only about a domain's user."""
        return self._lacking(authorization, subject, family) is None

    def _lacking(self, authorization: str | None, subject: str, family: str) -> tuple[str, Role, str] | None:
        """The caller's name, with a role that the subject holds outside of a domain and the caller lacks."""
        caller = self.recognise_header(authorization)
        if caller.subject == subject:
            return None
        principal = self.principal(caller)
        theirs = Admitted(name=subject, subject=subject)
        for held in (*self._bound(theirs), *self.by_profiles(subject, besides=family)):
            if principal.at(held.scope).roles.isdisjoint(_at_least(held.role)):
                return caller.name, held.role, self.tree.path(held.scope) or held.scope
        return None

    def _elsewhere(self, admitted: Admitted) -> Iterator[Binding]:
        """What roles at a tenant are at scopes of other domains that belong to the same tenant."""
        if not admitted.roles or not admitted.scope.startswith("tenant/"):
            return
        path = self.tree.path(admitted.scope)
        for scope in self.tree.stored(path) if path is not None else ():
            if scope != admitted.scope:
                yield from (
                    Binding(role=role, scope=scope, origin=admitted.name) for role in sorted(admitted.roles)
                )

    def recognise(
        self, token: str, *, first: str = OPERATORS, unknown: Unauthenticated | None = None
    ) -> Admitted:
        """Whose token it is; raises `Unauthenticated`.

        The family `first` is asked before the others, and says why a token is refused that nobody knows;
        where it has nothing to say, `unknown` is raised, or what the operators' family says.
        """
        refusals: dict[str, Unauthenticated] = {}
        order = [first] if first in self._families else []
        for family in (*order, *(name for name in self._families if name != first)):
            try:
                found = self._families[family](token)
            except Unauthenticated as error:
                if error.details.get("cause") not in _ANOTHERS:
                    raise
                refusals[family] = error
                continue
            if found is not None:
                return self._unless_revoked(found)
        try:
            return self._of_operators(token)
        except Unauthenticated as error:
            if first in refusals:
                raise refusals[first] from error
            if unknown is not None and error.details.get("cause") != "revoked":
                raise unknown from error
            raise

    def _of_operators(self, token: str) -> Admitted:
        found = self._operators.authenticate(token)
        return Admitted(name=found.name, subject=found.name, roles=found.roles, scope=found.scope)
