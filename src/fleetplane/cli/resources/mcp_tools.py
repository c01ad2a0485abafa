"""What an assistant may ask of a fleet: the resource API as tools. Knows nothing of the protocol around them.

Every tool reads, unless changes were allowed. A change is a plan first: what would be done is answered, and
only a plan that was made in the same session is applied.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleetplane.client import requests
from fleetplane.client.aio import Fleet
from fleetplane.client.calls import Request
from fleetplane.client.requests import Query
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument, NotFound, PermissionDenied

EDGE = "/v1/edge"
ANSWER_LIMIT_CHARACTERS = 200_000
"""Of one answer: some fifty thousand tokens, more than an assistant reads well."""
LIST_LIMIT = 200
"""Objects of one list; an assistant that needs others narrows it down."""

Call = Callable[[Mapping[str, Any]], Awaitable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolEntry:
    """One tool: what it is for, what it takes, and what it does."""

    name: str
    summary: str
    takes: Mapping[str, Any]
    """JSON Schema of each argument."""
    needs: Sequence[str] = ()
    reads_only: bool = True
    call: Call


TEXT = {"type": "string"}
KIND = {**TEXT, "description": "A resource, such as gpus; `kinds` lists them."}
SCOPE = {**TEXT, "description": "At and below which scope, such as /tenants/acme; everywhere when empty."}
TARGET = {**TEXT, "description": "A node, @group, tags=prod, or all."}
TENANT = {**TEXT, "description": "The tenant of the edge daemons."}


class FleetTools:
    """The tools of one session."""

    def __init__(self, fleet: Fleet, *, allow_changes: bool) -> None:
        self._fleet = fleet
        self._allow_changes = allow_changes
        self._plans: set[str] = set()
        """Made in this session."""

    def entries(self) -> list[ToolEntry]:
        """Every tool that is offered."""
        named = {"kind": KIND, "name": TEXT, "scope": SCOPE}
        listed = {"kind": KIND, "scope": SCOPE, "labels": TEXT, "fields": TEXT, "sort": TEXT}
        objects = {
            "type": "array",
            "items": {"type": "object"},
            "description": "Each with kind, metadata, spec.",
        }
        planned = {"objects": objects, "scope": SCOPE, "owner": TEXT, "prune": {"type": "boolean"}}
        edge = {"target": TARGET, "tenant": TENANT}
        found = [
            ToolEntry(
                name="whoami", summary="Who this session acts as, with its roles", takes={}, call=self.whoami
            ),
            ToolEntry(
                name="kinds",
                summary="List the kinds of things, with verbs and actions",
                takes={},
                call=self.kinds,
            ),
            ToolEntry(
                name="list", summary="List objects of a kind", takes=listed, needs=("kind",), call=self.list
            ),
            ToolEntry(
                name="get", summary="Read one object", takes=named, needs=("kind", "name"), call=self.get
            ),
            ToolEntry(
                name="explain",
                summary="Why an object is as it is",
                takes=named,
                needs=("kind", "name"),
                call=self.explain,
            ),
            ToolEntry(
                name="plan",
                summary="What applying objects would change, field by field; changes nothing",
                takes=planned,
                needs=("objects",),
                call=self.plan,
            ),
            ToolEntry(
                name="aegis.edge.fleet.list",
                summary="Which edge daemons a target means, and which are left out and why",
                takes=edge,
                needs=("target",),
                call=self.edge_list,
            ),
        ]
        return [*found, *self._changing(edge, named)] if self._allow_changes else found

    def _changing(self, edge: Mapping[str, Any], named: Mapping[str, Any]) -> list[ToolEntry]:
        invoked = {**edge, "tool_name": TEXT, "args": {"type": "object"}}
        return [
            ToolEntry(
                name="apply_plan",
                summary="Carry out a plan that was made in this session, all of it or nothing",
                takes={"plan": TEXT},
                needs=("plan",),
                reads_only=False,
                call=self.apply_plan,
            ),
            ToolEntry(
                name="act",
                summary="Have an action of a kind done with an object, such as scale",
                takes={**named, "action": TEXT, "body": {"type": "object"}},
                needs=("kind", "name", "action"),
                reads_only=False,
                call=self.act,
            ),
            ToolEntry(
                name="aegis.edge.fleet.invoke",
                summary="Run a tool on every edge daemon that a target means; look with list first",
                takes=invoked,
                needs=("target", "tool_name"),
                reads_only=False,
                call=self.edge_invoke,
            ),
            ToolEntry(
                name="aegis.edge.fleet.cancel",
                summary="Cancel a run of edge daemons",
                takes={"fleet_command_id": TEXT, "tenant": TENANT},
                needs=("fleet_command_id",),
                reads_only=False,
                call=self.edge_cancel,
            ),
        ]

    async def answer(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """The text of a call's answer, and whether it is an error."""
        entry = next((one for one in self.entries() if one.name == name), None)
        try:
            if entry is None:
                raise PermissionDenied(
                    f"there is no tool {name!r}", hint="start with --allow-changes for more"
                )
            _check(entry, arguments)
            text = json.dumps(await entry.call(arguments), ensure_ascii=False)
        except FleetplaneError as error:
            told = {"error": error.message, "reason": error.reason, "hint": error.advice}
            return json.dumps(told, ensure_ascii=False), True
        except TimeoutError as error:
            return json.dumps({"error": str(error), "reason": "TIMEOUT"}), True
        if len(text) > ANSWER_LIMIT_CHARACTERS:
            long = {"error": "the answer is too long", "hint": "narrow it down with scope, labels or fields"}
            return json.dumps(long), True
        return text, False

    async def whoami(self, _given: Mapping[str, Any]) -> Any:
        return await self._fleet.call(requests.whoami())

    async def kinds(self, _given: Mapping[str, Any]) -> Any:
        found = (await self._fleet.discover()).get("resources") or []
        return [
            {key: one.get(key) for key in ("plural", "shortNames", "summary", "verbs", "may", "actions")}
            for one in found
        ]

    async def _plural(self, word: str) -> str:
        for one in (await self._fleet.discover()).get("resources") or []:
            if word in (one.get("plural"), one.get("name"), *(one.get("shortNames") or ())):
                return str(one["plural"])
        raise NotFound(f"there is no kind {word!r}", hint="the tool `kinds` lists them")

    async def list(self, given: Mapping[str, Any]) -> Any:
        query = Query(**{key: given.get(key, "") for key in ("scope", "labels", "fields", "sort")})
        found = await self._fleet.resource(await self._plural(given["kind"])).list(query)
        items = [one.raw for one in found.items[:LIST_LIMIT]]
        return {"items": items, "total": len(found.items), "revision": found.revision}

    async def get(self, given: Mapping[str, Any]) -> Any:
        resources = self._fleet.resource(await self._plural(given["kind"]))
        return (await resources.get(given["name"], scope=given.get("scope", ""))).raw

    async def explain(self, given: Mapping[str, Any]) -> Any:
        resources = self._fleet.resource(await self._plural(given["kind"]))
        return await resources.explain(given["name"], scope=given.get("scope", ""))

    async def plan(self, given: Mapping[str, Any]) -> Any:
        made = await self._fleet.plan(
            given["objects"],
            scope=given.get("scope", ""),
            owner=given.get("owner", ""),
            prune=given.get("prune", False),
        )
        self._plans.add(made.id)
        return made.raw

    async def apply_plan(self, given: Mapping[str, Any]) -> Any:
        if given["plan"] not in self._plans:
            raise PermissionDenied(
                "this plan was not made in this session", hint="make it with the tool `plan`, and look at it"
            )
        return await self._fleet.apply_plan(given["plan"])

    async def act(self, given: Mapping[str, Any]) -> Any:
        resources = self._fleet.resource(await self._plural(given["kind"]))
        return await resources.act(
            given["name"], given["action"], given.get("body"), scope=given.get("scope", "")
        )

    async def edge_list(self, given: Mapping[str, Any]) -> Any:
        return await self._edge("/fleet/preview", {"target": given["target"]}, given)

    async def edge_invoke(self, given: Mapping[str, Any]) -> Any:
        body = {"target": given["target"], "tool": given["tool_name"], "args": given.get("args") or {}}
        return await self._edge("/fleet/invoke", body, given)

    async def edge_cancel(self, given: Mapping[str, Any]) -> Any:
        run = given["fleet_command_id"]
        if not run.replace("-", "").isalnum():
            raise InvalidArgument("is no id of a run", field="fleet_command_id")
        return await self._edge(f"/fleet/{run}/cancel", {}, given)

    async def _edge(self, path: str, body: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
        headers = {"x-tenant-id": given["tenant"]} if given.get("tenant") else {}
        return await self._fleet.call(Request(method="POST", path=EDGE + path, body=body, headers=headers))


_TYPES: Mapping[str, type] = {"string": str, "object": dict, "array": list, "boolean": bool}


def _check(entry: ToolEntry, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that a tool does not take, before anything is asked."""
    for name, value in arguments.items():
        if name not in entry.takes:
            raise InvalidArgument(f"{name}: is no argument of {entry.name}", field=name)
        if not isinstance(value, _TYPES[entry.takes[name]["type"]]):
            raise InvalidArgument(f"{name}: is no {entry.takes[name]['type']}", field=name)
    for name in entry.needs:
        if not arguments.get(name) and name != "objects":
            raise InvalidArgument(f"{name}: is required", field=name)
        if name not in arguments:
            raise InvalidArgument(f"{name}: is required", field=name)
