"""A whole group on EC2 behind a load balancer, kept by the controller itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import boto3
from support.instances.aws_patience import AWS_PATIENCE
from support.instances.controller_rig import GROUP, rig, wanted
from support.instances.instances_lab import TENANT

from fleetplane.domains.instances.providers.aws.provider import AwsProvider
from fleetplane.domains.instances.providers.contract import ProviderContext
from fleetplane.sim.clock import VirtualClock

REGION = "eu-west-1"


def client(service: str, endpoint: str) -> Any:
    return boto3.client(
        service,
        region_name=REGION,
        endpoint_url=endpoint,
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
    )


async def test_instances_are_targets_while_they_serve(tmp_path: Path, aws_endpoint: str) -> None:
    ec2, elb = client("ec2", aws_endpoint), client("elbv2", aws_endpoint)
    vpc = ec2.create_vpc(CidrBlock="10.8.0.0/16")["Vpc"]["VpcId"]
    [created] = elb.create_target_group(Name="group-www", Protocol="TCP", Port=443, VpcId=vpc)["TargetGroups"]
    arn = created["TargetGroupArn"]

    def config(size: int) -> dict[str, Any]:
        made = wanted(size)
        target = {"arn": arn, "listener_port": 443, "target_port": 8443, "proxy_port": 18443}
        made["load_balancers"] = {"www": {"provider": "aws", "target_groups": [target]}}
        made["groups"][TENANT][GROUP] |= {"load_balancers": ["www"], "instance_type": "t3.micro"}
        made["templates"]["worker"]["args"] = {"ImageId": "ami-12c6146b"}
        return made

    def targets() -> set[tuple[str, int]]:
        answer = elb.describe_target_health(TargetGroupArn=arn)["TargetHealthDescriptions"]
        return {(each["Target"]["Id"], each["Target"]["Port"]) for each in answer}

    clock = VirtualClock()
    aws = AwsProvider(ProviderContext(clock=clock, state_directory=tmp_path, region=REGION))
    credentials = {"access_key_id": "testing", "secret_access_key": "testing"}
    aws.configure({**credentials, "endpoint_url": aws_endpoint, **AWS_PATIENCE})
    await aws.start()  # it takes real time, of which the rig knows nothing
    async with rig(tmp_path, config(1), clock=clock, provider=aws) as place:  # type: ignore[arg-type]
        place.machinery._guarded._check_seconds = 60.0  # a server that a busy machine lets wait answers, too
        [name] = await place.grown(1)
        await place.advance(2)
        status = place.instances.get(TENANT, name).status
        assert status is not None
        assert targets() == {(status.provider_id, 8443)}

        await place.configure(config(0))
        await place.advance(2)
        assert targets() == set()
        [seen] = ec2.describe_instances(InstanceIds=[status.provider_id])["Reservations"]
        assert seen["Instances"][0]["State"]["Name"] == "running", "out before it is gone"
        await place.advance(30)
        [seen] = ec2.describe_instances(InstanceIds=[status.provider_id])["Reservations"]
        assert seen["Instances"][0]["State"]["Name"] == "terminated"
