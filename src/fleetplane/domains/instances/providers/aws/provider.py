"""EC2 instances; what surrounds them is in `aws_network`.

Ownership is in tags. Creation is idempotent twice over: an instance that carries our id is
looked for first, and the id is also EC2's client token, which EC2 itself refuses to use twice,
so that not even two servers at once make two machines. EC2 answers from many places that
agree only after a while: what it does not show moments after it was asked for is not gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TypeVar

from fleetplane.domains.instances.providers.aws import wire
from fleetplane.domains.instances.providers.aws.api import MISSING, Api, AwsApi, is_installed
from fleetplane.domains.instances.providers.aws.network import AwsNetwork
from fleetplane.domains.instances.providers.contract import (
    PAGE_LIMIT_MAX,
    PAGE_LIMIT_MIN,
    Created,
    CreateRequest,
    Description,
    InstanceGone,
    ObservedMachine,
    ProviderCapability,
    ProviderContext,
    ProviderError,
    ProviderPage,
    ProviderRefused,
    ProviderStatus,
    QuotaExhausted,
)
from fleetplane.domains.instances.providers.options import ProviderOptions, parse
from fleetplane.kernel.clock import Clock

T = TypeVar("T")
VERSION = "1"
LOCKS = 64
"""One guards the creations whose ids fall on it, so that a repeat waits and then finds."""

SETTLING_SECONDS = 60.0
"""How long EC2 may fail to show what it just made; its documentation speaks of seconds to a few minutes."""

SETTLING_LIMIT = 4096
"""Machines remembered as just asked for: sixty seconds of creations far above EC2's own rate limit."""


class AwsOptions(ProviderOptions, frozen=True):
    region: str = ""
    profile: str = ""
    access_key_id: str = ""
    secret_access_key: str = ""
    session_token: str = ""
    endpoint_url: str = ""
    tag_prefix: str = "nstance:"
    connect_timeout_seconds: float = 5.0
    read_timeout_seconds: float = 20.0
    max_attempts: int = 3


