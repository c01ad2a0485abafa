"""Settings of boards: lists of numbers from every source, and that they reach the domain."""

from __future__ import annotations

import pytest

from fleetplane import settings
from fleetplane.domains.boards.settings import BoardSettings
from fleetplane.kernel.errors import SettingsError


def test_a_list_of_numbers_is_read_from_the_environment_and_from_flags() -> None:
    loaded = settings.load(config=None, environment={"FLEETPLANE_BOARDS__UNPROTECTED_PINS": "2, 3"})
    assert loaded.of(BoardSettings).unprotected_pins == (2, 3)
    loaded = settings.load(config=None, environment={}, flags={"boards.unprotected_pins": "14"})
    assert loaded.of(BoardSettings).unprotected_pins == (14,)


@pytest.mark.parametrize(
    ("key", "value"),
    [("boards.unprotected_pins", "two"), ("boards.requests_per_minute", "0"), ("boards.agent_port", "x")],
)
def test_what_is_no_number_is_named(key: str, value: str) -> None:
    with pytest.raises(SettingsError, match="boards"):
        settings.load(config=None, environment={}, flags={key: value})
