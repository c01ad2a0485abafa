"""From a tool call on the wire to something that may run here, or to the reason why not.

In this order: is the call the server's and for our tenant, is its context known, does the policy
permit it, is there such a tool. Nothing has run before all of it is settled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from google.protobuf import json_format

from fleetplane.domains.edge.agent import policy, proof
from fleetplane.domains.edge.agent.config import NodeConfig
from fleetplane.domains.edge.agent.policy import Permit, SecurityContext
from fleetplane.domains.edge.agent.tools.contract import BadArguments, Claims, ErrorKind, Tool
from fleetplane.domains.edge.wellknown import mapping_of, seconds_of
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb

DEFAULT_SECONDS: Final = 600.0
LONGEST_SECONDS: Final = 24 * 3600.0
_KNOWN_ELSEWHERE: Final = ("fs.", "web.", "aegis.schema.")


class Refused(Exception):
    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    command_id: str
    tool: Tool
    context: str
    permit: Permit
    arguments: Mapping[str, object]
    paths: Mapping[str, Path]
    seconds: float
    """What the command may take in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """What calls are judged by. Blocking: paths are followed to where they lead."""

    config: NodeConfig
    tools: Mapping[str, Tool]
    tenant: str
    server_key: bytes
    tolerate_unsigned: bool
    mount_points: tuple[str, ...]
    protected: tuple[Path, ...]

    def judge(self, call: pb.InvokeTool) -> Job:
        """Raises Refused."""
        complaint = proof.call_complaint(
            call, tenant=self.tenant, server_key=self.server_key, tolerate_unsigned=self.tolerate_unsigned
        )
        if complaint:
            raise Refused(ErrorKind.ENVELOPE_INVALID, complaint)
        context = self.config.context(call.security_context_name)
        if context is None:
            raise Refused(
                ErrorKind.SECURITY_CONTEXT_NOT_FOUND,
                f"this machine has no security context {call.security_context_name[:80]!r}",
            )
        self._permit(context, call.tool_name, Claims(), {})
        tool = self._tool(call.tool_name)
        arguments = _arguments(call)
        claims = _claims(tool, arguments)
        paths = {written: _followed(written) for written in claims.paths}
        permit = self._permit(context, call.tool_name, claims, paths)
        self._within_mounts(paths)
        limits = [LONGEST_SECONDS, claims.timeout_seconds or DEFAULT_SECONDS]
        deadline = seconds_of(call.deadline) if call.HasField("deadline") else 0.0
        if deadline > 0:
            limits.append(deadline)
        return Job(
            command_id=call.command_id,
            tool=tool,
            context=context.name,
            permit=permit,
            arguments=arguments,
            paths=paths,
            seconds=min(limits),
        )

    def _permit(
        self, context: SecurityContext, tool: str, claims: Claims, paths: Mapping[str, Path]
    ) -> Permit:
        entries = {entry for capability in context.capabilities for entry in capability.path_allowlist or ()}
        decision = policy.decide(
            context,
            policy.Request(tool=tool, claims=claims, paths=paths),
            roots={entry: _followed(entry) for entry in entries} if paths else {},
            protected=self.protected,
        )
        if not isinstance(decision, Permit):
            raise Refused(ErrorKind.POLICY_VIOLATION, decision.reason)
        return decision

    def _tool(self, name: str) -> Tool:
        tool = self.tools.get(name)
        if tool is None:
            elsewhere = name.startswith(_KNOWN_ELSEWHERE)
            kind = ErrorKind.TOOL_NOT_LOCALLY_SUPPORTED if elsewhere else ErrorKind.TOOL_NOT_FOUND
            raise Refused(kind, f"there is no tool {name[:80]!r} on this machine")
        return tool

    def _within_mounts(self, paths: Mapping[str, Path]) -> None:
        roots = [_followed(entry) for entry in self.mount_points]
        for path in paths.values():
            if not any(path.is_relative_to(root) for root in roots):
                raise Refused(ErrorKind.POLICY_VIOLATION, f"{path} is outside of this machine's mount points")


def _arguments(call: pb.InvokeTool) -> Mapping[str, object]:
    try:
        return mapping_of(call.args)
    except json_format.Error as error:
        raise Refused(ErrorKind.INVALID_ARGUMENTS, f"args: {error}") from error


def _claims(tool: Tool, arguments: Mapping[str, object]) -> Claims:
    try:
        return tool.claims(arguments)
    except BadArguments as error:
        raise Refused(ErrorKind.INVALID_ARGUMENTS, error.message) from error
    except Exception as error:
        # A tool may be anyone's code: the command is refused, the daemon goes on.
        raise Refused(ErrorKind.INTERNAL, f"{tool.name} cannot judge the call: {error!r}") from error


def _followed(written: str) -> Path:
    """Where a path leads, through every link and `..`; what is not there yet is taken as it is written."""
    try:
        return Path(written).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise Refused(ErrorKind.POLICY_VIOLATION, f"{written[:200]!r} leads nowhere: {error}") from error
