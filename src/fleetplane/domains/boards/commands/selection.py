"""Which boards are meant, in the selector language of all fleets and in the fields of `/exec`. Pure.

A board is selected by its labels, and by `id`, `name`, `role`, `status`, `cluster` (its number or its name),
`architecture` and `model`. Where a label has one of these names, `label/` stands before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from fleetplane.domains.boards.inventory.boards import status_of
from fleetplane.domains.boards.kinds import Board, BoardRole, BoardState
from fleetplane.fleet.selectors import LABEL, Facts, Requirement, Selector, facts_of
from fleetplane.kernel.errors import InvalidArgument


def facts(board: Board, clusters: Mapping[int, str]) -> Facts:
    """What a board can be selected by; `clusters` has the names of clusters."""
    spec = board.spec
    cluster = spec.cluster_id
    own: dict[str, str | tuple[str, ...]] = {
        "id": board.name,
        "name": spec.name,
        "role": spec.role,
        "status": status_of(board).state,
        "cluster": () if cluster is None else (str(cluster), clusters.get(cluster, str(cluster))),
        "architecture": spec.architecture,
        "model": spec.model,
    }
    return facts_of(board.labels, own)


class Selection(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """All that is given must fit; nothing given fits nobody, unless `all` is said."""

    node_ids: list[int] = []
    cluster_id: int | None = None
    role: BoardRole | None = None
    status: BoardState | None = None
    labels: dict[str, str] = {}
    all: bool = False

    def selector(self) -> Selector:
        """The selection as a selector of the one language."""
        if not self.all and not any((self.node_ids, self.cluster_id, self.role, self.status, self.labels)):
            raise InvalidArgument(
                "is required; name boards, a cluster or labels, or set `all`", field="target"
            )
        return Selector(tuple(self._requirements()))

    def _requirements(self) -> Iterator[Requirement]:
        if self.node_ids:
            yield Requirement("id", True, frozenset(map(str, self.node_ids)))
        if self.cluster_id is not None:
            yield Requirement("cluster", True, frozenset({str(self.cluster_id)}))
        if self.role is not None:
            yield Requirement("role", True, frozenset({self.role.value}))
        if self.status is not None:
            yield Requirement("status", True, frozenset({self.status.value}))
        for key, value in self.labels.items():
            yield Requirement(LABEL + key, True, frozenset({value}))
