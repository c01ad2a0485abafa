"""The node side runs on small machines: it must not bring the server along."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = (
    "aiosqlite", "alembic", "fleetplane.kernel.store", "fleetplane.kernel.identity", "fleetplane.rpc",
    "fleetplane.web", "h2corn", "httpx", "litestar", "obstore", "prometheus_client", "sqlalchemy",
)  # fmt: skip
IMPORT_ALL = """
import importlib, json, pkgutil, sys
import fleetplane.domains.edge.agent as agent
for module in pkgutil.walk_packages(agent.__path__, f"{agent.__name__}."):
    importlib.import_module(module.name)
print(json.dumps(sorted(sys.modules)))
"""


def test_the_daemon_loads_nothing_of_the_server() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = json.loads(done.stdout)
    assert "fleetplane.domains.edge.agent.session" in loaded
    assert "fleetplane.domains.edge.agent.tools.files" in loaded
    assert [name for name in loaded if name.startswith(HEAVY)] == []
