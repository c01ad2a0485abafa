"""Which of a domain's resources can be written, and how. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from fleetplane.fleet.resources.declaration import AnyPublicResource, ResourceVerb, Writable
from fleetplane.kernel.errors import SettingsError

WRITING = frozenset({ResourceVerb.PUT, ResourceVerb.PATCH, ResourceVerb.DELETE})


def with_writing(
    resources: Iterable[AnyPublicResource], writers: Mapping[str, Writable]
) -> tuple[AnyPublicResource, ...]:
    """The resources, those that have a writer by their name with the verbs that write."""
    declared = tuple(resources)
    unknown = writers.keys() - {one.name for one in declared}
    if unknown:
        raise SettingsError(f"nobody declares what could be written as {', '.join(sorted(unknown))}")
    return tuple(
        replace(one, verbs=one.verbs | WRITING, write=writers[one.name]) if one.name in writers else one
        for one in declared
    )
