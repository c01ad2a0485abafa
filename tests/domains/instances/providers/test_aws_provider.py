"""The AWS provider against a server that speaks EC2's and ELB's API."""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from support.instances.aws_patience import AWS_PATIENCE

from fleetplane.domains.instances.providers.aws import wire
from fleetplane.domains.instances.providers.aws.provider import SETTLING_SECONDS, AwsProvider
from fleetplane.domains.instances.providers.conformance import (
    CHECKS,
    Check,
    Subject,
    name_of,
    new_instance_id,
)
from fleetplane.domains.instances.providers.contract import (
    BalancerTargetState,
    CapacityExhausted,
    CreateRequest,
    InstanceGone,
    LoadBalancer,
    ProviderContext,
    ProviderError,
    ProviderRefused,
    ProviderStatus,
    QuotaExhausted,
    TargetGroup,
)
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument
from fleetplane.sim.clock import VirtualClock

REGION = "eu-west-1"
IMAGE = "ami-12c6146b"
CREDENTIALS = {"access_key_id": "testing", "secret_access_key": "testing"}
MakeAws = Callable[..., AwsProvider]


def context(state: Path = Path()) -> ProviderContext:
    return ProviderContext(clock=VirtualClock(), state_directory=state, region=REGION)


def configured(provider: AwsProvider, **options: object) -> AwsProvider:
    provider.configure({**CREDENTIALS, **options})
    assert provider.validate() == []
    return provider


@pytest.fixture
async def make_aws(aws_endpoint: str) -> MakeAws:
    def make(**options: object) -> AwsProvider:
        return configured(AwsProvider(context()), endpoint_url=aws_endpoint, **AWS_PATIENCE, **options)

    return make


@pytest.fixture
async def aws(make_aws: MakeAws) -> AsyncIterator[AwsProvider]:
    provider = make_aws()
    await provider.start()
    yield provider
    await provider.close()


@pytest.fixture
def client(aws_endpoint: str) -> Iterator[Callable[[str], Any]]:
    """Amazon's own client, to see what the provider did."""
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


def request(**fields: Any) -> CreateRequest:
    return CreateRequest(
        **{
            "cluster": "c",
            "shard": "s",
            "tenant": "t",
            "group": "g",
            "template": "web",
            "prefix": "web",
            "instance_id": new_instance_id("web"),
            "instance_type": "t3.micro",
            "args": {"ImageId": IMAGE},
            **fields,
        }
    )


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
async def test_the_aws_provider_conforms(check: Check, make_aws: MakeAws) -> None:
    await check(Subject(factory=make_aws, request=request()))


async def test_a_machine_is_made_from_the_request_with_its_id_as_token(
    aws: AwsProvider, client: Callable[[str], Any]
) -> None:
    ec2 = client("ec2")
    subnet = ec2.describe_subnets()["Subnets"][0]["SubnetId"]
    wanted = request(subnet=subnet, user_data=b"\x1f\x8b\xff not text", tags={"team": "blue"})
    created = await aws.create_instance(wanted)

    (reservation,) = ec2.describe_instances(InstanceIds=[created.provider_id])["Reservations"]
    (machine,) = reservation["Instances"]
    assert machine["ClientToken"] == wanted.instance_id
    assert (machine["InstanceType"], machine["ImageId"], machine["SubnetId"]) == ("t3.micro", IMAGE, subnet)
    assert {tag["Key"]: tag["Value"] for tag in machine["Tags"]} == {
        "Name": wanted.instance_id,
        "team": "blue",
        "nstance:instance-id": wanted.instance_id,
        "nstance:cluster-id": "c",
        "nstance:shard": "s",
        "nstance:tenant": "t",
        "nstance:group": "g",
        "nstance:template": "web",
        "nstance:kind": "web",
    }
    told = ec2.describe_instance_attribute(InstanceId=created.provider_id, Attribute="userData")
    assert base64.b64decode(told["UserData"]["Value"]) == wanted.user_data

    seen = await aws.get_instance_status(wanted.instance_id, created.provider_id)
    assert seen.private_ipv4 == machine["PrivateIpAddress"]
    assert (seen.region, seen.zone) == (REGION, machine["Placement"]["AvailabilityZone"])
    assert seen.tags == {"team": "blue", "tenant": "t", "group": "g", "template": "web", "kind": "web"}


