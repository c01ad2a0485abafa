"""The node side runs on small machines: it must not bring the server along."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = (
    "aiosqlite", "alembic", "boto3", "fleetplane.kernel.store", "fleetplane.kernel.identity",
    "fleetplane.rpc", "h2corn", "litestar", "obstore", "prometheus_client", "sqlalchemy",
)  # fmt: skip
IMPORT_ALL = """
import importlib, json, pkgutil, sys
import fleetplane.domains.instances.agent as agent
for module in pkgutil.iter_modules(agent.__path__):
    importlib.import_module(f"{agent.__name__}.{module.name}")
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(IMPORT_ALL, id="the agent's modules"),
        pytest.param(
            "import json, sys, fleetplane.agents.instance; print(json.dumps(sorted(sys.modules)))",
            id="its root",
        ),
    ],
)
def test_the_agent_loads_nothing_of_the_server(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = json.loads(done.stdout)

    assert "fleetplane.domains.instances.agent.session" in loaded
    assert [name for name in loaded if name.startswith(HEAVY)] == []
