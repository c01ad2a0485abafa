"""The certificate methods of the original controller's service, over the real authority."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from support.boards.boards_rig import BoardKey, BoardsRig, boards_rig

from fleetplane.domains.boards.ca import rules as ca_rules
from fleetplane.domains.boards.core import BoardOptions
from fleetplane.domains.boards.wire import certificates as ca_wire
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.gen.pi_controller import pi_controller_pb2_grpc
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import InvalidArgument

CODE = grpc.StatusCode
ROLE = "fleetplane://role/boards.operator"


class LaterClock(SystemClock):
    """The calendar of another day; what is waited for takes its time as ever."""

    def __init__(self) -> None:
        self.days = 0

    def now_ns(self) -> int:
        return super().now_ns() + self.days * 86_400 * 1_000_000_000


class Operator:
    """The original service, with an operator's token on each call."""

    def __init__(self, stub: Any, metadata: list[tuple[str, str]]) -> None:
        self._stub = stub
        self._metadata = metadata

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._stub, name)
        return lambda request, **more: method(request, metadata=self._metadata, **more)


async def operator(rig: BoardsRig, role: str = "boards.admin") -> Operator:
    return Operator(*await rig.operator(role))


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value


def asking(key: BoardKey | None = None, **said: Any) -> pi.CreateCertificateRequestRequest:
    wanted = {
        "common_name": "anna",
        "type": pi.CERTIFICATE_TYPE_CLIENT,
        "csr_pem": (key or BoardKey()).csr,
        "sans": [ROLE],
        "validity_period": "12h",
        **said,
    }
    return pi.CreateCertificateRequestRequest(**wanted)


async def issued(admin: Operator, key: BoardKey | None = None, **said: Any) -> pi.Certificate:
    request = await admin.CreateCertificateRequest(asking(key, **said))
    made: pi.Certificate = await admin.ProcessCertificateRequest(
        pi.ProcessCertificateRequestRequest(id=request.id, approve=True)
    )
    return made


def pem_of(rig: BoardsRig, certificate: pi.Certificate) -> bytes:
    kept = rig.core.certificates.get(certificate.id)
    assert kept is not None
    return kept.spec.pem.encode()


async def test_the_authority_is_there_and_tells_about_itself(rig: BoardsRig) -> None:
    admin = await operator(rig)

    made = await admin.InitializeCA(pi.InitializeCARequest())
    info = await admin.GetCAInfo(pi.GetCAInfoRequest())
    own = await admin.GetCACertificate(pi.GetCACertificateRequest())

    assert made.success
    assert made.ca_info == info
    assert (info.type, info.status) == (pi.CA_TYPE_ROOT, pi.CA_STATUS_ACTIVE)
    root = x509.load_pem_x509_certificate(own.certificate_pem.encode())
    assert own.serial_number == info.serial_number == f"{root.serial_number:x}"
    assert own.certificate_pem.encode() == rig.kernel.authority.certificate_pem


async def test_a_request_is_decided_once_and_its_certificate_lets_its_owner_in(rig: BoardsRig) -> None:
    admin, key = await operator(rig), BoardKey()
    request = await admin.CreateCertificateRequest(asking(key))
    assert request.status == pi.CSR_STATUS_PENDING
    assert request.validity_period == "12h"
    listed = await admin.ListCertificateRequests(
        pi.ListCertificateRequestsRequest(status=pi.CSR_STATUS_PENDING)
    )
    assert [one.id for one in listed.requests] == [request.id]

    certificate = await admin.ProcessCertificateRequest(
        pi.ProcessCertificateRequestRequest(id=request.id, approve=True)
    )

    assert isinstance(certificate, pi.Certificate), "as the original answers"
    (decided,) = (await admin.ListCertificateRequests(pi.ListCertificateRequestsRequest())).requests
    assert (decided.status, decided.certificate_id) == (pi.CSR_STATUS_APPROVED, certificate.id)
    assert decided.HasField("processed_at")
    assert (certificate.common_name, certificate.type) == ("anna", pi.CERTIFICATE_TYPE_CLIENT)
    assert list(certificate.sans) == [ROLE]
    channel = await rig.channel(key, pem_of(rig, certificate) + rig.kernel.authority.certificate_pem)
    anna = pi_controller_pb2_grpc.PiControllerServiceStub(channel)
    assert (await anna.GetCAInfo(pi.GetCAInfoRequest())).certificates_issued == 1
    assert (await refusal(anna.RevokeCertificate(pi.RevokeCertificateRequest(id=1)))).code() is (
        CODE.PERMISSION_DENIED
    )
    again = await refusal(
        admin.ProcessCertificateRequest(pi.ProcessCertificateRequestRequest(id=request.id, approve=False))
    )
    assert again.code() is CODE.FAILED_PRECONDITION


