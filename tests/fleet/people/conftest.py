"""A whole server for tests of its doors."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from support.fleet.one_door import EMAIL, PASSWORD, SECONDS, Site
from support.shared.server_process import running_server


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("d")
    settings = ("--set", f"proxies.admin_email={EMAIL}", "--set", "listeners.operator.tokens=true")
    with (
        running_server(folder, *settings, admin_password=PASSWORD) as server,
        httpx.Client(timeout=SECONDS) as http,
    ):
        yield Site(folder, server, http)


@pytest.fixture(scope="module")
def owner(site: Site) -> str:
    return site.token("everything", "owner")
