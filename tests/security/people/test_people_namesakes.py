"""A token that is made under the name of another inherits nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
from support.fleet.resources_rig import ResourcesRig, resources_rig

from fleetplane.domains.blueprint import prepare_both
from fleetplane.domains.fleetwide import BLUEPRINT as FLEETWIDE
from fleetplane.domains.operators import BLUEPRINT as OPERATORS
from fleetplane.domains.operators import OperatorsDomain
from fleetplane.fleet.people.rights import Rights
from fleetplane.kernel.access import BUILT_IN_ROLES
from fleetplane.kernel.identity.bindings import Bindings


async def people(rig: ResourcesRig) -> Any:
    """`/apis/v1/people` of the same server."""
    held = Rights(rig.kernel.door.tree, (OPERATORS.grants, FLEETWIDE.grants), BUILT_IN_ROLES)
    domain = OperatorsDomain(rig.kernel, held=held)
    await prepare_both(domain)
    return next(iter(domain.routes)).app


async def test_a_namesake_of_a_token_inherits_nothing(tmp_path: Path) -> None:
    async with resources_rig(tmp_path, (OPERATORS,)) as rig:
        bindings = Bindings(rig.store)
        root = await rig.token("root", "owner")
        tenant_admin = await rig.token("tenant-admin", "admin", tenant="acme")
        await rig.token("ci", "viewer", tenant="other")
        await bindings.give("token/ci", "owner", "/", actor="tester")
        assert (await rig.post("/tokens/ci/actions/revoke", root)).status_code == 200
        assert bindings.of(("token/ci",)) == [], "they ended with the token"

        # Given in advance, to a token that somebody else makes first.
        await bindings.give("token/deploy", "owner", "/", actor="tester")
        transport = httpx.ASGITransport(app=await people(rig))
        async with httpx.AsyncClient(transport=transport, base_url="http://rig") as client:

            async def make(name: str, token: str) -> httpx.Response:
                body = {"name": name, "roles": ["viewer"], "scope": "/tenants/acme", "expiresInSeconds": 60}
                headers = {"authorization": f"Bearer {token}"}
                return await client.post("/apis/v1/people/tokens", json=body, headers=headers)

            refused = await make("deploy", tenant_admin)
            assert refused.status_code == 403, refused.text
            assert (await make("ci", tenant_admin)).status_code == 201
            assert (await make("deploy", root)).status_code == 201


async def test_a_token_cannot_be_called_so_that_its_deeds_look_like_anothers(tmp_path: Path) -> None:
    async with resources_rig(tmp_path, (OPERATORS,)) as rig:
        tenant_admin = await rig.token("tenant-admin", "admin", tenant="acme")
        headers = {"authorization": f"Bearer {tenant_admin}"}
        transport = httpx.ASGITransport(app=await people(rig))
        async with httpx.AsyncClient(transport=transport, base_url="http://rig", headers=headers) as client:
            for name in ("root&once=00", "root?", "root\n", "a/b", " root", "ro\u200bot", "<b>", ""):
                body = {"name": name, "roles": ["viewer"], "scope": "/tenants/acme", "expiresInSeconds": 60}
                answer = await client.post("/apis/v1/people/tokens", json=body)
                assert answer.status_code == 400, name
        assert [one.name for one in rig.kernel.operators.tokens.records()] == ["tenant-admin"]
