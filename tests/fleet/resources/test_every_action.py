"""Every declared action does what it says. What needs an agent is shown in the tests of its domain."""

from __future__ import annotations

import ast
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio
from support.fleet.resources_rig import ResourcesRig, resources_rig
from support.fleet.started_domains import started_domains
from support.instances.instances_lab import TENANT
from support.shared.lost_answers import lost_answer

from fleetplane.domains.boards.kinds import BOARD, BoardSpec, BoardState, BoardStatus
from fleetplane.domains.boards.kinds import SCOPE as BOARDS_SCOPE
from fleetplane.domains.boards.server import BLUEPRINT as BOARDS
from fleetplane.domains.edge.server import BLUEPRINT as EDGE
from fleetplane.domains.fleetwide import BLUEPRINT as FLEETWIDE
from fleetplane.domains.gpus.server import BLUEPRINT as GPUS
from fleetplane.domains.instances.kinds import GROUP, INSTANCE, InstanceSpec, InstanceStatus
from fleetplane.domains.instances.server import BLUEPRINT as INSTANCES
from fleetplane.domains.proxies.acme.issuers import SelfSigned
from fleetplane.domains.proxies.kinds.records import AGENT, CERTIFICATE, CONFIG_VERSION, UPSTREAM, AgentSpec
from fleetplane.domains.proxies.kinds.unique import register
from fleetplane.domains.proxies.server import BLUEPRINT as PROXIES
from fleetplane.kernel.freeze import FREEZE
from fleetplane.kernel.store import Draft

DOMAINS = (GPUS, EDGE, INSTANCES, PROXIES, BOARDS)
TESTS = Path(__file__).parents[2]
HERE = "fleet/resources/test_every_action.py"
EDGE_RUNS = "domains/edge/runs/test_edge_fleet.py::test_the_actions_run_and_cancel_of_daemons_groups_and_runs"
PROXY_RUNS = "domains/proxies/test_proxy_runs.py"
PROXY_RUNS += "::test_the_actions_reload_restart_test_and_cancel_reach_the_agent"
CHANGED_HANDS = "domains/proxies/test_takeover_road.py::test_what_runs_is_seen_taken_over_and_given_back"
BOARD_RUNS = "domains/boards/test_board_runs.py::test_the_actions_run_cancel_and_write_reach_the_board"
ROLLOUTS = "fleet/rollouts/test_rollouts_simulation.py::"
ORDERS = f"{ROLLOUTS}test_orders_of_people_are_kept_with_who_gave_them"
ABORTED = f"{ROLLOUTS}test_an_order_to_abort_leaves_what_is_not_reached_as_it_is"
FROZEN = f"{HERE}::freezing"
DAEMONS = f"{HERE}::daemons"
ROLLED_BACK = f"{HERE}::rolling_back"
SHOWN = {
    ("edge", "edge-nodes", "drain"): DAEMONS,
    ("edge", "edge-nodes", "activate"): DAEMONS,
    ("edge", "edge-nodes", "revoke"): DAEMONS,
    ("edge", "edge-nodes", "readmit"): DAEMONS,
    ("edge", "edge-nodes", "run"): EDGE_RUNS,
    ("edge", "edge-nodes", "freeze"): FROZEN,
    ("edge", "edge-nodes", "lift"): FROZEN,
    ("edge", "edge-groups", "run"): EDGE_RUNS,
    ("edge", "runs", "cancel"): EDGE_RUNS,
    ("proxies", "workspaces", "roll-back"): ROLLED_BACK,
    ("proxies", "workspaces", "freeze"): FROZEN,
    ("proxies", "workspaces", "lift"): FROZEN,
    ("proxies", "proxy-agents", "reload"): PROXY_RUNS,
    ("proxies", "proxy-agents", "restart"): PROXY_RUNS,
    ("proxies", "proxy-agents", "test"): PROXY_RUNS,
    ("proxies", "proxy-agents", "roll-back"): ROLLED_BACK,
    ("proxies", "proxy-agents", "take-over"): CHANGED_HANDS,
    ("proxies", "proxy-agents", "give-back"): CHANGED_HANDS,
    ("proxies", "proxy-agents", "freeze"): FROZEN,
    ("proxies", "proxy-agents", "lift"): FROZEN,
    ("proxies", "certificates", "rotate"): f"{HERE}::certificates",
    ("proxies", "certificates", "revoke"): f"{HERE}::certificates",
    ("proxies", "runs", "cancel"): PROXY_RUNS,
    ("boards", "boards", "run"): BOARD_RUNS,
    ("boards", "boards", "freeze"): FROZEN,
    ("boards", "boards", "lift"): FROZEN,
    ("boards", "pins", "write"): BOARD_RUNS,
    ("boards", "runs", "cancel"): BOARD_RUNS,
    ("instances", "instances", "drain"): f"{HERE}::groups",
    ("instances", "groups", "scale"): f"{HERE}::groups",
    ("instances", "groups", "freeze"): FROZEN,
    ("instances", "groups", "lift"): FROZEN,
    ("fleetwide", "freezes", "lift"): f"{HERE}::freezes_and_tokens",
    ("fleetwide", "tokens", "revoke"): f"{HERE}::freezes_and_tokens",
    ("fleetwide", "rollouts", "pause"): ORDERS,
    ("fleetwide", "rollouts", "resume"): ORDERS,
    ("fleetwide", "rollouts", "skip"): ORDERS,
    ("fleetwide", "rollouts", "approve"): ORDERS,
    ("fleetwide", "rollouts", "undo"): ORDERS,
    (
        "fleetwide",
        "rollouts",
        "abort",
    ): ABORTED,
    ("fleetwide", "rollouts", "retry"): f"{ROLLOUTS}test_what_failed_is_tried_again",
}
"""Where the effect of each action is seen."""


