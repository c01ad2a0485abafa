"""The REST side of a boards server in this process, and short words for driving it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client import CollectorRegistry
from support.boards.boards_rig import BoardsRig

from fleetplane.kernel.access import Role
from fleetplane.web.ops import OpsApp

Json = dict[str, Any]
ROLES = ("viewer", "operator", "admin")


@dataclass(slots=True, kw_only=True)
class BoardsWeb:
    rig: BoardsRig
    http: httpx.AsyncClient

    def token(self, role: str = "admin", *, scope: str = "", name: str = "boss") -> str:
        return self.rig.kernel.operators.session(
            name, roles=[Role(f"boards.{role}")], scope=scope, life_seconds=600
        )

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        role: str | None = "admin",
        token: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        """As an operator of a role, with a token of one's own, or (role None) as nobody."""
        bearer = token or (self.token(role) if role is not None else "")
        given = {"authorization": f"Bearer {bearer}"} if bearer else {}
        return await self.http.request(
            method, f"/api/v1{path}", json=body, headers={**given, **(headers or {})}
        )

    async def get(self, path: str, **how: Any) -> Json:
        return good(await self.call("GET", path, **how), 200)

    async def post(self, path: str, body: Any = None, *, status: int = 201, **how: Any) -> Json:
        return good(await self.call("POST", path, body, **how), status)

    async def put(self, path: str, body: Any, **how: Any) -> Json:
        return good(await self.call("PUT", path, body, **how), 200)

    async def delete(self, path: str, **how: Any) -> None:
        answer = await self.call("DELETE", path, **how)
        assert (answer.status_code, answer.content) == (204, b""), answer.text

    async def refused(self, method: str, path: str, body: Any = None, **how: Any) -> int:
        """The status of an error, whose body is one of an error."""
        answer = await self.call(method, path, body, **how)
        told = answer.json()
        assert isinstance(told["error"], str), told
        assert told["message"], told
        return answer.status_code

    async def events(self, path: str, **how: Any) -> list[tuple[str, Json]]:
        """Server-sent events of a stream that ends by itself."""
        answer = await self.call("GET", path, **how)
        assert answer.status_code == 200, answer.text
        return list(parsed(answer.text))


def good(answer: httpx.Response, status: int) -> Json:
    assert answer.status_code == status, answer.text
    made: Json = answer.json()
    return made


def parsed(text: str) -> list[tuple[str, Json]]:
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "data" in fields:
            found.append((fields.get("event", ""), json.loads(fields["data"])))
    return found


@asynccontextmanager
async def boards_web(rig: BoardsRig) -> AsyncIterator[BoardsWeb]:
    front = OpsApp(CollectorRegistry(), version="0")
    front.mount(rig.domain.routes)
    transport = httpx.ASGITransport(app=front)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield BoardsWeb(rig=rig, http=http)
