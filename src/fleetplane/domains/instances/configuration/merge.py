"""What a group is after all that has a say: defaults, its template, the group itself, run-time changes.

Objects merge key by key, whatever their depth; everything else, lists included, is replaced. Files belong to
the template alone, and user data is the template's or else the defaults', whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from fleetplane.domains.instances.configuration.decode import nearest
from fleetplane.domains.instances.configuration.ownership import (
    files_for,
    template_is_for,
    templates_for,
)
from fleetplane.domains.instances.configuration.schema import (
    FileSection,
    GroupSection,
    InstancesDocument,
    InstanceTemplate,
    Json,
    Userdata,
)
from fleetplane.domains.instances.configuration.validate import identifier_problem
from fleetplane.domains.instances.kinds import GroupOverride
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument, NotFound

GroupKey = tuple[str, str]
"""Tenant and key."""

Overrides = Mapping[GroupKey, GroupOverride]

MAX_VARS = 256  # per group; all of them travel in every group event


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveGroup:
    tenant: str
    key: str
    is_static: bool
    """Configured, whether or not it was changed at run time."""
    is_nat: bool
    """The tenant's own NAT machines; hidden from operators."""
    template: str
    prefix: str
    """The template's kind: what the ids of its instances begin with."""
    arch: str
    size: int
    instance_type: str
    subnet_pool: str
    subnets: tuple[str, ...]
    """Of the pool; empty when the group has none."""
    vars: Mapping[str, str]
    args: Mapping[str, Json]
    files: Mapping[str, FileSection]
    userdata: Userdata | None
    drain_timeout_seconds: float | None
    """None is the shard's default, 0 is at once."""
    load_balancers: tuple[str, ...]
    stated: Stated


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """What the group says of itself, without what it inherits: this is what operators are shown."""

    instance_type: str
    subnet_pool: str
    vars: Mapping[str, str]
    args: Mapping[str, Json]


def effective(
    config: InstancesDocument, tenant: str, key: str, override: GroupOverride | None
) -> EffectiveGroup | None:
    """The group as it is now, None when nobody has it.

    Raises FailedPrecondition when a group made at run time stands on a template that the configuration
    no longer has: such a group is neither there nor gone, and must be left alone.
    """
    group = config.groups.get(tenant, {}).get(key)
    if group is None and override is None:
        return None
    own = _group(group, override)
    template = config.templates.get(own.template)
    if template is None or not template_is_for(config, own.template, tenant):
        raise FailedPrecondition(
            f"group {key!r} of tenant {tenant!r} was made from template {own.template!r}, "
            "which the configuration no longer has for this tenant",
            hint="bring the template back, name the tenant in its `tenants`, or delete the group",
        )
    stated_pool = own.subnet_pool
    if group is None and not stated_pool:  # taken from the template when the group was made
        stated_pool = template.subnet_pool
    stated = Stated(instance_type=own.instance_type, subnet_pool=stated_pool, vars=own.vars, args=own.args)
    return _merged(config, tenant, key, template, own, stated, is_static=group is not None)


def _group(group: GroupSection | None, override: GroupOverride | None) -> GroupSection:
    """The configured group with what was changed at run time."""
    if override is None:
        assert group is not None
        return group
    if group is None:
        return GroupSection(
            template=override.template,
            size=override.size,
            instance_type=override.instance_type,
            subnet_pool=override.subnet_pool,
            vars=override.vars,
            args=dict(override.args),
        )
    return msgspec.structs.replace(
        group,
        size=override.size,
        instance_type=override.instance_type or group.instance_type,
        vars={**group.vars, **override.vars},
        args={**group.args, **override.args},
    )


def _merged(
    config: InstancesDocument,
    tenant: str,
    key: str,
    template: InstanceTemplate,
    group: GroupSection,
    stated: Stated,
    *,
    is_static: bool,
) -> EffectiveGroup:
    pool = group.subnet_pool or template.subnet_pool
    nat = config.nat.get(tenant)
    return EffectiveGroup(
        tenant=tenant,
        key=key,
        is_static=is_static,
        is_nat=nat is not None and nat.group == key,
        template=group.template,
        prefix=template.kind,
        arch=template.arch,
        size=group.size or 0,  # a group that names no size has none; the template's is not inherited
        instance_type=group.instance_type or template.instance_type,
        subnet_pool=pool,
        subnets=config.shard.subnet_pools.get(pool, ()),
        vars={**config.defaults.vars, **template.vars, **group.vars},
        args=deep_merge(deep_merge(config.defaults.args, template.args), group.args),
        files=files_for(template.files, tenant),
        userdata=template.userdata or config.defaults.userdata,
        drain_timeout_seconds=group.drain_timeout_seconds,
        load_balancers=group.load_balancers,
        stated=stated,
    )


def deep_merge(below: Mapping[str, Json], above: Mapping[str, Json]) -> dict[str, Json]:
    merged = dict(below)
    for key, value in above.items():
        beneath = merged.get(key)
        both = isinstance(beneath, Mapping) and isinstance(value, Mapping)
        merged[key] = deep_merge(beneath, value) if both else value  # type: ignore[arg-type]
    return merged


