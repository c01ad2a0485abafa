"""The node's agent runs on small machines: it must not bring the server's store and web along."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = (
    "aiosqlite", "alembic", "fleetplane.kernel.store", "fleetplane.web", "litestar", "obstore", "sqlalchemy",
    "fleetplane.domains.boards.registry", "fleetplane.domains.boards.domain", "asyncssh",
)  # fmt: skip
WHOLE = "fleetplane.domains.boards.agent.assembly"
CODE = f"import json, sys, {WHOLE}; print(json.dumps(sorted(sys.modules)))"


def test_the_whole_agent_is_put_together_without_the_server() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = json.loads(done.stdout)
    assert "fleetplane.domains.boards.agent.node_service" in loaded
    assert [name for name in loaded if name.startswith(HEAVY)] == []
