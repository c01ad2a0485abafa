"""Runs that are followed: cut off and resumed, across a restart too; and whatever anyone sends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings, strategies
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance
from support.edge.edge_company import at_work
from support.edge.edge_site import ADMIN, PREFIX, Event, Rest, a_tenant, restarting, until

EXAMPLES = 12
"""Per operation, of which there are some 25."""


async def _take(events: AsyncIterator[Event], number: int) -> list[Event]:
    return [await anext(events) for _ in range(number)]


async def _rest_of(rest: Rest, path: str, mark: str) -> list[Event]:
    async with rest.events(path, headers={"last-event-id": mark} if mark else {}) as events:
        return [event async for event in events]


async def test_a_follower_goes_on_where_it_was_cut_off_also_after_a_restart(tmp_path: Path) -> None:
    tenant, data = a_tenant(), tmp_path / "data"
    async with restarting(data) as here:
        token = here.token(tenant=tenant)
        async with here.rest(tenant, token=token) as rest, at_work(here, rest) as daemon:
            # Of both outputs in turns, each after the one before was heard: lines of one are told together.
            turns = "echo 1; turn b; echo 1 >&2; turn c; echo 2; turn d; echo 2 >&2; turn e"
            script = f"turn() {{ until [ -e {tmp_path}/$1 ]; do sleep 0.02; done; }}; {turns}"
            run_id = await rest.start(script=script)
            path = f"/fleet/runs/{run_id}/events"
            async with rest.events(path) as events:
                first = await _take(events, 3)
                (tmp_path / "b").touch()
                first += await _take(events, 1)
            for lines, turn in enumerate("cde", 2):
                await until(lambda: daemon.sent.count("progress") == lines)  # noqa: B023
                (tmp_path / turn).touch()
            later = await _rest_of(rest, path, first[-1].mark)
            whole = await _rest_of(rest, path, "")
            assert whole == [*first, *later]
            assert [event.kind for event in whole] == [
                "fleet_started",
                "command_started",
                *["command_progress"] * 4,
                "command_result",
                "fleet_result",
            ]
            assert await _rest_of(rest, path, whole[-1].mark) == []
            node_id, mark = daemon.node_id, first[-1].mark
        here.server.stop()
    async with restarting(data) as here, here.rest(tenant, token=token) as rest:
        for stale in (mark, "", "nonsense", "stored-0"):
            told = await _rest_of(rest, path, stale)
            assert [event.kind for event in told] == ["command_result", "fleet_result"]
            assert told[0].data["node_id"] == node_id
        assert [event.kind for event in await _rest_of(rest, path, told[0].mark)] == ["fleet_result"]


async def test_a_follower_of_a_run_that_a_restart_interrupts_sees_it_end(tmp_path: Path) -> None:
    tenant, data = a_tenant(), tmp_path / "data"
    async with restarting(data) as here:
        token = here.token(tenant=tenant)
        async with here.rest(tenant, token=token) as rest, at_work(here, rest) as daemon:
            run_id = await rest.start(script="exec sleep 30")
            path = f"/fleet/runs/{run_id}/events"
            async with rest.events(path) as events:
                seen = await _take(events, 2)
            await until(lambda: len(daemon.commands) == 1)
            here.server.process.kill()
    async with restarting(data) as here, here.rest(tenant, token=token) as rest:
        async with asyncio.timeout(60):
            told = await _rest_of(rest, path, seen[-1].mark)
        assert told[-1].kind == "fleet_result"
        assert told[-1].data["summary"]["err"] == 1


# Whatever anyone sends.

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance)


async def test_whatever_is_sent_the_answer_is_one_that_the_document_promises(tmp_path: Path) -> None:
    async with restarting(tmp_path / "data") as here:
        tenant = a_tenant()
        async with here.rest(tenant) as rest, at_work(here, rest) as daemon:
            group = await rest.post("/groups", {"name": "g"})
            ids = {
                "node_id": daemon.node_id,
                "group_id": group["id"],
                "run_id": (await rest.do())["fleet_command_id"],
                "token_id": "t",
                "worker_id": "11111111-2222-4333-8444-555555555555",
                "tenant_id": "nobody-at-all",
            }
            tokens = [here.token(ADMIN, tenant=tenant) for _ in range(6)]
            answers = await asyncio.to_thread(_fuzz, here.server.web, tokens, ids)
            assert len(answers) > 150
            assert {200, 201, 400} <= {*answers}
            assert not [status for status in answers if status >= 500 and status != 503]
            assert (await rest.host(daemon.node_id))["node_id"] == daemon.node_id


def _fuzz(web: str, tokens: list[str], ids: dict[str, str]) -> list[int]:
    logging.getLogger("urllib3").setLevel(logging.WARNING)
    schema = schemathesis.openapi.from_dict(httpx.get(f"{web}{PREFIX}/openapi.json", timeout=60).json())
    answers: list[int] = []

    def attempt(case: Any) -> None:
        for name in case.path_parameters or {}:
            case.path_parameters[name] = ids[name]
        token = tokens[len(answers) % len(tokens)]  # each may call so often in a minute
        headers = {"authorization": f"Bearer {token}", "accept": "application/json"}
        answer = case.call(base_url=f"{web}{PREFIX}", headers=headers, timeout=60)
        answers.append(answer.status_code)
        case.validate_response(answer, checks=list(CHECKS))

    for found in schema.get_all_operations():
        assert isinstance(found, Ok), found
        operation = found.ok()
        if operation.path.endswith("/events") or (operation.method, operation.path) == (
            "delete",
            "/hosts/{node_id}",
        ):
            continue
        _each(operation, attempt)
    return answers


def _each(operation: Any, attempt: Any) -> None:
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=_anything(operation))
    def attempts(case: schemathesis.Case[Any]) -> None:
        attempt(case)

    attempts()


def _anything(operation: Any) -> Any:
    """What the document allows, and where it forbids something, what it forbids."""
    allowed = operation.as_strategy()
    if not operation.body and not operation.query:
        return allowed
    return strategies.one_of(allowed, operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
