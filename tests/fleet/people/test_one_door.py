"""The same credential at every surface: REST of each family, sockets, server-sent events and gRPC."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest
from google.protobuf.empty_pb2 import Empty
from google.protobuf.json_format import ParseDict
from google.protobuf.message_factory import GetMessageClass
from support.fleet.one_door import (
    EMAIL,
    PASSWORD,
    REFUSALS,
    SECONDS,
    SURFACES,
    Metadata,
    Site,
    invite,
    tenant_status,
)

from fleetplane.gen.nstance.v1 import operator_pb2, operator_pb2_grpc


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
