"""What every REST family has: idempotency, gateway, OpenAPI document, mounts, metrics and sweep.

A domain brings its route table, its gate and how its errors look; the rest is the same for all.
Litestar is loaded with the gateway: when its numbers are asked for, which is while a domain is built, or else
with the first request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from prometheus_client.registry import Collector

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.store import Store
from fleetplane.rpc import Needs
from fleetplane.web.documents import Documents, WebDocument
from fleetplane.web.metrics import GatewayCollector
from fleetplane.web.ops import App, Mount
from fleetplane.web.rest import openapi
from fleetplane.web.rest.gateway import REQUESTS_PER_MINUTE, Gateway, Receive, Scope, Send
from fleetplane.web.rest.idempotency import Answers
from fleetplane.web.rest.problems import Envelope, ErrorEnvelope, refusal
from fleetplane.web.rest.routes import C, Caller, Gate, RouteTable

SWEEP_SECONDS = 3600.0
Sweep = Callable[[], Awaitable[object]]


class FamilyKernel(Protocol):
    """What of the kernel a family needs."""

    @property
    def store(self) -> Store: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def master(self) -> MasterKey: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyText:
    """Texts of a REST family, for its OpenAPI document and the list of mounts."""

    title: str
    version: str
    description: str
    summary: str
    """Of its mount."""
    document_path: str = ""
    """Where its document is; `openapi.json` below its prefix unless said otherwise."""
    document_summary: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyErrors:
    """How the errors of a family look."""

    envelope: Envelope = refusal
    shape: Any = ErrorEnvelope
    """Of every refusal, for the document."""
    rejected: str = openapi.REJECTED
    """The status of a request that is wrong."""
    content_type: str = openapi.JSON
    """Of every refusal."""
    conditional: bool = True
    """Whether things have versions that a request may insist on."""


PROBLEMS = FamilyErrors()
C2 = TypeVar("C2", bound=Caller)


class RestFamily(Generic[C]):
    """One route table, served."""

    def __init__(
        self,
        kernel: FamilyKernel,
        table: RouteTable,
        gate: Gate[C],
        *,
        domain: str,
        text: FamilyText,
        errors: FamilyErrors = PROBLEMS,
        requests_per_minute: int = REQUESTS_PER_MINUTE,
        sweeps: Sequence[Sweep] = (),
        described: RouteTable | None = None,
    ) -> None:
        """`domain` names its metrics and keeps its idempotency keys; `sweeps` run beside its own, hourly.

        `described` is what the document is about, where that is more than the table.
        """
        self.table = table
        self._described = described or table
        self._gate = gate
        self._domain = domain
        self._text = text
        self._errors = errors
        self._clock = kernel.clock
        self._store = kernel.store
        self._requests_per_minute = requests_per_minute
        self._answers = Answers(kernel.store, kernel.master, kernel.clock, namespace=domain)
        self._sweeps = (*sweeps, self._answers.sweep)

    def __repr__(self) -> str:
        return f"<RestFamily {self._domain} {self.table!r}>"

    @cached_property
    def gateway(self) -> Gateway[C]:
        return self.application(self.table, self._gate)

    def application(self, table: RouteTable, gate: Gate[C2]) -> Gateway[C2]:
        """Another table, or the family's own, with the family's idempotency keys, limits and errors."""
        from fleetplane.web.rest.app import application

        return application(
            table,
            gate=gate,
            answers=self._answers,
            store=self._store,
            clock=self._clock,
            requests_per_minute=self._requests_per_minute,
            envelope=self._errors.envelope,
        )

    @cached_property
    def collectors(self) -> Sequence[Collector]:
        return (GatewayCollector(self.gateway, domain=self._domain),)

    @cached_property
    def mounts(self) -> Sequence[Mount]:
        """The routes and the document that describes them."""
        path = self._text.document_path or f"{self.table.prefix}/openapi.json"
        document = WebDocument(content_type="application/json", content=lambda: self.document)
        return (
            Mount(
                path=self.table.prefix,
                app=LateApp(lambda: self.gateway),
                summary=self._text.summary,
                needs=Needs.STORE if self.table.is_served_anywhere else Needs.ACTIVE,
            ),
            Mount(
                path=path,
                app=Documents({path: document}),
                summary=self._text.document_summary,
                needs=Needs.NOTHING,
            ),
        )

    @cached_property
    def document(self) -> bytes:
        """The OpenAPI document."""
        text, errors = self._text, self._errors
        made = openapi.document(
            self._described,
            title=text.title,
            version=text.version,
            description=text.description,
            error=errors.shape,
            rejected=errors.rejected,
            conditional=errors.conditional,
            error_type=errors.content_type,
        )
        return msgspec.json.encode(made)

    async def take_over(self) -> None:
        """Adopt idempotency keys as an earlier version kept them, before anything is done by their like."""
        await self._answers.adopt()

    async def run_active(self) -> None:
        """Sweep at the start and every hour, until cancelled."""
        while True:
            for sweep in self._sweeps:
                await sweep()
            await self._clock.sleep(SWEEP_SECONDS)


class LateApp:
    """An application that is made when it is first asked, beside the event loop."""

    def __init__(self, make: Callable[[], App]) -> None:
        self._make = make
        self._made: App | None = None
        self._making = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._made is None:
            async with self._making:
                if self._made is None:
                    self._made = await asyncio.to_thread(self._make)
        await self._made(scope, receive, send)
