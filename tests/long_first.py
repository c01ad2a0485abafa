"""The tests that take longest begin first, one at each worker, so that no worker ends long after the others.

Workers are given equal stretches of the tests in their order, and take from each other when they have nothing
left; whoever is in the middle of a long test then is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

LONG = (
    "tests/faults/test_cluster_faults.py",
    "tests/faults/test_cluster_agents.py",
    "tests/faults/test_rolling_upgrade.py",
    "tests/docs/test_pages_run.py::test_the_page_about_boards",
    "tests/web/test_console_browser.py",
    "tests/web/test_console_pages.py",
    "tests/docs/test_pages_run.py::test_the_pages_that_use_the_demonstration",
    "tests/docs/test_pages_run.py::test_the_page_about_rollouts",
    "tests/domains/proxies/rest/test_proxy_openapi.py",
    "tests/domains/edge/test_edge_page.py",
    "tests/faults/test_instances_faults.py",
    "tests/faults/test_database_failover.py",
    "tests/test_run_script.py",
    "tests/fleet/releases/test_agents_upgraded.py",
    "tests/docs/test_pages_run.py::test_the_page_about_the_command_line",
    "tests/test_standby_reads.py",
    "tests/test_standby_grpc.py",
    "tests/bench/test_bench_edge.py",
    "tests/bench/test_bench_proxies.py",
    "tests/test_docs_site.py",
    "tests/docs/test_pages_run.py",
    "tests/domains/proxies/test_rollout_with_nginx.py",
    "tests/web/test_openapi_clients.py",
    "tests/test_presenting.py",
    "tests/faults/test_store_crash.py",
    "tests/domains/boards/test_boards_acceptance_server.py",
    "tests/fleet/rollouts/test_rollouts_simulation.py",
    "tests/test_standby_servers.py",
)
"""Longest first: a test, or a module whose tests share what is dear to start."""


def arranged(items: Sequence[pytest.Item], workers: int) -> list[pytest.Item]:
    """The same tests, with the long ones at the beginning of the stretch of each worker."""
    groups: dict[str, list[pytest.Item]] = {one: [] for one in LONG}
    others: list[pytest.Item] = []
    for item in items:
        name = next((one for one in LONG if f"{item.nodeid}:[".startswith((f"{one}:", f"{one}["))), None)
        (others if name is None else groups[name]).append(item)
    first: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for place, group in enumerate(groups.values()):
        first[place % workers].extend(group)
    found: list[pytest.Item] = []
    for worker, mine in enumerate(first):
        stretch = (len(items) - len(found)) // (workers - worker)
        room = max(stretch - len(mine), 0)
        found += [*mine, *others[:room]]
        del others[:room]
    return [*found, *others]
