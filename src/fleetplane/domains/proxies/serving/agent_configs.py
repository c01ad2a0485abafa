"""An agent's configuration as it goes out, built once for all agents that get the same."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from fleetplane.domains.proxies import wire
from fleetplane.domains.proxies.rules.configuration import AgentConfig
from fleetplane.domains.proxies.rules.deployment import WantedVersion
from fleetplane.domains.proxies.serving.private_keys import Vault
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb

RESPONDER_VARIABLE = "NXMESH_ACME_RESPONDER"
WORKSPACE_VARIABLE = "NXMESH_ACME_WORKSPACE"
"""Whose challenges may be answered through the agents that get this."""
PREPARED_LIMIT = 32
"""Different configurations kept ready. They hold private keys, so not more than are being sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    update: pb.ConfigUpdate
    wanted: WantedVersion


class Configs:
    def __init__(self, vault: Vault, *, challenge_address: str = "") -> None:
        """`challenge_address` is where agents pass the challenges of authorities on to; empty: nowhere."""
        self._vault = vault
        self._challenge_address = challenge_address
        self._ready: OrderedDict[tuple[int, str, str], Prepared] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Configs ready={len(self._ready)}>"

    async def prepare(self, config: AgentConfig, *, workspace: str) -> Prepared:
        key = (config.version, config.digest, workspace)
        ready = self._ready.get(key)
        if ready is None:
            keys = {
                name: await self._vault.private_key(name, part.fingerprint)
                for name, part in config.certificates.items()
            }
            update = wire.config_update(config, keys, self._variables(workspace))
            wanted = WantedVersion(
                version=config.version, config_id=config.config_id, checksum=wire.checksum(update)
            )
            self._ready[key] = ready = Prepared(update=update, wanted=wanted)
            if len(self._ready) > PREPARED_LIMIT:
                self._ready.popitem(last=False)
        return ready

    def _variables(self, workspace: str) -> dict[str, str]:
        if not self._challenge_address:
            return {}
        return {RESPONDER_VARIABLE: self._challenge_address, WORKSPACE_VARIABLE: workspace}
