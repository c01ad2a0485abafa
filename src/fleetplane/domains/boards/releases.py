"""Who asks for releases of the boards' agent: a board, by its certificate."""

from __future__ import annotations

from typing import Any

from fleetplane.domains.boards.access import LISTENER, REPORT
from fleetplane.domains.boards.joining.credentials import board_of
from fleetplane.domains.boards.kinds import BOARD, SCOPE
from fleetplane.fleet.releases.agents_service import ReleaseAudience
from fleetplane.fleet.releases.check_in import AgentCard
from fleetplane.kernel.errors import PermissionDenied
from fleetplane.kernel.store import Store
from fleetplane.rpc import Authentication, CallContext, Needs


class BoardRegister:
    def __init__(self, store: Store) -> None:
        self._store = store

    def recognise(self, context: CallContext, name: str) -> str:  # noqa: ARG002  # its certificate says it
        """The board whose certificate it is; others who may report are no agents."""
        number = board_of(context.principal)
        if number is None:
            raise PermissionDenied("releases are for the agents of boards")
        return str(number)

    def card(self, agent: str) -> AgentCard | None:
        """A board by its number."""
        board = self._store.get(BOARD, SCOPE, agent)
        if board is None:
            return None
        own = {"role": str(board.spec.role), "architecture": board.spec.architecture}
        return AgentCard(title=board.spec.name, labels={**own, **board.labels})


def _register(_domain: Any, store: Store) -> BoardRegister:
    return BoardRegister(store)


AUDIENCE = ReleaseAudience(
    listener=LISTENER,
    authentication=Authentication.CERTIFICATE,
    permission=REPORT,
    register=_register,
    needs=Needs.WRITES,
)
