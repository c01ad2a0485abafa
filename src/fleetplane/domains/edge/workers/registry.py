"""The cluster's workers: nodes that can be dialled and run executions.

A call of theirs is an envelope around a serialized inner message: the token must be ours and theirs,
and the signature by the key that the token is bound to, over the message and what it is for: this method
of this server, about now, once. What the inner message says about its sender must agree with that, and a
worker acts for its tenants and no others. Heartbeats stay in memory; the record changes when a worker's
state does. Where several servers share a database, a worker is silent only if none of them heard it.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from google.protobuf.message import DecodeError, Message

from fleetplane.domains.edge.expiring_records import ExpiringRecords
from fleetplane.domains.edge.identity.policy import IdentityPolicy
from fleetplane.domains.edge.identity.tokens import EDGE_ROLE, NodeClaims, NodeTokens, thumbprint
from fleetplane.domains.edge.kinds import (
    ROUTE,
    WORKER,
    NodeResources,
    RouteSpec,
    Worker,
    WorkerRole,
    WorkerSpec,
    WorkerState,
    WorkerStatus,
    worker_scope,
)
from fleetplane.domains.edge.nodes.last_heard import LastHeard
from fleetplane.domains.edge.wire import envelope
from fleetplane.domains.edge.workers.forwarding import (
    RUNS_EXECUTIONS,
    WorkerReport,
    preferred,
    state_of,
    suffices,
)
from fleetplane.fleet.freeze import Freezes
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from fleetplane.kernel.identity.enrolment import Redemption, digest, redeem
from fleetplane.kernel.stalls import StallDetector
from fleetplane.kernel.store import Draft, Store
from fleetplane.rpc import Rate
from fleetplane.rpc.methods import RateLimiter

InnerT = TypeVar("InnerT", bound=Message)
CALLS_LIMIT = 65_536
"""Calls remembered; about 200 bytes each. A thousand workers make a call every 5 s for 300 s."""
CALLS = "edge-worker-call"
"""The purpose of claims on calls that change something."""
CLAIM_RATE = Rate(per_second=20.0, burst=200)
"""Of one worker at one server, where calls that change something are claimed."""
ACTOR = "system/edge"
HEARD = "edge-workers"
SAME_NS = 1_000_000_000
"""Two moments this close are of one heartbeat: the database's clock is known to some milliseconds."""
LEADS = frozenset({WorkerRole.CONTROLLER, WorkerRole.HYBRID})

CLUSTER_ID = str(uuid.uuid5(uuid.NAMESPACE_DNS, "aegis-cluster"))
CLUSTER_NAME = "aegis-cluster"
ROUTES_LIMIT = 16_384
"""Executions whose worker is remembered between routing and forwarding; about 200 bytes each."""


ROUTE_SECONDS = 3600.0
"""How long other servers know of a route: executions are forwarded right after."""


