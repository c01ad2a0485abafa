"""Answers to HTTP-01 challenges, over plain HTTP.

Agents pass `/.well-known/acme-challenge/` on to this server, so the authority may reach any of them.
Answers are kept in memory while an order runs, with a bound. Servers that share a database keep them in the
store: the server that orders writes the answer before the authority is told to look, and deletes it when
the order ends; answers of a server that died are swept. An order that a restart interrupts is begun anew.

A domain that points to one tenant's agents must not be proved by another tenant, whose challenge these agents
would pass on just as well. So agents say whose they are, and a challenge is answered only through agents of
the workspace that it belongs to.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Final

import structlog

from fleetplane.domains.proxies.acme.orders import ACTOR
from fleetplane.domains.proxies.kinds.records import ProxiesSpec
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument, ResourceExhausted
from fleetplane.kernel.resources import Key, Kind, Nothing
from fleetplane.kernel.store import Draft, Store, transact_found
from fleetplane.kernel.values.times import NS
from fleetplane.rpc import Needs
from fleetplane.web.ops import Mount, Receive, Scope, Send

SCOPE: Final = ""


class ShownChallengeSpec(ProxiesSpec, frozen=True):
    """Named by the digest of the challenge's token. Meant for everyone to read."""

    text: str
    workspace: str
    ends_at_ns: int


CHALLENGE: Kind[ShownChallengeSpec, Nothing] = Kind("proxy-acme-challenge", ShownChallengeSpec, Nothing)


class ShownChallenges:
    def __init__(self, store: Store) -> None:
        self._store = store
        self.shared = store.shared

    def __repr__(self) -> str:
        return f"<ShownChallenges {self._store.count(CHALLENGE)}>"

    async def show(self, token: str, text: str, *, workspace: str, ends_at_ns: int) -> None:
        name = _name(token)
        spec = ShownChallengeSpec(text=text, workspace=workspace, ends_at_ns=ends_at_ns)
        await self._store.transact(
            lambda draft: draft.put(CHALLENGE, SCOPE, name, spec=spec),
            actor=ACTOR,
            action="acme.show",
            touches=[CHALLENGE.key(SCOPE, name)],
        )

    async def hide(self, token: str) -> None:
        key = CHALLENGE.key(SCOPE, _name(token))
        await self._store.transact(
            lambda draft: _hide(draft, key), actor=ACTOR, action="acme.hide", touches=[key]
        )

    async def find(self, token: str) -> ShownChallengeSpec | None:
        """An answer that any server has shown, as far as the database can be asked."""
        with suppress(FleetplaneError):  # what is known may still be the answer
            await self._store.confirmed()
        found = self._store.get(CHALLENGE, SCOPE, _name(token))
        if found is None or found.spec.ends_at_ns <= self._store.clock.now_ns():
            return None
        return found.spec

    async def sweep(self) -> None:
        """Forget what earlier holders of the seat left behind: whoever has it orders alone."""

        def left(reader: Store | Draft) -> list[Key]:
            return [one.key for one in reader.list(CHALLENGE)]

        def change(draft: Draft, found: Sequence[Key]) -> None:
            for key in found:
                _hide(draft, key)

        if self.shared and left(self._store):
            await transact_found(self._store, left, change, actor=ACTOR, action="acme.sweep")


def _hide(draft: Draft, key: Key) -> None:
    if draft.get(CHALLENGE, key.scope, key.name) is not None:
        draft.delete(CHALLENGE, key.scope, key.name)


def _name(token: str) -> str:
    """Tokens are the authority's to choose."""
    return hashlib.sha256(token.encode()).hexdigest()


log = structlog.get_logger(__name__)

PATH = "/.well-known/acme-challenge"
WORKSPACE_HEADER = b"x-fleetplane-workspace"
TOKENS_LIMIT = 1000
"""Challenges that can be open at once: orders run two at a time, each with at most a few."""
LIFE_SECONDS = 3600.0
"""An authority has looked long before; whatever is still here then was forgotten."""
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,256}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShownAnswer:
    ends: float
    text: str
    workspace: str


