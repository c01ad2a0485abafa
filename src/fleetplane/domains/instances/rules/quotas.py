"""How many instances a tenant may have, so that none uses up what the provider has for all. Pure.

The document says it for a tenant (`shard.tenant_quotas`); else it is the server's setting, or as many as the
tenant's groups in the document want together, whichever is more: what the document's author has written down
is meant. Instances that drain do not count, because their replacements must come before they go; how many
there may be with them is bounded too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fleetplane.domains.instances.configuration import InstancesDocument
from fleetplane.domains.instances.kinds import Instance
from fleetplane.domains.instances.rules.plans import State, state
from fleetplane.kernel.errors import ResourceExhausted

DEFAULT = 100
NEAR_SHARE = 0.8
"""The share of the quota at which a warning is reported."""
OVERLAP = 2
"""With those that are leaving there may be so many times as many: each may be replaced once."""
WHO_DECIDES = "the server's owner raises it, in shard.tenant_quotas or instances.tenant_instances"


class TenantQuota(ResourceExhausted):
    """A tenant has, or wants, as many instances as it may."""

    reason = "TENANT_QUOTA"
    hint = WHO_DECIDES


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceUsage:
    """The instances that a tenant has now."""

    standing: int = 0
    """Not on their way out."""
    total: int = 0
    """With those that are; not those that are gone."""


def bound(config: InstancesDocument, tenant: str, default: int) -> int | None:
    """How many instances the tenant may have; None: any number."""
    own = config.shard.tenant_quotas.get(tenant)
    if own is not None:
        return own
    if default == 0:
        return None
    return max(default, sum(group.size or 0 for group in config.groups.get(tenant, {}).values()))


def usage(instances: Iterable[Instance]) -> InstanceUsage:
    """What counts of a tenant's instances. NAT instances are the server's own doing, one for each subnet."""
    states = [state(instance) for instance in instances if not instance.spec.serves]
    total = sum(found is not State.DELETED for found in states)
    leaving = sum(found in (State.DRAINING, State.DELETING) for found in states)
    return InstanceUsage(standing=total - leaving, total=total)


def check_creation(tenant: str, used: InstanceUsage, limit: int | None) -> None:
    """Refuse one more instance of a tenant that has as many as it may."""
    if limit is None:
        return
    if used.standing >= limit:
        raise TenantQuota(f"tenant {tenant!r} has {used.standing} instances, and may have {limit}")
    if used.total >= limit * OVERLAP:
        raise TenantQuota(
            f"tenant {tenant!r} has {used.total} instances with those that are leaving, and may have "
            f"{limit * OVERLAP} with them"
        )


def check_sizes(tenant: str, sizes: Mapping[str, int], key: str, size: int, limit: int | None) -> None:
    """Refuse to make a group larger than the tenant's other groups leave room for; smaller is always good."""
    if limit is None or size <= sizes.get(key, 0):
        return
    others = sum(sizes.values()) - sizes.get(key, 0)
    if others + size > limit:
        raise TenantQuota(
            f"tenant {tenant!r} may have {limit} instances: its other groups want {others}, so {key!r} "
            f"can have {max(0, limit - others)}, not {size}",
            field="config.size",
        )


def near(tenant: str, used: InstanceUsage, limit: int | None) -> str:
    """A sentence for a tenant that comes close to its bound; empty if it does not."""
    if limit is None or used.standing < NEAR_SHARE * limit:
        return ""
    return f"tenant {tenant!r} has {used.standing} of the {limit} instances that it may have"
