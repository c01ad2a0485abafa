from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.instances.agents_rig import BOSS
from support.proxies.events_rig import EventsRig, events_rig
from support.shared.throwaway_ca import ThrowawayCa

from fleetplane.domains.proxies.kinds.records import CERTIFICATE, CertificateSpec, CertificateStatus
from fleetplane.domains.proxies.kinds.values import CertificateState
from fleetplane.domains.proxies.serving.certificates import Material, material
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.store import Draft


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[EventsRig]:
    async with events_rig(tmp_path) as rig:
        yield rig


def made(folder: Path) -> Material:
    chain, key = ThrowawayCa().server(folder)
    return material(chain.read_text(), key.read_text(), now_ns=SystemClock().now_ns())


async def write_status(rig: EventsRig, name: str, status: CertificateStatus, *, alarm: str = "") -> None:
    import msgspec

    def change(draft: Draft) -> None:
        current = draft.get(CERTIFICATE, rig.fleet.scope, name)
        assert current is not None
        noted = msgspec.structs.replace(status, alarm=alarm, alarmed_at_ns=draft.now_ns if alarm else None)
        draft.put(CERTIFICATE, rig.fleet.scope, name, spec=current.spec, status=noted)

    touches = [CERTIFICATE.key(rig.fleet.scope, name)]
    await rig.fleet.store.transact(change, actor="t", action="t", touches=touches)


async def test_a_certificates_life_is_told_and_its_key_reaches_the_agents_that_serve_it(
    rig: EventsRig, tmp_path: Path
) -> None:
    listener = await rig.listen(await rig.member("ann"))
    await listener.ask(action="subscribe", events=["certificate.*"])
    fleet = rig.fleet
    spec = CertificateSpec(domain="example.com", provider="letsencrypt", auto_renew=True)
    certificate = await fleet.certificates.request(fleet.scope, spec, actor=BOSS)
    host = await fleet.host("example.com", port=443, ssl_enabled=True, ssl_certificate_id=certificate.name)
    agent = await fleet.agent("web-01")
    await agent.open()
    await agent.health(0)
    update = await agent.next("config_update")
    assert len(update.virtual_hosts) == 0, "it waits for its certificate"
    await agent.status(update, "SUCCESS")
    await agent.health(update.version)

    first, second = made(tmp_path), made(tmp_path)
    for found, told in ((first, "certificate.issued"), (second, "certificate.renewed")):
        await fleet.certificates.issued(fleet.scope, certificate.name, found, actor="acme")
        event = await listener.next()
        assert (event["type"], event["data"]["certificate_id"]) == (told, certificate.name)
        assert "PRIVATE KEY" not in str(event)
        update = await agent.next("config_update")
        assert [one.id for one in update.virtual_hosts] == [host.name]
        sent = update.certificates[certificate.name]
        assert (sent.domain, sent.certificate_pem) == ("example.com", found.chain_pem)
        assert sent.private_key_pem.encode() == found.key_pem
        assert sent.expires_at == found.expires_at_ns // 1_000_000
        await agent.status(update, "SUCCESS")
        await agent.health(update.version)

    status = second.status()
    await write_status(rig, certificate.name, status, alarm="warning")
    event = await listener.next()
    assert (event["type"], event["data"]["severity"]) == ("certificate.expiring", "warning")
    failed = CertificateStatus(state=CertificateState.FAILED, error="urn:ietf:params:acme:error:unauthorized")
    await write_status(rig, certificate.name, failed)
    event = await listener.next()
    assert (event["type"], event["data"]["error"]) == ("certificate.failed", failed.error)


async def test_an_imported_certificate_is_issued_at_once(rig: EventsRig, tmp_path: Path) -> None:
    listener = await rig.listen(await rig.member("ann"))
    chain, key = ThrowawayCa().server(tmp_path)
    await rig.fleet.certificates.bring(
        rig.fleet.scope, "example.com", chain.read_text(), key.read_text(), actor=BOSS
    )
    assert (await listener.next())["type"] == "certificate.issued"
