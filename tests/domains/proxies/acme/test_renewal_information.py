"""When to renew, as an authority suggests it. Debian's has no opinion; `make faults` builds one that has."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography import x509
from support.instances.certificates_rig import Desk, desk, side, until
from support.proxies.pebble_lab import Pebble

from fleetplane.domains.proxies.acme.authority import AcmeConversation, explained
from fleetplane.domains.proxies.acme.issuers import AccountVault
from fleetplane.domains.proxies.acme.orders import IssuanceFailed
from fleetplane.domains.proxies.acme.renewal import RenewalPolicy
from fleetplane.domains.proxies.kinds.records import Certificate, CertificateStatus, organization_of
from fleetplane.domains.proxies.kinds.values import CertificateState

asked = pytest.mark.skipif(
    "PEBBLE" not in os.environ, reason="the packaged authority suggests no renewals; `make faults` builds one"
)
S = CertificateState
HOUR = dt.timedelta(hours=1)
SENSELESS = (
    "{",
    "null",
    "[]",
    "{}",
    '"soon"',
    '{"suggestedWindow": null}',
    '{"suggestedWindow": "soon"}',
    '{"suggestedWindow": {"start": "soon", "end": "later"}}',
    '{"suggestedWindow": {"start": 5, "end": 6}}',
    '{"suggestedWindow": {"start": "2026-01-01T00:00:00", "end": "2026-01-02T00:00:00Z"}}',
    "[" * 100_000,
)


def window(start: dt.datetime, end: dt.datetime) -> str:
    return json.dumps({"suggestedWindow": {"start": start.isoformat(), "end": end.isoformat()}})


@asynccontextmanager
async def issued(at: Desk, authority: Pebble) -> AsyncIterator[tuple[Certificate, CertificateStatus]]:
    async with side(at, authority):
        certificate = await at.request("suggested.example.test")
        status = await at.reached(certificate, S.ACTIVE, S.FAILED)
        assert (status.state, status.error) == (S.ACTIVE, "")
        yield certificate, status


@asynccontextmanager
async def talking(at: Desk, authority: Pebble) -> AsyncIterator[AcmeConversation]:
    accounts = AccountVault(at.store, at.master)
    account = await accounts.load_or_create(authority.directory_url, organization_of(at.scope))
    talk = AcmeConversation(authority.options, account.key_pem, account.uri)
    try:
        yield talk
    finally:
        talk.close()


@asked
async def test_the_authority_is_asked_when_to_renew(tmp_path: Path, authority: Pebble) -> None:
    async with (
        desk(tmp_path) as at,
        issued(at, authority) as (_, status),
        talking(at, authority) as talk,
    ):
        suggested, again = await asyncio.to_thread(talk.suggestion, status.chain_pem)
        leaf = x509.load_pem_x509_certificate(status.chain_pem.encode())
        assert suggested is not None
        assert leaf.not_valid_before_utc < suggested < leaf.not_valid_after_utc
        assert again > dt.datetime.now(dt.UTC)


@asked
async def test_what_the_authority_wants_replaced_is_replaced(tmp_path: Path, authority: Pebble) -> None:
    async with desk(tmp_path) as at:
        async with issued(at, authority) as (certificate, first):
            now = dt.datetime.now(dt.UTC)
            authority.suggest_renewal(first.chain_pem, window(now - 2 * HOUR, now - HOUR))
        # It is asked every six hours; a server that has just started asks at once.
        async with side(at, authority, policy=RenewalPolicy(shortest_share=0.0)):
            await until(lambda: at.status(certificate).fingerprint != first.fingerprint)


@asked
async def test_an_answer_without_sense_is_no_suggestion_and_no_defect(
    tmp_path: Path, authority: Pebble
) -> None:
    async with (
        desk(tmp_path) as at,
        issued(at, authority) as (_, status),
        talking(at, authority) as talk,
    ):
        for answer in SENSELESS:
            await asyncio.to_thread(authority.suggest_renewal, status.chain_pem, answer)
            with pytest.raises(IssuanceFailed):
                await asyncio.to_thread(talk.suggestion, status.chain_pem)


@pytest.mark.parametrize("raised", [TypeError, AttributeError, OverflowError, IndexError, RecursionError])
def test_what_the_library_stumbles_over_was_said_by_the_authority(raised: type[Exception]) -> None:
    with pytest.raises(IssuanceFailed, match="makes no sense"), explained():
        raise raised("argument of type 'NoneType' is not iterable")
