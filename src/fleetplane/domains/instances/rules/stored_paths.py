"""Which objects of the storage a document's files and user data may be. Pure.

The storage also holds the document itself and the sealed secrets. Variables in a path are set by operators,
so they fill in a name and never add a folder.
"""

from __future__ import annotations

import re

from fleetplane.domains.instances.configuration import rendering
from fleetplane.domains.instances.configuration.templates.template import TemplateData
from fleetplane.kernel.errors import FailedPrecondition

SERVERS_OWN = ("cluster", "shard", "config")
"""Folders of the storage that are the server's: secrets, documents."""

_ACTION = re.compile(r"\{\{.*?\}\}", re.DOTALL)


def object_path(text: str, data: TemplateData) -> str:
    """The path that a document's text means for an instance."""
    path = rendering.render_text(text, data)
    folders = path.split("/")
    if path.count("/") > _ACTION.sub("", text).count("/"):
        raise FailedPrecondition(f"{path[:200]!r}: variables in the path {text[:200]!r} may not add folders")
    if any(part in ("", ".", "..") for part in folders) or folders[0] in SERVERS_OWN:
        raise FailedPrecondition(
            f"{path[:200]!r} is no object for instances",
            hint=f"every folder has a name, and {', '.join(SERVERS_OWN)} are the server's own",
        )
    return path