def test_every_declared_action_is_carried_out_by_a_test_that_sees_what_it_does() -> None:
    declared = {
        (blueprint.name, resource.plural, action.name)
        for blueprint in (*DOMAINS, FLEETWIDE)
        for resource in blueprint.resources
        for action in resource.actions
    }
    assert declared == set(SHOWN)
    for (_, _, action), place in SHOWN.items():
        path, _, name = place.partition("::")
        text = (TESTS / path).read_text()
        found = [one for one in ast.walk(ast.parse(text)) if getattr(one, "name", "") == name]
        assert len(found) == 1, place
        assert f'"{action}"' in (ast.get_source_segment(text, found[0]) or ""), (action, place)


class Caller:
    """Asks for actions, as one who may do everything."""

    def __init__(self, rig: ResourcesRig, token: str) -> None:
        self.rig = rig
        self.store = rig.store
        self.token = token

    async def act(self, plural: str, name: str, action: str, body: Any = None) -> dict[str, Any]:
        answer = await self.rig.post(f"/{plural}/{name}/actions/{action}", self.token, body)
        assert answer.status_code in (200, 202), (plural, action, answer.text)
        done: dict[str, Any] = answer.json()
        assert (done["action"], done["object"]["resource"]) == (action, plural)
        return done

    async def shown(self, plural: str, name: str) -> dict[str, Any]:
        answer = await self.rig.get(f"/{plural}/{name}", self.token)
        found: dict[str, Any] = answer.json()
        return found

    async def apply(self, *objects: dict[str, Any]) -> None:
        made = await self.rig.post("/plans", self.token, {"objects": objects})
        assert made.status_code == 201, made.text
        done = await self.rig.post(f"/plans/{made.json()['id']}/apply", self.token)
        assert done.status_code == 200, done.text


