"""The rules for addresses: listeners, load balancers, tunnels and NAT."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from fleetplane.domains.instances.configuration.decode import nearest
from fleetplane.domains.instances.configuration.jsonc import Path
from fleetplane.domains.instances.configuration.problems import ProblemReport
from fleetplane.domains.instances.configuration.schema import (
    InstancesDocument,
    LoadBalancerSection,
    Nat,
    Thresholds,
    Tunnel,
)

MAX_PORT = 65535
MAX_HOST_CHARACTERS = 253  # of a DNS name

FIELDS_OF_PROVIDER = {
    "aws": ("target_groups",),
    "google": ("network_endpoint_groups", "frontends"),
    "tunnel": ("listeners",),
}
_MINUTE = 60.0
NAT_WINDOWS = {
    "scale_up_window": (2 * _MINUTE, 5 * _MINUTE),
    "scale_down_window": (20 * _MINUTE, 30 * _MINUTE),
}
NAT_MIN_COOLDOWN_SECONDS = 10 * _MINUTE

_ADDRESS = re.compile(r"(?:\[(?P<bracketed>[^\[\]]*)\]|(?P<host>[^:\[\]]*)):(?P<port>[0-9]{1,5})")
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_PINNED_IMAGE = re.compile(r"[^@]+@sha256:[0-9a-f]{64}")


def host_and_port_problem(address: str) -> str | None:
    """An empty host is every interface when bound, and found out when advertised."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        return f"{address[:80]!r} must be host:port; IPv6 hosts stand in brackets"
    if not 1 <= int(match["port"]) <= MAX_PORT:
        return f"port {match['port']} is not one from 1 to {MAX_PORT}"
    host = match["host"]
    if match["bracketed"] is not None:
        return None if _is_ip(match["bracketed"].partition("%")[0]) else f"{address!r} has no IPv6 address"
    if host and (len(host) > MAX_HOST_CHARACTERS or ".." in host or not _HOST.fullmatch(host)):
        return f"{host[:80]!r} is no host name"
    return None


def _is_ip(text: str, version: int | None = None) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return version is None or address.version == version


def _check_port(report: ProblemReport, path: Path, port: int) -> None:
    if not 1 <= port <= MAX_PORT:
        report.add(path, f"port {port} is not one from 1 to {MAX_PORT}")


def check_load_balancers(config: InstancesDocument, report: ProblemReport) -> None:
    for name, balancer in config.load_balancers.items():
        path: Path = ("load_balancers", name)
        fields = FIELDS_OF_PROVIDER.get(balancer.provider)
        if fields is None:
            continue  # an unknown provider was reported
        for field in ("target_groups", "network_endpoint_groups", "frontends", "listeners"):
            given = bool(getattr(balancer, field))
            if field in fields and not given:
                report.add((*path, field), f"provider {balancer.provider} needs at least one of {field}")
            if field not in fields and given:
                report.add((*path, field), f"is not for provider {balancer.provider}", at_key=True)
        _check_members(report, path, balancer)


def _check_members(report: ProblemReport, path: Path, balancer: LoadBalancerSection) -> None:
    for index, group in enumerate(balancer.target_groups):
        for port in ("listener_port", "target_port", "proxy_port"):
            _check_port(report, (*path, "target_groups", index, port), getattr(group, port))
    for index, name in enumerate(balancer.network_endpoint_groups):
        if not name:
            report.add((*path, "network_endpoint_groups", index), "must not be empty")
    for index, frontend in enumerate(balancer.frontends):
        where = (*path, "frontends", index)
        if not _is_ip(frontend.ip):
            report.add((*where, "ip"), f"{frontend.ip!r} is no IP address")
        _check_port(report, (*where, "port"), frontend.port)
    for index, listener in enumerate(balancer.listeners):
        for port in ("target_port", "proxy_port"):
            _check_port(report, (*path, "listeners", index, port), getattr(listener, port))


def check_tunnels(config: InstancesDocument, report: ProblemReport) -> None:
    balancers = config.load_balancers
    for name, tunnel in config.tunnels.items():
        path: Path = ("tunnels", name)
        if name not in balancers or balancers[name].provider != "tunnel":
            message = f"needs a load balancer {name!r} of provider tunnel"
            report.add(path, message, at_key=True)
        _check_tunnel(report, path, tunnel)
    for name, balancer in balancers.items():
        if balancer.provider == "tunnel" and name not in config.tunnels:
            report.add(("load_balancers", name), f"needs an entry {name!r} in tunnels", at_key=True)


