"""EC2's and ELB's words and ours, both directions, pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from datetime import datetime

import msgspec

from fleetplane.domains.instances.providers.contract import (
    OWN_TAGS,
    BalancerTargetState,
    CapacityExhausted,
    CreateRequest,
    InstanceGone,
    ObservedMachine,
    ProviderError,
    ProviderRefused,
    ProviderStatus,
    QuotaExhausted,
)
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument

USER_DATA_LIMIT_BYTES = 16 * 1024
"""EC2's own, before it is encoded."""

ARGS: Mapping[str, str] = {
    "ImageId": "the machine image; this or LaunchTemplate must be given",
    "LaunchTemplate": "an EC2 launch template, by id or name",
    "KeyName": "an SSH key pair",
    "SecurityGroupIds": "list of security groups",
    "IamInstanceProfile": "the role the machine may take",
    "BlockDeviceMappings": "its disks",
    "InstanceMarketOptions": "spot instead of on-demand capacity",
    "CapacityReservationSpecification": "which reserved capacity to use",
    "CpuOptions": "cores and threads",
    "CreditSpecification": "bursting of T instances",
    "EbsOptimized": "a network of its own for disks",
    "Ipv6AddressCount": "how many IPv6 addresses it gets",
    "MetadataOptions": "of the metadata service",
    "Monitoring": "detailed monitoring",
    "Placement": "placement group, tenancy, host",
    "PrivateDnsNameOptions": "how its host name is made",
    "TagSpecifications": "tags of your own, by resource type, beside the server's",
}
"""What a template may pass to RunInstances. All else is the server's to set, or has no place here."""

TAGGED = ("instance", "volume")
"""Types of resources that carry our own tags."""

STATUSES: Mapping[str, ProviderStatus] = {
    "pending": ProviderStatus.PENDING,
    "running": ProviderStatus.RUNNING,
    "stopping": ProviderStatus.STOPPING,
    "stopped": ProviderStatus.STOPPED,
    "shutting-down": ProviderStatus.DELETING,
    "terminated": ProviderStatus.DELETED,
}
PRESENT = tuple(name for name, status in STATUSES.items() if status is not ProviderStatus.DELETED)

TARGET_STATES: Mapping[str, BalancerTargetState] = {
    "initial": BalancerTargetState.REGISTERED,
    "healthy": BalancerTargetState.HEALTHY,
    "unhealthy": BalancerTargetState.REGISTERED,
    "unhealthy.draining": BalancerTargetState.DRAINING,
    "draining": BalancerTargetState.DRAINING,
    "unavailable": BalancerTargetState.REGISTERED,
    "unused": BalancerTargetState.DEREGISTERED,
}

GONE = frozenset({"InvalidInstanceID.NotFound", "InvalidInstanceID.Malformed"})
NO_CAPACITY = frozenset(
    {
        "InsufficientInstanceCapacity",
        "InsufficientHostCapacity",
        "InsufficientReservedInstanceCapacity",
        "InsufficientFreeAddressesInSubnet",
        "InsufficientCapacity",
        "SpotMaxPriceTooLow",
        "Unsupported",  # this type is not offered in this zone
    }
)
NO_QUOTA = frozenset(
    {
        "InstanceLimitExceeded",
        "VcpuLimitExceeded",
        "MaxSpotInstanceCountExceeded",
        "VolumeLimitExceeded",
        "NetworkInterfaceLimitExceeded",
        "PendingInstanceLimitExceeded",
    }
)
PASSING = frozenset(
    {
        "RequestLimitExceeded",
        "Throttling",
        "ThrottlingException",
        "RequestTimeout",
        "InternalError",
        "InternalFailure",
        "Unavailable",
        "ServiceUnavailable",
        "EC2ThrottledException",
    }
)
NO_TARGET = frozenset({"InvalidTarget", "TargetGroupNotFound"})
"""It is in no such group, or there is no such group any more: either way it gets no traffic from it."""
TOKEN_REUSED = "IdempotentParameterMismatch"  # noqa: S105  # an error code