@pytest_asyncio.fixture
async def caller(tmp_path: Path) -> AsyncIterator[Caller]:
    async with resources_rig(tmp_path, DOMAINS, started=started_domains(tmp_path)) as rig:
        roles = ("owner", "admin", "operator", "viewer", "edge.admin")
        yield Caller(rig, await rig.token("boss", *roles))


def made(kind: str, name: str, scope: str, **spec: Any) -> dict[str, Any]:
    return {"kind": kind, "metadata": {"name": name, "scope": scope}, "spec": spec}


async def site(caller: Caller) -> str:
    """A workspace with an agent that no machine has come for; its stored scope."""
    prod = "/tenants/acme/workspaces/prod"
    await caller.apply(
        made("organization", "acme", "/tenants/acme"),
        made("workspace", "prod", "/tenants/acme"),
        made("upstream", "app", prod, algorithm="round_robin", servers=[{"address": "127.0.0.1:1"}]),
        made("certificate", "shop.example", prod, provider="selfsigned"),
    )
    scope = caller.store.list(UPSTREAM)[0].scope

    def enrol(draft: Draft) -> None:
        register(draft, AGENT, scope, "a")
        draft.claim(AGENT, scope, "name", "web-1", "a")
        draft.put(AGENT, scope, "a", spec=AgentSpec(name="web-1"))

    await caller.store.transact(enrol, actor="tester", action="enrol", touches=[AGENT.key(scope, "a")])
    return scope


async def freezing(caller: Caller, scope: str) -> None:
    await caller.rig.node("acme", "n1")
    ready = BoardStatus(state=BoardState.READY)
    await caller.rig.put(BOARD, BOARDS_SCOPE, "7", spec=BoardSpec(name="attic"), status=ready)
    for plural, name, held in (
        ("edge-nodes", "n1", "tenant/acme/daemon/n1"),
        ("workspaces", "prod", scope),
        ("proxy-agents", "web-1", f"{scope}/agent/a"),
        ("boards", "attic", None),
        ("groups", "workers", f"tenant/{TENANT}/group/workers"),
    ):
        await caller.act(plural, name, "freeze", {"reason": "looking"})
        (freeze,) = caller.store.list(FREEZE)
        assert held in (None, freeze.scope)
        assert (freeze.spec.reason, freeze.spec.actor) == ("looking", "token/boss")
        await caller.act(plural, name, "lift")
        assert not caller.store.list(FREEZE)


async def daemons(caller: Caller) -> None:
    await caller.rig.node("acme", "n2")
    for action, state in (("drain", "draining"), ("activate", "active")):
        await caller.act("edge-nodes", "n2", action)
        assert (await caller.shown("edge-nodes", "n2"))["spec"]["desired"] == state
    await caller.act("edge-nodes", "n2", "revoke", {"reason": "stolen"})
    assert (await caller.shown("edge-nodes", "n2"))["status"]["state"] == "revoked"
    await caller.act("edge-nodes", "n2", "readmit")
    assert (await caller.shown("edge-nodes", "n2"))["status"]["state"] != "revoked"


async def rolling_back(caller: Caller, scope: str) -> None:
    version = caller.store.list(CONFIG_VERSION, scope)[-1].spec.version
    headers = {"authorization": f"Bearer {caller.token}"}
    gone = await caller.rig.client.delete("/apis/v1/upstreams/app", headers=headers)
    assert gone.status_code == 204, gone.text
    await caller.act("proxy-agents", "web-1", "roll-back", {"version": version})
    assert (await caller.shown("proxy-agents", "web-1"))["spec"]["pinnedVersion"] == version
    await caller.act("proxy-agents", "web-1", "roll-back")
    assert (await caller.shown("proxy-agents", "web-1"))["spec"]["pinnedVersion"] is None
    assert not caller.store.list(UPSTREAM)
    await caller.act("workspaces", "prod", "roll-back", {"version": version})
    assert [one.spec.name for one in caller.store.list(UPSTREAM)] == ["app"]
    assert caller.store.list(CONFIG_VERSION, scope)[-1].spec.restored_version == version