class AwsProvider(AwsNetwork):
    kind = "aws"

    def __init__(self, context: ProviderContext, *, api: Api | None = None) -> None:
        self._context = context
        self._options = AwsOptions()
        self._api = api
        self._locks = tuple(asyncio.Lock() for _ in range(LOCKS))
        self._asked_for: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<AwsProvider region={self._region!r}>"

    def describe(self) -> Description:
        return Description(
            name=self.kind,
            version=VERSION,
            summary="EC2 instances",
            options={
                "region": "the region; the shard's own when empty",
                "profile": "of the shared AWS configuration",
                "access_key_id": "with secret_access_key; AWS's usual sources when empty",
                "secret_access_key": "",
                "session_token": "of temporary credentials",
                "endpoint_url": "another endpoint than Amazon's",
                "tag_prefix": "begins the names of our tags",
                "connect_timeout_seconds": "for one attempt",
                "read_timeout_seconds": "for one attempt",
                "max_attempts": "of one call, the first included",
            },
            args=wire.ARGS,
            capabilities=frozenset(ProviderCapability),
        )

    def configure(self, options: Mapping[str, object]) -> None:
        self._options = parse(self.kind, options, AwsOptions)

    def validate(self) -> list[str]:
        options, problems = self._options, []
        if not is_installed():
            problems.append(MISSING)
        if not self._region:
            problems.append("region: none is set, here or for the shard")
        if bool(options.access_key_id) != bool(options.secret_access_key):
            problems.append("access_key_id and secret_access_key go together")
        if options.endpoint_url and not options.endpoint_url.startswith(("http://", "https://")):
            problems.append(f"endpoint_url: {options.endpoint_url!r} is no http or https address")
        if not options.tag_prefix or options.tag_prefix.startswith("aws:"):
            problems.append("tag_prefix: must be there, and not Amazon's own aws:")
        if options.max_attempts < 1:
            problems.append("max_attempts: must be at least 1")
        return problems

    @property
    def _region(self) -> str:
        return self._options.region or self._context.region

    async def start(self) -> None:
        if self._api is not None:
            return
        options = self._options
        session = {
            "region_name": self._region,
            "profile_name": options.profile,
            "aws_access_key_id": options.access_key_id,
            "aws_secret_access_key": options.secret_access_key,
            "aws_session_token": options.session_token,
        }
        self._api = await AwsApi.open(
            session={name: value for name, value in session.items() if value},
            endpoint_url=options.endpoint_url,
            connect_timeout_seconds=options.connect_timeout_seconds,
            read_timeout_seconds=options.read_timeout_seconds,
            max_attempts=options.max_attempts,
        )

    async def close(self) -> None:
        if self._api is not None:
            api, self._api = self._api, None
            await api.close()

    async def create_instance(self, request: CreateRequest) -> Created:
        parameters = wire.run_parameters(request, self._options.tag_prefix)
        async with self._locks[hash(request.instance_id) % LOCKS]:
            instance = await self._look_up(request.instance_id)
            if instance is None:
                instance = await self._run(request.instance_id, parameters)
        if instance.status is ProviderStatus.DELETED:
            raise InstanceGone(f"EC2 has already terminated {instance.provider_id} ({request.instance_id})")
        return instance.as_created()

    async def delete_instance(self, instance_id: str, provider_id: str) -> None:
        # Looked at first: terminating by a stale provider id must never hit someone else's machine.
        instance = await self.get_instance_status(instance_id, provider_id)
        if instance.status is ProviderStatus.DELETED:
            raise InstanceGone(f"EC2 has already terminated {instance.provider_id} ({instance_id})")
        await self._ec2("terminate_instances", wire.AwsNothing, InstanceIds=[instance.provider_id])
        self._asked_for.pop(instance_id, None)

    async def get_instance_status(self, instance_id: str, provider_id: str) -> ObservedMachine:
        if not provider_id:
            found = await self._look_up(instance_id)
        else:
            try:
                answer = await self._ec2("describe_instances", wire.Reservations, InstanceIds=[provider_id])
                found = next(iter(self._observed(answer)), None)
            except InstanceGone:
                found = None
        if found is not None and found.instance_id == instance_id:
            return found
        unseen = found is None or not found.instance_id  # not shown yet, or not yet with its tags
        if unseen and self._is_settling(instance_id):
            raise ProviderError(f"EC2 does not show {instance_id} yet, which it was asked for moments ago")
        raise InstanceGone(f"EC2 has no instance {instance_id!r} {provider_id}".rstrip())

    async def list_instances(
        self, cluster: str, shard: str, *, limit: int, next_token: str = ""
    ) -> ProviderPage:
        names = wire.tag_names(self._options.tag_prefix)
        answer = await self._ec2(
            "describe_instances",
            wire.Reservations,
            Filters=wire.filters(
                {
                    f"tag:{names['cluster']}": cluster,
                    f"tag:{names['shard']}": shard,
                    "instance-state-name": wire.PRESENT,
                }
            ),
            MaxResults=max(PAGE_LIMIT_MIN, min(limit, PAGE_LIMIT_MAX)),
            **({"NextToken": next_token} if next_token else {}),
        )
        return ProviderPage(items=tuple(self._observed(answer)), next_token=answer.next_token)

    async def check_subnet_capacity(self, subnet: str) -> bool:
        answer = await self._ec2("describe_subnets", wire.Subnets, SubnetIds=[subnet])
        return any(each.available_ip_address_count > 0 for each in answer.subnets)

    async def _look_up(self, instance_id: str) -> ObservedMachine | None:
        """The machine that carries this id; one that lives before one that is terminated."""
        name = wire.tag_names(self._options.tag_prefix)["instance"]
        found = await self._ec2(
            "describe_instances", wire.Reservations, Filters=wire.filters({f"tag:{name}": instance_id})
        )
        instances = sorted(self._observed(found), key=lambda each: each.status is ProviderStatus.DELETED)
        return instances[0] if instances else None

    async def _run(self, instance_id: str, parameters: Mapping[str, object]) -> ObservedMachine:
        # Before the call, whose answer may be lost: from here on the machine may exist unseen.
        self._remember(instance_id)
        try:
            answer = await self._ec2("run_instances", wire.Reservation, **parameters)
        except (ProviderRefused, QuotaExhausted) as error:
            if error.details.get("code") == wire.TOKEN_REUSED:
                # An earlier request with another nonce got through, and is not shown yet to everyone.
                raise ProviderError(f"EC2 has made {instance_id} and does not show it yet") from error
            self._asked_for.pop(instance_id, None)  # a clear no: there is none
            raise
        if not answer.instances:
            raise ProviderError(f"EC2 made nothing for {instance_id}, and does not say why")
        return wire.observed(answer.instances[0], self._options.tag_prefix, self._region)

    def _remember(self, instance_id: str) -> None:
        now = self._context.clock.monotonic()
        self._asked_for.pop(instance_id, None)  # to stand last again: they are kept in order of time
        while self._asked_for and (
            len(self._asked_for) >= SETTLING_LIMIT
            or next(iter(self._asked_for.values())) < now - SETTLING_SECONDS
        ):
            del self._asked_for[next(iter(self._asked_for))]
        self._asked_for[instance_id] = now

    def _is_settling(self, instance_id: str) -> bool:
        asked_at = self._asked_for.get(instance_id)
        return asked_at is not None and self._context.clock.monotonic() < asked_at + SETTLING_SECONDS

    def _observed(self, answer: wire.Reservations) -> list[ObservedMachine]:
        return [wire.observed(each, self._options.tag_prefix, self._region) for each in answer.instances]

    @property
    def _clock(self) -> Clock:
        return self._context.clock

    @property
    def _cluster_tag(self) -> str:
        return wire.tag_names(self._options.tag_prefix)["cluster"]

    async def _ec2(self, operation: str, shape: type[T], **parameters: object) -> T:
        return await self._started.call("ec2", operation, shape, **parameters)

    async def _elb(self, operation: str, shape: type[T], **parameters: object) -> T:
        return await self._started.call("elbv2", operation, shape, **parameters)

    @property
    def _started(self) -> Api:
        if self._api is None:
            raise ProviderError("the aws provider is not running")
        return self._api
