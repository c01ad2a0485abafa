"""Names that typed options need in a configuration: of zones, variables and internal locations. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Final

from fleetplane.domains.proxies.nginx.blocks import Node, block, directive

INTERNAL: Final = "/.fleetplane/"
"""Begins the path of every internal location."""


def tag(*parts: str) -> str:
    """A short name for something that has a long one; the same for the same."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


@dataclass(slots=True)
class HostParts:
    """What the options of one host need besides directives in their own place."""

    host: str
    """The host's id."""
    before: dict[str, list[Node]] = field(default_factory=dict)
    """For the `http` context, by what they are: zones, maps."""
    locations: dict[str, Node] = field(default_factory=dict)
    """Internal locations, by path."""
    user_files: dict[str, bytes] = field(default_factory=dict)
    """Files that workers read, by name."""

    def variable(self, purpose: str, *parts: str) -> str:
        """A variable of the agent's, without its `$`."""
        return f"fleetplane_{purpose}_{tag(self.host, *parts)}"

    def text(self, text: str) -> str:
        """A text that NGINX takes as it is: a `$` is not the start of a variable, and lines are joined."""
        plain = text.replace("\r\n", " ").replace("\n", " ").replace("\t", " ")
        if "$" not in plain:
            return plain
        name = self.variable("dollar")
        self.before.setdefault(name, [block("geo", f"${name}", body=[directive("default", "$")])])
        return plain.replace("$", f"${{{name}}}")
