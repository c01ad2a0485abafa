"""Which machine an agent runs on, and the handling of a second machine that claims to be it.

An agent that exchanged its token for a certificate is bound to the key that it made: only that key
speaks for it. An agent of the documented protocol has only its token, and every holder of the token looks the
same; so the first machine stays for as long as it is connected, and another is refused. Either way the other
machine is stored as the contender, written to the audit log and shown as an alert, until an operator approves
it or sends it away. Decisions are pure; `Machines` writes them down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import msgspec

from fleetplane.domains.proxies.kinds.records import (
    AGENT,
    AGENT_TOKEN,
    Agent,
    AgentToken,
    AgentTokenStatus,
    Contender,
    agent_scope,
)
from fleetplane.domains.proxies.rules.alerts import ALERT, MACHINE_ALERT, AlertSpec, Severity
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Conflict, NotFound, Unauthenticated
from fleetplane.kernel.identity.enrolment import digest
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.values.times import NS
from fleetplane.rpc import Connection

APPROVAL_SECONDS = 3600.0
"""How long an approved machine has to come: our agent asks again every five minutes."""
REPEAT_SECONDS = 60.0
"""The same contender is written down at most this often, however often it tries."""
OTHERS_SECONDS = 5.0
"""And another contender after this: whoever reads the audit log should see each, not drown in them."""
CERTIFICATE_DAYS = 30.0
"""Of an agent; renewed when a third is left. What revokes one is the binding, not its end."""
SILENT_HEARTBEATS = 1.5
"""After so many heartbeats without a word, an agent that has only its token may be taken over by another
stream: that of the same agent, after its connection broke without anyone noticing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Approach:
    """A connection that claims to be an agent."""

    hostname: str
    address: str
    """Where its connection comes from, without the port."""
    peer: str
    """The connection itself; empty where TLS does not end here, and many may share one."""
    key: str = ""
    """The digest of the key that it has shown to hold; empty for one that has only the token."""

    @property
    def described(self) -> dict[str, str]:
        """For the log."""
        return {"hostname": self.hostname, "address": self.address}

    @property
    def identity(self) -> str:
        """A name for this machine, by the best that is known of it."""
        return digest(self.key or f"{self.hostname}\0{self.address}")[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Whose stream is open."""

    peer: str
    last_seen_ns: int


class MachineVerdict(Enum):
    WELCOME = auto()
    TAKES_OVER = auto()
    """Approved: the machine before it is the agent no more."""
    CONTENDS = auto()


def verdict(
    approach: Approach,
    binding: AgentTokenStatus | None,
    holder: Holder | None,
    *,
    heartbeat_seconds: float,
    now_ns: int,
) -> MachineVerdict:
    """Whether a machine may be the agent; its token or certificate was found to be the agent's."""
    if binding is not None and binding.key:
        ours = approach.key == binding.key
    elif holder is not None and (not approach.peer or holder.peer != approach.peer):
        ours = now_ns - holder.last_seen_ns >= SILENT_HEARTBEATS * heartbeat_seconds * NS
    else:
        ours = True
    if ours:
        return MachineVerdict.WELCOME
    return MachineVerdict.TAKES_OVER if is_approved(approach, binding, now_ns) else MachineVerdict.CONTENDS


def is_approved(approach: Approach, binding: AgentTokenStatus | None, now_ns: int) -> bool:
    return (
        binding is not None and binding.approved == approach.identity and now_ns < binding.approved_until_ns
    )


def connection_of(connection: Connection) -> str:
    """The peer of a connection whose TLS ends here; empty behind a proxy, where peers are shared."""
    return connection.peer if connection.transport == "tls" else ""


class MachineContended(Conflict):
    """Another machine is this agent. A stream that lost against another ends with ABORTED, as documented."""

    reason = "MACHINE_CONTENDED"


def contended() -> MachineContended:
    return MachineContended(
        "another machine is connected as this agent",
        hint="an administrator can approve the change of machine",
    )


class Machines:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def binding(self, agent: Agent) -> AgentTokenStatus | None:
        token = self._store.get(AGENT_TOKEN, agent.scope, agent.name)
        return token.status if token is not None else None

    # Written by the agents' service.

    async def note_contender(self, agent: Agent, approach: Approach) -> None:
        """Write down that a machine was refused, and raise the alert."""
        if not _is_news(self.binding(agent), approach, self._clock.now_ns()):
            return

        def change(draft: Draft) -> None:
            token = _token(draft, agent)
            if not _is_news(token.status, approach, draft.now_ns):
                return
            if token.status is None:
                return
            found = Contender(
                id=approach.identity,
                hostname=approach.hostname,
                address=approach.address,
                key=approach.key,
                refused_at_ns=draft.now_ns,
            )
            put(draft, token, msgspec.structs.replace(token.status, contender=found))
            below = agent_scope(agent.scope, agent.name)
            who = f"{approach.hostname or 'no name'}, {approach.address}"
            message = f"another machine ({who}) says that it is this agent"
            draft.put(
                ALERT, below, MACHINE_ALERT, spec=AlertSpec(severity=Severity.CRITICAL, message=message)
            )

        await self._store.transact(
            change, actor=f"agent/{agent.name}", action="agent.refuse_machine", touches=touches(agent)
        )

    async def bind(
        self,
        agent: Agent,
        approach: Approach,
        token_digest: str,
        *,
        serial: str,
        expires_at_ns: int,
        holder: Holder | None,
        heartbeat_seconds: float,
    ) -> bool | None:
        """Bind an agent to the key that came with its token; whether that is news.

        None for a machine that contends with another one: nothing is written then.
        """

        def change(draft: Draft) -> bool | None:
            token = _token(draft, agent)
            if token.spec.digest != token_digest:
                raise Unauthenticated("the token is not known or was revoked", hint="ask for a new token")
            require_fresh(token, draft.now_ns)
            found = verdict(
                approach, token.status, holder, heartbeat_seconds=heartbeat_seconds, now_ns=draft.now_ns
            )
            if found is MachineVerdict.CONTENDS:
                return None
            status = token.status or AgentTokenStatus(activated_at_ns=draft.now_ns)
            news = status.key != approach.key
            if news:
                status = taken(status, approach, draft.now_ns)
                clear_alert(draft, agent)
            put(draft, token, msgspec.structs.replace(status, serial=serial, expires_at_ns=expires_at_ns))
            return news

        done = await self._store.transact(
            change, actor=f"agent/{agent.name}", action="agent.bind_machine", touches=touches(agent)
        )
        return done.value

    async def renewed(self, agent: Agent, key: str, *, serial: str, expires_at_ns: int) -> None:
        def change(draft: Draft) -> None:
            token = _token(draft, agent)
            if token.status is None or token.status.key != key:
                raise replaced()
            put(
                draft,
                token,
                msgspec.structs.replace(token.status, serial=serial, expires_at_ns=expires_at_ns),
            )

        await self._store.transact(
            change, actor=f"agent/{agent.name}", action="agent.renew_certificate", touches=touches(agent)
        )

    def require_bound(self, agent: Agent, key: str) -> None:
        binding = self.binding(agent)
        if binding is None or not key or binding.key != key:
            raise replaced()

    # Written by REST.

    async def approve(self, agent: Agent, contender: str, *, actor: str) -> AgentToken:
        """Let the machine that was refused be the agent, when it comes again."""

        def change(draft: Draft) -> AgentToken:
            token = _contended(draft, agent, contender)
            assert token.status is not None
            status = msgspec.structs.replace(
                token.status,
                contender=None,
                approved=contender,
                approved_until_ns=draft.now_ns + round(APPROVAL_SECONDS * NS),
            )
            clear_alert(draft, agent)
            return put(draft, token, status)

        done = await self._store.transact(
            change, actor=actor, action="agent.approve_machine", touches=touches(agent)
        )
        return done.value

    async def dismiss(self, agent: Agent, contender: str, *, actor: str) -> AgentToken:
        """Forget the machine that was refused; if it comes again, it is refused again."""

        def change(draft: Draft) -> AgentToken:
            token = _contended(draft, agent, contender)
            assert token.status is not None
            clear_alert(draft, agent)
            return put(draft, token, msgspec.structs.replace(token.status, contender=None))

        done = await self._store.transact(
            change, actor=actor, action="agent.dismiss_machine", touches=touches(agent)
        )
        return done.value


# Within somebody's transaction.


def touches(agent: Agent) -> Sequence[Key]:
    below = agent_scope(agent.scope, agent.name)
    return (AGENT_TOKEN.key(agent.scope, agent.name), ALERT.key(below, MACHINE_ALERT))


def taken(status: AgentTokenStatus, approach: Approach, now_ns: int) -> AgentTokenStatus:
    """The agent is on this machine from now on; what was approved is used up."""
    return msgspec.structs.replace(
        status,
        key=approach.key,
        serial="",
        expires_at_ns=None,
        contender=None,
        approved="",
        approved_until_ns=0,
        machine_changed_at_ns=now_ns,
    )


def require_fresh(token: AgentToken, now_ns: int) -> None:
    """A token's end limits its first use; afterwards it lasts as long as its agent."""
    if token.status is None and now_ns >= token.spec.expires_at_ns:
        raise Unauthenticated("the token has expired", hint="ask for a new token")


def clear_alert(draft: Draft, agent: Agent) -> None:
    below = agent_scope(agent.scope, agent.name)
    if draft.get(ALERT, below, MACHINE_ALERT) is not None:
        draft.delete(ALERT, below, MACHINE_ALERT)


def put(draft: Draft, token: AgentToken, status: AgentTokenStatus) -> AgentToken:
    return draft.put(AGENT_TOKEN, token.scope, token.name, spec=token.spec, status=status)


def _token(draft: Draft, agent: Agent) -> AgentToken:
    found = draft.get(AGENT_TOKEN, agent.scope, agent.name)
    if found is None or draft.get(AGENT, agent.scope, agent.name) is None:
        raise Unauthenticated("the token is not known or was revoked", hint="ask for a new token")
    return found


def _contended(draft: Draft, agent: Agent, contender: str) -> AgentToken:
    token = draft.get(AGENT_TOKEN, agent.scope, agent.name)
    found = token.status.contender if token is not None and token.status is not None else None
    if token is None or found is None:
        raise NotFound("no machine was refused for this agent")
    if found.id != contender:
        raise Conflict(f"the machine that was refused last is {found.id}, not {contender}", hint="look again")
    return token


def _is_news(status: AgentTokenStatus | None, approach: Approach, now_ns: int) -> bool:
    known = status.contender if status is not None else None
    if known is None:
        return True
    quiet = REPEAT_SECONDS if known.id == approach.identity else OTHERS_SECONDS
    return now_ns - known.refused_at_ns >= quiet * NS


def replaced() -> Unauthenticated:
    """For one who holds a key that is not, or no longer, the agent's."""
    return Unauthenticated("the agent is bound to another key", hint="enrol again with a registration token")
