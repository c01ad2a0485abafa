"""Which files of a machine an NGINX configuration may name.

The node's owner lists the document roots; everything else is out of reach, and some folders can
never be listed. The server does not know a node's roots: it refuses what no node may allow, and
each agent decides about the rest, on paths with every symbolic link resolved.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

DEFAULT_DOCUMENT_ROOTS: Final = ("/var/www", "/usr/share/nginx/html", "/srv/www")
"""The web folders of common distributions."""
NEVER: Final = ("/proc", "/sys", "/etc", "/dev", "/run", "/var/run", "/boot", "/root")
"""Descriptors and memory of processes, devices, credentials, sockets: served by nobody."""
GUARD: Final = "${fleetplane_inside}"
"""Comes before every root and alias of a rendered configuration: empty, or a folder that does not
exist once the request's path has come to hold `..`, as a rewrite can bring about."""


def within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def overlaps(path: str, folder: str) -> bool:
    """Whether one of them lies in the other."""
    return within(path, folder) or within(folder, path)


def never_fault(path: str, agent_folders: Iterable[str] = ()) -> str:
    """Why this path can be no document root on any machine; empty if it could be one."""
    for folder in NEVER:
        if overlaps(path, folder):
            return f"{path!r} must not lie in {folder} or contain it"
    for folder in agent_folders:
        if overlaps(path, folder):
            return f"{path!r} must not lie in the agent's state directory or contain it"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathPolicy:
    roots: tuple[str, ...] | None = None
    """Document roots, resolved; None where they are not known."""
    agent_folders: tuple[str, ...] = ()
    """The agent's own folders, resolved: named by its own directives only."""
    agent_files: tuple[str, ...] = ()
    """Other files that the agent's own directives may name."""
    resolve: Callable[[str], str] = os.path.normpath

    def root_of(self, path: str) -> str:
        """The document root that holds a path; empty if none does."""
        return next((root for root in self.roots or () if within(self.resolve(path), root)), "")

    def fault(self, path: str) -> str:
        """Why a configuration may not name this path; empty if it may."""
        if not path.startswith("/") or "$" in path:
            return f"{path[:200]!r} must be an absolute path without variables"
        plain = path.rstrip("/") or "/"
        if os.path.normpath(plain) != plain or plain.startswith("//"):  # POSIX leaves two in front alone
            return f"{path[:200]!r} must not contain '.', '..' or '//'"
        for one in (plain, self.resolve(plain)):
            if fault := never_fault(one, self.agent_folders):
                return fault
        if self.roots is not None and not self.root_of(plain):
            listed = ", ".join(self.roots) or "none"
            return (
                f"{path[:200]!r} is not inside a document root of this node ({listed}); "
                "its owner adds one with --document-root"
            )
        return ""

    def own_fault(self, path: str) -> str:
        """What is wrong with a path in a directive that only the agent writes."""
        if path in self.agent_files:
            return ""
        if os.path.normpath(path) == path and any(within(path, folder) for folder in self.agent_folders):
            return ""
        return f"{path[:200]!r} is not a path of the agent's"


ANYWHERE: Final = PathPolicy()
"""The server's: it refuses what no node may allow."""
