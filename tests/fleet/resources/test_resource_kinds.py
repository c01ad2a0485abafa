"""Every stored kind that the resource API shows: names, scopes, shapes, and what must not leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from support.fleet.resources_rig import ResourcesRig, resources_rig, watched

from fleetplane.domains.boards.commands.encoding import BoardProgram
from fleetplane.domains.boards.commands.runs import BOARD_RUN, BoardRunSpec
from fleetplane.domains.boards.kinds import (
    BOARD,
    CLUSTER,
    BoardSpec,
    BoardState,
    BoardStatus,
    ClusterSpec,
    ClusterStatus,
)
from fleetplane.domains.boards.kinds import SCOPE as BOARDS_SCOPE
from fleetplane.domains.boards.pins.kinds import GPIO_DEVICE, GpioSpec, GpioStatus, PinHold
from fleetplane.domains.boards.server import BLUEPRINT as BOARDS
from fleetplane.domains.boards.users import PERSON, PersonSpec
from fleetplane.domains.edge.nodes.groups import EDGE_GROUP, GroupSpec
from fleetplane.domains.edge.runs.selectors import Selector, TagMatch, TagOp
from fleetplane.domains.edge.server import BLUEPRINT as EDGE
from fleetplane.domains.gpus.server import BLUEPRINT as GPUS
from fleetplane.domains.instances.kinds import INSTANCE, InstanceSpec, InstanceStatus
from fleetplane.domains.instances.server import BLUEPRINT as INSTANCES
from fleetplane.domains.proxies.kinds import records
from fleetplane.domains.proxies.kinds.values import (
    AgentState,
    Algorithm,
    CertificateState,
    Header,
    Location,
    NamedAgents,
    UpstreamServer,
)
from fleetplane.domains.proxies.resources.places import MIRROR, references
from fleetplane.domains.proxies.server import BLUEPRINT as PROXIES
from fleetplane.domains.proxies.typed_options import HostTls
from fleetplane.fleet.feeds import ring
from fleetplane.fleet.people.account_kind import ACCOUNT, AccountSpec
from fleetplane.fleet.people.account_kind import SCOPE as PEOPLE
from fleetplane.fleet.runs.policy import RunPolicy
from fleetplane.fleet.runs.records import RunStatus
from fleetplane.fleet.runs.targets import RunTarget
from fleetplane.kernel.watch import EventBatch, Watch

ORG, WS, AGENT, UP, CERT, HOST = ("org-1", "ws-1", "agent-1", "up-1", "cert-1", "host-1")
PLACE = records.workspace_scope(ORG, WS)
HIDDEN = ("hidden-nonce", "hidden-key", "hidden-lease", "hidden-header", "hidden-stdin", "BEGIN CERTIFICATE")
VIEWER = "viewer"


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[ResourcesRig]:
    async with resources_rig(tmp_path, (GPUS, EDGE, BOARDS, INSTANCES, PROXIES)) as made:
        await fill_proxies(made)
        await fill_boards(made)
        await fill_others(made)
        yield made


HOST_SPEC = records.VirtualHostSpec(
    name="shop",
    server_name="shop.example",
    listen_port=443,
    ssl_enabled=True,
    ssl_certificate_id=CERT,
    locations=(
        Location(
            path="/", upstream_id=UP, custom_headers=(Header(name="Authorization", value="hidden-header"),)
        ),
    ),
    target_agents=NamedAgents(agent_ids=(AGENT,)),
    tls=HostTls(force_https=True),
)


async def fill_proxies(rig: ResourcesRig) -> None:
    await rig.put(
        records.ORGANIZATION,
        records.organization_scope(ORG),
        ORG,
        spec=records.OrganizationSpec(name="Acme", slug="acme"),
    )
    await rig.put(records.WORKSPACE, PLACE, WS, spec=records.WorkspaceSpec(name="Prod", slug="prod"))
    await rig.put(
        records.AGENT,
        PLACE,
        AGENT,
        spec=records.AgentSpec(name="web-1", labels={"role": "web"}),
        status=records.AgentStatus(state=AgentState.ONLINE, labels={"zone": "a"}),
    )
    servers = (UpstreamServer(address="10.0.0.1:80"),)
    upstream = records.UpstreamSpec(name="api", algorithm=Algorithm.ROUND_ROBIN, servers=servers)
    await rig.put(records.UPSTREAM, PLACE, UP, spec=upstream)
    stream = records.StreamSpec(name="db", listen_port=5432, upstream_id=UP)
    await rig.put(records.STREAM, PLACE, "st1", spec=stream)
    zone = records.DnsZoneSpec(zone="shop.example", provider="hetzner")
    await rig.put(records.DNS_ZONE, PLACE, "dz1", spec=zone)
    await rig.put(
        records.CERTIFICATE,
        PLACE,
        CERT,
        spec=records.CertificateSpec(domain="shop.example", provider="acme", auto_renew=True),
        status=records.CertificateStatus(
            state=CertificateState.ACTIVE, fingerprint="ab", chain_pem="BEGIN CERTIFICATE"
        ),
    )
    await rig.put(records.VIRTUAL_HOST, PLACE, HOST, spec=HOST_SPEC)
    await rig.put(records.USER, "user/u", "u", spec=records.UserSpec(email="boss@example.com"))


async def fill_boards(rig: ResourcesRig) -> None:
    async def put(kind: Any, name: str, **content: Any) -> None:
        await rig.put(kind, BOARDS_SCOPE, name, **content)

    await put(CLUSTER, "1", spec=ClusterSpec(name="attic"), status=ClusterStatus())
    ready = BoardStatus(state=BoardState.READY)
    await put(BOARD, "7", spec=BoardSpec(name="pi-7", cluster_id=1), status=ready)
    await put(BOARD, "8", spec=BoardSpec(name="pi-8"), status=ready)
    lease = PinHold(id="hidden-lease", holder="token/x", taken_at_ns=1)
    await put(
        GPIO_DEVICE, "3", spec=GpioSpec(name="lamp", board=7, pin=17, level=1), status=GpioStatus(lease=lease)
    )
    going = GpioSpec(name="gone", board=8, pin=18, removing=True)
    await put(GPIO_DEVICE, "4", spec=going, status=GpioStatus())
    await put(PERSON, "1", spec=PersonSpec(username="ann"))
    await put(PERSON, "2", spec=PersonSpec(username="zoe", is_guest=True, is_adopted=True))
    run = BoardRunSpec(
        policy=RunPolicy(),
        actor="token/x",
        targets=1,
        skipped_count=0,
        skipped=(),
        started_at_ns=10**18,
        target=RunTarget(everyone=True),
        order=BoardProgram(command="uname", stdin=b"hidden-stdin"),
    )
    await put(BOARD_RUN, "ab12", spec=run, status=RunStatus())


async def fill_others(rig: ResourcesRig) -> None:
    await rig.gpu("gpu-0")
    for name, home in (("zoe", ""), ("ann", "boards")):
        await rig.put(ACCOUNT, PEOPLE, name, spec=AccountSpec(login=name, home=home))
    await rig.node("acme", "n1", role="edge")
    selector = Selector(tags=(TagMatch(op=TagOp.HAS, tags=("x",)),))
    await rig.put(EDGE_GROUP, "tenant/acme", "g-1", spec=GroupSpec(name="tagged", selector=selector))
    await rig.put(
        INSTANCE,
        "tenant/acme",
        "wkr01",
        spec=InstanceSpec(cluster="c", shard="s", group="web", template="t", prefix="wkr"),
        status=InstanceStatus(nonce_digest="hidden-nonce", key_digest="hidden-key", provider_id="i-1"),
    )


WANTED = {
    "accounts": {("boss@example.com", "/"), ("ann", "/"), ("zoe", "/")},
    "boards": {("pi-7", "/tenants/default/clusters/attic"), ("pi-8", "/tenants/default")},
    "certificates": {("shop.example", "/tenants/acme/workspaces/prod")},
    "clusters": {("attic", "/tenants/default")},
    "edge-groups": {("tagged", "/tenants/acme")},
    "edge-nodes": {("n1", "/tenants/acme")},
    "gpus": {("gpu-0", "/")},
    "instances": {("wkr01", "/tenants/acme/groups/web")},
    "pins": {("pi-7.17", "/tenants/default/clusters/attic")},
    "proxy-agents": {("web-1", "/tenants/acme/workspaces/prod")},
    "runs": {("ab12", "/tenants/default")},
    "upstreams": {("api", "/tenants/acme/workspaces/prod")},
    "proxy-streams": {("db", "/tenants/acme/workspaces/prod")},
    "dns-zones": {("shop.example", "/tenants/acme/workspaces/prod")},
    "virtual-hosts": {("shop", "/tenants/acme/workspaces/prod")},
    "workspaces": {("prod", "/tenants/acme")},
}


async def test_every_kind_is_shown_by_name_and_scope_in_its_declared_shape(rig: ResourcesRig) -> None:
    token = await rig.token("all", VIEWER, "fleet.auditor")
    for plural, wanted in WANTED.items():
        answer = await rig.get(f"/{plural}", token)
        assert answer.status_code == 200, answer.text
        found = answer.json()["items"]
        assert {(one["metadata"]["name"], one["metadata"]["scope"]) for one in found} == wanted, plural
        for one in found:
            msgspec.convert(one, rig.api.catalogue.named(plural).object_type)
        for hidden in HIDDEN:
            assert hidden not in answer.text, plural
        name, scope = min(wanted)
        one_of_them = await rig.get(f"/{plural}/{name}", token, scope=scope)
        assert one_of_them.json()["metadata"]["name"] == name
        table = (await rig.get(f"/table/{plural}", token)).json()
        assert {len(row["cells"]) for row in table["rows"]} == {len(table["columns"])}


async def test_references_are_names_and_not_ids(rig: ResourcesRig) -> None:
    token = await rig.token("all", VIEWER)
    spec = (await rig.get("/virtual-hosts/shop", token)).json()["spec"]
    assert spec["certificate"] == "shop.example"
    assert spec["locations"][0]["upstream"] == "api"
    assert spec["targetAgents"] == {"type": "agents", "agents": ["web-1"]}
    assert spec["tls"] == {"forceHttps": True, "ocspStapling": False}
    agent = (await rig.get("/proxy-agents/web-1", token)).json()
    assert agent["metadata"]["labels"] == {"role": "web", "zone": "a"}


async def test_a_mirrored_spec_comes_back_as_it_was(rig: ResourcesRig) -> None:
    names = references(PLACE, rig.store)
    shown = MIRROR.shown(HOST_SPEC, names)
    ids = {"certificate": {"shop.example": CERT}, "upstream": {"api": UP}, "agents": {"web-1": AGENT}}
    as_json = msgspec.json.encode(shown)
    read = msgspec.json.decode(as_json, type=MIRROR.shape(records.VirtualHostSpec))
    back = MIRROR.stored(read, {field: table.__getitem__ for field, table in ids.items()}, name="shop")
    assert back == HOST_SPEC


async def test_a_place_in_a_tenant_is_a_scope_of_its_own(rig: ResourcesRig) -> None:
    token = await rig.token("all", VIEWER)
    for path, wanted in (
        ("/scopes/tenants/acme/groups/web/instances", ["wkr01"]),
        ("/scopes/tenants/acme/groups/db/instances", []),
        ("/scopes/tenants/acme/instances", ["wkr01"]),
        ("/scopes/tenants/acme/workspaces/prod/upstreams", ["api"]),
        ("/scopes/tenants/default/clusters/attic/boards", ["pi-7"]),
        ("/scopes/tenants/default/clusters", ["attic"]),
    ):
        answer = await rig.get(path, token)
        assert [one["metadata"]["name"] for one in answer.json()["items"]] == wanted, path
    one = await rig.get("/scopes/tenants/default/clusters/attic", token)
    assert one.json()["kind"] == "cluster"


async def test_a_board_that_changes_its_cluster_leaves_the_watch_of_the_old_one(rig: ResourcesRig) -> None:
    token = await rig.token("all", VIEWER)
    before = rig.store.revision
    async with watched(rig, token, of="boards@/tenants/default/clusters/attic") as reader:
        assert await reader.until("bookmark") == [("added", "pi-7")]
        await rig.put(BOARD, BOARDS_SCOPE, "7", spec=BoardSpec(name="pi-7"), status=None)
        word, _, data = await reader.next()
        assert (word, data["metadata"]["scope"]) == ("deleted", "/tenants/default/clusters/attic")
    rig.forget_ring()
    async with watched(
        rig, token, of="boards@/tenants/default/clusters/attic", after=str(before)
    ) as reader:  # the log does not say where it was
        assert (await reader.next())[0] == "compacted"


async def test_what_is_deleted_with_its_workspace_is_told_to_whoever_saw_it(rig: ResourcesRig) -> None:
    token = await rig.token("acme", VIEWER, tenant="acme")
    async with watched(rig, token, of="upstreams,workspaces") as reader:
        assert {name for _, name in await reader.until("bookmark")} == {"api", "prod"}
        await rig.remove(records.WORKSPACE, PLACE, WS)
        await rig.remove(records.UPSTREAM, PLACE, UP)
        seen = [await reader.next() for _ in range(2)]
    assert [(word, data["metadata"]["name"]) for word, _, data in seen] == [
        ("deleted", "prod"),
        ("deleted", "api"),
    ]


async def test_what_was_made_a_moment_before_its_workspace_went_is_told_to_whoever_saw_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ring comes to what was made when the workspace that names its scope is gone already."""
    followed, anything = asyncio.Event(), ring._anything

    async def late(watches: Sequence[Watch]) -> list[EventBatch]:
        found = await anything(watches)
        await followed.wait()
        return found

    monkeypatch.setattr(ring, "_anything", late)
    async with resources_rig(tmp_path, (PROXIES,)) as rig:
        await fill_proxies(rig)
        token = await rig.token("acme", VIEWER, tenant="acme")
        async with watched(rig, token, of="upstreams,workspaces") as reader:
            assert {name for _, name in await reader.until("bookmark")} == {"api", "prod"}
            await rig.remove(records.WORKSPACE, PLACE, WS)
            await rig.remove(records.UPSTREAM, PLACE, UP)
            followed.set()
            seen = [await reader.next() for _ in range(2)]
    assert [(word, data["metadata"]["name"]) for word, _, data in seen] == [
        ("deleted", "prod"),
        ("deleted", "api"),
    ]
    assert seen[1][2]["metadata"]["scope"] == "/tenants/acme/workspaces/prod"