class _Shape(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """Part of an answer; what we do not read is not named."""


class AwsState(_Shape, frozen=True):
    name: str = ""


class Placement(_Shape, frozen=True):
    availability_zone: str = ""


class AwsTag(_Shape, frozen=True):
    key: str
    value: str = ""


class InterfaceAttachment(_Shape, frozen=True):
    attachment_id: str = ""
    instance_id: str = ""
    device_index: int = 0


class InstanceInterface(_Shape, frozen=True):
    network_interface_id: str = ""
    attachment: InterfaceAttachment = InterfaceAttachment()


class AwsInterface(_Shape, frozen=True):
    network_interface_id: str = ""
    private_ip_address: str = ""
    attachment: InterfaceAttachment | None = None


class Interfaces(_Shape, frozen=True):
    network_interfaces: tuple[AwsInterface, ...] = ()


class AwsRoute(_Shape, frozen=True):
    destination_cidr_block: str = ""
    destination_ipv6_cidr_block: str = ""
    network_interface_id: str = ""
    instance_id: str = ""
    state: str = ""

    @property
    def destination(self) -> str:
        return self.destination_cidr_block or self.destination_ipv6_cidr_block


class AwsRouteTable(_Shape, frozen=True):
    route_table_id: str = ""
    routes: tuple[AwsRoute, ...] = ()
    tags: tuple[AwsTag, ...] = ()


class RouteTables(_Shape, frozen=True):
    route_tables: tuple[AwsRouteTable, ...] = ()


class AwsImage(_Shape, frozen=True):
    image_id: str
    name: str = ""
    creation_date: str = ""
    """ISO 8601: sorts as text."""


class AwsImages(_Shape, frozen=True):
    images: tuple[AwsImage, ...] = ()


class Ec2Instance(_Shape, frozen=True):
    instance_id: str
    instance_type: str = ""
    state: AwsState = AwsState()
    placement: Placement = Placement()
    launch_time: datetime | None = None
    private_ip_address: str = ""
    ipv6_address: str = ""
    private_dns_name: str = ""
    network_interfaces: tuple[InstanceInterface, ...] = ()
    tags: tuple[AwsTag, ...] = ()

    @property
    def status(self) -> ProviderStatus:
        return STATUSES.get(self.state.name, ProviderStatus.UNKNOWN)


class Reservation(_Shape, frozen=True):
    """A reservation of DescribeInstances; also the whole answer of RunInstances."""

    instances: tuple[Ec2Instance, ...] = ()


class Reservations(_Shape, frozen=True):
    reservations: tuple[Reservation, ...] = ()
    next_token: str = ""

    @property
    def instances(self) -> tuple[Ec2Instance, ...]:
        return tuple(instance for each in self.reservations for instance in each.instances)


class Subnet(_Shape, frozen=True):
    available_ip_address_count: int = 0


class Subnets(_Shape, frozen=True):
    subnets: tuple[Subnet, ...] = ()


class AwsTarget(_Shape, frozen=True):
    id: str
    port: int = 0


class TargetHealth(_Shape, frozen=True):
    state: str = ""


class TargetHealthDescription(_Shape, frozen=True):
    target: AwsTarget
    target_health: TargetHealth = TargetHealth()


class TargetHealths(_Shape, frozen=True):
    target_health_descriptions: tuple[TargetHealthDescription, ...] = ()


class AwsNothing(_Shape, frozen=True):
    """An answer without anything for us."""


def tag_names(prefix: str) -> dict[str, str]:
    """Our names in EC2's tags."""
    return {
        "instance": f"{prefix}instance-id",
        "cluster": f"{prefix}cluster-id",
        "shard": f"{prefix}shard",
        **{name: f"{prefix}{name}" for name in OWN_TAGS},
    }


def filters(values: Mapping[str, str | tuple[str, ...]]) -> list[dict[str, object]]:
    return [
        {"Name": name, "Values": list(value) if isinstance(value, tuple) else [value]}
        for name, value in values.items()
    ]


def destination(cidr: str) -> dict[str, object]:
    return {"DestinationIpv6CidrBlock" if ":" in cidr else "DestinationCidrBlock": cidr}


def run_parameters(request: CreateRequest, prefix: str) -> dict[str, object]:
    """The parameters of RunInstances. The instance id is its token: EC2 itself refuses to do it twice."""
    for name in request.args:
        if name not in ARGS:
            near = difflib.get_close_matches(name, ARGS, n=1)
            advice = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(ARGS)}"
            raise InvalidArgument(f"EC2 instances take no argument {name!r}{advice}", field=f"args.{name}")
    if not {"ImageId", "LaunchTemplate"} & set(request.args):
        raise InvalidArgument("args must have an ImageId or a LaunchTemplate", field="args.ImageId")
    if len(request.user_data) > USER_DATA_LIMIT_BYTES:
        raise InvalidArgument(
            f"user data of {len(request.user_data)} bytes; EC2 takes {USER_DATA_LIMIT_BYTES}",
            field="user_data",
        )
    optional: dict[str, str | bytes] = {
        "InstanceType": request.instance_type,
        "SubnetId": request.subnet,
        "UserData": request.user_data,  # as it is: boto3 encodes it
    }
    return {
        **request.args,
        **{name: value for name, value in optional.items() if value},
        "MinCount": 1,
        "MaxCount": 1,
        "ClientToken": request.instance_id,
        "TagSpecifications": _tag_specifications(request, prefix),
    }


