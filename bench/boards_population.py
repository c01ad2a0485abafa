"""Join tokens for the boards' figures, an operator and a controller's certificate, made in a data directory.

They are made before its server starts, with the server's own code; the boards register over the network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fleetplane.domains.boards.joining import credentials
from fleetplane.domains.boards.joining.join_tokens import JoinTokens
from fleetplane.domains.boards.kinds import SCOPE
from fleetplane.domains.boards.server import BLUEPRINT
from fleetplane.kernel.access import Role
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.identity import Authority, MasterKey
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.store import Store, StoreSettings

ACTOR = "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    tokens: Sequence[str]
    operator: str
    """A token that may do anything with boards."""
    reader: str
    """Another, which may only look: what one may ask for in a minute is limited."""
    ca: bytes
    certificate: bytes
    key: bytes
    """Of a controller, whom boards answer."""


def prepared(data_dir: Path, boards: int) -> Population:
    data_dir.mkdir(mode=0o700, exist_ok=True)
    return asyncio.run(_prepare(data_dir, boards))


async def _prepare(data_dir: Path, boards: int) -> Population:
    clock = SystemClock()
    kinds = list(dict.fromkeys((*KERNEL_KINDS, *BLUEPRINT.kinds)))
    async with Store.open(StoreSettings(path=data_dir / "fleetplane.db"), kinds=kinds, clock=clock) as store:
        master = MasterKey.from_file(data_dir / "master.key", clock)
        authority = await Authority.load_or_create(store, master, clock)
        tokens = JoinTokens(store, authority, clock)
        made = await asyncio.gather(*(tokens.create(actor=ACTOR) for _ in range(boards)))
        operators = await Operators.load(store, master, clock)
        operator, reader = [
            await operators.tokens.create(role, roles=frozenset({Role(role)}), scope=SCOPE, actor=ACTOR)
            for role in ("boards.admin", "boards.viewer")
        ]
        certificate, key = credentials.issue_to_self(authority, "bench", days=1)
        return Population(
            tokens=[one.text for one in made],
            operator=operator,
            reader=reader,
            ca=authority.trust_pem,
            certificate=certificate,
            key=key,
        )
