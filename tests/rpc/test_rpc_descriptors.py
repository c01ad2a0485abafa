from __future__ import annotations

import pytest

from fleetplane.kernel.errors import SettingsError
from fleetplane.rpc.listening.sockets import CONNECTIONS, FEWEST, RESERVED, connections_within


@pytest.mark.parametrize(
    ("descriptors", "listeners", "each"),
    [(256, 2, 64), (1024, 8, 112), (1_000_000, 8, CONNECTIONS), (RESERVED, 2, FEWEST), (20, 2, FEWEST)],
)
def test_connections_of_all_listeners_fit_beside_what_else_is_open(
    descriptors: int, listeners: int, each: int
) -> None:
    assert connections_within(descriptors, [0] * listeners) == [each] * listeners


def test_a_listener_gets_as_many_connections_as_it_wants_and_the_others_share_the_rest() -> None:
    assert connections_within(20_000, [0, 11_000, 0]) == [4436, 11_000, 4436]
    assert sum(connections_within(20_000, [0, 11_000, 0])) + RESERVED <= 20_000


def test_a_listener_may_want_more_than_others_get_by_themselves() -> None:
    assert connections_within(1_000_000, [0, 50_000]) == [CONNECTIONS, 50_000]


def test_wanting_more_connections_than_files_can_be_open_is_refused_in_words() -> None:
    with pytest.raises(SettingsError, match="want 11000 connections, and this process may have 4096 files"):
        connections_within(4096, [0, 11_000])
    with pytest.raises(SettingsError, match="want 1000 connections"):
        connections_within(RESERVED + 1000, [0, 1000])  # nothing would be left for the other
