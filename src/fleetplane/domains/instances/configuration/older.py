"""Detects documents of the older shape, with everything in one `server` block, and explains the migration."""

from __future__ import annotations

from collections.abc import Mapping

from fleetplane.domains.instances.configuration.problems import ProblemReport

MOVED = {
    "cluster_id": "cluster.id",
    "secrets": "cluster.secrets",
    "shard": "shard.id",
    "provider": "shard.infra, with its kind as shard.infra.provider",
    "subnet_pools": "shard.subnet_pools",
    "dynamic_subnet_pools": "shard.dynamic_subnet_pools",
    "bind": "shard.bind",
    "advertise": "shard.advertise",
    "leader_network": "shard.leader_network",
    "garbage_collection": "shard.garbage_collection",
    "expiry": "shard.expiry",
    "image_refresh_interval": "shard.image_refresh_interval",
}
USERDATA = {
    "templateString": '{"content": …}',
    "templateUrl": '{"source": "url", "content": …}',
}
BALANCERS = {
    "target_group_arns": "target_groups, a list of {arn, listener_port, target_port, proxy_port}",
    "instance_group_name": "network_endpoint_groups and frontends",
}
GROUP_KEYS = frozenset({"template", "size", "instance_type", "subnet_pool", "vars", "args"})


def recognise(value: object, report: ProblemReport) -> bool:
    """Whether the document has the older shape. If so, the report says where each of its parts went."""
    if not isinstance(value, Mapping):
        return False
    server = value.get("server")
    if not isinstance(server, Mapping) or "cluster" in value or not MOVED.keys() & server.keys():
        return False
    report.add(
        ("server",),
        "this is the older document shape; its server block was divided into cluster and shard "
        "(the lines below say where each key went)",
        at_key=True,
    )
    for key in server:
        if key in MOVED:
            report.add(("server", key), f"is now {MOVED[key]}", at_key=True)
    note_renamed(value, report)
    return True


def note_renamed(value: object, report: ProblemReport) -> None:
    """Older keys that may have stayed behind in a document that is otherwise up to date."""
    if not isinstance(value, Mapping):
        return
    for section in ("defaults", "templates"):
        part = value.get(section)
        for name, holder in [("", part), *_members(part)]:
            path = (section, name) if name else (section,)
            userdata = holder.get("userdata") if isinstance(holder, Mapping) else None
            for key in USERDATA.keys() & set(userdata if isinstance(userdata, Mapping) else ()):
                report.add((*path, "userdata", key), f"is now written {USERDATA[key]}", at_key=True)
    for name, balancer in _members(value.get("load_balancers")):
        for key in BALANCERS.keys() & set(balancer if isinstance(balancer, Mapping) else ()):
            report.add(("load_balancers", name, key), f"is now {BALANCERS[key]}", at_key=True)
    for name, group in _members(value.get("groups")):
        if (
            isinstance(group, Mapping)
            and isinstance(group.get("template"), str)
            and group.keys() <= GROUP_KEYS
        ):
            message = f"groups are listed by tenant now: move this one to groups.default.{name}"
            report.reject(("groups", name), message, at_key=True)


def _members(value: object) -> list[tuple[str, object]]:
    return list(value.items()) if isinstance(value, Mapping) else []
