"""Enrolled daemons for the edge figures, written straight into a data directory before its server starts.

What enrolment leaves behind is written as enrolment writes it: a key of its own and a token for each
daemon, its record and its claim. Only the two calls by which a daemon gets there are left out; ten
thousand of them would take half a minute, and are not what is measured.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleetplane.domains.edge.identity.policy import IdentityPolicy, ServerKey
from fleetplane.domains.edge.identity.tokens import NodeTokens
from fleetplane.domains.edge.kinds import EDGE_NODE, NODE_CLAIM, NodeSpec, tenant_scope
from fleetplane.domains.edge.server import BLUEPRINT
from fleetplane.kernel.access import Role
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.store import Draft, Store, StoreSettings

TENANT = "bench"
TOKEN_SECONDS = 86_400.0
BATCH = 256
ACTOR = "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a daemon has on its disk."""

    node_id: str
    key: Ed25519PrivateKey
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    daemons: Sequence[Identity]
    operator: str
    """A token that may run commands on them."""


def enrolled(data_dir: Path, number: int) -> Population:
    data_dir.mkdir(mode=0o700, exist_ok=True)
    return asyncio.run(_enrol(data_dir, number))


async def _enrol(data_dir: Path, number: int) -> Population:
    clock = SystemClock()
    kinds = list(dict.fromkeys((*KERNEL_KINDS, *BLUEPRINT.kinds)))
    async with Store.open(StoreSettings(path=data_dir / "fleetplane.db"), kinds=kinds, clock=clock) as store:
        master = MasterKey.from_file(data_dir / "master.key", clock)
        key = await ServerKey.load_or_create(store, master)
        tokens = await NodeTokens.load(
            store,
            master,
            clock,
            issuer=IdentityPolicy().role.issuer,
            endpoint=lambda: "127.0.0.1:50056",
            server_public_key=key.public_key,
        )
        daemons: list[Identity] = []
        for start in range(0, number, BATCH):
            daemons += await _enrol_some(store, tokens, min(BATCH, number - start))
        operators = await Operators.load(store, master, clock)
        operator = await operators.tokens.create(
            "bench", roles=frozenset({Role("edge.admin")}), scope=tenant_scope(TENANT), actor=ACTOR
        )
    return Population(daemons=daemons, operator=operator)


async def _enrol_some(store: Store, tokens: NodeTokens, number: int) -> list[Identity]:
    made: list[Identity] = []
    specs: list[NodeSpec] = []
    for _ in range(number):
        node_id, key = str(uuid.uuid4()), Ed25519PrivateKey.generate()
        public = key.public_key().public_bytes_raw()
        issued = tokens.issue_node(node_id, TENANT, public, life_seconds=TOKEN_SECONDS)
        made.append(Identity(node_id=node_id, key=key, token=issued.token))
        specs.append(
            NodeSpec(
                display_name="",
                public_key=public,
                token_id=issued.jti,
                enrolled_at_ns=issued.issued_at_ns,
                token_expires_at_ns=issued.expires_at_ns,
            )
        )
    scope = tenant_scope(TENANT)

    def change(draft: Draft) -> None:
        for one, spec in zip(made, specs, strict=True):
            draft.claim(EDGE_NODE, "", NODE_CLAIM, one.node_id, scope)
            draft.put(EDGE_NODE, scope, one.node_id, spec=spec)

    touches = [EDGE_NODE.key(scope, one.node_id) for one in made]
    await store.transact(change, actor=ACTOR, action="edge.enrol", touches=touches)
    return made
