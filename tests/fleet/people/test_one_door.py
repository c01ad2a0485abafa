"""The same credential at every surface: REST of each family, sockets, server-sent events and gRPC."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.empty_pb2 import Empty
from google.protobuf.json_format import ParseDict
from google.protobuf.message_factory import GetMessageClass
from support.shared.server_process import ServerProcess, running_server
from support.shared.tampering import altered
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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("d")
    settings = ("--set", f"proxies.admin_email={EMAIL}", "--set", "listeners.operator.tokens=true")
    with (
        running_server(folder, *settings, admin_password=PASSWORD) as server,
        httpx.Client(timeout=SECONDS) as http,
    ):
        yield Site(folder, server, http)


@pytest.fixture(scope="module")
def owner(site: Site) -> str:
    return site.token("everything", "owner")


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
    url = f"{site.server.web}/v1/instances/events"
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


@pytest.mark.parametrize("surface", SURFACES)
def test_one_token_opens_every_surface_and_a_made_up_one_none(site: Site, owner: str, surface: str) -> None:
    ask = SURFACES[surface]
    assert ask(site, owner) == 200
    assert ask(site, "fp_" + "x" * 43) == 401


def test_a_token_with_every_role_of_the_domains_works_in_all_of_them(site: Site) -> None:
    roles = ("edge.admin", "boards.admin", "proxies.owner", "proxies.system_admin", "instances.viewer")
    token = site.token("all-roles", *roles, "fleet.operator", "gpus.viewer")
    expected = {
        **dict.fromkeys(SURFACES, 200),
        "instances-grpc": 403,
    }  # which a viewer of instances may not use
    assert {name: ask(site, token) for name, ask in SURFACES.items()} == expected

    before = site.ask("GET", "/v1/auth/me", token).json()["organizations"]  # of other tests
    made = site.ask("POST", "/v1/organizations", token, {"name": "Acme", "slug": "acme-by-token"})
    assert made.status_code == 201, made.text
    after = site.ask("GET", "/v1/auth/me", token).json()["organizations"]
    assert [one for one in after if one not in before] == [
        {"organization_id": made.json()["id"], "role": "owner"}
    ]


def test_a_token_does_in_each_family_what_its_roles_reach_and_no_more(site: Site) -> None:
    viewer = site.token("looks", "viewer")
    assert site.ask("GET", "/v1/edge/hosts", viewer).status_code == 200
    assert site.ask("POST", "/v1/edge/enrollment-tokens", viewer, {"name": "x"}).status_code in (403, 404)
    assert site.ask("DELETE", "/api/v1/nodes/1", viewer).status_code == 403
    assert site.ask("POST", "/v1/organizations", viewer, {"name": "A", "slug": "a-b-c"}).status_code == 403
    edge = site.token("edge-only", "edge.admin")
    assert site.ask("GET", "/api/v1/nodes", edge).status_code == 403
    assert site.ask("GET", "/v1/organizations", edge).json()["data"] == [], "a stranger everywhere"


def test_a_login_is_recognised_everywhere_and_reaches_as_far_as_its_roles(site: Site) -> None:
    token = site.log_in()
    found = {name: ask(site, token) for name, ask in SURFACES.items()}
    assert found["proxies"] == found["proxies-socket"] == 200
    assert 401 not in found.values(), "known on every surface"


def test_a_refresh_token_of_a_login_opens_nothing(site: Site) -> None:
    answer = site.http.post(
        f"{site.server.web}/v1/auth/login", json={"email": EMAIL, "password": PASSWORD}, timeout=SECONDS
    )
    refresh = answer.json()["refresh_token"]
    assert {name: ask(site, refresh) for name, ask in SURFACES.items()} == dict.fromkeys(SURFACES, 401)


def test_a_revoked_token_is_refused_by_every_family(site: Site) -> None:
    token = site.token("soon-gone", "owner")
    assert site.ask("GET", "/v1/organizations", token).status_code == 200
    site.run("tokens", "revoke", "soon-gone")
    assert {name: ask(site, token) for name, ask in SURFACES.items()} == dict.fromkeys(SURFACES, 401)
    assert "soon-gone" not in json.dumps(site.run("tokens", "list", "-o", "json"))


def test_a_token_at_the_listener_of_operators_acts_for_one_tenant_and_becomes_no_certificate(
    site: Site, owner: str
) -> None:
    address = next(one for one in site.server.listeners["operator"] if "://" in one).partition("://")[2]
    trust = site.http.get(f"{site.server.web}/.well-known/ca.pem").content
    token = site.account(owner, "operating")
    given = site.give(owner, "account/operating", "operator", "/tenants/acme").json()["id"]

    def metadata(tenant: str = "acme") -> Metadata:
        named = (("x-tenant-id", tenant),) if tenant else ()
        return (("authorization", f"Bearer {token}"), *named)

    with grpc.secure_channel(address, grpc.ssl_channel_credentials(trust)) as channel:
        stub = operator_pb2_grpc.OperatorServiceStub(channel)

        def refused(tenant: str) -> grpc.StatusCode:
            with pytest.raises(grpc.RpcError) as error:
                tenant_status(channel, metadata(tenant))
            return error.value.code()

        tenant_status(channel, metadata())
        assert refused("other") is grpc.StatusCode.PERMISSION_DENIED
        assert refused("") is grpc.StatusCode.INVALID_ARGUMENT
        renewal = operator_pb2.RenewCertificateRequest(public_key_pem=b"x")
        with pytest.raises(grpc.RpcError, match="does not become one"):
            stub.RenewCertificate(renewal, metadata=metadata(), timeout=SECONDS)
        with pytest.raises(grpc.RpcError) as nobody:
            tenant_status(channel, ())
        assert nobody.value.code() is grpc.StatusCode.UNAUTHENTICATED

        # A watch ends with the role that allowed it.
        watch = stub.WatchErrors(Empty(), metadata=metadata(), timeout=SECONDS)
        watch.initial_metadata()
        assert site.people("DELETE", f"/bindings/{given}", owner).status_code == 204
        with pytest.raises(grpc.RpcError) as ended:
            for _ in watch:
                pass
        assert ended.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_no_method_of_operators_acts_for_a_tenant_at_which_the_caller_holds_nothing(
    site: Site, owner: str
) -> None:
    """Each method, with the other tenant's id in every place in which a caller can put one."""
    address = next(one for one in site.server.listeners["operator"] if "://" in one).partition("://")[2]
    trust = site.http.get(f"{site.server.web}/.well-known/ca.pem").content
    person = site.account(owner, "intruding")
    assert site.give(owner, "account/intruding", "owner", "/tenants/prowler").status_code == 201
    program = site.token("intruding", "owner", tenant="prowler")
    service = operator_pb2.DESCRIPTOR.services_by_name["OperatorService"]
    bodies: dict[str, dict[str, object]] = {
        "UpsertGroup": {"key": "theirs", "config": {"template": "small", "size": 9}},
        "DeleteGroup": {"key": "theirs"},
        "RenewCertificate": {"publicKeyPem": "eA=="},
    }
    about = ("CreateInstance", "DeleteInstance", "GetInstanceStatus", "AcknowledgeDrained")
    bodies |= {name: {"instanceId": "theirs"} for name in about}
    of_tenant = ("SleepTenant", "WakeTenant", "GetTenantStatus")

    def call(channel: grpc.Channel, name: str, metadata: Metadata, tenant: str = "victim") -> grpc.StatusCode:
        method = service.methods_by_name[name]
        request = GetMessageClass(method.input_type)()
        ParseDict({"tenant": tenant} if name in of_tenant else bodies.get(name, {}), request)
        kind: Any = channel.unary_stream if method.server_streaming else channel.unary_unary
        stub = kind(
            f"/{service.full_name}/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        try:
            answer = stub(request, metadata=metadata, timeout=SECONDS)
            if method.server_streaming:
                next(answer)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    def named(token: str, *tenants: str) -> Metadata:
        return (("authorization", f"Bearer {token}"), *(("x-tenant-id", one) for one in tenants))

    with grpc.secure_channel(address, grpc.ssl_channel_credentials(trust)) as channel:
        assert call(channel, "GetTenantStatus", named(owner, "victim")) is grpc.StatusCode.OK
        for token in (person, program):
            assert call(channel, "GetTenantStatus", named(token, "prowler"), "prowler") is grpc.StatusCode.OK
            for method in service.methods_by_name:
                for tenants in (
                    ("victim",),
                    ("prowler", "victim"),
                    ("prowler,victim",),
                ):  # the last one counts
                    code = call(channel, method, named(token, *tenants))
                    assert code in REFUSALS, (method, tenants, code)
            for method in of_tenant:
                for tenants in (("prowler",), ("victim", "prowler")):
                    code = call(channel, method, named(token, *tenants))
                    assert code in REFUSALS, (method, code)

    def invited(*tenants: str) -> grpc.StatusCode:
        edge = next(one for one in site.server.listeners["edge"] if "://" in one).partition("://")
        channel = (
            grpc.insecure_channel(edge[2])
            if edge[0] == "http"
            else grpc.secure_channel(edge[2], grpc.ssl_channel_credentials(trust))
        )
        with channel:
            try:
                invite(channel, named(person, *tenants))
            except grpc.RpcError as error:
                return error.code()
        return grpc.StatusCode.OK

    assert invited("prowler") is grpc.StatusCode.OK
    for tenants in (("victim",), ("prowler", "victim"), ("prowler,victim",)):
        assert invited(*tenants) in REFUSALS, tenants
    assert SURFACES["boards-grpc"](site, person) == 403, "boards lie in another tenant"


# Roles at scopes.


@pytest.mark.parametrize("directory", ["proxies", "boards", "people"])
def test_one_login_opens_every_surface_once_it_was_given_a_role(
    site: Site, owner: str, directory: str, tmp_path: Path
) -> None:
    if directory == "proxies":
        token = site.log_in()
    elif directory == "people":
        token = site.account(owner, "everywhere")
    else:
        (tmp_path / "password").write_text(PASSWORD)
        site.run("boards", "user", "add", "bea", "--password-file", str(tmp_path / "password"))
        body = {"username": "bea", "password": PASSWORD}
        login = site.http.post(f"{site.server.web}/api/v1/auth/login", json=body)
        token = login.json()["access_token"]
    subject = site.people("GET", "/whoami", token).json()["subject"]

    before = {name: ask(site, token) for name, ask in SURFACES.items()}
    given = site.give(owner, subject, "admin", "/")
    assert given.status_code == 201, given.text
    after = {name: ask(site, token) for name, ask in SURFACES.items()}
    taken = site.people("DELETE", f"/bindings/{given.json()['id']}", owner)

    assert after == dict.fromkeys(SURFACES, 200)
    assert taken.status_code == 204
    assert {name: ask(site, token) for name, ask in SURFACES.items()} == before, "it ended with the binding"


def test_one_name_and_password_is_one_person_at_the_login_of_every_family(site: Site, owner: str) -> None:
    site.account(owner, "one@example.com")
    assert site.give(owner, "account/one@example.com", "admin", "/").status_code == 201

    def log_in(path: str, field: str) -> str:
        body = {field: "one@example.com", "password": PASSWORD}
        answer = site.http.post(site.server.web + path, json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json().get("access_token") or answer.json()["accessToken"])

    tokens = (
        log_in("/apis/v1/people/login", "name"),
        log_in("/v1/auth/login", "email"),
        log_in("/api/v1/auth/login", "username"),
    )
    for token in tokens:
        assert site.people("GET", "/whoami", token).json()["subject"] == "account/one@example.com"
        assert {name: ask(site, token) for name, ask in SURFACES.items()} == dict.fromkeys(SURFACES, 200)
    listed = site.people("GET", "/accounts", owner).json()["items"]
    found = [one for one in listed if one["name"] == "one@example.com"]
    assert [sorted(one["users"]) for one in found] == [["boards", "proxies"]], "listed once"
    reset = site.people("PATCH", "/accounts/one@example.com", owner, {"password": f"{PASSWORD} 2"})
    assert reset.status_code == 200, reset.text
    assert {site.people("GET", "/whoami", token).status_code for token in tokens} == {401}


def test_a_role_at_a_tenant_holds_there_in_every_domain_and_nowhere_else(site: Site, owner: str) -> None:
    slugs = {}
    for slug in ("acme", "other"):
        made = site.ask("POST", "/v1/organizations", owner, {"name": slug, "slug": slug})
        slugs[slug] = made.json()["id"]
    token = site.account(owner, "ann")
    assert site.give(owner, "account/ann", "operator", "/tenants/acme").status_code == 201

    def status(path: str, tenant: str = "acme") -> int:
        headers = {"authorization": f"Bearer {token}", "x-tenant-id": tenant}
        return site.http.get(site.server.web + path, headers=headers).status_code

    assert status("/v1/instances/groups") == status("/v1/edge/hosts") == 200
    assert status("/v1/instances/groups", "other") == status("/v1/edge/hosts", "other") == 403
    assert status(f"/v1/organizations/{slugs['acme']}") == 200
    assert status(f"/v1/organizations/{slugs['other']}") == 404, "a stranger is told that it is not there"
    assert status("/api/v1/nodes") == 403, "boards lie in another tenant"
    assert status("/apis/v1/scopes/tenants/acme/edge-nodes") == 200
    assert status("/apis/v1/scopes/tenants/other/edge-nodes") == 404
    listed = site.ask("GET", "/v1/organizations", token).json()["data"]
    assert [one["id"] for one in listed] == [slugs["acme"]]

    site.give(owner, "account/ann", "viewer", "/tenants/default")
    assert status("/api/v1/nodes") == 200, "boards lie in the tenant default"
    assert status("/v1/edge/hosts", "default") == 200
    assert status("/v1/edge/hosts", "other") == 403
    no_tenant = site.http.get(
        f"{site.server.web}/v1/edge/hosts", headers={"authorization": f"Bearer {token}"}, timeout=SECONDS
    )
    assert no_tenant.status_code == 403, "roles of two tenants are never added up"


def test_whoami_and_can_i_tell_which_binding_gives_what(site: Site, owner: str) -> None:
    token = site.account(owner, "why")
    site.give(owner, "account/why", "operator", "/tenants/acme")

    told = site.people("GET", "/whoami", token).json()
    assert (told["name"], told["subject"]) == ("account/why", "account/why")
    origin = "account/why is bound to operator at /tenants/acme"
    assert told["roles"] == [{"role": "operator", "scope": "/tenants/acme", "origin": origin}]

    may = site.people("GET", "/can-i?verb=list&kind=edge-nodes&scope=/tenants/acme", token).json()
    assert may["allowed"] is True
    assert may["because"] == told["roles"]
    there = site.people("GET", "/can-i?verb=list&kind=edge-nodes&scope=/tenants/other", token).json()
    assert (there["allowed"], there["because"]) == (False, [])
    manages = site.people("GET", "/can-i?permission=people.manage&scope=/tenants/acme", token).json()
    assert manages["allowed"] is False
    for query in ("", "?permission=nope", "?verb=list&kind=nope", "?permission=people.read&scope=acme"):
        assert site.people("GET", f"/can-i{query}", token).status_code in (400, 404), query


def test_nobody_gives_or_takes_more_than_they_hold(site: Site, owner: str) -> None:
    admin, viewer = site.account(owner, "tenant-admin"), site.account(owner, "mere-viewer")
    site.give(owner, "account/tenant-admin", "admin", "/tenants/acme")
    site.give(owner, "account/mere-viewer", "viewer", "/tenants/acme")
    above = site.give(owner, "account/mere-viewer", "owner", "/tenants/acme").json()["id"]
    site.people("DELETE", f"/bindings/{above}", owner)
    foreign = site.give(owner, "account/someone", "viewer", "/tenants/other").json()["id"]
    owners = site.give(owner, "account/someone", "owner", "/tenants/acme").json()["id"]

    assert site.give(admin, "account/mere-viewer", "operator", "/tenants/acme").status_code == 201
    assert site.give(admin, "account/tenant-admin", "owner", "/tenants/acme").status_code == 403
    assert site.give(admin, "account/tenant-admin", "admin", "/").status_code == 403
    assert site.give(admin, "account/tenant-admin", "viewer", "/tenants/other").status_code == 404
    assert site.give(viewer, "account/mere-viewer", "admin", "/tenants/acme").status_code == 403
    assert site.people("DELETE", f"/bindings/{foreign}", admin).status_code == 404
    assert site.people("DELETE", f"/bindings/{owners}", admin).status_code == 403
    seen = site.people("GET", "/bindings", admin).json()["items"]
    assert {one["scope"] for one in seen} == {"/tenants/acme"}
    assert site.people("GET", "/bindings", viewer).status_code == 403
    for body in (("nobody", "viewer", "/"), ("account/x", "emperor", "/"), ("account/x", "viewer", "/x")):
        assert site.give(owner, *body).status_code == 400
    # Accounts belong to the installation; and a password is as good as the roles of its account.
    assert site.people("GET", "/accounts", admin).status_code == 403
    assert site.people("PATCH", "/accounts/why", admin, {"password": PASSWORD}).status_code == 403
    site.give(owner, "account/tenant-admin", "admin", "/")
    site.account(owner, "an-owner")
    site.give(owner, "account/an-owner", "owner", "/")
    refused = site.people("PATCH", "/accounts/an-owner", admin, {"password": "stolen by an admin"})
    assert refused.status_code == 403


def test_a_token_made_over_rest_ends_holds_no_more_than_its_maker_and_leaves_nothing_to_a_namesake(
    site: Site, owner: str
) -> None:
    admin = site.account(owner, "token-maker")
    site.give(owner, "account/token-maker", "admin", "/tenants/acme")
    body = {"name": "made", "roles": ["operator"], "scope": "/tenants/acme", "expiresInSeconds": 3600}
    made = site.people("POST", "/tokens", admin, body)
    assert made.status_code == 201, made.text
    token = made.json()["token"]
    assert made.json()["expiresAt"] is not None
    assert site.ask("GET", "/v1/edge/hosts", token).status_code == 200
    listed = {one["name"]: one for one in site.people("GET", "/tokens", admin).json()["items"]}
    assert "made" in listed
    assert {(one["token"], one["scope"]) for one in listed.values()} == {("", "/tenants/acme")}

    changes: tuple[dict[str, object], ...] = (
        {"roles": ["owner"]},
        {"scope": "/"},
        {"scope": "/tenants/other"},
        {"roles": []},
    )
    for change in changes:
        assert site.people("POST", "/tokens", admin, {**body, "name": "more", **change}).status_code in (
            400,
            403,
            404,
        )
    assert site.people("POST", "/tokens", admin, {**body, "expiresInSeconds": 0}).status_code == 400
    assert site.people("DELETE", "/tokens/everything", admin).status_code == 404, "another scope's"

    site.give(owner, "token/made", "viewer", "/tenants/default")
    assert site.people("DELETE", "/tokens/made", admin).status_code == 204
    assert site.ask("GET", "/v1/edge/hosts", token).status_code == 401
    again = site.people("POST", "/tokens", admin, body).json()["token"]
    assert [one["scope"] for one in site.people("GET", "/whoami", again).json()["roles"]] == ["/tenants/acme"]


def test_an_administrator_does_not_revoke_the_token_of_an_owner(site: Site, owner: str) -> None:
    admin = site.account(owner, "revoker")
    site.give(owner, "account/revoker", "admin", "/tenants/acme")
    body = {"roles": ["owner"], "scope": "/tenants/acme", "expiresInSeconds": 3600}
    token = site.people("POST", "/tokens", owner, {**body, "name": "owners"}).json()["token"]
    lifted = site.people("POST", "/tokens", owner, {**body, "name": "lifted", "roles": ["viewer"]}).json()
    site.give(owner, "token/lifted", "owner", "/tenants/acme")
    path = "/apis/v1/scopes/tenants/acme/tokens"
    for name in ("owners", "lifted"):
        assert site.people("DELETE", f"/tokens/{name}", admin).status_code == 403
        assert site.ask("POST", f"{path}/{name}/actions/revoke", admin).status_code == 403
    assert site.ask("GET", "/v1/edge/hosts", token).status_code == 200
    assert site.people("DELETE", "/tokens/owners", owner).status_code == 204
    assert site.ask("POST", f"{path}/lifted/actions/revoke", owner).status_code == 200
    assert site.ask("GET", "/v1/edge/hosts", lifted["token"]).status_code == 401


def test_what_was_given_at_a_place_ends_with_it_and_is_not_left_to_another_of_its_name(
    site: Site, owner: str
) -> None:
    def scopes(token: str) -> list[str]:
        return [one["scope"] for one in site.people("GET", "/whoami", token).json()["roles"]]

    def organization(slug: str) -> str:
        made = site.ask("POST", "/v1/organizations", owner, {"name": slug, "slug": slug})
        assert made.status_code == 201, made.text
        return str(made.json()["id"])

    token = site.account(owner, "former-member")
    site.give(owner, "account/former-member", "viewer", "/tenants/reused")  # at a name, before there is one
    before = site.token("before-reused", "viewer", tenant="reused")
    first = organization("reused")
    during = site.token("during-reused", "admin", tenant="reused")
    assert site.ask("GET", f"/v1/organizations/{first}", during).status_code == 200
    made = site.ask("POST", f"/v1/organizations/{first}/workspaces", owner, {"name": "p", "slug": "prod"})
    assert made.status_code == 201, made.text
    site.give(owner, "account/former-member", "admin", "/tenants/reused")
    site.give(owner, "account/former-member", "operator", "/tenants/reused/workspaces/prod")
    site.give(owner, "account/former-member", "operator", "/tenants/reused-too")
    assert len(scopes(token)) == 4

    workspace = f"/v1/workspaces/{made.json()['id']}"
    assert site.ask("PATCH", workspace, owner, {"slug": "stage"}).status_code == 200
    assert scopes(token) == ["/tenants/reused", "/tenants/reused", "/tenants/reused-too"]
    assert site.ask("DELETE", workspace, owner).status_code == 204
    assert site.ask("DELETE", f"/v1/organizations/{first}", owner).status_code == 204
    assert scopes(token) == ["/tenants/reused", "/tenants/reused-too"], "what came before it is the tenant's"
    second = organization("reused")
    assert site.ask("GET", f"/v1/organizations/{second}", during).status_code == 401
    assert "ended with the tenant" in site.people("GET", "/whoami", during).text
    after = site.token("after-reused", "admin", tenant="reused")
    for one in (before, after):
        assert site.ask("GET", f"/v1/organizations/{second}", one).status_code == 200
    path = f"/v1/organizations/{second}"
    assert site.ask("PATCH", path, token, {"name": "mine"}).status_code == 403, "it is a viewer as before"

    site.give(owner, "account/former-member", "admin", "/tenants/reused")
    assert site.ask("PATCH", path, token, {"name": "mine"}).status_code == 200
    assert site.ask("PATCH", path, owner, {"slug": "renamed"}).status_code == 200
    organization("reused")
    assert site.ask("PATCH", path, token, {"name": "again"}).status_code == 404
    assert scopes(token) == ["/tenants/reused", "/tenants/reused-too"]

    # The same through the resource API, and for clusters of boards.
    url = "/apis/v1/organizations/written"
    metadata = {"name": "written", "scope": "/tenants/written"}
    put = site.ask("PUT", url, owner, {"kind": "organization", "metadata": metadata, "spec": {}})
    assert put.status_code in (200, 201), put.text
    site.give(owner, "account/former-member", "admin", "/tenants/written")
    cluster = site.ask("POST", "/api/v1/clusters", owner, {"name": "attic"})
    assert cluster.status_code == 201, cluster.text
    site.give(owner, "account/former-member", "admin", "/tenants/default/clusters/attic")
    assert len(scopes(token)) == 4
    deleted = site.ask("DELETE", url, owner)
    assert deleted.status_code in (200, 204), deleted.text
    number = cluster.json().get("id") or cluster.json()["data"]["id"]
    assert site.ask("DELETE", f"/api/v1/clusters/{number}", owner).status_code in (200, 204)
    assert scopes(token) == ["/tenants/reused", "/tenants/reused-too"]


def test_no_page_of_somebody_else_signs_a_browser_in(site: Site, owner: str) -> None:
    """Else a victim would work in the attacker's account, and leave there what they type."""
    site.account(owner, "attacker")
    url = f"{site.server.web}/apis/v1/people/console"
    body = json.dumps({"name": "attacker", "password": PASSWORD})
    # All that a form, or a script of another origin without our leave, can send.
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        headers = {"content-type": kind} if kind else {}
        answer = site.http.post(url, content=body, headers=headers)
        assert answer.status_code == 400, kind
        assert "set-cookie" not in answer.headers
    good = {"content-type": "application/json"}
    crossed = (
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
    )
    for path in ("", "/token", "/link"):
        for shown in crossed:
            sent = body if path != "/link" else json.dumps({"code": "x"})
            answer = site.http.post(url + path, content=sent, headers={**good, **shown})
            assert answer.status_code == 403, (path, shown)
            assert "set-cookie" not in answer.headers
    own = {"origin": site.server.web, "sec-fetch-site": "same-origin"}
    for shown in ({}, own):
        answer = site.http.post(url, content=body, headers={**good, **shown})
        assert answer.status_code == 200, answer.text
    # A browser asks whether a page of another origin may send JSON; it is not told so.
    asked = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    preflight = site.http.options(url, headers=asked)
    assert "access-control-allow-origin" not in preflight.headers


def test_a_kept_answer_with_a_token_is_not_given_to_one_who_lost_the_right_to_make_it(
    site: Site, owner: str
) -> None:
    admin = site.account(owner, "replayer")
    given = site.give(owner, "account/replayer", "admin", "/tenants/acme").json()["id"]
    site.give(owner, "account/replayer", "admin", "/tenants/default")
    body = {"name": "replayed", "roles": ["viewer"], "scope": "/tenants/acme", "expiresInSeconds": 3600}

    def make() -> httpx.Response:
        headers = {"authorization": f"Bearer {admin}", "idempotency-key": "once"}
        return site.http.post(f"{site.server.web}/apis/v1/people/tokens", headers=headers, json=body)

    first, again = make(), make()
    assert (first.status_code, again.json()) == (201, first.json())
    site.people("DELETE", f"/bindings/{given}", owner)
    refused = make()
    assert refused.status_code == 404
    assert first.json()["token"] not in refused.text


def test_sessions_of_every_domain_are_listed_and_ended(site: Site, owner: str) -> None:
    mine = site.account(owner, "two-logins")
    other = site.account_login("two-logins")
    login = site.log_in()
    everybody = site.people("GET", "/sessions", owner).json()["items"]
    assert {"proxies", "people"} <= {one["directory"] for one in everybody}
    own = site.people("GET", "/sessions", mine).json()["items"]
    assert {one["subject"] for one in own} == {"account/two-logins"}
    assert len(own) == 2
    foreign = next(one for one in everybody if one["directory"] == "proxies")
    assert site.people("DELETE", f"/sessions/{foreign['id']}", mine).status_code == 404

    assert site.people("POST", "/logout", other["accessToken"]).status_code == 204
    assert site.people("GET", "/whoami", other["accessToken"]).status_code == 401
    assert site.people("GET", "/whoami", mine).status_code == 200
    for one in site.people("GET", "/sessions", owner).json()["items"]:
        if one["directory"] == "proxies":
            assert site.people("DELETE", f"/sessions/{one['id']}", owner).status_code == 204
    assert site.ask("GET", "/v1/organizations", login).status_code == 401


def test_an_account_that_is_disabled_changed_or_deleted_loses_its_logins(site: Site, owner: str) -> None:
    token = site.account(owner, "leaving")
    refresh = site.account_login("leaving")["refreshToken"]
    site.give(owner, "account/leaving", "viewer", "/tenants/acme")
    assert site.people("PATCH", "/accounts/leaving", owner, {"disabled": True}).status_code == 200
    assert site.people("GET", "/whoami", token).status_code == 401
    url = f"{site.server.web}/apis/v1/people/refresh"
    assert site.http.post(url, json={"refreshToken": refresh}).status_code == 401
    site.people("PATCH", "/accounts/leaving", owner, {"disabled": False})
    token = site.account_login("leaving")["accessToken"]
    site.people("PATCH", "/accounts/leaving", owner, {"password": "another good password"})
    assert site.people("GET", "/whoami", token).status_code == 401
    assert site.people("DELETE", "/accounts/leaving", owner).status_code == 204
    again = site.account(owner, "leaving")
    assert site.people("GET", "/whoami", again).json()["roles"] == [], "a namesake inherits nothing"


def test_a_refresh_token_is_good_once_and_its_replay_ends_the_login(site: Site, owner: str) -> None:
    site.account(owner, "refreshing")
    first = site.account_login("refreshing")
    url = f"{site.server.web}/apis/v1/people/refresh"
    second = site.http.post(url, json={"refreshToken": first["refreshToken"]})
    assert second.status_code == 200, second.text
    access = second.json()["accessToken"]
    assert site.people("GET", "/whoami", access).status_code == 200
    assert site.http.post(url, json={"refreshToken": first["refreshToken"]}).status_code == 401
    assert site.people("GET", "/whoami", access).status_code == 401, "whoever replays it ends the login"


def test_a_console_session_is_a_cookie_that_changes_nothing_without_its_csrf_token(
    site: Site, owner: str
) -> None:
    site.account(owner, "console")
    site.give(owner, "account/console", "admin", "/")
    web, people = site.server.web, f"{site.server.web}/apis/v1/people"
    login = {"name": "console", "password": PASSWORD}
    with httpx.Client(timeout=SECONDS, headers=TENANT) as browser:
        opened = browser.post(f"{people}/console", json=login)
        assert opened.status_code == 200, opened.text
        cookie = opened.headers["set-cookie"]
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
        value = cookie.partition("=")[2].partition(";")[0]
        paths = ("/v1/organizations", "/v1/edge/hosts", "/api/v1/nodes", "/v1/fleet/freezes", "/apis/v1/gpus")
        assert {browser.get(web + path).status_code for path in (*paths, "/v1/instances/groups")} == {200}

        freeze = {"domains": ["boards"], "reason": "a test", "scope": "boards"}
        told = browser.get(f"{people}/console").json()
        assert told == opened.json()
        for shown in ({}, {"x-csrf-token": ""}, {"x-csrf-token": "0" * 32}):
            assert browser.post(f"{web}/v1/fleet/freezes", json=freeze, headers=shown).status_code == 401
        csrf = {"x-csrf-token": told["csrfToken"]}
        assert browser.post(f"{web}/v1/fleet/freezes", json=freeze, headers=csrf).status_code == 201
        assert browser.delete(f"{web}/v1/fleet/freezes?scope=boards&domain=boards").status_code == 401
        lifted = browser.delete(f"{web}/v1/fleet/freezes?scope=boards&domain=boards", headers=csrf)
        assert lifted.status_code == 204

        # The cookie's value is no bearer token and no refresh token, and neither of these is a cookie.
        assert {name: ask(site, value) for name, ask in SURFACES.items()} == dict.fromkeys(SURFACES, 401)
        assert site.http.get(web + paths[0], headers={"authorization": f"Session {value}"}).status_code == 401
        assert site.http.post(f"{people}/refresh", json={"refreshToken": value}).status_code == 401
        pair = site.account_login("console")
        for other in (pair["accessToken"], pair["refreshToken"], altered(value)):
            shown = {"cookie": f"fleetplane_session={other}"}
            assert site.http.get(f"{people}/whoami", headers=shown).status_code == 401
        two = {"cookie": f"fleetplane_session={value}; fleetplane_session=x"}
        assert site.http.get(f"{people}/whoami", headers=two).status_code == 401

        assert browser.delete(f"{people}/console", headers=csrf).status_code == 204
        kept = {"cookie": f"fleetplane_session={value}"}
        assert site.http.get(f"{people}/whoami", headers=kept).status_code == 401, "it ended at the server"


def test_a_token_is_traded_for_a_session_that_is_worth_no_more_than_the_token(site: Site, owner: str) -> None:
    web, people = site.server.web, f"{site.server.web}/apis/v1/people"
    shown = {"name": "traded", "roles": ["viewer"], "scope": "/", "expiresInSeconds": 3600}
    token = site.people("POST", "/tokens", owner, shown).json()["token"]
    with httpx.Client(timeout=SECONDS, headers=TENANT, trust_env=False) as browser:
        assert browser.post(f"{people}/console/token").status_code == 401
        bearer = {"authorization": f"Bearer {token}"}
        opened = browser.post(f"{people}/console/token", headers=bearer)
        assert opened.status_code == 200, opened.text
        cookie = opened.headers["set-cookie"]
        assert {"HttpOnly", "SameSite=Strict"} <= {part.strip() for part in cookie.split(";")}
        value = cookie.partition("=")[2].partition(";")[0]
        assert token not in value
        assert browser.get(f"{people}/whoami").json()["subject"] == "token/traded"
        assert browser.get(f"{people}/console").json() == opened.json()
        paths = ("/v1/organizations", "/v1/edge/hosts", "/api/v1/nodes", "/v1/fleet/freezes", "/apis/v1/gpus")
        assert {browser.get(web + path).status_code for path in paths} == {200}
        freeze = {"domains": ["boards"], "reason": "a test", "scope": "boards"}
        assert browser.post(f"{web}/v1/fleet/freezes", json=freeze).status_code == 401
        csrf = {"x-csrf-token": opened.json()["csrfToken"]}
        refused = browser.post(f"{web}/v1/fleet/freezes", json=freeze, headers=csrf)
        assert refused.status_code == 403, "a viewer's session is a viewer's"

        # The cookie is no bearer token, its parts are nobody's, and it is listed and ended like any session.
        assert {name: ask(site, value) for name, ask in SURFACES.items()} == dict.fromkeys(SURFACES, 401)
        for other in (value[2:], f"t.{token}", "t.", altered(value)):
            bad = {"cookie": f"fleetplane_session={other}"}
            assert site.http.get(f"{people}/whoami", headers=bad).status_code == 401
        listed = browser.get(f"{people}/sessions").json()["items"]
        assert [one["subject"] for one in listed] == ["token/traded"], "a viewer sees its own"
        assert browser.delete(f"{people}/console", headers=csrf).status_code == 204
        kept = {"cookie": f"fleetplane_session={value}"}
        assert site.http.get(f"{people}/whoami", headers=kept).status_code == 401, "it ended at the server"

        again = browser.post(f"{people}/console/token", headers=bearer)
        assert again.status_code == 200
        assert browser.get(f"{people}/whoami").status_code == 200
        assert site.people("DELETE", "/tokens/traded", owner).status_code == 204
        assert browser.get(f"{people}/whoami").status_code == 401, "it ends with its token"


def test_a_link_of_the_owner_opens_one_session(site: Site) -> None:
    address, _, code = site.run("open", "--role", "operator").strip().partition("#link=")
    assert address == f"{site.server.web}/ui/"
    redeem = f"{site.server.web}/apis/v1/people/console/link"
    with httpx.Client(timeout=SECONDS, trust_env=False) as browser:
        cookie = {"cookie": f"fleetplane_session=t.{code}"}
        assert site.http.get(f"{site.server.web}/apis/v1/gpus", headers=cookie).status_code == 401
        assert browser.post(redeem, json={"code": altered(code)}).status_code == 401
        opened = browser.post(redeem, json={"code": code})
        assert opened.status_code == 200, opened.text
        assert opened.json()["name"] == "operator/local"
        assert browser.get(f"{site.server.web}/apis/v1/gpus").status_code == 200
        csrf = {"x-csrf-token": opened.json()["csrfToken"]}
        account = {"name": "no", "password": PASSWORD}
        made_account = browser.post(f"{site.server.web}/apis/v1/people/accounts", json=account, headers=csrf)
        assert made_account.status_code == 403, "the link was an operator's"
    again = site.http.post(redeem, json={"code": code})
    assert again.status_code == 401
    assert "used before" in again.json()["detail"]


def test_a_stream_ends_when_the_role_that_let_it_in_is_taken(site: Site, owner: str) -> None:
    token = site.account(owner, "streaming")
    given = site.give(owner, "account/streaming", "viewer", "/tenants/acme").json()["id"]
    headers = {"authorization": f"Bearer {token}", **TENANT}
    url = f"{site.server.web}/v1/instances/events"
    with site.http.stream("GET", url, headers=headers) as answer:
        assert answer.status_code == 200
        chunks = answer.iter_raw()
        next(chunks)
        assert site.people("DELETE", f"/bindings/{given}", owner).status_code == 204
        for _ in chunks:  # until the server ends it
            pass
    assert site.http.get(url, headers=headers).status_code == 403
