"""What the parts of one rendering share, and what they leave out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fleetplane.domains.proxies.nginx.blocks import Directive, Unrenderable
from fleetplane.domains.proxies.nginx.paths import PathPolicy
from fleetplane.domains.proxies.nginx.site import Site
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something that was asked for and left out."""

    id: str
    message: str


class PartUnrenderable(Unrenderable):
    """One part of a configuration cannot be written; the others may do without it."""

    def __init__(self, message: str, *, part: str) -> None:
        super().__init__(message)
        self.part = part


@contextmanager
def rendering_part(part: str) -> Iterator[None]:
    """Add to a rendering error which part of the configuration it belongs to."""
    try:
        yield
    except PartUnrenderable:
        raise
    except Unrenderable as error:
        raise PartUnrenderable(error.message, part=part) from error


@dataclass(slots=True)
class RenderingContext:
    """What the parts of one rendering share."""

    site: Site
    update: pb.ConfigUpdate
    acme_responder: str
    acme_workspace: str
    files: PathPolicy
    settings: list[Directive]
    """The workspace's own directives."""
    former: frozenset[str] = frozenset()
    """Virtual hosts in an earlier form than was asked for: they give way to others."""
    in_service: frozenset[str] = frozenset()
    """Virtual hosts that are being served: others give way to them."""
    notes: dict[str, Note] = field(default_factory=dict)
    made: dict[str, bytes] = field(default_factory=dict)
    """Further files that the parts need, by path inside the release."""
    users_folder: str = ""
    """Where workers find the files of users and passwords."""
    user_files: dict[str, bytes] = field(default_factory=dict)
    """Those files, by name."""

    def note(self, identity: str, message: str) -> None:
        self.notes[identity] = Note(id=identity, message=message)
