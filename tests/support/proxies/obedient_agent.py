"""An agent of the documented contract that takes every configuration and answers every command.

Plain grpcio in threads, at whichever server it is told to connect to.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Any, Self

import grpc

from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2_grpc

DEADLINE_SECONDS = 60.0


class ObedientAgent:
    """One stream, from entry to exit."""

    def __init__(self, address: str, authority: bytes, token: str, *, hostname: str = "web-01") -> None:
        self._channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(authority))
        self._token, self._hostname = token, hostname
        self._sent: queue.SimpleQueue[pb.AgentMessage | None] = queue.SimpleQueue()
        self._agent_id = ""
        self._call: Any = None
        self._thread = threading.Thread(target=self._listen, name="obedient-agent")
        self.registered: pb.RegistrationResponse | None = None
        self.versions: list[int] = []
        """Those that it was sent and has confirmed."""
        self.refuses = ""
        """What NGINX has against every configuration, if it has anything."""
        self.commands: list[str] = []
        self.errors: list[str] = []
        """Codes of what the server complained about; the last one says why the stream ended."""
        self.status: grpc.StatusCode | None = None
        """How the stream ended."""

    def __enter__(self) -> Self:
        stub = agent_pb2_grpc.AgentServiceStub(self._channel)
        self._call = stub.Stream(iter(self._sent.get, None), wait_for_ready=True)
        self.say(
            registration=pb.RegistrationRequest(
                token=self._token, hostname=self._hostname, version="0.1.0", capabilities=["http2"]
            )
        )
        self.registered = next(self._call).registration_response
        if self.registered.success:
            self._agent_id = self.registered.agent_id
            self.report(0, "")
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._sent.put(None)
        self._call.cancel()
        if self._thread.ident is not None:
            self._thread.join(DEADLINE_SECONDS)
        self._channel.close()

    def say(self, **payload: Any) -> None:
        self._sent.put(
            pb.AgentMessage(agent_id=self._agent_id, timestamp=time.time_ns() // 1_000_000, **payload)
        )

    def report(self, version: int, checksum: str) -> None:
        self.say(
            health=pb.HealthReport(
                nginx=pb.NginxStatus(is_running=True, uptime_seconds=60),
                system=pb.SystemMetrics(cpu_percent=5.0, memory_used_bytes=1 << 20),
                config_version=version,
                config_checksum=checksum,
            )
        )

    def _listen(self) -> None:
        try:
            for message in self._call:
                match message.WhichOneof("payload"):
                    case "config_update":
                        self._apply(message.config_update)
                    case "command":
                        self._obey(message.command)
                    case "error":
                        self.errors.append(message.error.code)
        except grpc.RpcError as error:
            self.status = error.code()

    def _apply(self, update: pb.ConfigUpdate) -> None:
        done = pb.ConfigStatus(
            config_id=update.config_id,
            version=update.version,
            status=pb.FAILED if self.refuses else pb.SUCCESS,
            error_message=self.refuses,
        )
        self.say(config_status=done)
        if self.refuses:
            return
        self.versions.append(update.version)
        self.report(update.version, "")

    def _obey(self, command: pb.Command) -> None:
        verb = str(command.WhichOneof("command"))
        self.commands.append(verb)
        data = {
            "command_id": command.command_id,
            "command": verb,
            "success": "true",
            "message": f"done at {self._hostname}",
            "duration_ms": "31",
        }
        self.say(event=pb.Event(event_id=command.command_id, event_type="command.result", data=data))
