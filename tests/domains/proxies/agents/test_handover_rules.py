"""What an agent says of an NGINX that it found is bounded, whatever it says."""

from __future__ import annotations

import base64
import zlib

import msgspec
import pytest

from fleetplane.domains.proxies import wire
from fleetplane.domains.proxies.agents.handover import TEXT_LIMIT, ShownFile, _listened_on, _unpacked
from fleetplane.domains.proxies.agents.live import is_observing
from fleetplane.domains.proxies.kinds.values import Hands
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.errors import Unavailable


def packed(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content)).decode()


def test_a_packed_configuration_is_unpacked_within_bounds() -> None:
    assert _unpacked(packed(msgspec.json.encode([{"path": "/a", "text": "b"}]))) == (
        ShownFile(path="/a", text="b"),
    )
    bomb = packed(b" " * (TEXT_LIMIT + 1))
    deep = packed(b'[{"path":"/a","text":"","x":' + b"[" * 100_000)
    for bad in (bomb, deep, packed(b"{}"), packed(b"[]")[:-4], "no base64", base64.b64encode(b"x").decode()):
        with pytest.raises(Unavailable):
            _unpacked(bad)


def test_a_report_of_what_was_found_is_bounded_and_of_one_line_each() -> None:
    said = pb.Observation(
        state="observing",
        config_path="/etc/nginx/nginx.conf\x1b[2J",
        modules=["m"] * 1000,
        logs=["l" * 10_000],
        bytes=2**64 - 1,
        digest="d" * 1000,
        listening=["0.0.0.0:80", "[::]:443", "port", "", ":٣", "1:" + "9" * 300],
    )
    found = wire.observed(pb.HealthReport(observation=said))
    assert found is not None
    assert (found.config_path, len(found.modules)) == ("/etc/nginx/nginx.conf?[2J", wire.OBSERVED_LIMIT)
    assert (len(found.logs[0]), len(found.digest), found.bytes) == (400, 64, 2**53)
    assert _listened_on(found) == {80, 443}
    assert wire.observed(pb.HealthReport()) is None
    assert wire.observed(pb.HealthReport(observation=pb.Observation(state="mine"))) is None


def test_an_agent_is_sent_versions_once_it_takes_over() -> None:
    held = {Hands.OBSERVING: True, Hands.TAKING_OVER: False, Hands.TAKEN_OVER: False, Hands.GIVING_BACK: True}
    for state, is_held in held.items():
        found = wire.observed(pb.HealthReport(observation=pb.Observation(state=state)))
        assert is_observing(found) is is_held
    assert not is_observing(None)
