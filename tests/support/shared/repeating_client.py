"""Clients that ask again with one key until they hear an answer, and servers that must do it once.

The claims, the records and the order of both around a handler are the real ones (`web/rest/idempotency.py`,
`Desk`); handlers make one thing, or call somebody outside once they have written that they will.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from support.shared.storekit import SCOPE, THING, Spec

from fleetplane.kernel.access import Principal
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.unbroken import run_to_completion
from fleetplane.web.rest.app import Desk, Reply
from fleetplane.web.rest.gate import OperatorCaller
from fleetplane.web.rest.idempotency import Answers
from fleetplane.web.rest.routes import Answer, Call, Headers, Route

MADE = "once-"
"""How names of what keys made begin."""
ATTEMPTS = 12
PATIENCE_SECONDS = 3.0
CALLER = OperatorCaller(principal=Principal(name="repeating", roles=frozenset(), scope=""))


class Made(msgspec.Struct, frozen=True):
    name: str


class Outside:
    """Somebody who is called, and what the clients were told in the end."""

    def __init__(self) -> None:
        self.called: Counter[str] = Counter()
        self.told: dict[str, set[str]] = {}
        self.asked = 0


class KeyedServer:
    """Requests with keys at one process of a server."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        chance: random.Random,
        outside: Outside,
        *handlers: Callable[[Call[Any]], Awaitable[Answer[Made]]],
    ) -> None:
        """Of several `handlers`, a key's number says which one; three of its own unless some are given."""
        self._store = store
        self._chance = chance
        self._outside = outside
        answers = Answers(store, MasterKey(bytes(32), clock), clock, namespace="sim")
        self._answers = answers
        self._desk: Desk[Any] = Desk(None, answers, store)  # type: ignore[arg-type]
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._routes = [
            Route(method="POST", path="/", handler=one, summary="", tag="", answer=Made)
            for one in handlers or (self._promised, self._unsigned, self._calling)
        ]

    async def ask(self, key: str) -> str | None:
        """The name of what was made; None if the answer was lost, or was a refusal."""
        self._outside.asked += 1
        route = self._routes[int(key.rpartition("-")[2]) % len(self._routes)]
        call: Call[Any] = Call(
            request_id="",
            address="",
            scope="",
            path={"key": key},
            query={},
            headers=Headers({}),
            body=None,
            _caller=CALLER,
        )
        digest = self._answers.digest(CALLER.name, "POST /", key)
        task = asyncio.ensure_future(self._desk._once(route, call, digest, b""))
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        done, _ = await asyncio.wait([task], timeout=self._chance.uniform(0.0, PATIENCE_SECONDS))
        if not done and self._chance.random() < 0.5:
            task.cancel()  # else it goes on, for nobody
        if not done or task.cancelled() or task.exception() is not None or self._chance.random() < 0.5:
            return None
        reply = task.result()
        assert isinstance(reply, Reply)
        return msgspec.json.decode(reply.body, type=Made).name

    def kill(self) -> None:
        """Whatever is under way ends here."""
        for task in tuple(self._tasks):
            task.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, FleetplaneError):
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a handler failed", "exception": error}
            )

    # Handlers.

    async def _make(self, call: Call[Any], actor: str) -> Made:
        name = f"{call.path['key']}.{self._store.clock.token_bytes(4).hex()}"

        def change(draft: Draft) -> Made:
            draft.put(THING, SCOPE, name, spec=Spec(value=1))
            return Made(name)

        touches = [THING.key(SCOPE, name)]
        return (await self._store.transact(change, actor=actor, action="make", touches=touches)).value

    async def _promised(self, call: Call[Any]) -> Answer[Made]:
        """A run: what is answered follows from the one transaction."""
        view = call.answering(lambda made: Answer(content=made))
        return view(await run_to_completion(self._make(call, call.signed("repeating"))))

    async def _unsigned(self, call: Call[Any]) -> Answer[Made]:
        """An action that writes as whoever knows nothing of keys, and is answered later."""
        made = await run_to_completion(self._make(call, "repeating"))
        await asyncio.sleep(self._chance.uniform(0.0, 0.5))
        return Answer(content=made)

    async def _calling(self, call: Call[Any]) -> Answer[Made]:
        """An order to somebody outside, who is called once it is written that he will be."""
        made = await self._make(call, "repeating")
        self._outside.called[call.path["key"]] += 1
        await asyncio.sleep(self._chance.uniform(0.0, 0.5))
        return Answer(content=made)


async def repeat(
    key: str, server: Callable[[], KeyedServer | None], outside: Outside, pause: Callable[[], float]
) -> None:
    """Ask, each time whichever server is up, until an answer is heard."""
    for _ in range(ATTEMPTS):
        found = server()
        if found is not None and (name := await found.ask(key)) is not None:
            outside.told.setdefault(key, set()).add(name)
            return
        await asyncio.sleep(pause())
