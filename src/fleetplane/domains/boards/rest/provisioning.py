"""REST: provisioning boards and clusters, and following that."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec

from fleetplane.domains.boards.access import PROVISION, READ
from fleetplane.domains.boards.kinds import BoardRole
from fleetplane.domains.boards.ports import (
    ProvisioningAction,
    ProvisioningAnswer,
    ProvisioningOrder,
    ProvisioningState,
    ProvisioningStep,
)
from fleetplane.domains.boards.provisioning.engine import ProvisioningEngine, told
from fleetplane.domains.boards.provisioning.operations import Operation, Operations, is_over, status_of
from fleetplane.domains.boards.rest.common import (
    ACCEPTED,
    PAGING,
    BoardCall,
    choice,
    listed,
    number_in,
    projected,
    provisioning_envelope,
    reference,
)
from fleetplane.domains.boards.rest.shapes.people import (
    OperationData,
    OperationRows,
    OrderAnswer,
    ShownOperation,
    ShownStep,
)
from fleetplane.domains.boards.rules import BoardFacts, checked
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument
from fleetplane.web.rest.routes import Answer, Query, Route, RouteGroup, Stream
from fleetplane.web.streaming import EVENT_STREAM, event

REQUEST_ID_BYTES = 12
WORKERS_LIMIT = 64
_ROUTES = RouteGroup("Provisioning")
_FAILED, _UNDOING_FAILED = "PROVISIONING_FAILED", "DEPROVISIONING_FAILED"
_RENAMED = {"install_script": "installer"}
"""Names that known clients use, as our options are called."""


class OrderBody(msgspec.Struct, forbid_unknown_fields=True):
    credential: str = ""
    """The name of a kept SSH credential; `default` when empty."""
    k3s_config: dict[str, Any] = {}
    addresses: dict[str, str] = {}
    """By the board's id, its SSH address, confirmed by the caller; the board's own report does not count."""
    request_id: str = ""
    dry_run: bool = False
    ssh_config: Any = None
    """What other servers take here; see `_refuse_inline`."""


class NodeOrder(OrderBody, forbid_unknown_fields=True):
    role: BoardRole | None = None
    cluster_id: int | None = None


class ClusterOrder(OrderBody, forbid_unknown_fields=True, kw_only=True):
    master_node_id: int
    worker_node_ids: list[int] = []


class ScaleOrder(OrderBody, forbid_unknown_fields=True, kw_only=True):
    worker_node_ids: list[int]


class ProvisioningRoutes:
    def __init__(self, *, engine: ProvisioningEngine, operations: Operations, clock: Clock) -> None:
        self._engine = engine
        self._operations = operations
        self._clock = clock

    def routes(self) -> Sequence[Route]:
        return (*self._orders(), *self._operation_routes())

    def _orders(self) -> Sequence[Route]:
        table = (
            ("/nodes/{id}/provision", self.provision, NodeOrder, "Install k3s on a board", _FAILED),
            (
                "/nodes/{id}/deprovision",
                self.deprovision,
                OrderBody,
                "Remove k3s from a board",
                _UNDOING_FAILED,
            ),
            ("/nodes/{id}/check", self.check, OrderBody, "Check whether a board can be provisioned", _FAILED),
            ("/clusters/{id}/provision", self.found, ClusterOrder, "Provision a cluster on boards", _FAILED),
            (
                "/clusters/{id}/deprovision",
                self.dissolve,
                OrderBody,
                "Remove a cluster from its boards",
                _UNDOING_FAILED,
            ),
            ("/clusters/{id}/scale", self.scale, ScaleOrder, "Add boards to a cluster", _FAILED),
        )
        return tuple(
            _ROUTES.post(
                path,
                handler,
                PROVISION,
                summary=summary,
                body=body,
                body_optional=body is OrderBody,
                answer=OrderAnswer,
                status=ACCEPTED,
                envelope=provisioning_envelope(failure),
            )
            for path, handler, body, summary, failure in table
        )

    def _operation_routes(self) -> Sequence[Route]:
        one = "/operations/{operation}"
        envelope = provisioning_envelope(_FAILED)
        return (
            _ROUTES.get(
                "/operations",
                self.list,
                READ,
                envelope=envelope,
                query=(
                    Query(name="node_id", summary="Only with this board", kind="integer", low=1),
                    Query(name="state", summary="Only in this state", choices=tuple(ProvisioningState)),
                    *PAGING,
                ),
            ),
            _ROUTES.get(one, self.show, READ, envelope=envelope),
            _ROUTES.get(f"{one}/log", self.log, READ, streams=True, envelope=envelope),
            _ROUTES.post(f"{one}/cancel", self.cancel, PROVISION, envelope=envelope),
            _ROUTES.post(f"{one}/resume", self.resume, PROVISION, envelope=envelope, status=ACCEPTED),
        )

    # Asking.

    async def provision(self, call: BoardCall) -> Answer[OrderAnswer]:
        body: NodeOrder = call.body
        return await self._ask(
            call,
            ProvisioningAction.PROVISION,
            body,
            board_id=number_in(call),
            role=body.role,
            cluster_id=body.cluster_id,
        )

    async def deprovision(self, call: BoardCall) -> Answer[OrderAnswer]:
        body: OrderBody = call.body or OrderBody()
        return await self._ask(call, ProvisioningAction.DEPROVISION, body, board_id=number_in(call))

    async def check(self, call: BoardCall) -> Answer[OrderAnswer]:
        body: OrderBody = call.body or OrderBody()
        return await self._ask(call, ProvisioningAction.CHECK, body, board_id=number_in(call))

    async def found(self, call: BoardCall) -> Answer[OrderAnswer]:
        body: ClusterOrder = call.body
        return await self._ask(
            call,
            ProvisioningAction.PROVISION,
            body,
            board_id=body.master_node_id,
            role=BoardRole.MASTER,
            cluster_id=number_in(call),
            worker_ids=_workers(body.worker_node_ids),
        )

    async def dissolve(self, call: BoardCall) -> Answer[OrderAnswer]:
        body: OrderBody = call.body or OrderBody()
        return await self._ask(call, ProvisioningAction.DEPROVISION, body, cluster_id=number_in(call))

    async def scale(self, call: BoardCall) -> Answer[OrderAnswer]:
        body: ScaleOrder = call.body
        workers = _workers(body.worker_node_ids)
        if not workers:
            raise InvalidArgument("name at least one board", field="worker_node_ids")
        return await self._ask(
            call,
            ProvisioningAction.PROVISION,
            body,
            board_id=workers[0],
            role=BoardRole.WORKER,
            cluster_id=number_in(call),
            worker_ids=workers[1:],
        )

    async def _ask(
        self,
        call: BoardCall,
        action: ProvisioningAction,
        body: OrderBody,
        *,
        board_id: int | None = None,
        cluster_id: int | None = None,
        role: BoardRole | None = None,
        worker_ids: tuple[int, ...] = (),
    ) -> Answer[OrderAnswer]:
        _refuse_inline(body.ssh_config)
        config = _config(body.k3s_config)
        order = ProvisioningOrder(
            action=action,
            board_id=board_id,
            cluster_id=cluster_id,
            role=role,
            worker_ids=worker_ids,
            k3s_version=config.pop("version", ""),
            k3s_channel=config.pop("channel", ""),
            k3s_config=config,
            credential_ref=body.credential,
            dry_run=body.dry_run,
            addresses=_addresses(body.addresses),
            request_id=body.request_id or f"rest-{self._clock.token_bytes(REQUEST_ID_BYTES).hex()}",
        )
        answer = await self._engine.request(order, actor=call.caller.name)
        return Answer(content=_answered(answer, request_id="" if body.dry_run else order.request_id))

    # Following.

    async def list(self, call: BoardCall) -> Answer[OperationRows]:
        """List operations."""
        board, state = reference(call, "node_id"), choice(call, "state", ProvisioningState)
        found = [
            one
            for one in self._operations.list()
            if state in (None, status_of(one).state)
            and (board is None or any(work.board == board for work in one.spec.works))
        ]
        return Answer(content=listed(call, found, _operation, OperationRows))

    async def show(self, call: BoardCall) -> Answer[OperationData]:
        """Get an operation and its progress."""
        return Answer(content=OperationData(data=_operation(self._operation(call))))

    async def log(self, call: BoardCall) -> Stream:
        """Follow an operation's output as server-sent events."""
        operation = self._operation(call)
        return Stream(chunks=self._lines(operation.name), content_type=EVENT_STREAM)

    async def _lines(self, name: str) -> AsyncGenerator[bytes]:
        number = 0
        async for line in self._engine.follow(name):
            number += 1
            yield event("line", {"text": line}, mark=str(number))
        yield event("end", _operation(self._operations.get(name)))

    async def cancel(self, call: BoardCall) -> Answer[OrderAnswer]:
        """Cancel an operation."""
        operation = self._operation(call)
        if is_over(operation):
            return Answer(content=_answered(told(operation, "it was over already")))
        order = ProvisioningOrder(
            action=ProvisioningAction.CANCEL,
            board_id=operation.spec.works[0].board,
            request_id=operation.spec.request_id,
        )
        return Answer(content=_answered(await self._engine.request(order, actor=call.caller.name)))

    async def resume(self, call: BoardCall) -> Answer[OrderAnswer]:
        """Resume an operation at the failed step."""
        operation = self._operation(call)
        if not operation.spec.request_id:
            raise FailedPrecondition("it was asked for without a request id, and cannot be asked for again")
        order = ProvisioningOrder(action=operation.spec.action, request_id=operation.spec.request_id)
        return Answer(content=_answered(await self._engine.request(order, actor=call.caller.name)))

    def _operation(self, call: BoardCall) -> Operation:
        return self._operations.get(call.path["operation"])


