"""Keys that are used again while they are kept or forgotten."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.sim.clock import VirtualClock
from fleetplane.web.rest.idempotency import KEPT_SECONDS, Answers
from fleetplane.web.rest.routes import Answer


def _encoded(content: Any) -> bytes:
    return str(content).encode()


async def asked(answers: Answers, digest: str, content: str) -> str:
    """What a request is answered: what it was before, or else this."""
    with answers.running(digest, b"", caller="somebody", status=200, encode=_encoded) as once:
        if (kept := await answers.find(once)) is not None:
            return kept.body.decode()
        await answers.keep(once, Answer(content=content))
        return content


async def test_a_key_that_is_used_again_while_old_ones_are_forgotten_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock()
    settings = StoreSettings(path=tmp_path / "s.db")
    async with asyncio.timeout(60), Store.open(settings, kinds=KERNEL_KINDS, clock=clock) as store:
        answers = Answers(store, MasterKey(bytes(32), clock), clock, namespace="test")
        for key in ("a", "b"):
            await asked(answers, key, "first")
        await clock.advance(KEPT_SECONDS)
        transact, deleting, go_on = store.transact, asyncio.Event(), asyncio.Event()

        async def slowly(change: Any, *, action: str, **said: Any) -> Any:
            if action == "idempotency.sweep":
                deleting.set()
                await go_on.wait()
            return await transact(change, action=action, **said)

        monkeypatch.setattr(store, "transact", slowly)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(answers.sweep())
            await deleting.wait()
            assert await asked(answers, "b", "second") == "second"
            go_on.set()
        assert await asked(answers, "b", "third") == "second"


async def test_an_answer_is_given_again_although_whoever_got_it_left_while_it_was_kept(
    tmp_path: Path,
) -> None:
    clock = VirtualClock()
    settings = StoreSettings(path=tmp_path / "s.db")
    async with asyncio.timeout(60), Store.open(settings, kinds=KERNEL_KINDS, clock=clock) as store:
        answers = Answers(store, MasterKey(bytes(32), clock), clock, namespace="test")
        asking, commit = asyncio.create_task(asked(answers, "a", "first")), store._engine.commit

        async def left(rows: Any) -> Any:
            asking.cancel()
            return await commit(rows)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store._engine, "commit", left)
            with pytest.raises(asyncio.CancelledError):
                await asking
        await store.transact(lambda _: None, actor="test", action="nothing", touches=())
        assert await asked(answers, "a", "second") == "first"
