"""Build hook: protobuf modules and the console's libraries are brought in at every build, never committed."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class FleetplaneBuildHook(BuildHookInterface[BuilderConfig]):
    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Node, in an isolated build on a machine that has none, unless the libraries are there already."""
        root, libraries = Path(self.root), self._tool("console/libraries.py")
        if self.target_name != "wheel" or libraries["is_complete"](root) or libraries["find_npm"]():
            return []
        return [libraries["node_pin"](root)]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        del version, build_data
        if self.target_name != "wheel":
            return
        root, libraries = Path(self.root), self._tool("console/libraries.py")
        self._tool("protogen.py")["generate"](root)
        try:
            libraries["bring"](root)
        except libraries["LibrariesMissing"] as missing:
            # Everything else works, and the console shows numbers instead; `make wheel` insists.
            self.app.display_warning(
                f"The console will have no charts: {missing}; tools/setup.sh console gets them later"
            )

    def _tool(self, name: str) -> dict[str, Any]:
        return runpy.run_path(str(Path(self.root) / "tools" / name))