def on_demand(
    config: InstancesDocument,
    group: EffectiveGroup,
    *,
    template: str = "",
    instance_type: str = "",
    subnet_pool: str = "",
    vars: Mapping[str, str] | None = None,  # noqa: A002 -- the document's word
) -> EffectiveGroup:
    """The group as a single instance made in it for a caller, with what the caller chose."""
    if template and not template_is_for(config, template, group.tenant):
        raise _unknown_template(config, template, group.tenant)
    if subnet_pool:
        _check_pool(config, subnet_pool)
    own = GroupSection(
        template=template or group.template,
        size=1,
        instance_type=instance_type or group.stated.instance_type,
        subnet_pool=subnet_pool or group.stated.subnet_pool,
        vars={**group.stated.vars, **(vars or {})},
        args=dict(group.stated.args),
        drain_timeout_seconds=group.drain_timeout_seconds,
        load_balancers=group.load_balancers,
    )
    stated = Stated(
        instance_type=own.instance_type, subnet_pool=own.subnet_pool, vars=own.vars, args=own.args
    )
    base = config.templates[own.template]
    return _merged(config, group.tenant, group.key, base, own, stated, is_static=group.is_static)


def group_keys(config: InstancesDocument, overrides: Iterable[GroupKey]) -> list[GroupKey]:
    configured = {(tenant, key) for tenant, groups in config.groups.items() for key in groups}
    return sorted(configured.union(overrides))


def groups(config: InstancesDocument, overrides: Overrides) -> list[EffectiveGroup]:
    """Every group, by tenant and key. Those that `unresolved` names are not among them."""
    missing = unresolved(config, overrides)
    found = (
        effective(config, tenant, key, overrides.get((tenant, key)))
        for tenant, key in group_keys(config, overrides)
        if (tenant, key) not in missing
    )
    return [group for group in found if group is not None]


def unresolved(config: InstancesDocument, overrides: Overrides) -> dict[GroupKey, str]:
    """Groups made at run time whose template is gone, each with the reason.

    They are not gone: scaling them to nothing because of an edit elsewhere would be a disaster.
    """
    return {
        (tenant, key): f"template {override.template!r} is not in the configuration, or not for {tenant!r}"
        for (tenant, key), override in overrides.items()
        if key not in config.groups.get(tenant, {}) and not template_is_for(config, override.template, tenant)
    }


def check_override(
    config: InstancesDocument, tenant: str, key: str, override: GroupOverride, present: bool
) -> None:
    """Refuse a run-time change that the configuration does not allow. `present`: there was one before."""
    for field, value in (("tenant", tenant), ("key", key)):
        problem = identifier_problem(value)
        if problem is not None:
            raise InvalidArgument(f"{field} {value[:64]!r} {problem}", field=field)
    if override.size < 0:
        raise InvalidArgument(f"a group cannot have {override.size} instances", field="config.size")
    if len(override.vars) > MAX_VARS:
        raise InvalidArgument(f"a group has at most {MAX_VARS} vars", field="config.vars")
    group = config.groups.get(tenant, {}).get(key)
    if group is not None:
        _check_static(group, key, override)
    else:
        _check_dynamic(config, tenant, override, present)


def _check_static(group: GroupSection, key: str, override: GroupOverride) -> None:
    if override.template and override.template != group.template:
        raise FailedPrecondition(
            f"group {key!r} is configured with template {group.template!r}, and stays so at run time",
            field="config.template",
            hint="leave the template out, or change the configuration",
        )
    if override.subnet_pool:
        raise FailedPrecondition(
            f"the subnet pool of group {key!r} is configured and cannot be changed at run time",
            field="config.subnet_pool",
            hint="leave the subnet pool out, or change the configuration",
        )


def _check_dynamic(config: InstancesDocument, tenant: str, override: GroupOverride, present: bool) -> None:
    if not override.template and not present:
        raise InvalidArgument(
            "a new group needs a template",
            field="config.template",
            hint=f"one of {', '.join(sorted(templates_for(config, tenant))) or 'none'}",
        )
    if override.template and not template_is_for(config, override.template, tenant):
        raise _unknown_template(config, override.template, tenant)
    if override.subnet_pool:
        _check_pool(config, override.subnet_pool)
    elif not present and config.shard.subnet_pools:
        inherited = config.templates[override.template].subnet_pool
        if not inherited:
            raise InvalidArgument(
                f"template {override.template!r} has no subnet pool, so the group must name one",
                field="config.subnet_pool",
            )
        _check_pool(config, inherited)


def _unknown_template(config: InstancesDocument, template: str, tenant: str) -> NotFound:
    """The error for an unknown template; the same where only other tenants have it."""
    return NotFound(
        f"there is no template {template[:64]!r}; {nearest(template, templates_for(config, tenant))}",
        field="config.template",
        hint="templates name the tenants they are for in `tenants`",
    )


def _check_pool(config: InstancesDocument, pool: str) -> None:
    pools, allowed = config.shard.subnet_pools, config.shard.dynamic_subnet_pools
    if pool not in pools:
        raise InvalidArgument(
            f"there is no subnet pool {pool[:64]!r}; {nearest(pool, allowed or pools)}",
            field="config.subnet_pool",
        )
    if allowed and pool not in allowed:
        raise FailedPrecondition(
            f"subnet pool {pool!r} is not open to groups made at run time; these are: {', '.join(allowed)}",
            field="config.subnet_pool",
        )


def merge_override(existing: GroupOverride | None, new: GroupOverride) -> GroupOverride:
    """A second change on top of a first: the size is always the new one, empty fields stay as they were."""
    if existing is None:
        return new
    return GroupOverride(
        template=new.template or existing.template,
        size=new.size,
        instance_type=new.instance_type or existing.instance_type,
        subnet_pool=new.subnet_pool or existing.subnet_pool,
        vars={**existing.vars, **new.vars},
        args={**existing.args, **new.args},
    )