# What is asked for.


def _refuse_inline(given: object) -> None:
    if given is not None:
        raise InvalidArgument(
            "SSH logins are not accepted in a request; store one and name it as `credential`",
            field="ssh_config",
            hint="PUT /credentials/{name}, with the board's host key",
        )


def _addresses(given: Mapping[str, str]) -> dict[int, str]:
    if len(given) > WORKERS_LIMIT + 1:
        raise InvalidArgument(f"names more than {WORKERS_LIMIT + 1} boards", field="addresses")
    found = {}
    for board, address in given.items():
        if not (board.isascii() and board.isdecimal() and len(board) <= 10):
            raise InvalidArgument(f"{board[:64]!r} is no board's id", field="addresses")
        found[int(board)] = checked(BoardFacts(ip_address=address)).ip_address
    return found


def _workers(given: Sequence[int]) -> tuple[int, ...]:
    if len(given) > WORKERS_LIMIT:
        raise InvalidArgument(f"names more than {WORKERS_LIMIT} boards", field="worker_node_ids")
    return tuple(dict.fromkeys(given))


def _config(given: Mapping[str, Any]) -> dict[str, str]:
    """Options as the engine takes them: text, with commas between several."""
    found: dict[str, str] = {}
    for name, value in given.items():
        field = f"k3s_config.{name[:64]}"
        match value:
            case str():
                text = value
            case list():
                text = _joined(value, field)
            case dict():
                text = _joined([f"{key}={one}" if one != "" else key for key, one in value.items()], field)
            case _:
                raise InvalidArgument("must be a text, or a list of texts", field=field)
        if text:
            found[_RENAMED.get(name, name)] = text
    return found


def _joined(parts: Sequence[Any], field: str) -> str:
    for part in parts:
        if not isinstance(part, str) or "," in part:
            raise InvalidArgument("must be a list of texts without commas", field=field)
    return ",".join(parts)


# What is told.


def _answered(answer: ProvisioningAnswer, *, request_id: str = "") -> OrderAnswer:
    return projected(
        OrderAnswer,
        answer,
        operation_id=answer.operation_id or None,
        request_id=request_id or None,
        steps=[_step(step) for step in answer.steps],
    )


def _step(step: ProvisioningStep) -> ShownStep:
    board, _, name = step.name.partition("/")
    return projected(ShownStep, step, node_id=int(board), name=name)


def _operation(operation: Operation) -> ShownOperation:
    spec = operation.spec
    return projected(
        ShownOperation,
        status_of(operation),
        spec,
        id=operation.name,
        finished=is_over(operation),
        node_ids=[work.board for work in spec.works],
        request_id=spec.request_id or None,
        requested_by=spec.actor,
        steps=[_step(step) for step in told(operation, "").steps],
    )
