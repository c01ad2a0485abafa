"""An agent that is nothing but the documented contract: the generated client, and what the documents say.

Plain grpcio in a thread, so that a test which waits for curl can have it beside itself.
"""

from __future__ import annotations

import queue
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from support.shared.server_process import ServerProcess

from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2_grpc

DEADLINE_SECONDS = 60.0


class DocumentedAgent:
    """Registers, reports the documented health, and answers every command."""

    def __init__(self, channel: grpc.Channel, token: str) -> None:
        self._sent: queue.SimpleQueue[pb.AgentMessage | None] = queue.SimpleQueue()
        # A server that has no time to shake hands yet is asked again.
        self._call: Any = agent_pb2_grpc.AgentServiceStub(channel).Stream(
            iter(self._sent.get, None), wait_for_ready=True
        )
        self._say(
            registration=pb.RegistrationRequest(
                token=token,
                hostname="web-01.internal",
                ip_address="10.0.1.10",
                version="0.1.0",
                capabilities=["http2", "websocket"],
                deployment_mode=pb.DOCKER_SIDECAR,
            )
        )
        answer: pb.RegistrationResponse = next(self._call).registration_response
        assert answer.success, answer.error_message
        self._agent_id = answer.agent_id
        self._say(
            health=pb.HealthReport(
                nginx=pb.NginxStatus(
                    is_running=True, uptime_seconds=86_400, active_connections=42, requests_per_second=150.5
                ),
                system=pb.SystemMetrics(cpu_percent=25.0, memory_used_bytes=512 << 20),
                config_version=42,
            )
        )
        self.commands: list[str] = []
        self._listener = threading.Thread(target=self._listen, name="documented-agent")
        self._listener.start()

    def _say(self, **payload: Any) -> None:
        self._sent.put(pb.AgentMessage(agent_id=getattr(self, "_agent_id", ""), **payload))

    def _listen(self) -> None:
        try:
            for message in self._call:
                if message.WhichOneof("payload") == "command":
                    self._obey(message.command)
        except grpc.RpcError:
            return  # ended by either side

    def _obey(self, command: pb.Command) -> None:
        verb = command.WhichOneof("command")
        self.commands.append(str(verb))
        data = {
            "command_id": command.command_id,
            "command": str(verb),
            "success": "true",
            "duration_ms": "31",
        }
        self._say(event=pb.Event(event_id=command.command_id, event_type="command.result", data=data))

    def leave(self) -> None:
        self._sent.put(None)
        self._call.cancel()
        self._listener.join(DEADLINE_SECONDS)


@contextmanager
def documented_agent(server: ServerProcess, token: str) -> Iterator[DocumentedAgent]:
    """Connected, from entry to exit."""
    with urllib.request.urlopen(f"{server.web}/.well-known/ca.pem") as answer:
        credentials = grpc.ssl_channel_credentials(answer.read())
    address = server.address("proxy-agents", "https://").removeprefix("https://")
    with grpc.secure_channel(address, credentials) as channel:
        agent = DocumentedAgent(channel, token)
        try:
            yield agent
        finally:
            agent.leave()