class ChallengeBoard:
    """An ASGI application, for a listener of its own or mounted on another one."""

    def __init__(
        self,
        clock: Clock,
        *,
        limit: int = TOKENS_LIMIT,
        life_seconds: float = LIFE_SECONDS,
        strict: bool = False,
        shown: ShownChallenges | None = None,
    ) -> None:
        """With `strict`, a forwarded challenge must name its workspace; `shown` are those of all servers."""
        self._shown = shown if shown is not None and shown.shared else None
        self._clock = clock
        self._strict = strict
        self._limit = limit
        self._life_seconds = life_seconds
        self._answers: dict[str, _ShownAnswer] = {}
        self.asked = 0
        self.unknown = 0

    def __repr__(self) -> str:
        return f"<ChallengeBoard open={len(self._answers)} asked={self.asked} unknown={self.unknown}>"

    @property
    def mount(self) -> Mount:
        return Mount(path=PATH, app=self, needs=Needs.STORE)

    @contextmanager
    def answering(self, token: str, answer: str, *, workspace: str = "") -> Iterator[None]:
        """Answer a challenge of a workspace from entry to exit."""
        if not _TOKEN.fullmatch(token):
            raise InvalidArgument("a challenge's token must be base64url text")
        self._expire()
        if len(self._answers) >= self._limit:
            raise ResourceExhausted(f"{len(self._answers)} challenges are open, the most there may be")
        ends = self._clock.monotonic() + self._life_seconds
        self._answers[token] = _ShownAnswer(ends=ends, text=answer, workspace=workspace)
        try:
            yield
        finally:
            self._answers.pop(token, None)

    @asynccontextmanager
    async def answered_anywhere(self, token: str, answer: str, *, workspace: str = "") -> AsyncIterator[None]:
        """The same at every server that shares the database."""
        with self.answering(token, answer, workspace=workspace):
            if self._shown is None:
                yield
                return
            ends_at_ns = self._clock.now_ns() + round(self._life_seconds * NS)
            await self._shown.show(token, answer, workspace=workspace, ends_at_ns=ends_at_ns)
            try:
                yield
            finally:
                try:
                    await self._shown.hide(token)
                except FleetplaneError as error:  # the next holder of the seat sweeps it
                    log.warning("acme.challenge_left_behind", error=error.message)

    async def find_anywhere(self, token: str, *, workspace: str = "") -> str | None:
        """What this server answers, or another one that has the order."""
        found = self.find(token, workspace=workspace)
        if found is not None or self._shown is None or not _TOKEN.fullmatch(token):
            return found
        spec = await self._shown.find(token)
        if spec is None or ((workspace or self._strict) and workspace != spec.workspace):
            return None
        return spec.text

    def find(self, token: str, *, workspace: str = "") -> str | None:
        """`workspace` is whose agents were asked; empty if they did not say."""
        self._expire()
        found = self._answers.get(token)
        if found is None or ((workspace or self._strict) and workspace != found.workspace):
            return None
        return found.text

    def _expire(self) -> None:
        now = self._clock.monotonic()
        for token in [token for token, answer in self._answers.items() if answer.ends <= now]:
            del self._answers[token]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  # ASGI's
        if scope["type"] != "http":
            return
        self.asked += 1
        found = None
        if scope["method"] in ("GET", "HEAD") and scope["path"].startswith(f"{PATH}/"):
            asked = next((value for name, value in scope["headers"] if name == WORKSPACE_HEADER), b"")
            token = scope["path"][len(PATH) + 1 :]
            found = await self.find_anywhere(token, workspace=asked.decode("latin-1"))
        if found is None:
            self.unknown += 1
        body = (found or "no such challenge\n").encode()
        headers = [
            (b"content-type", b"application/octet-stream" if found else b"text/plain; charset=utf-8"),
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
        ]
        status = 200 if found is not None else 404
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
