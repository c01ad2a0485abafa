"""What this machine is and has, as the daemon tells the server: looked up unless the owner said otherwise."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from fleetplane.domains.edge.agent.config.document import CapabilitySettings
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.node.host import proc

TOOLS: Final = (
    "bash",
    "zsh",
    "sh",
    "docker",
    "podman",
    "kubectl",
    "helm",
    "git",
    "curl",
    "jq",
    "terraform",
    "ansible",
)
ALWAYS: Final = "shell"
MOUNT_POINTS: Final = {
    "linux": ("/", "/home", "/etc", "/var/log"),
    "macos": ("/", "/Users", "/Library", "/var/log"),
}
SYSTEMS: Final = {"darwin": "macos"}
RUNTIMES: Final = ("docker", "podman")
GIBIBYTE: Final = 1024**3


def capabilities(
    said: CapabilitySettings,
    *,
    tools: tuple[str, ...],
    path: str,
    config_version: str = "",
    draining: bool = False,
) -> pb.EdgeCapabilities:
    """Blocking. `tools` are the daemon's own; `path` is where programs are looked for."""
    system = said.os or SYSTEMS.get(platform.system().lower(), platform.system().lower())
    found = said.local_tools
    if found is None:
        found = (ALWAYS, *(name for name in TOOLS if shutil.which(name, path=path) is not None), *tools)
    mounts = said.mount_points
    if mounts is None:
        mounts = tuple(place for place in MOUNT_POINTS.get(system, ("/",)) if Path(place).is_dir())
    return pb.EdgeCapabilities(
        os=system,
        arch=said.arch or platform.machine().lower(),
        local_tools=found,
        mount_points=mounts,
        custom_labels=_labels(said.custom_labels),
        node_capabilities=pb.NodeCapabilities(
            cpu_cores=os.cpu_count() or 0,
            available_memory_gb=proc.memory_bytes() // GIBIBYTE,
            supported_runtimes=[name for name in RUNTIMES if shutil.which(name, path=path) is not None],
        ),
        config_version=config_version,
        draining=draining,
    )


def _labels(said: Mapping[str, str]) -> dict[str, str]:
    return dict(sorted(said.items()))
