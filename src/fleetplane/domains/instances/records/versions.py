"""Versions of a group: what its instances are made from and told, without its size. Pure.

A version has whatever of a group has a say in its hashes, so two groups of one version have the same
hashes. What else there is of a group (its size, its load balancers, how long drains take) is always the
newest.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from fleetplane.domains.instances.configuration import InstancesDocument
from fleetplane.domains.instances.configuration.merge import EffectiveGroup
from fleetplane.domains.instances.configuration.schema import FileSection, Json, Userdata

SUBJECT = "instances.template"
"""Of rollouts: the template and files of one group."""


class GroupVersion(msgspec.Struct, frozen=True, kw_only=True):
    template: str
    prefix: str
    arch: str
    instance_type: str
    subnet_pool: str
    vars: dict[str, str]
    args: dict[str, Json]
    files: dict[str, FileSection]
    userdata: Userdata | None


def encoded(group: EffectiveGroup) -> bytes:
    """The version that a group is now; the same bytes for the same version."""
    version = GroupVersion(
        template=group.template,
        prefix=group.prefix,
        arch=group.arch,
        instance_type=group.instance_type,
        subnet_pool=group.subnet_pool,
        vars=dict(group.vars),
        args=dict(group.args),
        files=dict(group.files),
        userdata=group.userdata,
    )
    return msgspec.json.encode(msgspec.to_builtins(version), order="deterministic")


def at_version(group: EffectiveGroup, content: bytes, configuration: InstancesDocument) -> EffectiveGroup:
    """The group as another version of it was."""
    found = msgspec.json.decode(content, type=GroupVersion)
    pools = configuration.shard.subnet_pools
    return replace(
        group,
        template=found.template,
        prefix=found.prefix,
        arch=found.arch,
        instance_type=found.instance_type,
        subnet_pool=found.subnet_pool,
        subnets=pools.get(found.subnet_pool, ()) if found.subnet_pool != group.subnet_pool else group.subnets,
        vars=found.vars,
        args=found.args,
        files=found.files,
        userdata=found.userdata,
    )