async def test_a_templates_own_tags_stand_beside_the_servers(
    aws: AwsProvider, client: Callable[[str], Any]
) -> None:
    chosen = [{"Key": "team", "Value": "red"}, {"Key": "tenant", "Value": "me"}]
    own = [
        {"ResourceType": "instance", "Tags": chosen},
        {"ResourceType": "network-interface", "Tags": [{"Key": "billing", "Value": "7"}]},
    ]
    wanted = request(args={"ImageId": IMAGE, "TagSpecifications": own})
    parameters: Any = wire.run_parameters(wanted, "nstance:")
    sent = {one["ResourceType"]: one["Tags"] for one in parameters["TagSpecifications"]}
    assert sent["network-interface"] == [{"Key": "billing", "Value": "7"}]
    assert {"Key": "nstance:tenant", "Value": "t"} in sent["volume"]
    assert {"Key": "team", "Value": "red"} not in sent["volume"]

    created = await aws.create_instance(wanted)
    (reservation,) = client("ec2").describe_instances(InstanceIds=[created.provider_id])["Reservations"]
    tags = {tag["Key"]: tag["Value"] for tag in reservation["Instances"][0]["Tags"]}
    assert (tags["team"], tags["tenant"], tags["nstance:tenant"]) == ("red", "me", "t")
    seen = await aws.get_instance_status(wanted.instance_id, created.provider_id)
    assert seen.tags["tenant"] == "t", "whose it is says the server's tag"


async def test_a_stopped_machine_is_seen_stopped(aws: AwsProvider, client: Callable[[str], Any]) -> None:
    created = await aws.create_instance(request())
    client("ec2").stop_instances(InstanceIds=[created.provider_id])
    seen = await aws.get_instance_status(created.instance_id, created.provider_id)
    assert seen.status is ProviderStatus.STOPPED


async def test_a_late_retry_of_a_terminated_machine_does_not_make_another(aws: AwsProvider) -> None:
    wanted = request()
    created = await aws.create_instance(wanted)
    await aws.delete_instance(created.instance_id, created.provider_id)
    with pytest.raises(InstanceGone):
        await aws.create_instance(wanted)


async def test_a_subnet_has_room_or_is_refused(aws: AwsProvider, client: Callable[[str], Any]) -> None:
    subnet = client("ec2").describe_subnets()["Subnets"][0]["SubnetId"]
    assert await aws.check_subnet_capacity(subnet)
    with pytest.raises(ProviderRefused, match="InvalidSubnetID"):
        await aws.check_subnet_capacity("subnet-0")


async def test_a_machine_joins_and_leaves_its_target_groups(
    aws: AwsProvider, client: Callable[[str], Any]
) -> None:
    vpc = client("ec2").describe_vpcs()["Vpcs"][0]["VpcId"]
    suffix = new_instance_id()[-8:]
    groups = tuple(
        TargetGroup(
            id=client("elbv2").create_target_group(
                Name=f"{name}-{suffix}", Protocol="HTTP", Port=80, VpcId=vpc, TargetType="instance"
            )["TargetGroups"][0]["TargetGroupArn"],
            target_port=8080,
        )
        for name in ("one", "two")
    )
    both, first = LoadBalancer(key="b", target_groups=groups), LoadBalancer(key="f", target_groups=groups[:1])
    provider_id = (await aws.create_instance(request())).provider_id
    assert await aws.get_lb_target_state(provider_id, both) is BalancerTargetState.DEREGISTERED

    await aws.register_with_lb(provider_id, first)
    assert await aws.get_lb_target_state(provider_id, both) is BalancerTargetState.PARTIALLY_REGISTERED
    await aws.register_with_lb(provider_id, both)
    assert await aws.list_lb_instances(both) == (provider_id,)
    state = await aws.get_lb_target_state(provider_id, both)
    assert state in (BalancerTargetState.REGISTERED, BalancerTargetState.HEALTHY)

    await aws.deregister_from_lb(provider_id, both)
    await aws.deregister_from_lb(provider_id, both)  # a second time is fine
    assert await aws.get_lb_target_state(provider_id, both) in (
        BalancerTargetState.DEREGISTERED,
        BalancerTargetState.DRAINING,
    )


