"""Whatever a caller with every right sends to any route, the server answers, and is none the worse for it.

Every operation of every OpenAPI document of one real server is sent what its document allows and what it
forbids, with a token that none of them can end. The short form takes a few operations; `FUZZ_EXAMPLES` of the
long one are sent to each.
"""

from __future__ import annotations

import json
import logging
import os
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from support.shared import warm_start
from support.shared.server_process import ServerProcess, running_server
from support.shared.waiting_server import patient

DOCUMENTS = (
    "/openapi.json",
    "/api/v1/openapi.json",
    "/apis/v1/openapi.json",
    "/v1/edge/openapi.json",
    "/v1/fleet/openapi.json",
    "/v1/instances/openapi.json",
    "/apis/v1/people/openapi.json",
)
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
"""For each operation; 0 is the short form."""
SHORT_OPERATIONS, SHORT_EXAMPLES = 15, 2
TOKEN = "fuzz"
NAMES_KEPT = 200
SEED = int(os.environ.get("FUZZ_SEED", "0")) or (random.randrange(1, 2**32) if EXAMPLES else 1)
"""The same calls every time in the short form, others each time in the long one, which prints it."""
CHOICES = random.Random(SEED)
ANSWER_SECONDS = 60.0
READ_BYTES = 65_536
GROWTH_BYTES = 150 * 1024**2
"""More than what the accepted objects, histories and caches of a run take, less than a leak of each call."""
WARM_CALLS = 200
"""Before memory is measured for the first time."""
UNLIMITED = """
from fleetplane.web.rest import gateway as rate
_make = rate.RateLimit.__init__
rate.RateLimit.__init__ = lambda self, _limit, **more: _make(self, 10**9, **more)
"""
NOT_NOW = {501: {"UNIMPLEMENTED"}, 503: {"UNAVAILABLE", "NOT_CONNECTED", "STANDS_BY"}}
"""Reasons that say how things are, such as an agent that is away, and not that the server failed."""


@dataclass(slots=True)
class Fuzzed:
    server: ServerProcess
    token: str
    http: requests.Session = field(default_factory=requests.Session)
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    warm_bytes: int = 0
    names: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """What there is, by the last word of the path that told of it."""

    def send(self, case: Any, prefix: str) -> None:
        """One call; of a stream, its beginning. Most names in its path are of things that there are."""
        words = case.path.split("/")
        for name in case.path_parameters or {}:
            place = next((at for at, word in enumerate(words) if f"{{{name}}}" in word), 0)
            if (known := self.names.get(words[place - 1])) and CHOICES.random() < 0.8:
                case.path_parameters[name] = CHOICES.choice(known)
        asked = case.as_transport_kwargs(base_url=self.server.web + prefix)
        headers = {**(asked.pop("headers", None) or {}), "authorization": f"Bearer {self.token}"}
        try:
            with self.http.request(
                **asked, headers=headers, stream=True, timeout=ANSWER_SECONDS, allow_redirects=False
            ) as answer:
                is_stream = "event-stream" in answer.headers.get("content-type", "")
                told = b"" if is_stream else next(answer.iter_content(READ_BYTES), b"")
                self.statuses[answer.status_code] += 1
                if answer.ok and not is_stream:
                    self.learn(words, told)
                if answer.status_code >= 500 and not is_how_things_are(answer.status_code, told):
                    self.complain(case, f"{answer.status_code} {told[:300]!r}")
        except requests.exceptions.InvalidHeader:
            return  # nothing that a client can send
        except requests.RequestException as error:
            self.complain(case, repr(error)[:300])
        if sum(self.statuses.values()) == WARM_CALLS:
            self.warm_bytes = self.memory()

    def learn(self, words: Sequence[str], told: bytes) -> None:
        """Remember names, but for that of the token of all these calls."""
        with suppress(ValueError):
            said = json.loads(told)
            items = said.get("items", said.get("data", [said])) if isinstance(said, dict) else said
            known = self.names[next((word for word in reversed(words) if word[:1] not in ("", "{")), "")]
            for item in items if isinstance(items, list) else []:
                for name in ("id", "name", "key", "agent_id", "number"):
                    value = item.get(name) if isinstance(item, dict) else None
                    if isinstance(value, str | int) and TOKEN not in str(value) and len(known) < NAMES_KEPT:
                        known.append(str(value))

    def complain(self, case: Any, what: str) -> None:
        assert self.server.process.poll() is None, "the server ended"
        self.wrong.append(f"{case.method} {case.formatted_path} {case.body!r:.300}: {what}")

    def memory(self) -> int:
        return int(psutil.Process(self.server.pid).memory_info().rss)


