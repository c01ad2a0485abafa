"""`fleetplane mcp`: the resource API as tools of the Model Context Protocol, on standard input and output."""

from __future__ import annotations

from typing import Any

import click

from fleetplane.cli.clients.rest_client import rest_options
from fleetplane.client.places import Place


@click.command("mcp")
@click.option(
    "--allow-changes", is_flag=True, help="Offer tools that change something too; each is a plan first."
)
@rest_options
def mcp(allow_changes: bool, **where: Any) -> None:
    """Let an assistant look at a fleet, over the Model Context Protocol.

    An assistant's program starts this and talks to it on standard input and output. It acts as you, in the
    context that is meant, and only reads unless --allow-changes is given. Needs the extra `mcp`.
    """
    import asyncio

    from fleetplane.cli.exits import CommandFailed, Exit

    try:
        import mcp.server.stdio  # noqa: F401  # whether it is there
    except ModuleNotFoundError as error:
        raise CommandFailed(
            Exit.FAILURE, f"{error.name} is not installed", hint="pip install 'fleetplane[mcp]'"
        ) from error
    asyncio.run(_serve(Place(**where), allow_changes))


async def _serve(place: Place, allow_changes: bool) -> None:
    import mcp_types as types
    from mcp.server.lowlevel import Server
    from mcp.server.stdio import stdio_server

    from fleetplane import __version__
    from fleetplane.cli.resources.mcp_tools import FleetTools
    from fleetplane.client.aio import connect

    async with connect(place) as fleet:
        tools = FleetTools(fleet, allow_changes=allow_changes)

        async def list_tools(_context: Any, _params: Any) -> types.ListToolsResult:
            return types.ListToolsResult(
                tools=[
                    types.Tool(
                        name=one.name,
                        description=one.summary,
                        input_schema={
                            "type": "object",
                            "properties": dict(one.takes),
                            "required": list(one.needs),
                            "additionalProperties": False,
                        },
                        annotations=types.ToolAnnotations(
                            read_only_hint=one.reads_only, destructive_hint=not one.reads_only
                        ),
                    )
                    for one in tools.entries()
                ]
            )

        async def call_tool(_context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
            text, failed = await tools.answer(params.name, params.arguments or {})
            return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=failed)

        server: Server[Any] = Server(
            "fleetplane",
            version=__version__,
            instructions="Look with kinds, list, get and explain. Change only by plan, then apply_plan.",
            on_list_tools=list_tools,
            on_call_tool=call_tool,
        )
        async with stdio_server() as (reading, writing):
            await server.run(reading, writing, server.create_initialization_options())
