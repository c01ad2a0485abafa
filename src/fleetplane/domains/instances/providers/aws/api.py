"""Calling AWS from the event loop: boto3 in threads of its own, errors in our words.

The only module that knows boto3, which is imported when a provider starts: it is an extra
(`fleetplane[aws]`) and slow to load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar

import msgspec

from fleetplane.domains.instances.providers.aws import wire
from fleetplane.domains.instances.providers.contract import ProviderError, ProviderRefused

THREADS = 8
"""Calls at a time; EC2 allows an account a few RunInstances a second, so more would only be throttled."""

SERVICES = ("ec2", "elbv2")
MISSING = "it needs boto3; install fleetplane[aws]"

T = TypeVar("T")


def is_installed() -> bool:
    return find_spec("boto3") is not None


class Api(Protocol):
    """AWS as the provider sees it."""

    async def call(self, service: str, operation: str, shape: type[T], **parameters: object) -> T:
        """One call: its answer in `shape`, its error in our words."""
        ...

    async def close(self) -> None: ...


class AwsApi:
    """The clients of one account and region."""

    def __init__(self, clients: Mapping[str, Any], threads: ThreadPoolExecutor) -> None:
        self._clients = clients
        self._threads = threads

    @classmethod
    async def open(
        cls,
        *,
        session: Mapping[str, str],
        endpoint_url: str,
        connect_timeout_seconds: float,
        read_timeout_seconds: float,
        max_attempts: int,
    ) -> AwsApi:
        threads = ThreadPoolExecutor(THREADS, thread_name_prefix="aws")

        def make() -> dict[str, Any]:
            import boto3
            from botocore.config import Config

            config = Config(
                connect_timeout=connect_timeout_seconds,
                read_timeout=read_timeout_seconds,
                retries={"mode": "standard", "total_max_attempts": max_attempts},
                max_pool_connections=THREADS,
            )
            origin = boto3.session.Session(**session)
            return {
                name: origin.client(name, endpoint_url=endpoint_url or None, config=config)
                for name in SERVICES
            }

        clients = await asyncio.get_running_loop().run_in_executor(threads, make)
        return cls(clients, threads)

    async def close(self) -> None:
        for client in self._clients.values():
            client.close()
        await asyncio.to_thread(self._threads.shutdown)

    async def call(self, service: str, operation: str, shape: type[T], **parameters: object) -> T:
        answer = await asyncio.get_running_loop().run_in_executor(
            self._threads, self._call, service, operation, parameters
        )
        try:
            return msgspec.convert(answer, shape)
        except msgspec.ValidationError as error:
            raise ProviderError(f"{operation}: an answer that makes no sense: {error}") from error

    def _call(self, service: str, operation: str, parameters: Mapping[str, object]) -> object:
        from botocore import exceptions as boto

        try:
            return getattr(self._clients[service], operation)(**parameters)
        except boto.ClientError as error:
            said = error.response.get("Error", {})
            http_status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code, message = str(said.get("Code", "")), str(said.get("Message", ""))
            raise wire.error(operation, code, message, http_status) from error
        except (boto.NoCredentialsError, boto.PartialCredentialsError, boto.ParamValidationError) as error:
            raise ProviderRefused(f"{operation}: {error}") from error
        except boto.BotoCoreError as error:  # no connection, no answer in time: what was done is unknown
            raise ProviderError(f"{operation}: {error}") from error
