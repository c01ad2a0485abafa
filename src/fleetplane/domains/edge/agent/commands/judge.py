"""From a tool call on the wire to something that may run here, or to the reason why not.

In this order: is the call the server's and for our tenant, is its context known, does the policy
permit it, is there such a tool. Nothing has run before all of it is settled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from google.protobuf import json_format

from fleetplane.domains.edge.agent import server_proof as proof
from fleetplane.domains.edge.agent.commands import policy
from fleetplane.domains.edge.agent.commands.policy import Permit, SecurityContext
from fleetplane.domains.edge.agent.config.document import DaemonConfig
from fleetplane.domains.edge.agent.tools.contract import BadArguments, Claims, ErrorKind, Tool
from fleetplane.domains.edge.wire.protobuf_types import mapping_of, seconds_of
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb

DEFAULT_SECONDS: Final = 600.0
LONGEST_SECONDS: Final = 24 * 3600.0
_KNOWN_ELSEWHERE: Final = ("fs.", "web.", "aegis.schema.")


class RefusedCommand(Exception):
    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class PermittedJob:
    command_id: str
    tool: Tool
    context: str
    permits: tuple[Permit, ...]
    """The owner's, and one more where the server pushed a narrower context."""
    arguments: Mapping[str, object]
    paths: Mapping[str, Path]
    seconds: float
    """What the command may take in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """What calls are judged by. Blocking: paths are followed to where they lead."""

    config: DaemonConfig
    """What is in force: the owner's, narrowed by what was pushed."""
    owner: DaemonConfig
    """The ceiling."""
    tools: Mapping[str, Tool]
    tenant: str
    server_key: bytes
    tolerate_unsigned: bool
    mount_points: tuple[tuple[str, ...], ...]
    """A path lies within one of each."""
    protected: tuple[Path, ...]

    def judge(self, call: pb.InvokeTool) -> PermittedJob:
        """Raises Refused."""
        complaint = proof.call_complaint(
            call, tenant=self.tenant, server_key=self.server_key, tolerate_unsigned=self.tolerate_unsigned
        )
        if complaint:
            raise RefusedCommand(ErrorKind.ENVELOPE_INVALID, complaint)
        contexts = self._contexts(call.security_context_name)
        self._permits(contexts, call.tool_name, Claims(), {})
        tool = self._tool(call.tool_name)
        arguments = _arguments(call)
        claims = _claims(tool, arguments)
        paths = {written: _followed(written) for written in claims.paths}
        permits = self._permits(contexts, call.tool_name, claims, paths)
        self._within_mounts(paths)
        limits = [LONGEST_SECONDS, claims.timeout_seconds or DEFAULT_SECONDS]
        deadline = seconds_of(call.deadline) if call.HasField("deadline") else 0.0
        if deadline > 0:
            limits.append(deadline)
        return PermittedJob(
            command_id=call.command_id,
            tool=tool,
            context=call.security_context_name,
            permits=permits,
            arguments=arguments,
            paths=paths,
            seconds=min(limits),
        )

    def _contexts(self, name: str) -> Sequence[tuple[str, SecurityContext]]:
        """All that must permit a call: what the owner wrote under this name, and what was pushed under it."""
        found = [(policy.OWNER, self.owner.context(name))]
        if self.config.spec.security_contexts != self.owner.spec.security_contexts:
            found.append((policy.PUSHED, self.config.context(name)))
        known = [(layer, context) for layer, context in found if context is not None]
        if len(known) < len(found):
            raise RefusedCommand(
                ErrorKind.SECURITY_CONTEXT_NOT_FOUND, f"this machine has no security context {name[:80]!r}"
            )
        return known

    def _permits(
        self,
        contexts: Sequence[tuple[str, SecurityContext]],
        tool: str,
        claims: Claims,
        paths: Mapping[str, Path],
    ) -> tuple[Permit, ...]:
        return tuple(self._permit(layer, context, tool, claims, paths) for layer, context in contexts)

    def _permit(
        self, layer: str, context: SecurityContext, tool: str, claims: Claims, paths: Mapping[str, Path]
    ) -> Permit:
        entries = {entry for capability in context.capabilities for entry in capability.path_allowlist or ()}
        decision = policy.decide(
            context,
            policy.PolicyRequest(tool=tool, claims=claims, paths=paths),
            roots={entry: _followed(entry) for entry in entries} if paths else {},
            protected=self.protected,
            layer=layer,
        )
        if not isinstance(decision, Permit):
            raise RefusedCommand(ErrorKind.POLICY_VIOLATION, decision.reason)
        return decision

    def _tool(self, name: str) -> Tool:
        tool = self.tools.get(name)
        if tool is None:
            elsewhere = name.startswith(_KNOWN_ELSEWHERE)
            kind = ErrorKind.TOOL_NOT_LOCALLY_SUPPORTED if elsewhere else ErrorKind.TOOL_NOT_FOUND
            raise RefusedCommand(kind, f"there is no tool {name[:80]!r} on this machine")
        return tool

    def _within_mounts(self, paths: Mapping[str, Path]) -> None:
        for within in self.mount_points:
            roots = [_followed(entry) for entry in within]
            for path in paths.values():
                if not any(path.is_relative_to(root) for root in roots):
                    raise RefusedCommand(
                        ErrorKind.POLICY_VIOLATION, f"{path} is outside of this machine's mount points"
                    )


def _arguments(call: pb.InvokeTool) -> Mapping[str, object]:
    try:
        return mapping_of(call.args)
    except json_format.Error as error:
        raise RefusedCommand(ErrorKind.INVALID_ARGUMENTS, f"args: {error}") from error


def _claims(tool: Tool, arguments: Mapping[str, object]) -> Claims:
    try:
        return tool.claims(arguments)
    except BadArguments as error:
        raise RefusedCommand(ErrorKind.INVALID_ARGUMENTS, error.message) from error
    except Exception as error:
        # A tool may be anyone's code: the command is refused, the daemon goes on.
        raise RefusedCommand(ErrorKind.INTERNAL, f"{tool.name} cannot judge the call: {error!r}") from error


def _followed(written: str) -> Path:
    """Where a path leads, through every link and `..`; what is not there yet is taken as it is written."""
    try:
        return Path(written).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise RefusedCommand(
            ErrorKind.POLICY_VIOLATION, f"{written[:200]!r} leads nowhere: {error}"
        ) from error