async def test_a_rejected_request_issues_nothing_and_is_no_error(rig: BoardsRig) -> None:
    admin = await operator(rig)
    request = await admin.CreateCertificateRequest(asking())

    decided = await admin.ProcessCertificateRequest(
        pi.ProcessCertificateRequestRequest(id=request.id, approve=False)
    )

    assert decided == pi.Certificate()
    (kept,) = (await admin.ListCertificateRequests(pi.ListCertificateRequestsRequest())).requests
    assert kept.status == pi.CSR_STATUS_REJECTED
    assert not kept.HasField("certificate_id")
    assert (await admin.ListCertificates(pi.ListCertificatesRequest())).total_count == 0


async def test_nobody_is_given_a_private_key(rig: BoardsRig) -> None:
    admin = await operator(rig)

    error = await refusal(
        admin.IssueCertificate(
            pi.IssueCertificateRequest(common_name="anna", type=pi.CERTIFICATE_TYPE_CLIENT)
        )
    )

    assert error.code() is CODE.FAILED_PRECONDITION
    assert "private key" in (error.details() or "")


@pytest.mark.parametrize(
    "kind", [pi.CERTIFICATE_TYPE_CA, pi.CERTIFICATE_TYPE_INTERMEDIATE, pi.CERTIFICATE_TYPE_SSH]
)
async def test_the_authority_makes_no_other_authorities(rig: BoardsRig, kind: Any) -> None:
    admin = await operator(rig)

    assert (await refusal(admin.CreateCertificateRequest(asking(type=kind)))).code() is CODE.UNIMPLEMENTED
    assert (
        await refusal(admin.IssueCertificate(pi.IssueCertificateRequest(common_name="x", type=kind)))
    ).code() is CODE.UNIMPLEMENTED


@pytest.mark.parametrize(
    "name",
    [
        "fleetplane://boards/node/1",
        "fleetplane://boards/controller/main",
        "fleetplane://role/boards.agent",
        "fleetplane://role/boards.controller",
        "fleetplane://role/admin",
        "board-1.boards.fleetplane.internal",
        "127.0.0.1",
        "localhost",
        "example.org",
        "evil-pi-controller.local",
    ],
)
async def test_no_name_is_certified_with_which_to_pose_as_someone_else(rig: BoardsRig, name: str) -> None:
    admin = await operator(rig)

    for kind in (pi.CERTIFICATE_TYPE_CLIENT, pi.CERTIFICATE_TYPE_SERVER):
        error = await refusal(admin.CreateCertificateRequest(asking(type=kind, sans=[name])))
        assert error.code() is CODE.PERMISSION_DENIED, name


async def test_servers_are_certified_under_the_domains_that_are_set(rig: BoardsRig) -> None:
    admin = await operator(rig)

    certificate = await issued(
        admin,
        common_name="db.pi-controller.local",
        type=pi.CERTIFICATE_TYPE_SERVER,
        sans=["*.db.cluster.local"],
        ext_key_usage=["server_auth"],
    )

    assert certificate.type == pi.CERTIFICATE_TYPE_SERVER
    leaf = x509.load_pem_x509_certificate(pem_of(rig, certificate))
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["db.pi-controller.local", "*.db.cluster.local"]


def rsa_csr() -> str:
    key = rsa.generate_private_key(65537, 2048)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    made = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM).decode()


