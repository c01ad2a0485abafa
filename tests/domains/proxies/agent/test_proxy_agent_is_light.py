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
import fleetplane.domains.proxies.agent as agent
for module in pkgutil.iter_modules(agent.__path__):
    importlib.import_module(f"{agent.__name__}.{module.name}")
print(json.dumps(sorted(sys.modules)))
"""


def test_the_agent_loads_nothing_of_the_server() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = json.loads(done.stdout)
    assert "fleetplane.domains.proxies.agent.session" in loaded
    assert [name for name in loaded if name.startswith(HEAVY)] == []
