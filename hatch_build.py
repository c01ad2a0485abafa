"""Build hook: the protobuf modules are made at every build, never committed."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ProtobufBuildHook(BuildHookInterface[BuilderConfig]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        del version, build_data
        if self.target_name == "wheel":
            generate = runpy.run_path(str(Path(self.root) / "tools" / "protogen.py"))["generate"]
            generate(Path(self.root))
