"""Which version each agent says it runs, and which one it is told to run.

An agent is who its domain says it is. What it says is stored when it changes; that it was heard is kept in
memory, and known again when each has checked in once. Servers that share a database tell each other whom
they heard (`kernel/presence/heard.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn, Protocol

import msgspec
import structlog

from fleetplane.fleet.releases.records import (
    AGENT_DEFAULT,
    AGENT_VERSION,
    DEFAULT,
    AgentHello,
    AgentVersion,
    AgentWish,
    DefaultSpec,
    agents_scope,
    wanted_version,
)
from fleetplane.fleet.releases.releases import Releases
from fleetplane.gen.fleetplane.fleet.v1 import releases_pb2 as pb
from fleetplane.kernel import release_documents as documents
from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument, ResourceExhausted
from fleetplane.kernel.presence.last_seen import LastSeen
from fleetplane.kernel.release_documents import UpgradeOrder, version_key
from fleetplane.kernel.store import Draft, Store
from fleetplane.rpc import CallContext

log = structlog.get_logger(__name__)

TEXT_LIMIT = 500
KEPT_LIMIT = 16
AGENTS_LIMIT = 100_000
"""Of one domain."""
MISSED = 3
"""Check-ins that an agent may miss before it counts as offline."""
LEEWAY_SECONDS = 5.0
CHANNEL = "releases"
LEARN_SECONDS = 10.0
"""Between two looks at whom other servers heard: a fraction of the time that agents have to check in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCard:
    """An agent as its domain knows it."""

    title: str
    """Its name for people."""
    labels: Mapping[str, str] = field(default_factory=dict)


class AgentRegister(Protocol):
    """A domain's side: who calls, and who is known."""

    def recognise(self, context: CallContext, name: str) -> str:
        """The id of the agent that calls; raises for anybody else.

        `name` is what the agent calls itself, for domains whose agents have nothing else to show.
        """
        ...

    def card(self, agent: str) -> AgentCard | None:
        """What is known of an agent; None if it is no longer there."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckInPolicy:
    every_seconds: float = 60.0
    hello_seconds: float = 120.0
    """The time that a new version has to say hello before its agent goes back by itself."""


class CheckIns:
    """Who runs which version, in every domain of this server."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        releases: Releases,
        registers: Mapping[str, AgentRegister],
        policy: CheckInPolicy,
    ) -> None:
        self._store = store
        self._clock = clock
        self.releases = releases
        self.registers = registers
        self.policy = policy
        self._heard: dict[tuple[str, str], float] = {}
        """When each was heard last, on the monotonic clock: here, and as far as is known elsewhere."""
        self._everywhere = LastSeen(store, clock, channel=CHANNEL) if store.shared else None
        self.check_ins: Counter[str] = Counter()
        """By domain."""
        self.failures: Counter[str] = Counter()
        """Upgrades that agents refused or took back, by domain."""
        self.sent_bytes: Counter[str] = Counter()
        """Of files, by domain."""

    def __repr__(self) -> str:
        return f"<CheckIns {len(self._heard)}>"

    def is_online(self, domain: str, agent: str) -> bool:
        """Whether an agent has checked in lately."""
        heard = self._heard.get((domain, agent))
        bound = MISSED * self.policy.every_seconds + LEEWAY_SECONDS
        return heard is not None and self._clock.monotonic() - heard <= bound

    def default(self, domain: str) -> DefaultSpec:
        """What agents of a domain should run unless they are named."""
        found = self._store.get(AGENT_DEFAULT, agents_scope(domain), DEFAULT)
        return found.spec if found is not None else DefaultSpec()

    async def hear(self, domain: str, agent: str, request: pb.CheckInRequest) -> pb.CheckInResponse:
        """Note what an agent says, and answer which version it should run."""
        said = _read(request)
        scope = agents_scope(domain)
        found = self._store.get(AGENT_VERSION, scope, agent)
        was_online = self.is_online(domain, agent)
        if found is None or not was_online or _differs(found.status, said):
            found = await self._note(domain, agent, said)
        self._heard[(domain, agent)] = self._clock.monotonic()
        if self._everywhere is not None:
            self._everywhere.note(f"{domain}/{agent}")
        self.check_ins[domain] += 1
        answer = pb.CheckInResponse(next_seconds=self.policy.every_seconds)
        order = self.order(domain, found, request.nonce)
        if order is None:
            return answer
        document = documents.encode(order)
        answer.order = document
        answer.order_signature = self.releases.key.sign(documents.order_payload(document))
        release = self.releases.find(order.version)
        if release is not None and order.manifest:
            answer.manifest, answer.manifest_signature = release.spec.manifest, release.spec.signature
        return answer

    def order(self, domain: str, agent: AgentVersion, nonce: bytes) -> UpgradeOrder | None:
        """What an agent is to be told; None if it runs what it should, or cannot be helped."""
        said, wish = agent.status, agent.spec
        wanted = wanted_version(wish, self.default(domain))
        if said is None or not said.can_upgrade or wanted in ("", said.version):
            return None
        if (said.failed_version, said.failed_attempt) == (wanted, wish.attempt):
            return None  # it said no; another attempt has another number
        release = self.releases.find(wanted)
        if release is None and wanted not in said.kept:
            return None
        own_seconds = release.spec.hello_seconds if release is not None else 0.0
        return UpgradeOrder(
            agent=agent.name,
            nonce=nonce.hex(),
            version=wanted,
            manifest=documents.digest(release.spec.manifest) if release is not None else "",
            attempt=wish.attempt,
            seconds=own_seconds or self.policy.hello_seconds,
        )

    async def _note(self, domain: str, agent: str, said: AgentHello) -> AgentVersion:
        scope, now_ns = agents_scope(domain), self._clock.now_ns()
        before = self._store.get(AGENT_VERSION, scope, agent)

        def change(draft: Draft) -> AgentVersion:
            found = draft.get(AGENT_VERSION, scope, agent)
            if found is None and draft.count(AGENT_VERSION, scope) >= AGENTS_LIMIT:
                raise ResourceExhausted(f"{AGENTS_LIMIT} agents of {domain} are known, the most there may be")
            wish = found.spec if found is not None else AgentWish()
            status = _merged(found.status if found is not None else None, said, now_ns)
            return draft.put(AGENT_VERSION, scope, agent, spec=wish, status=status)

        key = AGENT_VERSION.key(scope, agent)
        done = await self._store.transact(
            change, actor=f"agent/{domain}/{agent}"[:200], action="releases.checked_in", touches=[key]
        )
        self._tell(domain, agent, before.status if before is not None else None, done.value.status)
        return done.value

    def _tell(self, domain: str, agent: str, before: AgentHello | None, after: AgentHello | None) -> None:
        assert after is not None
        if before is None or before.version != after.version:
            log.info("releases.agent_runs", domain=domain, agent=agent, version=after.version)
        if after.failed_reason and (before is None or before.failed_at_ns != after.failed_at_ns):
            self.failures[domain] += 1
            log.warning(
                "releases.agent_went_back",
                domain=domain,
                agent=agent,
                version=after.failed_version,
                reason=after.failed_reason,
            )

    async def run_here(self) -> None:
        """On each of several servers: say whom it heard, and learn whom the others did, until cancelled."""
        if self._everywhere is None:
            return
        async with Boundary() as tasks:
            tasks.keep("releases/heard", self._everywhere.run_here)
            tasks.keep("releases/learn", partial(self._learn, self._everywhere))

    async def _learn(self, everywhere: LastSeen) -> NoReturn:
        while True:
            try:
                ages = await everywhere.read()
            except FleetplaneError as error:  # whoever was online stays so until its time is over
                log.warning("releases.not_learned", error=error.message)
            else:
                now = self._clock.monotonic()
                for name, age in ages.items():
                    domain, _, agent = name.partition("/")
                    at = (domain, agent)
                    self._heard[at] = max(now - age, self._heard.get(at, -math.inf))
            await self._clock.sleep(LEARN_SECONDS)

    async def sweep(self) -> int:
        """Forget agents that their domains do not know any more; how many that were."""
        gone = [
            (agents_scope(domain), one.name)
            for domain, register in self.registers.items()
            for one in self._store.list(AGENT_VERSION, agents_scope(domain))
            if register.card(one.name) is None
        ]
        if not gone:
            return 0

        def change(draft: Draft) -> None:
            for scope, name in gone:
                if draft.get(AGENT_VERSION, scope, name) is not None:
                    draft.delete(AGENT_VERSION, scope, name)

        keys = [AGENT_VERSION.key(scope, name) for scope, name in gone]
        await self._store.transact(change, actor="system/releases", action="releases.forgotten", touches=keys)
        return len(gone)