def is_how_things_are(status: int, told: bytes) -> bool:
    with suppress(ValueError):
        body = json.loads(told)
        error = body.get("error") if isinstance(body.get("error"), dict) else body
        said = {str(error.get(name, "")).upper() for name in ("code", "reason")}
        away = status == 503 and "not connected" in str(error.get("message"))
        return away or bool(said & NOT_NOW.get(status, set()))
    return False


@pytest.fixture
def fuzzed(tmp_path: Path) -> Iterator[Fuzzed]:
    logging.getLogger("urllib3").setLevel(logging.CRITICAL)
    environment = patient(tmp_path, more=UNLIMITED)
    limits = [f"--set={name}.requests_per_minute=100000000" for name in ("boards", "proxies")]
    with running_server(tmp_path / "server", *limits, environment=environment) as server:
        command = [*warm_start.COMMAND, "tokens", "create", TOKEN, "--role", "owner"]
        made = warm_start.run([*command, "--data-dir", str(tmp_path / "server")], timeout=60)
        yield Fuzzed(server, made.stdout.split()[-1])


def furnish(fuzzed: Fuzzed) -> None:
    """Something to find, of what is made below others."""
    with httpx.Client(base_url=fuzzed.server.web, timeout=ANSWER_SECONDS) as http:
        http.headers["authorization"] = f"Bearer {fuzzed.token}"

        def made(path: str, **body: object) -> str:
            answer = http.post(path, json=body)
            assert answer.status_code == 201, answer.text
            fuzzed.learn(path.split("/"), answer.content)
            return str(answer.json().get("id"))

        organization = made("/v1/organizations", name="a", slug="a")
        workspace = made(f"/v1/organizations/{organization}/workspaces", name="w", slug="w")
        made(f"/v1/workspaces/{workspace}/upstreams", name="u", servers=[{"address": "a:1"}])
        made(f"/v1/workspaces/{workspace}/virtual-hosts", name="h", server_name="h.example")
        made("/api/v1/clusters", name="c")


def operations(web: str) -> Iterator[tuple[str, Any]]:
    for path in DOCUMENTS:
        document = httpx.get(web + path, timeout=ANSWER_SECONDS).raise_for_status().json()
        prefix = document["servers"][0]["url"]
        for found in schemathesis.openapi.from_dict(document).get_all_operations():
            assert isinstance(found, Ok), found
            yield prefix, found.ok()


def anything(operation: Any) -> Any:
    """What the document allows, and where it forbids something, what it forbids."""
    allowed = operation.as_strategy()
    if not (operation.body or operation.query or operation.path_parameters):
        return allowed
    return strategies.one_of(allowed, operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))


def each(fuzzed: Fuzzed, prefix: str, operation: Any, examples: int) -> None:
    @seed(SEED)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=anything(operation))
    def attempts(case: Any) -> None:
        fuzzed.send(case, prefix)

    attempts()


@pytest.mark.timeout(300 + 2000 * EXAMPLES)
def test_whatever_is_sent_to_any_route_the_server_serves_on(fuzzed: Fuzzed) -> None:
    found = list(operations(fuzzed.server.web))
    if not EXAMPLES:
        found = random.Random(SEED).sample(found, SHORT_OPERATIONS)
    furnish(fuzzed)
    found.sort(key=lambda one: ("post", "put", "get", "patch", "delete").index(one[1].method))
    for prefix, operation in found:
        each(fuzzed, prefix, operation, EXAMPLES or SHORT_EXAMPLES)

    calls = sum(fuzzed.statuses.values())
    told = [one for one in fuzzed.server.logged() if one.get("level") in ("error", "critical")]
    told += [one for one in fuzzed.server.logged() if "exception" in one or "Traceback" in str(one)]
    print(f"{calls} calls, seed {SEED}: {dict(sorted(fuzzed.statuses.items()))}")
    assert fuzzed.wrong == [], f"seed {SEED}: {len(fuzzed.wrong)} answers"
    assert told == [], f"seed {SEED}"
    assert fuzzed.statuses[401] + fuzzed.statuses[429] < calls / 20, f"few get past access: {fuzzed.statuses}"
    if EXAMPLES:
        grown = fuzzed.memory() - fuzzed.warm_bytes
        assert grown < GROWTH_BYTES, f"{grown / 1024**2:.0f} MiB more after {calls} calls"
    assert httpx.get(f"{fuzzed.server.web}/readyz", timeout=ANSWER_SECONDS).status_code == 200