async def test_no_connection_is_not_the_same_as_gone() -> None:
    with socket.socket() as nobody:  # bound and never listening: connections are refused
        nobody.bind(("127.0.0.1", 0))
        provider = configured(
            AwsProvider(context()),
            endpoint_url=f"http://127.0.0.1:{nobody.getsockname()[1]}",
            max_attempts=1,
        )
        await provider.start()
        with pytest.raises(ProviderError) as failure:
            await provider.get_instance_status("web1", "i-1")
        await provider.close()
    assert failure.value.retryable


async def test_a_server_that_does_not_answer_is_given_up_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        provider = configured(
            AwsProvider(context()),
            endpoint_url=f"http://127.0.0.1:{silent.getsockname()[1]}",
            read_timeout_seconds=0.2,
            max_attempts=1,
        )
        await provider.start()
        async with asyncio.timeout(60):
            with pytest.raises(ProviderError, match=r"(?i)timed? ?out"):
                await provider.create_instance(request())
        await provider.close()


class ScriptedApi:
    """Answers in order; an error is raised."""

    def __init__(self, *answers: object) -> None:
        self._answers = list(answers)
        self.operations: list[str] = []

    async def call(self, service: str, operation: str, shape: type[Any], **parameters: object) -> Any:
        self.operations.append(operation)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        pass


def shown(wanted: CreateRequest, provider_id: str = "i-1") -> wire.Reservation:
    tags = (wire.AwsTag(key="nstance:instance-id", value=wanted.instance_id),)
    machine = wire.Ec2Instance(instance_id=provider_id, state=wire.AwsState(name="pending"), tags=tags)
    return wire.Reservation(instances=(machine,))


async def test_a_machine_that_ec2_does_not_show_yet_is_not_gone() -> None:
    clock = VirtualClock()
    wanted = request()
    unknown = InstanceGone("InvalidInstanceID.NotFound")
    api = ScriptedApi(wire.Reservations(), shown(wanted), unknown, unknown)
    provider = AwsProvider(ProviderContext(clock=clock, state_directory=Path(), region=REGION), api=api)
    created = await provider.create_instance(wanted)

    with pytest.raises(ProviderError, match="yet"):
        await provider.get_instance_status(wanted.instance_id, created.provider_id)
    await clock.advance(SETTLING_SECONDS)
    with pytest.raises(InstanceGone):
        await provider.get_instance_status(wanted.instance_id, created.provider_id)


async def test_a_token_that_was_used_with_another_nonce_leads_to_the_first_machine() -> None:
    wanted = request()
    reused = wire.error("run_instances", wire.TOKEN_REUSED, "other parameters", 400)
    api = ScriptedApi(wire.Reservations(), reused, wire.Reservations(reservations=(shown(wanted),)))
    provider = AwsProvider(context(), api=api)

    with pytest.raises(ProviderError) as not_yet:
        await provider.create_instance(wanted)
    assert not_yet.value.retryable
    assert (await provider.create_instance(wanted)).provider_id == "i-1"
    assert api.operations.count("run_instances") == 1


async def test_a_machine_whose_answer_was_lost_is_not_gone_but_one_that_was_refused_is() -> None:
    lost, full = ProviderError("timed out"), CapacityExhausted("no room")
    nothing = wire.Reservations()
    provider = AwsProvider(context(), api=ScriptedApi(nothing, lost, nothing, nothing, full, nothing))
    unsure, refused = request(), request()

    with pytest.raises(ProviderError):
        await provider.create_instance(unsure)
    with pytest.raises(ProviderError, match="yet"):
        await provider.get_instance_status(unsure.instance_id, "")
    with pytest.raises(CapacityExhausted):
        await provider.create_instance(refused)
    with pytest.raises(InstanceGone):
        await provider.get_instance_status(refused.instance_id, "")


