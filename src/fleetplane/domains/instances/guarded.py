"""A provider that always comes back, with an answer or with an error of ours.

Providers are plug-ins that talk to clouds: they hang, and they have defects. Neither may stop the
controller that serves everyone else, so every call has its time, and whatever else a provider
raises is a `ProviderError`: nothing is known, the same call may succeed later. Calls are
idempotent by contract, which is what makes giving up on one safe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import structlog

from fleetplane.domains.instances.providers.contract import (
    Created,
    CreateRequest,
    Observed,
    Page,
    Provider,
    ProviderError,
)
from fleetplane.kernel.errors import FleetplaneError

log = structlog.get_logger(__name__)

R = TypeVar("R")

CHECK_SECONDS = 5.0
"""Within which it must say how one instance is, or whether a subnet has room."""
LIST_SECONDS = 30.0
"""For one page."""
CHANGE_SECONDS = 60.0
"""To accept that a machine be made or removed; not until it is."""


class GuardedProvider:
    """The operations that keeping groups takes, each within its time."""

    def __init__(
        self,
        provider: Provider,
        *,
        check_seconds: float = CHECK_SECONDS,
        list_seconds: float = LIST_SECONDS,
        change_seconds: float = CHANGE_SECONDS,
    ) -> None:
        self._provider = provider
        self._check_seconds = check_seconds
        self._list_seconds = list_seconds
        self._change_seconds = change_seconds

    def __repr__(self) -> str:
        return f"<GuardedProvider {self._provider!r}>"

    async def create_instance(self, request: CreateRequest) -> Created:
        return await self._within(self._change_seconds, self._provider.create_instance(request), "create")

    async def delete_instance(self, instance_id: str, provider_id: str) -> None:
        call = self._provider.delete_instance(instance_id, provider_id)
        await self._within(self._change_seconds, call, "delete")

    async def get_instance_status(self, instance_id: str, provider_id: str) -> Observed:
        call = self._provider.get_instance_status(instance_id, provider_id)
        return await self._within(self._check_seconds, call, "status")

    async def list_instances(self, cluster: str, shard: str, *, limit: int, next_token: str = "") -> Page:
        call = self._provider.list_instances(cluster, shard, limit=limit, next_token=next_token)
        return await self._within(self._list_seconds, call, "list")

    async def check_subnet_capacity(self, subnet: str) -> bool:
        return await self._within(
            self._check_seconds, self._provider.check_subnet_capacity(subnet), "check_subnet"
        )

    async def _within(self, seconds: float, call: Awaitable[R], operation: str) -> R:
        kind = self._provider.kind
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await call
        except FleetplaneError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                raise ProviderError(f"{kind}: {operation} took longer than {seconds:g} s") from error
            # A defect of the provider: its place is wanted, and the controller goes on.
            log.error("instances.provider_crashed", provider=kind, operation=operation, exc_info=error)
            raise ProviderError(f"{kind}: {operation} failed: {type(error).__name__}: {error}") from error