def forged_csr() -> str:
    """Signed by another key than it names."""
    der = bytearray(x509.load_pem_x509_csr(BoardKey().csr.encode()).public_bytes(serialization.Encoding.DER))
    der[-1] ^= 1
    return x509.load_der_x509_csr(bytes(der)).public_bytes(serialization.Encoding.PEM).decode()


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"csr_pem": ""}, "csr_pem"),
        ({"csr_pem": "nonsense"}, "csr_pem"),
        ({"csr_pem": "x" * 20_000}, "csr_pem"),
        ({"csr_pem": rsa_csr()}, "csr_pem"),
        ({"csr_pem": forged_csr()}, "csr_pem"),
        ({"common_name": ""}, "common_name"),
        ({"common_name": "x" * 65}, "common_name"),
        ({"validity_period": "soon"}, "validity_period"),
        ({"validity_period": "-1h"}, "validity_period"),
        ({"validity_period": "99999h"}, "validity_period"),
        ({"key_usage": ["key_cert_sign"]}, "key_usage"),
        ({"ext_key_usage": ["code_signing"]}, "ext_key_usage"),
        ({"sans": ["a.cluster.local"] * 33}, "names"),
        ({"sans": [ROLE, "fleetplane://role/boards.admin"]}, "role"),
        ({"type": pi.CERTIFICATE_TYPE_UNSPECIFIED}, "type"),
    ],
)
async def test_a_request_that_makes_no_sense_is_refused_by_name(
    rig: BoardsRig, said: dict[str, Any], field: str
) -> None:
    admin = await operator(rig)

    error = await refusal(admin.CreateCertificateRequest(asking(**said)))

    assert error.code() is CODE.INVALID_ARGUMENT
    assert field in (error.details() or "")
    assert rig.domain.nodes.requests.all() == []


async def test_a_request_about_a_board_that_is_not_there_is_refused(rig: BoardsRig) -> None:
    admin = await operator(rig)

    assert (await refusal(admin.CreateCertificateRequest(asking(node_id=9)))).code() is CODE.NOT_FOUND
    assert (await refusal(admin.CreateCertificateRequest(asking(cluster_id=9)))).code() is CODE.NOT_FOUND


async def test_a_revoked_certificate_is_refused_everywhere_and_says_so(rig: BoardsRig) -> None:
    admin, key = await operator(rig), BoardKey()
    certificate = await issued(admin, key)
    channel = await rig.channel(key, pem_of(rig, certificate) + rig.kernel.authority.certificate_pem)
    anna = pi_controller_pb2_grpc.PiControllerServiceStub(channel)
    await anna.GetCAInfo(pi.GetCAInfoRequest())

    without = await refusal(admin.RevokeCertificate(pi.RevokeCertificateRequest(id=certificate.id)))
    assert without.code() is CODE.INVALID_ARGUMENT
    answer = await admin.RevokeCertificate(
        pi.RevokeCertificateRequest(id=certificate.id, reason="left the company")
    )

    assert answer.success
    assert (await refusal(anna.GetCAInfo(pi.GetCAInfoRequest()))).code() is CODE.UNAUTHENTICATED
    found = await admin.GetCertificate(pi.GetCertificateRequest(serial_number=certificate.serial_number))
    assert found.status == pi.CERTIFICATE_STATUS_REVOKED
    assert found.revoked_reason == "left the company"
    assert found.HasField("revoked_at")
    renewal = await refusal(admin.RenewCertificate(pi.RenewCertificateRequest(id=certificate.id)))
    assert renewal.code() is CODE.FAILED_PRECONDITION
    unknown = await refusal(admin.RevokeCertificate(pi.RevokeCertificateRequest(id=99, reason="x")))
    assert unknown.code() is CODE.NOT_FOUND


async def test_a_renewed_certificate_has_the_same_key_and_names_and_another_serial(rig: BoardsRig) -> None:
    admin, key = await operator(rig), BoardKey()
    certificate = await issued(admin, key)

    renewed = await admin.RenewCertificate(pi.RenewCertificateRequest(id=certificate.id))

    assert renewed.id != certificate.id
    assert renewed.serial_number != certificate.serial_number
    assert list(renewed.sans) == list(certificate.sans)
    leaf = x509.load_pem_x509_certificate(pem_of(rig, renewed))
    public = leaf.public_key()
    assert isinstance(public, ec.EllipticCurvePublicKey)
    assert public.public_numbers() == key.key.public_key().public_numbers()


async def test_boards_renew_their_own_certificates(rig: BoardsRig) -> None:
    admin = await operator(rig)
    member = await rig.join("pi")
    (certificate,) = (
        await admin.ListCertificates(pi.ListCertificatesRequest(node_id=member.number))
    ).certificates

    assert certificate.auto_renew
    error = await refusal(admin.RenewCertificate(pi.RenewCertificateRequest(id=certificate.id)))
    assert error.code() is CODE.FAILED_PRECONDITION