@pytest.mark.parametrize(
    ("code", "http_status", "meaning", "retryable"),
    [
        ("InvalidInstanceID.NotFound", 400, InstanceGone, None),
        ("InsufficientInstanceCapacity", 500, CapacityExhausted, True),
        ("VcpuLimitExceeded", 400, QuotaExhausted, True),
        ("RequestLimitExceeded", 503, ProviderError, True),
        ("SomethingNew", 502, ProviderError, True),
        ("UnauthorizedOperation", 403, ProviderRefused, False),
        ("InvalidAMIID.NotFound", 400, ProviderRefused, False),
    ],
)
def test_an_error_is_told_by_what_can_be_done_about_it(
    code: str, http_status: int, meaning: type[FleetplaneError], retryable: bool | None
) -> None:
    error = wire.error("run_instances", code, "said AWS", http_status)
    assert type(error) is meaning
    assert getattr(error, "retryable", None) is retryable
    assert code in error.message


HEALTHY, REGISTERED, GONE = (
    BalancerTargetState.HEALTHY,
    BalancerTargetState.REGISTERED,
    BalancerTargetState.DEREGISTERED,
)


@pytest.mark.parametrize(
    ("states", "together"),
    [
        ([], GONE),
        ([GONE, GONE], GONE),
        ([HEALTHY, HEALTHY], HEALTHY),
        ([HEALTHY, REGISTERED], REGISTERED),
        ([HEALTHY, GONE], BalancerTargetState.PARTIALLY_REGISTERED),
        ([HEALTHY, BalancerTargetState.DRAINING, GONE], BalancerTargetState.DRAINING),
    ],
)
def test_several_target_groups_make_one_state(
    states: list[BalancerTargetState], together: BalancerTargetState
) -> None:
    assert wire.combined(states) is together


def own_tag(key: str) -> list[dict[str, Any]]:
    return [{"ResourceType": "instance", "Tags": [{"Key": key, "Value": "x"}]}]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"args": {"ImageID": IMAGE}}, "did you mean 'ImageId'"),
        ({"args": {"ImageId": IMAGE, "MaxCount": 5}}, "MaxCount"),
        ({"args": {"ImageId": IMAGE, "UserData": "x"}}, "UserData"),
        ({"args": {"ImageId": IMAGE, "ClientToken": "x"}}, "ClientToken"),
        ({"args": {}}, "ImageId or a LaunchTemplate"),
        ({"user_data": b"x" * (wire.USER_DATA_LIMIT_BYTES + 1)}, "user data of 16385 bytes"),
        ({"tags": {"group": "mine"}}, "set by the server"),
        ({"args": {"ImageId": IMAGE, "TagSpecifications": own_tag("nstance:tenant")}}, "not for templates"),
        ({"args": {"ImageId": IMAGE, "TagSpecifications": own_tag("aws:x")}}, "not for templates"),
        ({"args": {"ImageId": IMAGE, "TagSpecifications": "x"}}, "TagSpecifications"),
    ],
)
async def test_a_request_that_cannot_be_is_refused_before_any_call(
    fields: dict[str, Any], complaint: str
) -> None:
    api = ScriptedApi()
    with pytest.raises(InvalidArgument, match=complaint):
        await AwsProvider(context(), api=api).create_instance(request(**fields))
    assert api.operations == []


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"access_key_id": "a"}, "go together"),
        ({"endpoint_url": "ftp://x"}, "endpoint_url"),
        ({"tag_prefix": "aws:x"}, "tag_prefix"),
        ({"max_attempts": 0}, "max_attempts"),
    ],
)
def test_options_that_cannot_work_are_problems(options: dict[str, object], problem: str) -> None:
    provider = AwsProvider(context())
    provider.configure(options)
    assert any(problem in each for each in provider.validate())


def test_a_region_must_come_from_somewhere() -> None:
    provider = AwsProvider(ProviderContext(clock=VirtualClock(), state_directory=Path()))
    assert any("region" in each for each in provider.validate())
