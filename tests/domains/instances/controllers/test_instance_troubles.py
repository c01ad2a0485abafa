"""What went wrong with an instance is in its record, until it has gone right."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from support.instances.controller_rig import Rig, rig, wanted
from support.instances.instances_lab import TENANT, document, lab, until
from support.instances.operator_rig import make_key, private_pem
from support.instances.original_agent import OriginalAgent

from fleetplane.domains.instances import wire
from fleetplane.domains.instances.content.files import InstanceSecrets
from fleetplane.domains.instances.kinds import InstanceStatus
from fleetplane.domains.instances.providers.mock.provider import MockFault
from fleetplane.domains.instances.rules.decide import State

SECRET_KEY = private_pem(make_key())


def status_of(place: Rig, name: str) -> InstanceStatus:
    status = place.instances.get(TENANT, name).status
    assert status is not None
    return status


async def test_an_instance_that_cannot_be_made_says_why_until_it_is(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(0)) as place:
        place.provider.script(MockFault(operation="create_instance", count=0, error="quota"))
        await place.configure(wanted(1))
        await place.advance(1)
        [name] = place.names(State.PENDING)
        assert status_of(place, name).last_error == "mock: create_instance failed, as scripted"
        revision = place.instances.get(TENANT, name).revision
        await place.advance(12)
        assert place.instances.get(TENANT, name).revision == revision, "the same error is written once"
        place.provider.heal()
        await place.advance(6)
        assert status_of(place, name).last_error == ""


async def test_an_instance_that_cannot_be_deleted_says_why(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(1)) as place:
        [name] = await place.grown(1)
        place.provider.script(MockFault(operation="delete_instance", count=0, error="refused"))
        await place.configure(wanted(0))
        await place.advance(25)
        assert status_of(place, name).last_error == "mock: delete_instance failed, as scripted"


async def test_operators_are_told_since_when_an_instance_is_unhealthy(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(2)) as place:
        silent, _ = await place.grown(2)
        heard = place.reports.last(silent)
        assert heard is not None
        place.silent.add(silent)
        await place.advance(35)
        assert place.names(State.DRAINING) == [silent]
        since_ns = status_of(place, silent).unhealthy_since_ns
        assert since_ns == heard.at_ns + 30 * 10**9
        event = wire.instance_event(place.instances.get(TENANT, silent), "pending_deletion")
        assert event.unhealthy_at.ToNanoseconds() == since_ns


async def test_a_secret_that_cannot_be_had_is_in_the_record_and_explained_until_it_is_there(
    tmp_path: Path,
) -> None:
    wanted_files = document()
    wanted_files["templates"]["worker"]["files"] = {"db.key": {"kind": "secret", "source": "db"}}
    async with lab(tmp_path, wanted_files) as place:
        [request] = await place.created()
        identity = tmp_path / "agent" / "identity"
        agent = OriginalAgent(
            identity,
            place.addresses["registration"],
            place.addresses["agent"],
            place.ca,
            instance_id=request.instance_id,
            report_interval=0.1,
        )
        (identity / "nonce.jwt").write_text(request.nonce)
        running = asyncio.create_task(agent.run())
        why = "files cannot be made: there is no secret 'db' for tenant 'acme'"

        def last_error() -> str:
            status = place.instances()[0].status
            return status.last_error if status is not None else ""

        def explained() -> list[tuple[str, str]]:
            found = place.domain._explanations.about(f"{TENANT}/workers")
            return [(reason.subject, reason.message) for one in found for reason in one.explanation.reasons]

        await until(lambda: last_error() == why)
        await until(lambda: (request.instance_id, why) in explained())
        secrets = InstanceSecrets(place.objects, place.kernel.master)
        await secrets.put("db", SECRET_KEY)
        await until(lambda: "db.key" in agent.received_files)
        await until(lambda: last_error() == "")
        await until(lambda: (request.instance_id, why) not in explained())
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
