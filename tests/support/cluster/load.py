"""Writers, readers and watchers at all servers of a cluster, and the history of what they were answered."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from support.cluster.members import DEADLINE_SECONDS, Member, ServerCluster
from support.shared.linearizability import Operation

SCOPE = "/tenants/acme"
GROUPS = "/apis/v1/edge-groups"
PLANS = "/apis/v1/plans"
OF_A_TENANT = 400
"""Objects that are made in one: each may have a thousand."""
ANSWER_SECONDS = 8.0
"""Whoever is not answered in this time goes elsewhere, and does not know what became of it."""
AGAIN_SECONDS = 0.2
REGISTERS = ("r0", "r1")
BEGINNING = "v"
"""What is in each at the beginning."""
NOT_NOW = frozenset({500, 502, 503, 504})


def path(name: str, scope: str = SCOPE) -> str:
    return f"/apis/v1/scopes{scope}/edge-groups/{name}"


def group(name: str, value: str, scope: str = SCOPE) -> dict[str, Any]:
    return {
        "kind": "edge-group",
        "metadata": {"name": name, "scope": scope},
        "spec": {"selector": {"os": value}},
    }


class NotDone(Exception):
    """Nothing can have become of it: nobody listened, or it was refused because others were quicker."""


@dataclass(slots=True)
class Told:
    """What one watcher has heard of, over as many connections as it took."""

    began_after: int
    last: int
    events: list[tuple[int, str, str]] = field(default_factory=list)
    """Revision, type and name."""
    connections: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Load:
    cluster: ServerCluster
    bearer: str
    random: random.Random
    pause_seconds: float = 0.1
    acknowledged: dict[str, int] = field(default_factory=dict)
    """What was made: its revision."""
    unknown: set[str] = field(default_factory=set)
    """What may or may not have been made."""
    history: list[Operation] = field(default_factory=list)
    watchers: list[Told] = field(default_factory=list)
    listed: dict[str, set[str]] = field(default_factory=dict)
    """At the end, by each server."""
    answers: Counter[tuple[str, int | str]] = field(default_factory=Counter)
    """By server, status or kind of failure."""
    planned: int = 0
    """Keys with which a plan was asked for until two answers told of it."""
    keyed_elsewhere: int = 0
    """Plans that were made besides, and not deleted."""
    plans_left: int = 0
    """At the end; each but the last was deleted."""
    wrong: list[str] = field(default_factory=list)
    """Answers that nobody should have got."""
    _http: dict[str, httpx.AsyncClient] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def call(
        self, member: Member, method: str, path: str, body: Any = None, **headers: str
    ) -> httpx.Response | None:
        """None if it is not known what became of it. Raises `NotDone` if nothing was done."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            answer = await self._http[member.name].request(method, path, json=body, headers=named)
        except (httpx.TransportError, httpx.StreamError) as error:
            self.answers[member.name, type(error).__name__] += 1
            if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                raise NotDone from error
            return None
        self.answers[member.name, answer.status_code] += 1
        if answer.status_code == 409 and answer.json()["hint"] == "try again":
            raise NotDone
        return None if answer.status_code in NOT_NOW else answer

    def _somebody(self) -> Member:
        return self.random.choice(self.cluster.members)

    async def write(self, member: Member) -> str | None:
        """Make one object; its name if that was acknowledged."""
        number = next(self._numbers)
        name, scope = f"w{number}", f"{SCOPE}-{number // OF_A_TENANT}"
        self.unknown.add(name)  # also if whoever asks is cancelled
        try:
            answer = await self.call(
                member, "PUT", path(name, scope), group(name, "linux", scope), if_none_match="*"
            )
        except NotDone:
            self.unknown.discard(name)
            raise
        if answer is None:
            return None
        self.unknown.discard(name)
        if answer.status_code != 201:
            self.wrong.append(f"{member.name}: {answer.status_code} {answer.text}")
            return None
        self.acknowledged[name] = int(answer.json()["metadata"]["revision"])
        return name

    async def set_register(self, member: Member, register: str) -> None:
        value = f"v{next(self._numbers)}"
        operation = Operation(
            register=register, kind="write", value=value, began=time.monotonic(), where=member.name
        )
        made = group(register, value)
        try:
            answer = await self.call(member, "PUT", path(register), made, if_match="*")
        except NotDone:
            return
        except asyncio.CancelledError:
            self.history.append(operation)
            raise
        if answer is not None and answer.status_code != 200:
            self.wrong.append(f"{member.name}: {answer.status_code} {answer.text}")
            return
        ended = math.inf if answer is None else time.monotonic()
        self.history.append(replace(operation, ended=ended))

    async def read_register(self, member: Member, register: str) -> None:
        began = time.monotonic()
        answer = await self.call(member, "GET", path(register))
        if answer is None:
            return
        if answer.status_code != 200:
            self.wrong.append(f"{member.name}: {answer.status_code} {answer.text}")
            return
        value = answer.json()["spec"]["selector"]["os"]
        self.history.append(
            Operation(
                register=register,
                kind="read",
                value=value,
                began=began,
                ended=time.monotonic(),
                where=member.name,
            )
        )

    async def _plan_with_keys(self) -> None:
        """One plan for each key, asked for at one server after another until two answers are heard."""
        while True:
            key = f"once-{next(self._numbers)}"
            body = {"objects": [group(key, "linux")], "scope": SCOPE}
            told: list[str] = []
            while len(told) < 2:
                with suppress(NotDone):
                    answer = await self.call(self._somebody(), "POST", PLANS, body, idempotency_key=key)
                    if answer is not None and answer.status_code == 201:
                        told.append(answer.json()["id"])
                    elif answer is not None and answer.status_code != 409:
                        self.wrong.append(f"{key}: {answer.status_code} {answer.text}")
                await asyncio.sleep(self.pause_seconds)
            if told[0] != told[1]:
                self.wrong.append(f"one key, two plans: {told}")
            await self.insist(self._somebody(), "DELETE", f"{PLANS}/{told[0]}")
            self.planned += 1

    async def _work(self, number: int) -> None:
        while True:
            member = self._somebody()
            with suppress(NotDone):
                match number % 3:
                    case 0:
                        await self.write(member)
                    case 1:
                        await self.set_register(member, self.random.choice(REGISTERS))
                    case _:
                        await self.read_register(member, self.random.choice(REGISTERS))
            await asyncio.sleep(self.pause_seconds * self.random.uniform(0.5, 1.5))

    async def _watch(self, told: Told) -> None:
        """For ever, each connection at somebody else."""
        while True:
            member = self._somebody()
            address = f"/apis/v1/watch?of=edge-groups&after={told.last}"
            try:
                async with self._http[member.name].stream(
                    "GET", address, timeout=httpx.Timeout(ANSWER_SECONDS, read=20.0)
                ) as stream:
                    if stream.status_code == 200:
                        told.connections[member.name] += 1
                        await self._hear(stream, told)
                    elif stream.status_code not in NOT_NOW:
                        self.wrong.append(f"a watch at {member.name}: {stream.status_code}")
            except (httpx.TransportError, httpx.StreamError):
                pass
            await asyncio.sleep(AGAIN_SECONDS)

    async def _hear(self, stream: httpx.Response, told: Told) -> None:
        kind, mark, data = "", 0, ""
        async for line in stream.aiter_lines():
            if line.startswith("event:"):
                kind = line.removeprefix("event:").strip()
            elif line.startswith("id:"):
                mark = int(line.removeprefix("id:"))
            elif line.startswith("data:"):
                data += line.removeprefix("data:")
            elif not line and kind:
                if kind == "compacted":
                    self.wrong.append(f"a watch after {told.last}: {data}")
                if kind not in {"bookmark", "compacted"}:
                    told.events.append((mark, kind, json.loads(data)["metadata"]["name"]))
                told.last = max(told.last, mark)
                kind, mark, data = "", 0, ""

    async def begin_watch(self) -> None:
        """After the revision of a list."""
        answer = await self.insist(self._somebody(), "GET", f"{GROUPS}?limit=1")
        revision = int(answer.json()["revision"])
        told = Told(began_after=revision, last=revision)
        self.watchers.append(told)
        await self._watch(told)

    async def insist(self, member: Member, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """The answer, asked again until there is one: for what may be done twice."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                with suppress(NotDone):
                    answer = await self.call(member, method, path, body, **headers)
                    if answer is not None:
                        return answer
                await asyncio.sleep(AGAIN_SECONDS)

    async def _names(self, member: Member) -> set[str]:
        """Everything that a server lists."""
        found: set[str] = set()
        after = ""
        while True:
            answer = await self.insist(member, "GET", f"{GROUPS}?limit=500{after}")
            page = answer.json()
            found |= {item["metadata"]["name"] for item in page["items"]}
            if not page.get("continue"):
                return found
            after = f"&continue={page['continue']}"

    async def acknowledge(self, member: Member) -> int:
        """Make objects until one is acknowledged; its revision."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            with suppress(NotDone):
                if (name := await self.write(member)) is not None:
                    return self.acknowledged[name]
            assert time.monotonic() < deadline, (
                f"{member.name} acknowledges nothing\n{self.answers}\n{self.cluster.told()}"
            )
            await asyncio.sleep(AGAIN_SECONDS)

    async def goes_on(self, *members: Member) -> None:
        """Return when each of these servers, or of all, has acknowledged more."""
        for member in members or self.cluster.members:
            await self.acknowledge(member)

    async def _make_registers(self) -> None:
        for register in REGISTERS:
            made = await self.insist(self._somebody(), "PUT", path(register), group(register, BEGINNING))
            assert made.status_code in {201, 428}, made.text  # the second if an answer was lost


@asynccontextmanager
async def load(
    cluster: ServerCluster,
    bearer: str,
    *,
    seed: int = 1,
    workers: int = 6,
    watchers: int = 3,
    pause_seconds: float = 0.1,
) -> AsyncIterator[Load]:
    """Under way until the block ends; watchers go on until they have heard of everything."""
    async with clients(cluster, bearer) as http:
        made = Load(cluster, bearer, random.Random(seed), pause_seconds, _http=http)
        await made._make_registers()
        async with asyncio.TaskGroup() as tasks:
            watching = [tasks.create_task(made.begin_watch()) for _ in range(watchers)]
            working = [tasks.create_task(made._work(number)) for number in range(workers)]
            working.append(tasks.create_task(made._plan_with_keys()))
            try:
                yield made
                for task in working:
                    task.cancel()
                cluster.heal()
                await cluster.all_serve()
                last = await made.acknowledge(cluster.members[0])
                plans = await made.insist(cluster.members[0], "GET", PLANS)
                made.plans_left = len(plans.json()["items"])
                await cluster.until(lambda: all(one.last >= last for one in made.watchers))
                for member in cluster.members:
                    made.listed[member.name] = await made._names(member)
            finally:
                for task in (*watching, *working):
                    task.cancel()


@asynccontextmanager
async def clients(cluster: ServerCluster, bearer: str) -> AsyncIterator[dict[str, httpx.AsyncClient]]:
    """Of somebody with a token, at each server."""
    made = {
        member.name: httpx.AsyncClient(
            base_url=f"http://{member.web}",
            headers={"authorization": f"Bearer {bearer}"},
            timeout=ANSWER_SECONDS,
            limits=httpx.Limits(max_connections=None),
        )
        for member in cluster.members
    }
    try:
        yield made
    finally:
        for client in made.values():
            await client.aclose()
