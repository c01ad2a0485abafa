"""Enrolling and calling through a balancer: each call may come to another server of the same database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.edge.edge_identity_rig import SECONDS, UNLIMITED, Rig, code_of, refusal_of, two_servers

from fleetplane.domains.edge.identity.challenges import TRIES_LIMIT, SharedChallenges
from fleetplane.domains.edge.kinds import CHALLENGE, EDGE_NODE, WORKER
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.rpc import Rate
from fleetplane.rpc.methods import RateLimiter

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
RACES = 20


@pytest.fixture
async def rigs(tmp_path: Path) -> AsyncIterator[tuple[Rig, Rig]]:
    async with two_servers(tmp_path) as both:
        yield both


async def test_a_machine_asks_one_server_and_answers_to_another(rigs: tuple[Rig, Rig]) -> None:
    one, other = rigs
    machine, token = one.machine(), await one.invite()
    challenge = await machine.attest()
    machine.stub = other.stub
    first = await machine.respond(machine.answer(challenge, token))
    machine.stub = one.stub
    again = await machine.respond(machine.answer(challenge, token))
    assert one.side.tokens.verify_node(again.node_security_token).node_id == machine.node_id
    with pytest.raises(Exception, match="replaced"):  # whoever asks again has lost the first
        other.side.tokens.verify_node(first.node_security_token)
    assert [node.name for node in one.store.list(EDGE_NODE)] == [machine.node_id]


async def test_a_worker_asks_one_server_and_answers_to_another(rigs: tuple[Rig, Rig]) -> None:
    one, other = rigs
    machine = one.machine(role=pb.NODE_ROLE_WORKER)
    token = await one.side.worker_admission.issue(
        machine.node_id, tenants=("*",), life_seconds=600, actor="operator/boss"
    )
    challenge = await machine.attest(enrolment_token=token)
    (kept,) = one.store.list(CHALLENGE)
    assert token.encode() not in kept.spec.sealed
    assert token.partition(".")[2].encode() not in kept.spec.sealed
    machine.stub = other.stub
    assert (await machine.respond(machine.answer(challenge, None))).node_security_token
    assert [worker.name for worker in one.store.list(WORKER)] == [machine.node_id]


async def test_one_token_at_two_servers_at_once_lets_one_machine_in(rigs: tuple[Rig, Rig]) -> None:
    for _ in range(RACES):
        token = await rigs[0].invite()
        machines = [rig.machine() for rig in rigs]
        challenges = [await machine.attest() for machine in machines]
        for machine, rig in zip(machines, reversed(rigs), strict=True):
            machine.stub = rig.stub
        answers = await asyncio.gather(
            *(
                machine.respond(machine.answer(challenge, token))
                for machine, challenge in zip(machines, challenges, strict=True)
            ),
            return_exceptions=True,
        )
        refused = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
        assert [error.code() for error in refused] == [UNAUTHENTICATED], answers
    assert rigs[0].store.count(EDGE_NODE) == RACES


async def test_an_expired_or_foreign_challenge_is_refused_by_every_server(rigs: tuple[Rig, Rig]) -> None:
    one, other = rigs
    machine, token = one.machine(), await one.invite()
    challenge = await machine.attest()
    thief = other.machine()
    assert await refusal_of(thief.respond(thief.answer(challenge, token))) == (
        UNAUTHENTICATED,
        "the challenge was made for another node",
    )
    machine.stub = other.stub
    one.clock.ahead_seconds += UNLIMITED.challenge_seconds + 1
    late = machine.answer(challenge, await one.invite())
    code, text = await refusal_of(machine.respond(late))
    assert (code, "no such challenge" in text) == (UNAUTHENTICATED, True), text
    assert one.side.challenges is not None
    assert await one.side.challenges.sweep() == 1
    assert one.store.count(CHALLENGE) == 0


async def test_a_challenge_that_was_answered_too_often_stays_refused(rigs: tuple[Rig, Rig]) -> None:
    one, other = rigs
    machine, token = one.machine(), await one.invite()
    challenge = await machine.attest()
    for rig in (one, other):
        machine.stub = rig.stub
        wrong = machine.answer(challenge, token, challenge_signature=bytes(64))
        for _ in range(TRIES_LIMIT):
            assert "not signed" in (await refusal_of(machine.respond(wrong)))[1]
        for _ in range(2):
            right = machine.answer(challenge, token)
            assert "too often" in (await refusal_of(machine.respond(right)))[1]


async def test_there_are_never_more_challenges_than_the_limit(rigs: tuple[Rig, Rig]) -> None:
    one, other = rigs
    limit = 8
    for rig in rigs:
        small = SharedChallenges(rig.store, rig.side.challenges._master, limit=limit)  # type: ignore[union-attr]
        rig.side.enrolment._shared = small
    for number in range(3 * limit):
        await (one, other)[number % 2].machine().attest()
        assert one.store.count(CHALLENGE) <= limit
    last = other.machine()
    challenge = await last.attest()
    last.stub = one.stub
    assert (await last.respond(last.answer(challenge, await one.invite()))).node_security_token


async def test_what_a_stranger_says_of_a_daemon_is_not_stored(rigs: tuple[Rig, Rig]) -> None:
    one, other = rigs
    machine, token = one.machine(), await one.invite()
    long = pb.NodeCapabilities(supported_runtimes=["x" * 1000] * 200, tags=["y" * 250] * 60)
    challenge = await machine.attest(capabilities=long, grpc_address="z" * 250, enrolment_token="t" * 8000)
    (stored,) = one.store.list(CHALLENGE)
    assert len(stored.spec.sealed) < 600
    machine.stub = other.stub
    assert (await machine.respond(machine.answer(challenge, token))).node_security_token


async def test_a_workers_call_changes_something_once_on_all_servers(rigs: tuple[Rig, Rig]) -> None:
    one, other = rigs
    worker = await one.worker()
    leader = await one.worker(pb.NODE_ROLE_CONTROLLER)
    register = pb.RegisterNodeInner(node_id=worker.node_id, grpc_address="127.0.0.1:2")
    push = pb.PushConfigInner(target_node_id=worker.node_id, config_payload=b"{}")
    leave = pb.DeregisterNodeInner(node_id=worker.node_id)
    calls: list[tuple[str, Any]] = [
        ("RegisterNode", pb.RegisterNodeRequest(envelope=worker.sealed(register))),
        ("PushConfig", pb.PushConfigRequest(envelope=leader.sealed(push))),
        ("DeregisterNode", pb.DeregisterNodeRequest(envelope=worker.sealed(leave))),
    ]
    for method, request in calls:
        await getattr(one.stub, method)(request, timeout=SECONDS)
        again = getattr(other.stub, method)(request, timeout=SECONDS)
        assert await refusal_of(again) == (UNAUTHENTICATED, "the envelope was used before"), method


async def test_no_worker_claims_any_number_of_calls(
    rigs: tuple[Rig, Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = rigs
    greedy, other = await one.worker(), await one.worker()
    monkeypatch.setattr(one.side.workers, "_claiming", RateLimiter(Rate(per_second=0.001, burst=2)))

    async def register(worker: Any, number: int) -> None:
        inner = pb.RegisterNodeInner(node_id=worker.node_id, grpc_address=f"127.0.0.1:{number}")
        await one.stub.RegisterNode(pb.RegisterNodeRequest(envelope=worker.sealed(inner)), timeout=SECONDS)

    for number in (2, 3):
        await register(greedy, number)
    assert await code_of(register(greedy, 4)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    await register(other, 5)


async def test_nobody_has_much_stored_before_it_has_proved_anything(rigs: tuple[Rig, Rig]) -> None:
    one, _ = rigs
    machine = one.machine(role=pb.NODE_ROLE_WORKER)
    token = await one.side.worker_admission.issue(
        machine.node_id, tenants=("*",), life_seconds=600, actor="operator/boss"
    )
    large = pb.NodeCapabilities(tags=[f"{number:03}" + "t" * 253 for number in range(64)])
    code, text = await refusal_of(machine.attest(enrolment_token=token, capabilities=large))
    assert (code, "16384 bytes" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True), text
    assert not one.store.list(CHALLENGE)


async def test_an_execution_is_forwarded_to_the_worker_that_another_server_chose(
    rigs: tuple[Rig, Rig],
) -> None:
    one, other = rigs
    workers = [await one.worker() for _ in range(4)]
    for number in range(8):
        wanted = pb.RouteExecutionInner(execution_id=f"run-{number}")
        request = pb.RouteExecutionRequest(envelope=workers[0].sealed(wanted))
        chosen = (await one.stub.RouteExecution(request, timeout=SECONDS)).target_node_id
        for rig in rigs:
            assert rig.side.workers.routed(f"run-{number}", tenant="acme").name == chosen
    one.clock.ahead_seconds += 3601
    assert other.side.workers.routes is not None
    assert await other.side.workers.routes.sweep() == 8


async def test_what_is_asked_too_often_is_counted_by_each_server(tmp_path: Path) -> None:
    """Documented: rates are per server."""
    async with two_servers(tmp_path, policy=replace(UNLIMITED, attests_per_minute=2)) as rigs:
        for rig in rigs:
            for _ in range(2):
                await rig.machine().attest()
            assert await code_of(rig.machine().attest()) is grpc.StatusCode.RESOURCE_EXHAUSTED
