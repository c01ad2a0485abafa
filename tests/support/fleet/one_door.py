"""A whole server, and every surface at which a credential can be shown to it."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
from support.shared.server_process import ServerProcess
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from fleetplane.cli.main import run
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2, cluster_pb2_grpc
from fleetplane.gen.nstance.v1 import operator_pb2, operator_pb2_grpc
from fleetplane.gen.pi_controller import pi_controller_pb2, pi_controller_pb2_grpc

EMAIL, PASSWORD = "boss@example.com", "correct horse battery"
TENANT = {"x-tenant-id": "acme"}
SECONDS = 60.0
Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Site:
    folder: Path
    server: ServerProcess
    http: httpx.Client

    def run(self, *words: str) -> str:
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            code = run([*words, "--data-dir", str(self.folder)])
        assert code == 0, err.getvalue()
        return out.getvalue()

    def token(self, name: str, *roles: str, tenant: str = "") -> str:
        words = [word for role in roles for word in ("--role", role)]
        return self.run("tokens", "create", name, *words, *(("--tenant", tenant) if tenant else ())).split()[
            -1
        ]

    def ask(self, method: str, path: str, token: str, body: object = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {token}", **TENANT}
        return self.http.request(method, self.server.web + path, headers=headers, json=body)

    def people(self, method: str, path: str, token: str, body: object = None) -> httpx.Response:
        return self.ask(method, f"/apis/v1/people{path}", token, body)

    def give(self, giver: str, subject: str, role: str, scope: str) -> httpx.Response:
        body = {"subject": subject, "role": role, "scope": scope}
        return self.people("POST", "/bindings", giver, body)

    def account(self, owner: str, name: str) -> str:
        """A new account; its access token."""
        made = self.people("POST", "/accounts", owner, {"name": name, "password": PASSWORD})
        assert made.status_code == 201, made.text
        return self.account_login(name)["accessToken"]

    def account_login(self, name: str, password: str = PASSWORD) -> dict[str, str]:
        url = f"{self.server.web}/apis/v1/people/login"
        answer = self.http.post(url, json={"name": name, "password": password})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def log_in(self) -> str:
        answer = self.http.post(
            f"{self.server.web}/v1/auth/login", json={"email": EMAIL, "password": PASSWORD}, timeout=SECONDS
        )
        return str(answer.json()["access_token"])


# Every surface, by what it answers: an HTTP status.


def over_rest(path: str) -> Callable[[Site, str], int]:
    return lambda site, token: site.ask("GET", path, token).status_code


def over_socket(path: str) -> Callable[[Site, str], int]:
    def ask(site: Site, token: str) -> int:
        url = f"{site.server.web.replace('http', 'ws', 1)}{path}?token={token}"
        try:
            with connect(url, open_timeout=SECONDS, close_timeout=SECONDS):
                return 200
        except InvalidStatus as error:
            return error.response.status_code

    return ask


def over_events(site: Site, token: str) -> int:
    headers = {"authorization": f"Bearer {token}", **TENANT}
    url = f"{site.server.web}/apis/v1/watch?of=instances@/tenants/acme"
    with site.http.stream("GET", url, headers=headers) as answer:
        return answer.status_code


REFUSALS = (
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
)
_STATUS = {grpc.StatusCode.UNAUTHENTICATED: 401, grpc.StatusCode.PERMISSION_DENIED: 403}


def over_grpc(listener: str, call: Callable[[grpc.Channel, Metadata], object]) -> Callable[[Site, str], int]:
    def ask(site: Site, token: str) -> int:
        address = next(one for one in site.server.listeners[listener] if "://" in one)
        plain = address.startswith("http://")
        target = address.partition("://")[2]
        if plain:
            channel = grpc.insecure_channel(target)
        else:
            trust = site.http.get(f"{site.server.web}/.well-known/ca.pem").content
            channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(trust))
        with channel:
            try:
                call(channel, (("authorization", f"Bearer {token}"), *TENANT.items()))
            except grpc.RpcError as error:
                return _STATUS.get(error.code(), 500)
            return 200

    return ask


def list_boards(channel: grpc.Channel, metadata: Metadata) -> object:
    stub = pi_controller_pb2_grpc.PiControllerServiceStub(channel)
    return stub.ListNodes(pi_controller_pb2.ListNodesRequest(), metadata=metadata, timeout=SECONDS)


def invite(channel: grpc.Channel, metadata: Metadata) -> object:
    stub = cluster_pb2_grpc.NodeClusterServiceStub(channel)
    request = cluster_pb2.IssueEnrollmentTokenRequest(issued_to="somebody")
    return stub.IssueEnrollmentToken(request, metadata=metadata, timeout=SECONDS)


def tenant_status(channel: grpc.Channel, metadata: Metadata) -> object:
    stub = operator_pb2_grpc.OperatorServiceStub(channel)
    request = operator_pb2.GetTenantStatusRequest(tenant="acme")
    return stub.GetTenantStatus(request, metadata=metadata, timeout=SECONDS)


SURFACES: dict[str, Callable[[Site, str], int]] = {
    "instances": over_rest("/v1/instances/groups"),
    "edge": over_rest("/v1/edge/hosts"),
    "boards": over_rest("/api/v1/nodes"),
    "proxies": over_rest("/v1/organizations"),
    "fleet": over_rest("/v1/fleet/freezes"),
    "resources": over_rest("/apis/v1/edge-nodes"),
    "events": over_events,
    "proxies-socket": over_socket("/v1/events"),
    "boards-socket": over_socket("/ws"),
    "boards-grpc": over_grpc("boards", list_boards),
    "edge-grpc": over_grpc("edge", invite),
    "instances-grpc": over_grpc("operator", tenant_status),
}
