"""What is known of this node without asking anyone: from its folder."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from fleetplane.domains.boards.agent.membership import BoardIdentityFolder
from fleetplane.kernel.errors import FleetplaneError, Unavailable


def overview(folder: BoardIdentityFolder) -> dict[str, Any]:
    found: dict[str, Any] = {"state_dir": str(folder.root)}
    membership = folder.load_membership()
    found["member"] = membership is not None
    if membership is not None:
        found |= {
            "board": membership.node_id,
            "name": membership.name,
            "server": membership.server,
            "heartbeat_seconds": membership.heartbeat_seconds,
        }
        try:
            identity = folder.credentials()
        except FleetplaneError as error:
            found["certificate"] = error.message
        else:
            found["certificate_serial"] = identity.serial
            found["certificate_ends"] = datetime.fromtimestamp(identity.life.end, UTC).isoformat()
            found["renewed_from"] = datetime.fromtimestamp(identity.life.renewal_at(), UTC).isoformat()
    running = _running(folder)
    found["running"] = running is not None
    if running:
        found |= {"pid": running["pid"], "listeners": running["listeners"]}
    return found


def _running(folder: BoardIdentityFolder) -> dict[str, Any] | None:
    """Where the agent is. A file that a killed one left behind does not count: nobody holds its lock."""
    if not folder.root.is_dir():
        return None
    try:
        with folder.alone():
            return None
    except Unavailable:
        pass
    try:
        said: dict[str, Any] = json.loads(folder.running.read_bytes())
    except (OSError, ValueError):
        return {"pid": 0, "listeners": {}}
    return said
