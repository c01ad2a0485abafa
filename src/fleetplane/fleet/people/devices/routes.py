"""The device flow over REST: `fleetplane login URL --oidc`.

    POST /device                  a program asks; answered with a code for its user
    POST /device/token            it asks whether it may go on
    GET  /device/{code}           who asks, for whoever is signed in
    POST /device/{code}           approve or refuse

Only a person who is signed in to an account approves, for that account: a token of a program does not become
a login. The login holds the groups of the session that approved it, and ends no later than that does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fleetplane.fleet.people import shapes
from fleetplane.fleet.people.account_kind import FAMILY, subject_of
from fleetplane.fleet.people.devices.grants import (
    LIFE_SECONDS,
    DeviceGrant,
    DeviceGrants,
    GrantApproval,
    GrantStep,
    shown,
)
from fleetplane.fleet.people.logins import VerifiedLogin
from fleetplane.fleet.people.own_accounts import POLICY
from fleetplane.fleet.people.rest.parts import PeopleCall, PeopleParts
from fleetplane.fleet.people.rights import SELF
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import NotFound, PermissionDenied, ResourceExhausted, Unauthenticated
from fleetplane.kernel.identity.passwords import LoginFailures
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.values.times import spelled
from fleetplane.web.rest.routes import Answer, Call, Route, RouteGroup

TAG = RouteGroup("Logging in")
PAGE = "/ui/device"
WRONG_CODES = 10
"""Of one person in a quarter of an hour: codes are read, not guessed."""


class DeviceRoutes:
    def __init__(self, people: PeopleParts, store: Store, clock: Clock) -> None:
        self._people = people
        self._clock = clock
        self.grants = DeviceGrants(store, clock)
        self._wrong = LoginFailures(limit=WRONG_CODES)

    def routes(self) -> Iterator[Route]:
        yield TAG.post("/device", self.begin, public=True, body=shapes.DeviceBody)
        yield TAG.post("/device/token", self.poll, public=True, body=shapes.DevicePollBody)
        yield TAG.get("/device/{code}", self.show, SELF)
        yield TAG.post("/device/{code}", self.decide, SELF, body=shapes.DeviceDecision)

    async def begin(self, call: Call[Any]) -> Answer[shapes.DeviceAsked]:
        """Ask for a login that somebody approves in a browser (as RFC 8628)."""
        body: shapes.DeviceBody = call.body
        client = "".join(one for one in body.client if one.isprintable())
        asked = await self.grants.begin(client, call.address)
        code = shown(asked.user_code)
        return Answer(
            content=shapes.DeviceAsked(
                device_code=asked.device_code,
                user_code=code,
                verification_path=PAGE,
                verification_path_complete=f"{PAGE}?code={code}",
                expires_in_seconds=int(LIFE_SECONDS),
                interval_seconds=5,
            )
        )

    async def poll(self, call: Call[Any]) -> Answer[shapes.DeviceLogin]:
        """Ask whether the login was approved; answered with its tokens once."""
        body: shapes.DevicePollBody = call.body
        found = await self.grants.poll(body.device_code)
        if found.step is not GrantStep.APPROVED or found.approval is None:
            told = shapes.DeviceLogin(status=found.step, interval_seconds=int(found.interval_seconds))
            return Answer(content=told)
        try:
            tokens = await self._opened(found.approval)
        except Unauthenticated:  # the session that approved it has ended meanwhile
            return Answer(content=shapes.DeviceLogin(status=GrantStep.DENIED))
        return Answer(content=shapes.DeviceLogin(status=GrantStep.APPROVED, tokens=tokens))

    async def _opened(self, approval: GrantApproval) -> shapes.LoginTokens:
        logins = self._people.logins
        verified = logins.current(approval.login)

        def still_good(draft: Draft) -> bool:
            return logins.stands(draft, approval.login)

        pair = await logins.open(
            verified.account,
            actor=subject_of(approval.account),
            still_good=still_good,
            groups=verified.groups,
            ends_at_ns=verified.ends_at_ns,
        )
        return shapes.LoginTokens(
            access_token=pair.access, refresh_token=pair.refresh, expires_in_seconds=POLICY.access_seconds
        )

    async def show(self, call: PeopleCall) -> Answer[shapes.DeviceRequest]:
        """Tell which program asks for a login with this code."""
        self._approver(call)
        return Answer(content=_told(self._found(call)))

    async def decide(self, call: PeopleCall) -> Answer[shapes.DeviceRequest]:
        """Approve a login with the caller's account, or refuse it."""
        body: shapes.DeviceDecision = call.body
        approver = self._approver(call)
        found = self._found(call)
        approval = approver if body.approve else None
        await self.grants.decide(found.spec.user_code, approval, actor=call.caller.name)
        return Answer(content=_told(found))

    def _approver(self, call: PeopleCall) -> GrantApproval:
        """The account that the caller is signed in to, by password or by a provider."""
        admitted = self._people.door.recognise_header(call.headers.credential)
        verified = admitted.caller
        if not isinstance(verified, VerifiedLogin) or admitted.family != FAMILY:
            raise PermissionDenied(
                "only a person who is signed in to an account approves a login",
                hint="sign in with a name and password, or with the identity provider",
            )
        return GrantApproval(account=verified.account.name, login=verified.login)

    def _found(self, call: PeopleCall) -> DeviceGrant:
        """The grant of the code in the path; whoever tries many waits."""
        now = self._clock.now_ns() / 1e9
        if pause := self._wrong.pause_seconds(call.caller.name, now=now):
            raise ResourceExhausted("too many wrong codes", retry_after_seconds=pause)
        try:
            return self.grants.pending(call.path["code"])
        except NotFound:
            self._wrong.failed(call.caller.name, now=now)
            raise


def _told(found: DeviceGrant) -> shapes.DeviceRequest:
    return shapes.DeviceRequest(
        user_code=shown(found.spec.user_code),
        client=found.spec.client,
        address=found.spec.address,
        asked_at=spelled(found.spec.asked_at_ns),
    )