async def certificates(caller: Caller, scope: str) -> None:
    (certificate,) = caller.store.list(CERTIFICATE)
    running = next(
        member.running for member in caller.rig.api.catalogue.named("certificate").members if member.running
    )
    issued = await SelfSigned(caller.rig.kernel.clock).issue("shop.example")
    await running.certificates.issued(scope, certificate.name, issued, actor="tester")
    assert (await caller.shown("certificates", "shop.example"))["status"]["state"] == "active"
    begun = (await caller.act("certificates", "shop.example", "rotate"))["begun"]
    assert (begun["resource"], begun["name"]) == ("certificates", "shop.example")
    assert (await caller.shown("certificates", "shop.example"))["status"]["state"] == "renewing"
    await caller.act("certificates", "shop.example", "revoke", {"reason": "key_compromise"})
    shown = await caller.shown("certificates", "shop.example")
    assert (shown["status"]["state"], shown["status"]["fingerprint"]) == ("revoked", issued.fingerprint)


async def groups(caller: Caller) -> None:
    await caller.act("groups", "workers", "scale", {"size": 4})
    assert caller.store.list(GROUP)[0].spec.size == 4
    await caller.rig.put(
        INSTANCE,
        f"tenant/{TENANT}",
        "wkr01",
        spec=InstanceSpec(cluster="c", shard="local", group="workers", template="worker", prefix="wkr"),
        status=InstanceStatus(provider_id="i-1", registered_at_ns=10**18),
    )
    await caller.act("instances", "wkr01", "drain", {"timeout": "30s"})
    assert (await caller.shown("instances", "wkr01"))["status"]["state"] == "draining"


async def freezes_and_tokens(caller: Caller) -> None:
    await caller.act("groups", "workers", "freeze", {"reason": "looking"})
    (freeze,) = caller.store.list(FREEZE)
    await caller.act("freezes", freeze.uid, "lift")
    assert not caller.store.list(FREEZE)
    robot = await caller.rig.token("robot", "viewer")
    assert (await caller.rig.get("/groups", robot)).status_code == 200
    await caller.act("tokens", "robot", "revoke")
    assert (await caller.rig.get("/groups", robot)).status_code == 401


class Unheard(Caller):
    """Asks for everything twice with one key: what was answered first, it never learns."""

    replayed = 0

    async def act(self, plural: str, name: str, action: str, body: Any = None) -> dict[str, Any]:
        path = f"/{plural}/{name}/actions/{action}"
        key = {"idempotency-key": str(self.store.revision)}
        with lost_answer(self.store):
            await self.rig.post(path, self.token, body, **key)
        before = self.store.statistics().transactions
        again = await self.rig.post(path, self.token, body, **key)
        assert self.store.statistics().transactions == before, (path, again.text)
        done: dict[str, Any] = again.json()
        if again.status_code == 409:
            assert "its outcome is unknown" in done["detail"], done
        else:
            assert again.is_success, again.text
            assert again.headers["idempotency-replayed"] == "true"
            assert (done["action"], done["object"]["resource"]) == (action, plural)
            self.replayed += 1
        return done


async def test_an_action_whose_answer_is_lost_is_not_carried_out_again_under_its_key(caller: Caller) -> None:
    unheard = Unheard(caller.rig, caller.token)
    scope = await site(caller)
    await freezing(unheard, scope)
    await daemons(unheard)
    await certificates(unheard, scope)
    await groups(unheard)
    assert unheard.replayed == 2, "what one transaction does is answered as it would have been"


async def test_what_needs_no_agent_does_what_it_says(caller: Caller) -> None:
    scope = await site(caller)
    await freezing(caller, scope)
    await daemons(caller)
    await certificates(caller, scope)
    await rolling_back(caller, scope)
    await groups(caller)
    await freezes_and_tokens(caller)
