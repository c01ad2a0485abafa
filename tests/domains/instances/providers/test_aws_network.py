"""What surrounds EC2 instances, against a server that speaks EC2's and ELB's API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from support.instances.aws_patience import AWS_PATIENCE

from fleetplane.domains.instances.providers.aws.provider import AwsProvider
from fleetplane.domains.instances.providers.conformance import new_instance_id
from fleetplane.domains.instances.providers.contract import (
    CreateRequest,
    ImageQuery,
    LeaderNetwork,
    LoadBalancer,
    NatRoute,
    ProviderContext,
    ProviderRefused,
    TargetGroup,
)
from fleetplane.kernel.clock import SystemClock

pytestmark = pytest.mark.slow

REGION = "eu-west-1"
IMAGE = "ami-12c6146b"
CLUSTER_TAG = "nstance:cluster-id"
Client = Callable[[str], Any]


@pytest.fixture
async def aws(aws_endpoint: str) -> AsyncIterator[AwsProvider]:
    provider = AwsProvider(ProviderContext(clock=SystemClock(), state_directory=Path(), region=REGION))
    provider.configure(
        {
            "access_key_id": "testing",
            "secret_access_key": "testing",
            "endpoint_url": aws_endpoint,
            **AWS_PATIENCE,
        }
    )
    await provider.start()
    yield provider
    await provider.close()


@pytest.fixture
def client(aws_endpoint: str) -> Iterator[Client]:
    opened: list[Any] = []

    def make(service: str) -> Any:
        opened.append(
            boto3.client(
                service,
                region_name=REGION,
                endpoint_url=aws_endpoint,
                aws_access_key_id="testing",
                aws_secret_access_key="testing",
            )
        )
        return opened[-1]

    yield make
    for each in opened:
        each.close()


async def machine(aws: AwsProvider) -> str:
    wanted = CreateRequest(
        cluster="c",
        shard="s",
        tenant="t",
        group="g",
        template="nat",
        prefix="nat",
        instance_id=new_instance_id("nat"),
        instance_type="t3.micro",
        args={"ImageId": IMAGE},
    )
    return (await aws.create_instance(wanted)).provider_id


# Images


async def test_an_image_is_found_by_its_filters_newest_first(aws: AwsProvider, client: Client) -> None:
    ec2 = client("ec2")
    source = await machine(aws)
    made = [ec2.create_image(InstanceId=source, Name=f"fleet-{number}")["ImageId"] for number in (2, 1)]
    by_name = ImageQuery(filters={"name": ("fleet-*",)}, owners=("self",), sort="name")
    assert await aws.find_image(by_name) == made[0]
    oldest = ImageQuery(filters={"name": ("fleet-*",)}, owners=("self",), sort="name", newest_first=False)
    assert await aws.find_image(oldest) == made[1]
    assert await aws.find_image(ImageQuery(filters={"name": ("fleet-*",)})) in made
    assert await aws.find_image(ImageQuery(filters={"name": ("nothing-like-it",)})) == ""


@pytest.mark.parametrize(
    ("args", "spot"),
    [
        ({"InstanceMarketOptions": {"MarketType": "spot"}}, True),
        ({"InstanceMarketOptions": {"MarketType": "capacity-block"}}, False),
        ({}, False),
    ],
)
def test_spot_machines_are_told_by_their_market(args: dict[str, object], spot: bool) -> None:
    context = ProviderContext(clock=SystemClock(), state_directory=Path())
    assert AwsProvider(context).is_spot(args) is spot


# Load balancers


async def test_leaving_a_target_group_that_is_gone_is_no_failure(aws: AwsProvider) -> None:
    arn = f"arn:aws:elasticloadbalancing:{REGION}:123456789012:targetgroup/gone/50dc6c495c0c9188"
    balancer = LoadBalancer(key="www", target_groups=(TargetGroup(id=arn, target_port=80),))
    await aws.deregister_from_lb(await machine(aws), balancer)
    with pytest.raises(ProviderRefused, match="TargetGroupNotFound"):
        await aws.register_with_lb(await machine(aws), balancer)


# The way out


class Network:
    """A subnet with a route table, as whoever builds networks makes them."""

    def __init__(self, ec2: Any, *, cluster: str = "c") -> None:
        self.ec2 = ec2
        vpc = ec2.create_vpc(CidrBlock="10.7.0.0/16")["Vpc"]["VpcId"]
        self.subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.7.1.0/24")["Subnet"]["SubnetId"]
        self.table = ec2.create_route_table(VpcId=vpc)["RouteTable"]["RouteTableId"]
        ec2.associate_route_table(RouteTableId=self.table, SubnetId=self.subnet)
        ec2.create_tags(Resources=[self.table], Tags=[{"Key": CLUSTER_TAG, "Value": cluster}])
        self.vpc = vpc

    def route(self, provider_id: str, **fields: Any) -> NatRoute:
        return NatRoute(cluster="c", tenant="t", subnet=self.subnet, provider_id=provider_id, **fields)

    def way_out(self, destination: str = "0.0.0.0/0") -> str | None:
        [table] = self.ec2.describe_route_tables(RouteTableIds=[self.table])["RouteTables"]
        for entry in table["Routes"]:
            if destination in (entry.get("DestinationCidrBlock"), entry.get("DestinationIpv6CidrBlock")):
                return str(entry.get("NetworkInterfaceId", ""))
        return None

    def interface_of(self, provider_id: str) -> str:
        [reservation] = self.ec2.describe_instances(InstanceIds=[provider_id])["Reservations"]
        return str(reservation["Instances"][0]["NetworkInterfaces"][0]["NetworkInterfaceId"])


async def test_a_subnets_way_out_is_made_moved_and_taken_away(aws: AwsProvider, client: Client) -> None:
    network = Network(client("ec2"))
    first, second = await machine(aws), await machine(aws)
    for _ in range(2):
        await aws.ensure_nat_route(network.route(first))
        assert network.way_out() == network.interface_of(first)
    checked = network.ec2.describe_network_interfaces(NetworkInterfaceIds=[network.interface_of(first)])
    assert checked["NetworkInterfaces"][0]["SourceDestCheck"] is False

    await aws.ensure_nat_route(network.route(second, previous_provider_id=first))
    assert network.way_out() == network.interface_of(second)

    await aws.remove_nat_route(network.route(first))
    assert network.way_out() is not None, "it leads through another by now"
    for _ in range(2):
        await aws.remove_nat_route(network.route(second))
        assert network.way_out() is None


async def test_a_fixed_address_goes_with_the_way(aws: AwsProvider, client: Client) -> None:
    network = Network(client("ec2"))
    address = network.ec2.allocate_address(Domain="vpc")
    first, second = await machine(aws), await machine(aws)
    for provider_id, before in ((first, ""), (second, first)):
        await aws.ensure_nat_route(
            network.route(
                provider_id,
                previous_provider_id=before,
                public_ipv4=address["PublicIp"],
                allocation_id=address["AllocationId"],
            )
        )
        [held] = network.ec2.describe_addresses(AllocationIds=[address["AllocationId"]])["Addresses"]
        assert held["InstanceId"] == provider_id


async def test_somebody_elses_routes_are_left_alone(aws: AwsProvider, client: Client) -> None:
    provider_id = await machine(aws)
    foreign = Network(client("ec2"), cluster="another")
    with pytest.raises(ProviderRefused, match="lacks the tag nstance:cluster-id=c"):
        await aws.ensure_nat_route(foreign.route(provider_id))
    assert foreign.way_out() is None

    own = Network(client("ec2"))
    gateway = own.ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    own.ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=own.vpc)
    own.ec2.create_route(RouteTableId=own.table, DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway)
    with pytest.raises(ProviderRefused, match="not through our instances"):
        await aws.ensure_nat_route(own.route(provider_id))
    await aws.remove_nat_route(own.route(provider_id))
    assert own.way_out() == ""


# The leader's address


async def test_the_leaders_interface_moves_to_whoever_leads(aws: AwsProvider, client: Client) -> None:
    ec2 = client("ec2")
    subnet = ec2.describe_subnets()["Subnets"][0]["SubnetId"]
    interface = ec2.create_network_interface(SubnetId=subnet)["NetworkInterface"]
    network = LeaderNetwork(ip=interface["PrivateIpAddress"], interface_id=interface["NetworkInterfaceId"])

    def holder() -> str:
        [seen] = ec2.describe_network_interfaces(NetworkInterfaceIds=[network.interface_id])[
            "NetworkInterfaces"
        ]
        return str(seen.get("Attachment", {}).get("InstanceId", ""))

    first, second = await machine(aws), await machine(aws)
    for leader in (first, first, second):
        await aws.assign_leader_network(leader, network)
        assert holder() == leader
    await aws.release_leader_network(first, network)
    assert holder() == second, "it is not the first one's to release"
    await aws.release_leader_network(second, network)
    assert holder() == ""


async def test_an_interface_with_another_address_is_refused(aws: AwsProvider, client: Client) -> None:
    ec2 = client("ec2")
    subnet = ec2.describe_subnets()["Subnets"][0]["SubnetId"]
    interface = ec2.create_network_interface(SubnetId=subnet)["NetworkInterface"]
    network = LeaderNetwork(ip="10.99.99.99", interface_id=interface["NetworkInterfaceId"])
    with pytest.raises(ProviderRefused, match=r"not 10\.99\.99\.99"):
        await aws.assign_leader_network(await machine(aws), network)
