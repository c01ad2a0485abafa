"""The daemons that were let in: finding them, and what operators change about them.

A tenant sees its own daemons and no others; whatever is not its own does not exist for it. In which
state a daemon is, is its stream's side to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec

from fleetplane.domains.edge.identity.tokens import blacklist, check_label
from fleetplane.domains.edge.kinds import (
    BLACKLISTED,
    EDGE_NODE,
    NODE_CLAIM,
    Desired,
    EdgeNode,
    NodeSpec,
    NodeState,
    NodeStatus,
    credential_name,
    principal_name,
    tenant_of,
    tenant_scope,
)
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Conflict, FailedPrecondition, InvalidArgument, NotFound
from fleetplane.kernel.identity.revocation import Revocations, revocation_key
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import Draft, Store

TAGS_LIMIT = 64
TAG_LIMIT = 64
"""Characters of one tag."""
ATTEMPTS = 3
"""Attempts at a change whose record changes concurrently, before the caller gets a conflict."""
SWEEP_BATCH = 256


def shown_name(node: EdgeNode) -> str:
    return node.spec.display_name or f"edge-{node.name[:8]}"


def found_node(store: Store, node_id: str) -> EdgeNode | None:
    """The node of this id in any tenant; None if it was revoked."""
    scope = store.claimed_by(EDGE_NODE, "", NODE_CLAIM, node_id)
    return store.get(EDGE_NODE, scope, node_id) if scope is not None else None


class Nodes:
    def __init__(self, store: Store, clock: Clock, revocations: Revocations) -> None:
        self._store = store
        self._clock = clock
        self._revocations = revocations

    def __repr__(self) -> str:
        return f"<Nodes {len(self._store.list(EDGE_NODE))}>"

    # Finding.

    def find(self, node_id: str) -> EdgeNode | None:
        """The node of this id in any tenant; None if it was revoked."""
        return found_node(self._store, node_id)

    def lookup(self, tenant: str, node_id: str) -> EdgeNode | None:
        """The node of this id in a tenant, also if it was revoked."""
        return self._store.get(EDGE_NODE, tenant_scope(tenant), node_id)

    def get(self, tenant: str, node_id: str) -> EdgeNode:
        found = self.lookup(tenant, node_id)
        if found is None:
            raise _not_found(node_id)
        return found

    def list(self, tenant: str | None = None) -> Sequence[EdgeNode]:
        """Nodes of one tenant or all, revoked ones included."""
        return self._store.list(EDGE_NODE, tenant_scope(tenant) if tenant is not None else "")

    # What operators change.

    async def set_tags(self, tenant: str, node_id: str, tags: Iterable[str], *, actor: str) -> EdgeNode:
        wanted = check_tags(tags)
        return await self._respecify(
            tenant, node_id, lambda _: {"tags": wanted}, actor=actor, action="edge.tag"
        )

    async def change_tags(
        self, tenant: str, node_id: str, *, add: Iterable[str] = (), remove: Iterable[str] = (), actor: str
    ) -> EdgeNode:
        adding, removing = check_tags(add), frozenset(remove)

        def change(spec: NodeSpec) -> dict[str, object]:
            return {"tags": check_tags(tag for tag in (*spec.tags, *adding) if tag not in removing)}

        return await self._respecify(tenant, node_id, change, actor=actor, action="edge.tag")

    async def rename(self, tenant: str, node_id: str, name: str, *, actor: str) -> EdgeNode:
        wanted = check_label(name, field="name")
        if not wanted:
            raise InvalidArgument("name must not be blank", field="name")
        return await self._respecify(
            tenant, node_id, lambda _: {"display_name": wanted}, actor=actor, action="edge.rename"
        )

    async def amend(
        self,
        tenant: str,
        node_id: str,
        *,
        rename: str | None = None,
        tags: Iterable[str] | None = None,
        add: Iterable[str] = (),
        remove: Iterable[str] = (),
        actor: str,
    ) -> EdgeNode:
        """All of these at once, or none of them."""
        name = None if rename is None else check_label(rename, field="name")
        if name is not None and not name:
            raise InvalidArgument("name must not be blank", field="name")
        wanted = None if tags is None else check_tags(tags)
        adding, removing = check_tags(add), frozenset(remove)

        def change(spec: NodeSpec) -> dict[str, object]:
            kept = (*(spec.tags if wanted is None else wanted), *adding)
            return {
                "display_name": spec.display_name if name is None else name,
                "tags": check_tags(tag for tag in kept if tag not in removing),
            }

        return await self._respecify(tenant, node_id, change, actor=actor, action="edge.amend")

    async def set_desired(
        self, tenant: str, node_id: str, desired: Desired, *, grace_seconds: float = 0.0, actor: str
    ) -> EdgeNode:
        if grace_seconds < 0:
            raise InvalidArgument("must not be negative", field="grace_seconds")
        wanted = {"desired": desired, "shutdown_grace_seconds": grace_seconds}
        return await self._respecify(
            tenant, node_id, lambda _: wanted, actor=actor, action=f"edge.{desired.value}"
        )

    async def _respecify(
        self,
        tenant: str,
        node_id: str,
        changed: Callable[[NodeSpec], dict[str, object]],
        *,
        actor: str,
        action: str,
    ) -> EdgeNode:
        scope = tenant_scope(tenant)

        def change(draft: Draft) -> EdgeNode:
            node = draft.get(EDGE_NODE, scope, node_id)
            if node is None:
                raise _not_found(node_id)
            if node.spec.revoked_at_ns is not None:
                raise FailedPrecondition("the node was revoked", hint="readmit it first")
            spec = msgspec.structs.replace(node.spec, **changed(node.spec))
            return draft.put(EDGE_NODE, scope, node_id, spec=spec, status=node.status)

        done = await self._store.transact(
            change, actor=actor, action=action, touches=[EDGE_NODE.key(scope, node_id)]
        )
        return done.value

    # Revoking.

    async def revoke(self, tenant: str, node_id: str, *, reason: str, actor: str) -> EdgeNode:
        """Take a daemon's place away. When this returns its token is refused and its stream is cut.

        The record stays, for those who ask what became of it. Revoking again changes nothing.
        """
        principal = credential_name(tenant, node_id)
        for _ in range(ATTEMPTS):
            node = self.get(tenant, node_id)
            try:
                done = await self._store.transact(
                    partial(self._revoke, node=node, reason=reason, actor=actor),
                    actor=actor,
                    action="edge.revoke",
                    touches=_touched(node, principal),
                )
            except Conflict:
                await self._store.settled(EDGE_NODE, node.scope, node_id)
                continue
            self._announce(done.value)
            return done.value
        raise Conflict("the node's token was replaced while it was being revoked")

    async def revoke_tenant(self, tenant: str, *, reason: str, actor: str) -> int:
        """Take all of a tenant's daemons their places away, in one transaction; how many there were."""
        for _ in range(ATTEMPTS):
            nodes = [node for node in self.list(tenant) if node.spec.revoked_at_ns is None]
            if not nodes:
                return 0
            touches: set[Key] = set()
            for node in nodes:
                touches |= set(_touched(node, credential_name(tenant, node.name)))
            try:
                done = await self._store.transact(
                    partial(self._revoke_all, nodes=nodes, reason=reason, actor=actor),
                    actor=actor,
                    action="edge.revoke_tenant",
                    touches=touches,
                )
            except Conflict:
                await self._store.settled(EDGE_NODE)
                continue
            for node in done.value:
                self._announce(node)
            return len(nodes)
        raise Conflict("nodes changed while they were being revoked")

    def _revoke_all(
        self, draft: Draft, nodes: Sequence[EdgeNode], reason: str, actor: str
    ) -> Sequence[EdgeNode]:
        return [self._revoke(draft, node=node, reason=reason, actor=actor) for node in nodes]

    def _revoke(self, draft: Draft, *, node: EdgeNode, reason: str, actor: str) -> EdgeNode:
        current = draft.get(EDGE_NODE, node.scope, node.name)
        if current is None:
            raise _not_found(node.name)
        if current.spec.revoked_at_ns is not None:
            return current
        if current.spec.token_id != node.spec.token_id:
            raise Conflict("the node's token was replaced")
        if current.spec.token_id:
            blacklist(
                draft,
                current.spec.token_id,
                node_id=node.name,
                reason="revoked",
                expires_at_ns=current.spec.token_expires_at_ns,
            )
        draft.release(EDGE_NODE, "", NODE_CLAIM, node.name, node.scope)
        principal = credential_name(tenant_of(node.scope), node.name)
        self._revocations.revoke_within(draft, principal, reason=reason, actor=actor)
        spec = msgspec.structs.replace(
            current.spec, revoked_at_ns=draft.now_ns, previous_key_until_ns=0, earlier=()
        )
        status = current.status or NodeStatus(state=NodeState.REVOKED, since_ns=draft.now_ns)
        status = msgspec.structs.replace(status, state=NodeState.REVOKED, since_ns=draft.now_ns)
        return draft.put(EDGE_NODE, node.scope, node.name, spec=spec, status=status)

    def _announce(self, node: EdgeNode) -> None:
        self._revocations.announce(credential_name(tenant_of(node.scope), node.name))

    # Readmitting.

    async def readmit(self, tenant: str, node_id: str, *, actor: str) -> EdgeNode:
        """Let a revoked node enrol again. Until it does it has no credentials: its former key and token
        stay worthless."""
        scope, principal = tenant_scope(tenant), credential_name(tenant, node_id)
        before = principal_name(node_id)  # how earlier versions named what they revoked

        def change(draft: Draft) -> EdgeNode:
            node = draft.get(EDGE_NODE, scope, node_id)
            if node is None:
                raise _not_found(node_id)
            if node.spec.revoked_at_ns is None:
                raise FailedPrecondition("the node is not revoked")
            if draft.claimed_by(EDGE_NODE, "", NODE_CLAIM, node_id) not in (None, scope):
                raise FailedPrecondition("the node belongs to another tenant by now")
            for name in (principal, before):
                self._revocations.lift_within(draft, name)
            draft.claim(EDGE_NODE, "", NODE_CLAIM, node_id, scope)
            spec = msgspec.structs.replace(
                node.spec,
                revoked_at_ns=None,
                public_key=b"",
                token_id="",
                token_expires_at_ns=0,
                previous_public_key=b"",
                previous_token_id="",
                previous_key_until_ns=0,
                earlier=(),
                key_version=node.spec.key_version + 1,
                desired=Desired.ACTIVE,
            )
            status = node.status or NodeStatus(state=NodeState.DISCONNECTED, since_ns=draft.now_ns)
            status = msgspec.structs.replace(status, state=NodeState.DISCONNECTED, since_ns=draft.now_ns)
            return draft.put(EDGE_NODE, scope, node_id, spec=spec, status=status)

        done = await self._store.transact(
            change,
            actor=actor,
            action="edge.readmit",
            touches=[EDGE_NODE.key(scope, node_id), revocation_key(principal), revocation_key(before)],
        )
        return done.value

    # Housekeeping.

    async def sweep(self, *, actor: str = "system/edge") -> int:
        """Forget blacklisted tokens that have ended by themselves; how many."""
        now_ns = self._clock.now_ns()
        ended = [found.name for found in self._store.list(BLACKLISTED) if found.spec.expires_at_ns < now_ns]
        for start in range(0, len(ended), SWEEP_BATCH):
            names = ended[start : start + SWEEP_BATCH]
            await self._store.transact(
                partial(_forget, names=names),
                actor=actor,
                action="edge.sweep_blacklist",
                touches=[BLACKLISTED.key("", name) for name in names],
            )
        return len(ended)


def _touched(node: EdgeNode, principal: str) -> list[Key]:
    """What revoking a node touches."""
    token = [BLACKLISTED.key("", node.spec.token_id)] if node.spec.token_id else []
    return [node.key, revocation_key(principal), *token]


def _forget(draft: Draft, names: list[str]) -> None:
    for name in names:
        if draft.get(BLACKLISTED, "", name) is not None:
            draft.delete(BLACKLISTED, "", name)


def check_tags(tags: Iterable[str]) -> tuple[str, ...]:
    """Each once, in the order given."""
    found = tuple(dict.fromkeys(tags))
    if len(found) > TAGS_LIMIT:
        raise InvalidArgument(f"{len(found)} tags, more than {TAGS_LIMIT}", field="tags")
    for tag in found:
        if not tag or len(tag) > TAG_LIMIT or not tag.isprintable() or any(c in ", =" for c in tag):
            raise InvalidArgument(
                f"{tag[:80]!r} is no tag: 1 to {TAG_LIMIT} printable characters without blank, comma or =",
                field="tags",
            )
    return found


def _not_found(node_id: str) -> NotFound:
    return NotFound(f"there is no node {node_id[:80]!r}")
