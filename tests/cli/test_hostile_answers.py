"""A server that means harm, or is broken: what it answers reaches no terminal, and no memory, unchecked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from support.shared.cli_runner import Invoke, Outcome

from fleetplane.client import calls

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil\r\n\x00"


class Hostile(ThreadingHTTPServer):
    """Answers every path that begins with one of its keys as it says there."""

    answers: dict[str, tuple[int, Any]]

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hostile

    def do_GET(self) -> None:
        found = [one for path, one in self.server.answers.items() if self.path.startswith(path)]
        status, body = found[0] if found else (404, {"title": "Not Found"})
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *_arguments: Any) -> None:  # noqa: A002  # as it is called there
        pass


@pytest.fixture
def hostile() -> Iterator[Hostile]:
    with Hostile() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join(60)


@pytest.fixture
def ask(hostile: Hostile, invoke: Invoke) -> Invoke:
    def call(*words: str) -> Outcome:
        return invoke(*words, "--server", hostile.url, "--token", "t")

    return call


def thing(name: str) -> dict[str, Any]:
    condition = {"type": name, "status": name, "reason": name, "message": name}
    metadata = {"name": name, "scope": name, "labels": {name: name}, "createdAt": name, "revision": 1}
    return {
        "kind": name,
        "metadata": metadata,
        "spec": {name: name},
        "status": {"a": name},
        "conditions": [condition],
    }


def table(name: str) -> dict[str, Any]:
    row = {"cells": [name, name], "object": {"name": name, "scope": name}}
    columns = [{"title": name, "type": "text", "wide": False}, {"title": name, "type": "age", "wide": False}]
    return {"kind": "table", "columns": columns, "rows": [row, row], "revision": 1, "continue": None}


def is_harmless(text: str) -> bool:
    return all(one.isprintable() or one == "\n" for one in text)


@pytest.mark.parametrize(
    "form", ["table", "wide", "json", "yaml", "name", "jsonpath=.items[*].metadata.name"]
)
def test_no_escape_sequence_of_a_server_reaches_the_terminal(
    hostile: Hostile, ask: Invoke, form: str
) -> None:
    hostile.answers = {
        "/apis/v1/table/gpus": (200, table(EVIL)),
        "/apis/v1/gpus": (200, {"items": [thing(EVIL)], "revision": 1, "continue": None}),
    }
    outcome = ask("get", "gpus", "-o", form)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out
    assert is_harmless(outcome.out)
    if form == "json":
        assert json.loads(outcome.out)["items"][0]["metadata"]["name"] == EVIL


def test_neither_does_one_in_a_description_or_a_refusal(hostile: Hostile, ask: Invoke) -> None:
    resource = {"name": "gpu", "plural": "gpus", "shortNames": [EVIL], "verbs": [], "summary": EVIL}
    hostile.answers = {
        "/apis/v1/gpus/bad": (403, {"detail": EVIL, "hint": EVIL, "reason": EVIL, "field": EVIL}),
        "/apis/v1/gpus/": (200, thing(EVIL)),
        "/apis/v1": (200, {"resources": [resource]}),
    }
    described, refused, listed = ask("describe", "gpu/a"), ask("describe", "gpu/bad"), ask("kinds")
    assert (described.code, refused.code, listed.code) == (0, 5, 0)
    for outcome in (described, refused, listed):
        assert is_harmless(outcome.out + outcome.err)


STRANGE = [b"", b"[]", b"1", b"{", b'"x"', b"{}", b'{"columns":1,"rows":1}', b'{"rows":[{}],"revision":1}']
VERBS = (("get", "gpus"), ("get", "g"), ("get", "gpus", "-o", "json"), ("describe", "gpu/a"), ("kinds",))


@pytest.mark.parametrize("answer", [*STRANGE, b"\xff", b"[" * 100_000], ids=range(10))
def test_answers_of_another_shape_are_told_in_one_line(hostile: Hostile, ask: Invoke, answer: bytes) -> None:
    hostile.answers = {"/apis/v1": (200, answer)}
    for words in VERBS:
        outcome = ask(*words)
        assert outcome.code == 1
        assert outcome.err.count("\n") == 1


def test_a_list_that_never_ends_is_given_up(hostile: Hostile, ask: Invoke) -> None:
    hostile.answers = {"/apis/v1/gpus": (200, {"items": [], "revision": 1, "continue": "again"})}
    assert "in a circle" in ask("get", "gpus", "-o", "json").err


def test_an_answer_without_end_is_not_taken_into_memory(
    hostile: Hostile, ask: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetplane.client.transport.ANSWER_LIMIT_BYTES", 1000)
    hostile.answers = {"/apis/v1": (200, b" " * 2000)}
    outcome = ask("get", "gpus")
    assert (outcome.code, "more than 1000 bytes" in outcome.err) == (1, True)
    assert calls.ANSWER_LIMIT_BYTES == 64 * 1024 * 1024
