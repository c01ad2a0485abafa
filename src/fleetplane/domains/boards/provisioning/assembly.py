"""The part of the boards domain that provisions, put together."""

from __future__ import annotations

from fleetplane.domains.boards.core import BoardCore
from fleetplane.domains.boards.provisioning.engine import ProvisioningEngine, ProvisioningParts
from fleetplane.domains.boards.provisioning.operations import OPERATION, Operations
from fleetplane.domains.boards.provisioning.preflight import BoardPaths
from fleetplane.domains.boards.provisioning.secrets import ClusterSecrets, SshCredentials

KINDS = (OPERATION,)


class ProvisioningSide:
    def __init__(self, core: BoardCore, *, places: BoardPaths | None = None) -> None:
        """`places` is where things lie on boards; for tests, whose boards lie elsewhere."""
        kernel = core.kernel
        self.operations = Operations(kernel.store)
        self.credentials = SshCredentials(kernel.store, kernel.master)
        self.secrets = ClusterSecrets(kernel.store, kernel.master)
        self.engine = ProvisioningEngine(
            ProvisioningParts(
                boards=core.boards,
                clusters=core.clusters,
                operations=self.operations,
                credentials=self.credentials,
                secrets=self.secrets,
                clock=kernel.clock,
                places=places or BoardPaths(),
                policy=core.options.provisioning,
            )
        )

    def __repr__(self) -> str:
        return f"<ProvisioningSide {self.engine!r}>"

    async def run(self) -> None:
        """Until cancelled."""
        await self.engine.run()
