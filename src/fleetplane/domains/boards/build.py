"""Boards, built from their settings."""

from __future__ import annotations

from fleetplane.domains.blueprint import Domain, Kernel, ServerContext
from fleetplane.domains.boards.core import BoardOptions
from fleetplane.domains.boards.provisioning import policy
from fleetplane.domains.boards.server import BoardDomain
from fleetplane.domains.boards.settings import BoardSettings, PlainBoardsSettings


async def build(wanted: BoardSettings, context: ServerContext, kernel: Kernel) -> Domain:
    options = BoardOptions(
        heartbeat_seconds=wanted.heartbeat_seconds,
        certificate_days=wanted.certificate_days,
        agent_port=wanted.agent_port,
        plain=bool(context.listener("boards-plain", PlainBoardsSettings).addresses),
        plain_boards=wanted.plain_boards,
        server_names=wanted.server_names,
        controller_id=wanted.controller_id,
        unprotected_pins=frozenset(wanted.unprotected_pins),
        certificate_domains=wanted.certificate_domains,
        requests_per_minute=wanted.requests_per_minute,
        provisioning=policy.from_settings(
            installers=wanted.k3s_installers,
            paths=wanted.k3s_paths,
            servers=wanted.k3s_servers,
            arguments=wanted.k3s_arguments,
        ),
    )
    return BoardDomain(kernel, options)
