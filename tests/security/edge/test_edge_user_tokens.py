"""Tokens of users that nobody verified, in envelopes that the server signs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from support.edge import shipped_wire
from support.edge.edge_company import at_work
from support.edge.edge_identity_rig import claims_of
from support.edge.edge_site import Rest, Site, a_tenant, site


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("users") / "data") as here:
        yield here


@pytest.fixture
async def rest(house: Site) -> AsyncIterator[Rest]:
    async with house.rest(a_tenant()) as opened:
        yield opened


FORGED = "eyJhbGciOiJub25lIn0.eyJzdWIiOiJyb290IiwidGlkIjoicml2YWwifQ.c2lnbmF0dXJl"
"""Says that its holder is root of another tenant."""


async def test_a_token_that_the_server_did_not_verify_is_not_put_into_what_it_signs(
    house: Site, rest: Rest
) -> None:
    async with at_work(house, rest) as daemon:
        await rest.do(f"@{daemon.node_id}", user_security_token=FORGED)
        (call,) = [command for command in daemon.commands if isinstance(command, shipped_wire.Invoke)]
        assert call.seal is not None
        token = call.seal[1].decode()
        assert token != FORGED
        claims = claims_of(token)
        assert (claims["tid"], claims["jti"]) == (rest.tenant, call.command_id)
        assert claims["sub"] != "root"