class TagSpecification(_Shape, frozen=True, forbid_unknown_fields=True):
    """Tags of a template's author for one type of resource, in EC2's words."""

    resource_type: str
    tags: tuple[AwsTag, ...] = ()


def _tag_specifications(request: CreateRequest, prefix: str) -> list[dict[str, object]]:
    """Ours on the instance and its volumes; the author's beside them, and on what else they name."""
    ours = _ec2_tags(request, prefix)
    tags: dict[str, dict[str, str]] = {kind: dict(ours) for kind in TAGGED}
    for wanted in _own_specifications(request.args):
        for tag in wanted.tags:
            if tag.key.startswith((prefix, "aws:")):
                raise InvalidArgument(
                    f"the tag {tag.key!r} is not for templates: {prefix} is the server's, aws: Amazon's",
                    field="args.TagSpecifications",
                )
        tags.setdefault(wanted.resource_type, {}).update({tag.key: tag.value for tag in wanted.tags})
    return [
        {"ResourceType": kind, "Tags": [{"Key": key, "Value": value} for key, value in found.items()]}
        for kind, found in tags.items()
        if found
    ]


def _own_specifications(args: Mapping[str, object]) -> tuple[TagSpecification, ...]:
    try:
        return msgspec.convert(args.get("TagSpecifications", ()), tuple[TagSpecification, ...])
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"args.TagSpecifications: {error}", field="args.TagSpecifications") from None


def _ec2_tags(request: CreateRequest, prefix: str) -> dict[str, str]:
    names = tag_names(prefix)
    tags = {"Name": request.instance_id}
    tags |= {names[key] if key in OWN_TAGS else key: value for key, value in request.all_tags().items()}
    return tags | {
        names["instance"]: request.instance_id,
        names["cluster"]: request.cluster,
        names["shard"]: request.shard,
    }


def observed(instance: Ec2Instance, prefix: str, region: str) -> ObservedMachine:
    names = {theirs: ours for ours, theirs in tag_names(prefix).items()}
    theirs = {tag.key: tag.value for tag in instance.tags if not tag.key.startswith(("aws:", prefix))}
    # Ours last: somebody's own tag may be called `tenant` too, and says nothing about whose it is.
    tags = theirs | {names[tag.key]: tag.value for tag in instance.tags if tag.key in names}
    instance_id = tags.pop("instance", "")
    cluster, shard = tags.pop("cluster", ""), tags.pop("shard", "")
    if tags.get("Name") == instance_id:
        del tags["Name"]
    return ObservedMachine(
        instance_id=instance_id,
        provider_id=instance.instance_id,
        status=instance.status,
        private_ipv4=instance.private_ip_address,
        private_ipv6=instance.ipv6_address,
        hostname=instance.private_dns_name,
        launched_at_ns=int(instance.launch_time.timestamp()) * 10**9 if instance.launch_time else 0,
        instance_type=instance.instance_type,
        region=region,
        zone=instance.placement.availability_zone,
        cluster=cluster,
        shard=shard,
        tags=tags,
    )


def combined(states: Iterable[BalancerTargetState]) -> BalancerTargetState:
    """One word for a machine in several target groups: the one that matters for what comes next."""
    seen = set(states)
    if BalancerTargetState.DRAINING in seen:
        return BalancerTargetState.DRAINING
    if seen <= {BalancerTargetState.DEREGISTERED}:
        return BalancerTargetState.DEREGISTERED
    if BalancerTargetState.DEREGISTERED in seen:
        return BalancerTargetState.PARTIALLY_REGISTERED
    return (
        BalancerTargetState.HEALTHY
        if seen == {BalancerTargetState.HEALTHY}
        else BalancerTargetState.REGISTERED
    )


def error(operation: str, code: str, message: str, http_status: int) -> FleetplaneError:
    """What an error of AWS means to the server."""
    text = f"{operation}: {code}: {message}"
    details = {"code": code, "operation": operation}
    if code in GONE:
        return InstanceGone(text, details=details)
    if code in NO_CAPACITY:
        return CapacityExhausted(text, details=details)
    if code in NO_QUOTA:
        return QuotaExhausted(text, details=details)
    if code in PASSING or http_status >= 500:
        return ProviderError(text, details=details)
    return ProviderRefused(text, details=details)
