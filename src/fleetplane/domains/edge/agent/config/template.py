"""The configuration that enrolment writes for a machine that has none. Pure."""

from __future__ import annotations

from typing import Final

import yaml

from fleetplane.domains.edge.agent.config.document import API_VERSION, BACKOFF_SECONDS, KIND, Document

CONTEXT_NAMES: Final = ("zaru-free", "zaru-pro", "zaru-business", "zaru-enterprise")
"""The names that servers send commands under."""

_HEAD: Final = """\
# Written when this machine was enrolled; yours to edit from here on.
#
# Commands name a security context below. What is on its deny_list is denied; otherwise the first
# capability that permits all of a command permits it; otherwise it is refused. To limit one:
#
#   capabilities:
#     - tool_pattern: fs.*
#       path_allowlist: [/srv]
#     - tool_pattern: cmd.run
#       command_allowlist: [/usr/bin/uptime, systemctl]
#       subcommand_allowlist: [status]
#   deny_list: [fs.write]
"""


def document(*, node_id: str, tenant: str, endpoint: str, labels: dict[str, str], minimal: bool) -> Document:
    names = CONTEXT_NAMES[:1] if minimal else CONTEXT_NAMES
    edge: dict[str, object] = {"tenant_id": tenant}
    if not minimal:
        edge["stream_reconnect_backoff_secs"] = [int(wait) for wait in BACKOFF_SECONDS]
    if labels:
        edge["capabilities"] = {"custom_labels": labels}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": f"edge-{node_id[:8]}"},
        "spec": {
            "node": {"id": node_id, "type": "edge"},
            "cluster": {
                "enabled": True,
                "role": "edge",
                "controller": {"endpoint": endpoint},
                "heartbeat_interval_secs": 30,
                "edge": edge,
            },
            "security_contexts": [
                {"name": name, "description": "", "capabilities": [{"tool_pattern": "*"}], "deny_list": []}
                for name in names
            ],
        },
    }


def render(made: Document) -> bytes:
    return (_HEAD + yaml.safe_dump(made, sort_keys=False, default_flow_style=False)).encode()
