"""REST: commands to the NGINX of many agents, in waves."""

from __future__ import annotations

from fleetplane.domains.proxies.access import OPERATE, READ
from fleetplane.domains.proxies.agents.commands import printed
from fleetplane.domains.proxies.agents.runs import ProxyCall as NginxCall
from fleetplane.domains.proxies.agents.runs import ProxyCommand, ProxyOrder, ProxyRuns, ProxyRunSpec
from fleetplane.domains.proxies.rest.common import STOP_LIMIT_SECONDS, ProxyCall, actor
from fleetplane.fleet.runs.channel import RunOrder
from fleetplane.fleet.runs.rest import RunBody, RunRequests, RunRoutes, TargetResult
from fleetplane.kernel.commands import CommandTarget
from fleetplane.web.rest.problems import Code, Problem, Rejected


class ProxyRunBody(RunBody, forbid_unknown_fields=True, kw_only=True):
    command: ProxyCommand
    force: bool = False
    """With `restart`."""
    graceful: bool = True
    """With `reload` and `stop`."""
    timeout_seconds: int = 30
    """With `stop`: within how long NGINX has to end its connections."""


def order(call: ProxyCall) -> ProxyOrder:
    """What a request asks for. Agents have the usual time for an answer unless the policy gives another."""
    body: ProxyRunBody = call.body
    if not 0 <= body.timeout_seconds <= STOP_LIMIT_SECONDS:
        message = f"Must be between 0 and {STOP_LIMIT_SECONDS}"
        raise Rejected(Problem(field="timeout_seconds", message=message, code=Code.OUT_OF_RANGE))
    asked = NginxCall(
        command=body.command, force=body.force, graceful=body.graceful, timeout_seconds=body.timeout_seconds
    )
    return RunOrder(
        scope=call.scope,
        target=body.target.target(),
        call=asked,
        policy=body.policy.policy(deadline_seconds=asked.answer_seconds),
        actor=actor(call),
    )


def run_routes(runs: ProxyRuns) -> RunRoutes[ProxyRunSpec, NginxCall]:
    def result(target: CommandTarget) -> TargetResult:
        assert target.status is not None
        return TargetResult(message=target.status.detail, stdout=printed(runs.ledger, target))

    requests: RunRequests[ProxyRunSpec, NginxCall] = RunRequests(
        base="/workspaces/{workspace_id}",
        tag="Runs",
        read=READ,
        operate=OPERATE,
        body=ProxyRunBody,
        order=order,
        target=lambda spec: spec.target,
        program=lambda spec: (spec.call.command, spec.call.arguments),
        result=result,
        actor=actor,
        anywhere=True,
        started_by=lambda name: name.partition("?")[0],  # what follows belongs to the audit log
    )
    return RunRoutes(runs, requests)
