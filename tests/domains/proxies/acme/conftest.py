from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.proxies.pebble_lab import Pebble, pebble


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pebble]:
    with pebble(tmp_path_factory.mktemp("pebble")) as found:
        yield found