def _read(request: pb.CheckInRequest) -> AgentHello:
    version_key(request.version)
    if len(request.nonce) != documents.NONCE_BYTES:
        raise InvalidArgument(f"must have {documents.NONCE_BYTES} bytes", field="nonce")
    if len(request.kept) > KEPT_LIMIT:
        raise InvalidArgument(f"has more than {KEPT_LIMIT} versions", field="kept")
    for version in request.kept:
        version_key(version, field="kept")
    failed = request.failed
    return AgentHello(
        version=request.version,
        since_ns=0,
        kept=tuple(request.kept),
        can_upgrade=request.can_upgrade,
        python=request.python[:64],
        platform=request.platform[:64],
        failed_version=failed.version[:64],
        failed_attempt=failed.attempt,
        failed_reason=failed.reason[:TEXT_LIMIT],
    )


def _differs(before: AgentHello | None, said: AgentHello) -> bool:
    return before is None or _merged(before, said, 0) != before


def _merged(before: AgentHello | None, said: AgentHello, now_ns: int) -> AgentHello:
    """What is stored: what was said, with the times since when it is so."""
    same_version = before is not None and before.version == said.version
    same_failure = before is not None and (
        (before.failed_version, before.failed_attempt, before.failed_reason)
        == (said.failed_version, said.failed_attempt, said.failed_reason)
    )
    failed_at_ns = now_ns if said.failed_reason else 0
    return msgspec.structs.replace(
        said,
        since_ns=before.since_ns if before is not None and same_version else now_ns,
        failed_at_ns=before.failed_at_ns if before is not None and same_failure else failed_at_ns,
    )
