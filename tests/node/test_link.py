"""The connection that every agent makes: its channel arguments and the meaning of failed calls."""

from __future__ import annotations

from pathlib import Path

import grpc
import grpc.aio
import pytest

from fleetplane.domains.boards.agent import registration as boards
from fleetplane.domains.edge.agent import endpoint as edge
from fleetplane.domains.gpus.agent import session as gpus
from fleetplane.domains.instances.agent import transport as instances
from fleetplane.domains.proxies.agent import enrolment as proxies
from fleetplane.kernel.errors import PermissionDenied, SettingsError, Unauthenticated
from fleetplane.node import link
from fleetplane.node.link import LinkLost, LinkOptions, ServerRefused, ServerTrust

OPTIONS = {
    "gpus": gpus.OPTIONS,
    "instances": instances.OPTIONS,
    "proxies": proxies.OPTIONS,
    "edge": edge.OPTIONS,
    "boards": boards.OPTIONS,
}


def failed(code: grpc.StatusCode, details: str = "why") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


@pytest.mark.parametrize("agent", OPTIONS)
def test_no_agent_shares_a_back_off_or_goes_through_a_proxy_of_the_environment(agent: str) -> None:
    arguments = dict(OPTIONS[agent].arguments())
    assert arguments["grpc.use_local_subchannel_pool"] == 1
    assert arguments["grpc.enable_http_proxy"] == 0


@pytest.mark.parametrize(
    ("agent", "keepalive", "timeout", "idle", "mebibytes"),
    [
        ("gpus", 20_000, 10_000, 1, 4),
        ("instances", 20_000, 10_000, 1, 4),
        ("proxies", 20_000, 10_000, 1, 16),
        ("edge", 30_000, 15_000, 0, 16),
        ("boards", 20_000, 10_000, 1, 4),
    ],
)
def test_keepalive_and_message_size_are_those_of_the_protocol(
    agent: str, keepalive: int, timeout: int, idle: int, mebibytes: int
) -> None:
    arguments = dict(OPTIONS[agent].arguments())
    assert arguments["grpc.keepalive_time_ms"] == keepalive
    assert arguments["grpc.keepalive_timeout_ms"] == timeout
    assert arguments["grpc.keepalive_permit_without_calls"] == idle
    for way in ("receive", "send"):
        assert arguments[f"grpc.max_{way}_message_length"] == mebibytes * 1024 * 1024


@pytest.mark.parametrize(
    ("agent", "refusals"),
    [
        ("gpus", set()),
        ("instances", set()),
        ("proxies", {"UNAUTHENTICATED", "PERMISSION_DENIED"}),
        (
            "edge",
            {
                "UNAUTHENTICATED",
                "PERMISSION_DENIED",
                "FAILED_PRECONDITION",
                "NOT_FOUND",
                "INVALID_ARGUMENT",
            },
        ),
        (
            "boards",
            {
                "UNAUTHENTICATED",
                "PERMISSION_DENIED",
                "INVALID_ARGUMENT",
                "ALREADY_EXISTS",
                "NOT_FOUND",
                "UNIMPLEMENTED",
            },
        ),
    ],
)
def test_which_answers_are_final_is_the_protocols_to_say(agent: str, refusals: set[str]) -> None:
    found = {
        code.name
        for code in grpc.StatusCode
        if isinstance(link.translated(failed(code), OPTIONS[agent]), ServerRefused)
    }
    assert found == refusals


def test_a_refusal_keeps_its_status_and_a_lost_link_its_words() -> None:
    refused = edge.translated(failed(grpc.StatusCode.UNAUTHENTICATED))
    assert isinstance(refused, ServerRefused)
    assert refused.code is grpc.StatusCode.UNAUTHENTICATED
    assert refused.reason == "REFUSED"
    assert not isinstance(refused, PermissionDenied)  # exit code 1, not 5
    lost = edge.translated(failed(grpc.StatusCode.UNAVAILABLE, ""))
    assert isinstance(lost, LinkLost)
    assert lost.message == "UNAVAILABLE: no further words"


def test_a_board_that_is_refused_ends_with_permission_denied() -> None:
    refused = boards.translated(failed(grpc.StatusCode.NOT_FOUND))
    assert isinstance(refused, PermissionDenied)
    assert (refused.grpc_code, refused.reason) == (7, "REFUSED_BY_SERVER")
    assert boards.translated(failed(grpc.StatusCode.UNAVAILABLE)).reason == "SERVER_OUT_OF_REACH"


def test_a_server_behind_another_name_and_one_behind_a_relay() -> None:
    arguments = dict(LinkOptions().arguments(server_name="controller", authority="server:1"))
    assert arguments["grpc.ssl_target_name_override"] == "controller"
    assert arguments["grpc.default_authority"] == "server:1"
    assert "grpc.default_authority" not in dict(LinkOptions().arguments())


def test_an_authority_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert link.roots_from(None) is None
    with pytest.raises(SettingsError, match=r"absent\.pem"):
        link.roots_from(tmp_path / "absent.pem")


def test_trust_never_shows_a_key() -> None:
    assert "secret" not in repr(ServerTrust(roots_pem=b"r", key_pem=b"secret", certificate_pem=b"c"))


def test_of_several_errors_the_most_telling_one_is_given() -> None:
    group = BaseExceptionGroup(
        "", [LinkLost("the stream has ended"), BaseExceptionGroup("", [failed(grpc.StatusCode.ABORTED)])]
    )
    kinds = (ServerRefused, proxies.TokenSuperseded, LinkLost)
    found = link.most_telling(list(link.causes(group)), kinds, proxies.translated)
    assert isinstance(found, proxies.TokenSuperseded)
    assert link.most_telling([Unauthenticated("no")], kinds, proxies.translated).message == (
        "the server ended the stream"
    )
