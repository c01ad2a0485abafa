"""What the parts of one rendering share, and what they leave out."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleetplane.domains.proxies.agent.site import Site
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something that was asked for and left out."""

    id: str
    message: str


@dataclass(slots=True)
class Context:
    """What the parts of one rendering share."""

    site: Site
    update: pb.ConfigUpdate
    acme_responder: str
    acme_workspace: str
    notes: dict[str, Note] = field(default_factory=dict)

    def note(self, identity: str, message: str) -> None:
        self.notes[identity] = Note(id=identity, message=message)
