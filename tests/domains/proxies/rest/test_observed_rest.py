"""Who may see an observed NGINX and have it taken over, and what a plan is good for."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
from support.proxies.proxy_api import HOST, Api, rest_api

from fleetplane.domains.proxies.agents.ports import AgentOrder, AgentResult, AgentVerb
from fleetplane.domains.proxies.kinds.records import AGENT, Agent, AgentStatus, workspace_scope
from fleetplane.domains.proxies.kinds.values import AgentState, Hands, Observed
from fleetplane.domains.proxies.nginx.site import OBSERVES, TYPED_OPTIONS
from fleetplane.kernel.store import Draft

SEEN = Observed(
    state=Hands.OBSERVING,
    config_path="/etc/nginx/nginx.conf",
    nginx_version="1.22.1",
    modules=("http_ssl",),
    workers=2,
    listening=("0.0.0.0:80", "[::]:8080"),
    files=1,
    bytes=10,
    digest="as reported",
    problems=("/etc/shadow is outside the folders",),
    logs=("/var/log/nginx/access.log",),
    unit="nginx.service",
    error="",
)


class Node:
    """An agent that answers every command well."""

    def __init__(self) -> None:
        self.digest = "d1"
        self.orders: list[AgentOrder] = []

    async def order(self, agent: Agent, order: AgentOrder, *, actor: str) -> AgentResult:
        self.orders.append(order)
        page = json.dumps({"digest": self.digest, "pages": 1, "data": "no base64"})
        return AgentResult(success=True, message="done", output=page if order.verb is AgentVerb.SHOW else "")


async def observing(api: Api, organization: str, workspace: str, state: Hands = Hands.OBSERVING) -> str:
    scope = workspace_scope(organization, workspace)
    found = api.store.list(AGENT, scope)
    if not found:
        await api.admin.post(f"/workspaces/{workspace}/agents/tokens", {"name": "web-1"})
        found = api.store.list(AGENT, scope)
    (agent,) = found

    def change(draft: Draft) -> None:
        status = AgentStatus(
            state=AgentState.ONLINE,
            capabilities=(OBSERVES, TYPED_OPTIONS),
            observed=msgspec.structs.replace(SEEN, state=state),
        )
        draft.put(AGENT, scope, agent.name, spec=agent.spec, status=status)

    touches = [AGENT.key(scope, agent.name)]
    await api.store.transact(change, actor="test", action="test", touches=touches)
    return f"/agents/{agent.name}"


async def test_an_administrator_takes_over_what_a_plan_still_says(tmp_path: Path) -> None:
    node = Node()
    async with rest_api(tmp_path, commander=node) as api:
        organization, workspace = await api.workspace()
        agent = await observing(api, organization, workspace)
        operator = await api.person(organization, "operator")
        viewer = await api.person(organization, "viewer")
        assert (await viewer.get(agent))["observed"]["listening"] == ["0.0.0.0:80", "[::]:8080"]
        for path in ("observed", "observed/log?name=/var/log/nginx/access.log", "takeover"):
            assert (await operator.refused("GET", f"{agent}/{path}"))[0] == 403
        for path, body in (("takeover", {"plan": "x"}), ("give-back", {})):
            assert (await operator.refused("POST", f"{agent}/{path}", body))[0] == 403
        body = {"certificate": "/etc/x.pem"}
        assert (await operator.refused("POST", f"{agent}/observed/certificates", body))[0] == 403
        assert node.orders == []

        assert await api.admin.refused("GET", f"{agent}/takeover") == (
            409,
            "CONFLICT",
        )  # it would serve nothing
        await api.admin.post(f"/workspaces/{workspace}/virtual-hosts", HOST)
        plan = await api.admin.get(f"{agent}/takeover")
        assert [plan[f"ports_{one}"] for one in ("kept", "added", "lost")] == [[80], [], [8080]]
        assert any("nginx.service" in one for one in plan["warnings"])
        assert any("/etc/shadow" in one for one in plan["warnings"])
        candidate = next(one.candidate for one in node.orders if one.verb is AgentVerb.VALIDATE)
        assert b"PRIVATE" not in candidate

        node.digest = "d2"  # somebody changed the observed configuration
        confirm = {"plan": plan["id"]}
        assert (await api.admin.refused("POST", f"{agent}/takeover", confirm))[0] == 409
        node.digest = "d1"
        done = await api.admin.post(f"{agent}/takeover", confirm, 200)
        assert done["success"] is True
        assert (node.orders[-1].verb, node.orders[-1].digest) == (AgentVerb.TAKE_OVER, "d1")
        assert node.orders[-1].version == plan["version"]
        await api.admin.post(
            f"/workspaces/{workspace}/virtual-hosts", {**HOST, "name": "b", "server_name": "b.test"}
        )
        assert (await api.admin.refused("POST", f"{agent}/takeover", confirm))[0] == 409  # another version

        assert (await api.admin.refused("POST", f"{agent}/give-back", {}))[0] == 409  # it was not taken over
        await observing(api, organization, workspace, Hands.TAKEN_OVER)
        assert (await api.admin.refused("POST", f"{agent}/takeover", confirm))[0] == 409
        assert (await api.admin.refused("GET", f"{agent}/observed"))[0] == 503  # nobody can read that answer
        refused = await api.admin.refused("GET", f"{agent}/observed/log?name=/etc/shadow")
        assert refused[0] == 422
