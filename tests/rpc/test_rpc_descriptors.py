from __future__ import annotations

import pytest

from fleetplane.rpc.descriptors import CONNECTIONS, FEWEST, RESERVED, connections_within


@pytest.mark.parametrize(
    ("descriptors", "listeners", "each"),
    [(256, 2, 64), (1024, 8, 112), (1_000_000, 8, CONNECTIONS), (RESERVED, 2, FEWEST), (20, 2, FEWEST)],
)
def test_connections_of_all_listeners_fit_beside_what_else_is_open(
    descriptors: int, listeners: int, each: int
) -> None:
    assert connections_within(descriptors, listeners) == each