class EdgeWorkers:
    def __init__(
        self, store: Store, clock: Clock, tokens: NodeTokens, policy: IdentityPolicy, *, target: str
    ) -> None:
        """`target` is what workers call this server: its public key in hexadecimal."""
        self._target = target
        self._used: OrderedDict[bytes, int] = OrderedDict()
        """Signatures of calls, and when they are too old to be taken anyway."""
        self._store = store
        self._clock = clock
        self._freezes = Freezes(store, clock)
        self._tokens = tokens
        self._policy = policy
        self._reports: dict[str, WorkerReport] = {}
        """By node, as they came to this server; only of workers that are registered."""
        self.heard = LastHeard(store, clock, channel=HEARD)
        self.attention: StallDetector | None = None
        """Whether this server was listening, where somebody looks after that."""
        self._claiming = RateLimiter(CLAIM_RATE)
        self._turn = 0
        self._routes: OrderedDict[str, str] = OrderedDict()
        self.routes = ExpiringRecords(store, ROUTE, limit=ROUTES_LIMIT) if store.shared else None
        """The same for other servers."""

    def __repr__(self) -> str:
        return f"<Workers heard={len(self._reports)}>"

    # Who calls.

    def open(
        self, sealed: pb.SealNodeEnvelope | None, inner: type[InnerT], *, method: str
    ) -> tuple[Worker, InnerT]:
        """The worker that sealed a message for this method, and the message."""
        if sealed is None or not sealed.ByteSize():
            raise InvalidArgument("the request has no envelope", field="envelope")
        claims = self._tokens.verify_node(sealed.node_security_token)
        worker = self._holder(claims)
        self._check_purpose(sealed, method)
        message = envelope.call_message(
            method,
            target=self._target,
            node_id=worker.name,
            issued_at_ns=sealed.issued_at_ns,
            payload=sealed.payload,
        )
        if not envelope.verify(worker.spec.public_key, sealed.signature, message):
            raise Unauthenticated("the signature is wrong", details={"cause": "signature"})
        self._take_once(sealed)
        try:
            return worker, inner.FromString(sealed.payload)
        except DecodeError as error:
            raise InvalidArgument(f"the payload cannot be read: {error}", field="envelope.payload") from error

    def _check_purpose(self, sealed: pb.SealNodeEnvelope, method: str) -> None:
        if sealed.method != method:
            said = f"for {sealed.method[:80]}" if sealed.method else "for no method"
            raise Unauthenticated(
                f"the envelope is {said}, and not for {method}", details={"cause": "method"}
            )
        if sealed.target.lower() != self._target:
            raise Unauthenticated("the envelope is for another server", details={"cause": "target"})
        if abs(self._clock.now_ns() - sealed.issued_at_ns) > self._policy.skew_seconds * 1e9:
            raise Unauthenticated("the envelope's time is too far from now", details={"cause": "stale"})

    def _take_once(self, sealed: pb.SealNodeEnvelope) -> None:
        now_ns = self._clock.now_ns()
        while self._used:
            oldest, until_ns = next(iter(self._used.items()))
            if until_ns > now_ns and len(self._used) < CALLS_LIMIT:
                break
            del self._used[oldest]
        if sealed.signature in self._used:
            raise _used_before()
        self._used[sealed.signature] = sealed.issued_at_ns + round(self._policy.skew_seconds * 1e9)

    def _holder(self, claims: NodeClaims) -> Worker:
        if claims.role == EDGE_ROLE:
            raise Unauthenticated("Node not registered", details={"cause": "role"})
        worker = self._store.get(WORKER, "", claims.node_id)
        if worker is None:
            raise Unauthenticated("Node not attested", hint="attest, and answer the challenge")
        if claims.role != worker.spec.role or claims.thumbprint != thumbprint(worker.spec.public_key):
            raise Unauthenticated("the token is not of the node's current key", details={"cause": "key"})
        return worker

    async def claim(self, worker: Worker, sealed: pb.SealNodeEnvelope) -> None:
        """Use a verified call up for all servers of a shared database: what it changes happens once.

        Each is kept for as long as it could be shown again, so no worker may make any number of them.
        """
        if not self._store.shared:
            return
        wait_seconds = self._claiming.take(worker.name, self._clock.monotonic())
        if wait_seconds > 0:
            raise ResourceExhausted(
                f"worker {worker.name} changes something more than {CLAIM_RATE.per_second:g} times a second",
                hint=f"try again in {wait_seconds:.1f} seconds",
            )
        used = digest(sealed.signature)
        until_ns = sealed.issued_at_ns + round(self._policy.skew_seconds * 1e9)
        done = await self._store.transact(
            lambda draft: redeem(
                draft, purpose=CALLS, token_digest=used, key_digest=used, expires_at_ns=until_ns
            ),
            actor=ACTOR,
            action="edge.worker_call",
            touches=(),
        )
        if done.value is Redemption.RETRY:
            raise _used_before()

    def registered(
        self, sealed: pb.SealNodeEnvelope | None, inner: type[InnerT], *, method: str
    ) -> tuple[Worker, InnerT]:
        worker, said = self.open(sealed, inner, method=method)
        if worker.spec.registered_at_ns is None:
            raise Unauthenticated("Node not registered", hint="register first")
        return worker, said

    # Membership.

    async def register(
        self, worker: Worker, *, capabilities: NodeResources, tags: tuple[str, ...], address: str
    ) -> Worker:
        now_ns = self._clock.now_ns()
        self._reports[worker.name] = WorkerReport(at_ns=now_ns, state=WorkerState.ACTIVE)
        self.heard.note(worker.name)

        def change(spec: WorkerSpec) -> dict[str, object]:
            return {
                "capabilities": capabilities,
                "tags": tags,
                "grpc_address": address or spec.grpc_address,
                "registered_at_ns": spec.registered_at_ns or now_ns,
            }

        status = WorkerStatus(state=WorkerState.ACTIVE, since_ns=now_ns, last_heartbeat_at_ns=now_ns)
        return await self._respecify(
            worker.name, change, actor=_actor(worker), action="edge.register_worker", status=status
        )

    async def heartbeat(self, worker: Worker, report: WorkerReport) -> bool:
        """Record a worker's report; returns whether the worker has to drain."""
        self._reports[worker.name] = report
        self.heard.note(worker.name)
        state = self.state(worker)
        if worker.status is None or worker.status.state is not state:
            await self._note(worker, state)
        return (
            worker.spec.draining
            and report.state is WorkerState.ACTIVE
            and self._freezes.holding("edge", worker_scope(worker.name)) is None
        )

    async def _note(self, worker: Worker, state: WorkerState, **changed: object) -> None:
        now_ns = self._clock.now_ns()

        def change(draft: Draft) -> None:
            current = draft.get(WORKER, "", worker.name)
            if current is None:
                return
            before = current.status or WorkerStatus(state=state, since_ns=now_ns)
            since_ns = before.since_ns if before.state is state else now_ns
            status = msgspec.structs.replace(
                before, state=state, since_ns=since_ns, last_heartbeat_at_ns=now_ns, **changed
            )
            draft.put(WORKER, "", worker.name, spec=current.spec, status=status)

        await self._store.transact(
            change, actor=_actor(worker), action="edge.worker_status", touches=[worker.key]
        )

    async def deregister(self, worker: Worker) -> None:
        self._reports.pop(worker.name, None)
        await self._respecify(
            worker.name,
            lambda _: {"registered_at_ns": None},
            actor=_actor(worker),
            action="edge.deregister_worker",
        )

    async def synced(self, worker: Worker, version: str) -> None:
        """Write down which configuration a worker was sent."""
        if worker.status is None or worker.status.config_version != version:
            await self._note(worker, self.state(worker), config_version=version)

    # Operators.

    async def set_draining(self, node_id: str, draining: bool, *, actor: str) -> Worker:
        return await self._respecify(
            node_id, lambda _: {"draining": draining}, actor=actor, action="edge.drain_worker"
        )

    async def _respecify(
        self,
        node_id: str,
        changed: Callable[[WorkerSpec], dict[str, object]],
        *,
        actor: str,
        action: str,
        status: WorkerStatus | None = None,
    ) -> Worker:
        def change(draft: Draft) -> Worker:
            current = draft.get(WORKER, "", node_id)
            if current is None:
                raise NotFound(f"there is no worker {node_id[:80]!r}")
            spec = msgspec.structs.replace(current.spec, **changed(current.spec))
            return draft.put(WORKER, "", node_id, spec=spec, status=status or current.status)

        done = await self._store.transact(
            change, actor=actor, action=action, touches=[WORKER.key("", node_id)]
        )
        return done.value

    # Looking.

    def find(self, node_id: str) -> Worker | None:
        return self._store.get(WORKER, "", node_id)

    def peers(self) -> Sequence[Worker]:
        """Everyone who is registered."""
        return [one for one in self._store.list(WORKER) if one.spec.registered_at_ns is not None]

    def report(self, worker: Worker) -> WorkerReport | None:
        """Its last heartbeat; after a restart of the server, what is written down of it.

        Of one that another server heard later, its time and the state that was written down then.
        """
        here, status = self._reports.get(worker.name), worker.status
        if status is None:
            return here
        elsewhere_ns = self.heard.at_ns(worker.name) or 0
        if here is not None and elsewhere_ns <= here.at_ns + SAME_NS:
            return here
        at_ns = max(elsewhere_ns, status.last_heartbeat_at_ns or 0)
        return WorkerReport(at_ns=at_ns, state=status.state) if at_ns else here

    def state(self, worker: Worker) -> WorkerState:
        """In which it is now; time in which this server heard nobody is not counted as its silence."""
        report, now_ns = self.report(worker), self._clock.now_ns()
        stale_seconds = self._policy.worker_stale_seconds
        if report is not None and self.attention is not None and worker.name in self._reports:
            counts_from_ns = self.attention.term(stale_seconds).fair_ns(report.at_ns, now_ns=now_ns)
            report = msgspec.structs.replace(report, at_ns=counts_from_ns)
        if report is not None and not self.heard.is_settled(stale_seconds):
            report = msgspec.structs.replace(report, at_ns=now_ns)  # others may have heard it
        return state_of(worker, report, now_ns=now_ns, stale_seconds=stale_seconds)

    # Executions.

    def route(self, execution_id: str, needed: NodeResources, tags: Sequence[str], *, tenant: str) -> Worker:
        """The next worker that can take an execution; forwarding it later finds the same one."""
        if not execution_id or len(execution_id) > 128:
            raise InvalidArgument("must have 1 to 128 characters", field="execution_id")
        fitting = [worker for worker in self.peers() if self._takes(worker, needed, tenant)]
        if not fitting:
            raise Unavailable("no worker that is active and fresh can take the execution")
        choice = preferred(fitting, tags)
        self._turn += 1
        chosen = choice[self._turn % len(choice)]
        self._routes[execution_id] = chosen.name
        self._routes.move_to_end(execution_id)
        if len(self._routes) > ROUTES_LIMIT:
            self._routes.popitem(last=False)
        return chosen

    async def tell_route(self, execution_id: str, chosen: Worker) -> None:
        """Let other servers forward an execution to the worker that was chosen here."""
        if self.routes is None:
            return
        await self.routes.keep(
            digest(execution_id),
            lambda now_ns: RouteSpec(worker=chosen.name, expires_at_ns=now_ns + round(ROUTE_SECONDS * 1e9)),
            actor=ACTOR,
            action="edge.route",
        )

    def _takes(self, worker: Worker, needed: NodeResources, tenant: str) -> bool:
        report = self.report(worker)
        fresh_ns = self._policy.worker_fresh_seconds * 1e9
        return (
            worker.spec.role in RUNS_EXECUTIONS
            and worker.spec.serves(tenant)
            and bool(worker.spec.grpc_address)
            and report is not None
            and self._clock.now_ns() - report.at_ns < fresh_ns
            and self.state(worker) is WorkerState.ACTIVE
            and suffices(worker.spec.capabilities, needed)
        )

    def routed(self, execution_id: str, *, tenant: str) -> Worker:
        """The worker that an execution was routed to, or one that could take it."""
        named = self._routes.get(execution_id)
        if named is None and self.routes is not None:
            route = self.routes.get(digest(execution_id))
            named = route.worker if route is not None else None
        worker = self.find(named or "")
        if worker is not None and self._takes(worker, NodeResources(), tenant):
            return worker
        return self.route(execution_id, NodeResources(), (), tenant=tenant)


def must_be(worker: Worker, node_id: str) -> None:
    """Refuse a message that speaks of another node than the one that sealed it."""
    if node_id.lower() != worker.name:
        raise PermissionDenied("the message is about another node than its sender", field="node_id")


def must_lead(worker: Worker) -> None:
    """Refuse what only the cluster's controllers may ask for."""
    if worker.spec.role not in LEADS:
        raise PermissionDenied("only controllers may do this")


def must_serve(worker: Worker, tenant: str) -> None:
    """Refuse what concerns a tenant that the worker does not act for."""
    if not worker.spec.serves(tenant):
        whose = f"tenant {tenant!r}" if tenant else "all tenants"
        raise PermissionDenied(f"this node does not act for {whose}", hint="its token names its tenants")


def _used_before() -> Unauthenticated:
    return Unauthenticated("the envelope was used before", details={"cause": "replayed"})


def _actor(worker: Worker) -> str:
    return f"worker/{worker.name}"
