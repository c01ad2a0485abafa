"""Whose word a machine's host name and addresses are. Pure.

The provider's word stands. What it does not say is taken from the agent, which may be anyone who holds the
machine: it is shown and may stand in text, but in no certificate unless the template allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from fleetplane.domains.instances.kinds import InstanceStatus
from fleetplane.domains.instances.providers.contract import Created

FIELDS = ("private_ipv4", "private_ipv6", "hostname")


def named_by_provider(status: InstanceStatus, seen: Created) -> InstanceStatus:
    """The status with all that the provider says of the machine's names."""
    said = {field: getattr(seen, field) for field in FIELDS if getattr(seen, field)}
    proven = tuple(field for field in FIELDS if field in said or field in (status.proven or ()))
    return msgspec.structs.replace(status, proven=proven, **said)


def step_by_provider(seen: Created) -> Callable[[InstanceStatus, int], InstanceStatus]:
    """The provider's state as a step in an instance's life."""
    return lambda status, _now_ns: named_by_provider(status, seen)


def named_by_agent(status: InstanceStatus, said: Mapping[str, str]) -> InstanceStatus:
    """The status with what an agent says where the provider has said nothing."""
    proven = status.proven or ()
    taken = {field: said[field] for field in FIELDS if said.get(field) and field not in proven}
    return msgspec.structs.replace(status, **taken)


def lacks(status: InstanceStatus, seen: Created) -> bool:
    """Whether the provider says something that the record does not have from it yet."""
    if status.proven is None:
        return True
    return any(getattr(seen, field) and field not in status.proven for field in FIELDS)