async def test_a_certificate_is_validated_as_this_server_would(rig: BoardsRig) -> None:
    admin = await operator(rig)
    certificate = await issued(admin)
    pem = pem_of(rig, certificate).decode()

    async def validated(text: str) -> pi.CertificateValidation:
        answer = await admin.ValidateCertificate(pi.ValidateCertificateRequest(certificate_pem=text))
        found: pi.CertificateValidation = answer.validation
        return found

    assert (await validated(pem)).valid
    await admin.RevokeCertificate(pi.RevokeCertificateRequest(id=certificate.id, reason="x"))
    revoked = await validated(pem)
    assert (revoked.valid, revoked.revoked) == (False, True)
    foreign = BoardKey().key
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fleetplane")])
    root = x509.load_pem_x509_certificate(pem.encode())
    stranger = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(root.issuer)
        .public_key(foreign.public_key())
        .serial_number(7)
        .not_valid_before(root.not_valid_before_utc)
        .not_valid_after(root.not_valid_after_utc)
        .sign(foreign, hashes.SHA256())
    )
    verdict = await validated(stranger.public_bytes(serialization.Encoding.PEM).decode())
    assert not verdict.valid
    assert "not issued" in verdict.errors[0]
    assert (
        await refusal(admin.ValidateCertificate(pi.ValidateCertificateRequest(certificate_pem="x")))
    ).code() is CODE.INVALID_ARGUMENT


async def test_viewers_read_operators_ask_and_only_administrators_decide(rig: BoardsRig) -> None:
    worker, viewer = await operator(rig, "boards.operator"), await operator(rig, "boards.viewer")

    request = await worker.CreateCertificateRequest(asking())
    await viewer.GetCAInfo(pi.GetCAInfoRequest())
    for call in (
        viewer.CreateCertificateRequest(asking()),
        viewer.ListCertificateRequests(pi.ListCertificateRequestsRequest()),
        worker.ProcessCertificateRequest(pi.ProcessCertificateRequestRequest(id=request.id, approve=True)),
        worker.CleanupExpiredCertificates(pi.CleanupExpiredCertificatesRequest()),
        worker.InitializeCA(pi.InitializeCARequest()),
        worker.IssueCertificate(pi.IssueCertificateRequest()),
    ):
        assert (await refusal(call)).code() is CODE.PERMISSION_DENIED


async def test_certificates_are_counted_listed_and_forgotten_long_after_their_end(tmp_path: Path) -> None:
    clock = LaterClock()
    async with boards_rig(tmp_path, clock=clock, options=BoardOptions()) as rig:
        requests = rig.domain.nodes.requests
        for name in ("anna", "bert"):
            made = await requests.create(
                ca_wire.requested(asking(common_name=name), actor="operator/x"), actor="operator/x"
            )
            await requests.process(int(made.name), approve=True, actor="operator/boss")
        await rig.core.certificates.revoke(1, reason="lost", actor="operator/boss")
        methods: Any = rig.domain.nodes.certificate_methods
        context: Any = type("Context", (), {"principal": type("P", (), {"name": "operator/boss"})})

        stats = await methods.GetCertificateStats(pi.GetCertificateStatsRequest(), context)
        assert (stats.total_certificates, stats.active_certificates, stats.revoked_certificates) == (2, 1, 1)
        assert stats.certificates_issued_24h == 2
        assert stats.certificates_expiring_30d == 1
        cleaned = await methods.CleanupExpiredCertificates(pi.CleanupExpiredCertificatesRequest(), context)
        assert cleaned.cleaned_count == 0

        clock.days = 31
        expired = await methods.ListCertificates(
            pi.ListCertificatesRequest(status=pi.CERTIFICATE_STATUS_EXPIRED), context
        )
        assert [one.common_name for one in expired.certificates] == ["bert"]
        clock.days = 31 + 91
        cleaned = await methods.CleanupExpiredCertificates(pi.CleanupExpiredCertificatesRequest(), context)
        assert cleaned.cleaned_count == 2
        assert rig.core.certificates.all() == []
        assert requests.all() == []


@pytest.mark.parametrize(
    ("text", "seconds"), [("", 0.0), ("720h", 2_592_000.0), ("1h30m", 5400.0), ("90m", 5400.0)]
)
def test_periods_are_spelled_as_the_original_does(text: str, seconds: float) -> None:
    assert ca_rules.validity_seconds(text) == seconds


@pytest.mark.parametrize("text", ["1", "h", "1h ", "1d", "1h-1m", "1e9h", "1s"])
def test_other_periods_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        ca_rules.validity_seconds(text)