def _check_tunnel(report: ProblemReport, path: Path, tunnel: Tunnel) -> None:
    if not _PINNED_IMAGE.fullmatch(tunnel.image):
        report.add((*path, "image"), "must be pinned: name@sha256: and 64 hexadecimal digits")
    if not _is_loopback_url(tunnel.readiness_url):
        report.add((*path, "readiness_url"), "must be an http URL with a port on this machine")
    for destination, file in tunnel.files.items():
        where = (*path, "files", destination)
        parts = destination.split("/")
        if parts[0] or len(parts) < 2 or any(part in ("", ".", "..") for part in parts[1:]):
            report.add(where, f"{destination!r} must be a clean absolute path", at_key=True)
        if file.kind not in ("", "secret", "storage"):
            report.add((*where, "kind"), "must be secret or storage in a tunnel")
        elif not file.source:
            report.add((*where, "source"), f"'source' is required for kind {file.kind}")


def _is_loopback_url(url: str) -> bool:
    try:
        parsed = urlsplit(url)
        host, port = parsed.hostname or "", parsed.port
    except ValueError:
        return False
    if parsed.scheme != "http" or port is None or parsed.username is not None:
        return False
    return host == "localhost" or (_is_ip(host) and ipaddress.ip_address(host).is_loopback)


def check_nat(config: InstancesDocument, report: ProblemReport) -> None:
    addresses: dict[str, str] = {}
    for tenant, nat in config.nat.items():
        path: Path = ("nat", tenant)
        _check_nat_group(config, report, path, tenant, nat)
        _check_thresholds(report, path, nat.scale_up_thresholds, nat.scale_down_thresholds)
        for name, (shortest, longest) in NAT_WINDOWS.items():
            if not shortest <= getattr(nat, f"{name}_seconds") <= longest:
                span = f"{shortest / _MINUTE:.0f}m to {longest / _MINUTE:.0f}m"
                report.add((*path, name), f"must be from {span}")
        if nat.cooldown_seconds < NAT_MIN_COOLDOWN_SECONDS:
            report.add((*path, "cooldown"), "must be at least 10m")
        for index, address in enumerate(nat.public_addresses):
            where = (*path, "public_addresses", index)
            if not _is_ip(address.ipv4, 4):
                report.add((*where, "ipv4"), f"{address.ipv4!r} is no IPv4 address")
            elif address.ipv4 in addresses:
                report.add((*where, "ipv4"), f"is used by tenant {addresses[address.ipv4]!r} already")
            addresses.setdefault(address.ipv4, tenant)
            _check_allocation(config, report, where, address.allocation_id)


def _check_allocation(config: InstancesDocument, report: ProblemReport, path: Path, allocation: str) -> None:
    provider = config.shard.infra.provider
    if provider == "aws" and not allocation:
        report.add((*path, "allocation_id"), "'allocation_id' is required on aws")
    if provider == "google" and allocation:
        report.add((*path, "allocation_id"), "has no meaning on google", at_key=True)


def _check_nat_group(
    config: InstancesDocument, report: ProblemReport, path: Path, tenant: str, nat: Nat
) -> None:
    groups = config.groups.get(tenant, {})
    group = groups.get(nat.group)
    if group is None:
        if nat.group:
            message = f"tenant {tenant!r} has no group {nat.group!r}; {nearest(nat.group, groups)}"
            report.add((*path, "group"), message)
        return
    if group.size is not None:
        report.add(
            ("groups", tenant, nat.group, "size"), "a NAT group scales itself; leave size out", at_key=True
        )
    if not group.instance_type:
        report.add(("groups", tenant, nat.group, "instance_type"), "'instance_type' is required for NAT")
    ladder = nat.instance_type_ladder
    if len(set(ladder)) != len(ladder) or "" in ladder:
        report.add((*path, "instance_type_ladder"), "must hold each instance type once, and no empty one")
    elif group.instance_type not in ladder:
        report.add((*path, "instance_type_ladder"), f"must include {group.instance_type!r}, the group's own")


def _check_thresholds(report: ProblemReport, path: Path, up: Thresholds, down: Thresholds) -> None:
    for name in ("conntrack_percent", "cpu_percent"):
        high, low = getattr(up, name), getattr(down, name)
        if not 0 < high <= 100:
            report.add((*path, "scale_up_thresholds", name), "must be above 0 and at most 100")
        elif not 0 < low < high:
            report.add((*path, "scale_down_thresholds", name), f"must be above 0 and below {high:g}")
    if not 0 <= down.packet_drops_per_second < up.packet_drops_per_second:
        message = "must not be negative, and be below that of scale_up_thresholds"
        report.add((*path, "scale_down_thresholds", "packet_drops_per_second"), message)
