"""Every signed byte, against vectors computed independently of this code."""

from __future__ import annotations

import hashlib
import struct

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from fleetplane.domains.edge.wire import envelope
from fleetplane.domains.edge.wire.envelope import EventKind
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb

OLD = Ed25519PrivateKey.from_private_bytes(b"\x07" * 32)
NEW = Ed25519PrivateKey.from_private_bytes(b"\x09" * 32)
OLD_PUBLIC = bytes.fromhex("ea4a6c63e29c520abef5507b132ec5f9954776aebebe7b92421eea691446d22c")
NEW_PUBLIC = bytes.fromhex("fd1724385aa0c75b64fb78cd602fa1d991fdebf76b13c58ed702eac835e9f618")
NODE = "11111111-2222-4333-8444-555555555555"
STREAM = "aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee"
COMMAND = "cccccccc-1111-4222-8333-dddddddddddd"
AT_MS = 1_700_000_000_000
NONCE = bytes(range(32))

EVENTS = {
    "hello": (
        envelope.encode(EventKind.HELLO, AT_MS, NODE, STREAM),
        (
            "0417f09935126792480295bb4799b3eed472ceec215b98394bf59729eae4f977"
            "e840a912e0aebf6eb72c65bbcb58f66c7c928fba93f6397e450806a3e4ac960f"
        ),
    ),
    "heartbeat": (
        envelope.encode(EventKind.HEARTBEAT, AT_MS, NODE, STREAM),
        (
            "07e114a3307adb5e06c286f36744f0aefde02fe6cfe4cbfb9250928987c92e7a"
            "a456e87650106060f9ad0c0d8d761871966cb7b63c1bbdf489ac4da047802703"
        ),
    ),
    "result": (
        envelope.encode(EventKind.COMMAND_RESULT, AT_MS, NODE, STREAM, envelope.result_inner(COMMAND)),
        (
            "1f060364c9e5914e7b8ba86e5d23e945ac8d7135f3a6637d257bc2c74c0f67be"
            "3cfd4e5c89d70afd6520fc88e6a454bee49d3f9af4954996e3709af3ca350602"
        ),
    ),
    "progress": (
        envelope.encode(
            EventKind.COMMAND_PROGRESS,
            AT_MS,
            NODE,
            STREAM,
            envelope.short_progress_inner(COMMAND, sequence=5, stderr=True, chunk=b"oops\n"),
        ),
        (
            "fddec89068d1473c31116838ffb2151ea9f7ae43efc0d293bda41fc7685c4b09"
            "062271d7678b7ed4351711427f461bb66b6f3b99bde4bcab4563f59ed7fa7b03"
        ),
    ),
}


def test_the_keys_of_the_vectors_are_what_they_say() -> None:
    assert OLD.public_key().public_bytes_raw() == OLD_PUBLIC
    assert NEW.public_key().public_bytes_raw() == NEW_PUBLIC


def test_a_hello_has_exactly_these_bytes() -> None:
    payload, _ = EVENTS["hello"]
    expected = (
        bytes.fromhex("010068e5cf8b01000024000000")
        + NODE.encode()
        + bytes.fromhex("24000000")
        + STREAM.encode()
        + bytes.fromhex("00000000")
    )
    assert payload == expected
    assert len(payload) == 93


@pytest.mark.parametrize("name", EVENTS)
def test_an_event_is_signed_as_daemons_in_the_field_sign_it(name: str) -> None:
    payload, signature = EVENTS[name]
    assert envelope.sign(OLD, payload).hex() == signature
    assert envelope.verify(OLD_PUBLIC, bytes.fromhex(signature), payload)
    assert not envelope.verify(NEW_PUBLIC, bytes.fromhex(signature), payload)
    assert not envelope.verify(OLD_PUBLIC, bytes.fromhex(signature), payload + b"\0")


@pytest.mark.parametrize(
    ("signature", "key"),
    [(b"", OLD_PUBLIC), (b"\0" * 63, OLD_PUBLIC), (b"\0" * 64, OLD_PUBLIC), (b"\0" * 64, b"\x01" * 31)],
)
def test_a_signature_or_key_of_the_wrong_size_verifies_nothing(signature: bytes, key: bytes) -> None:
    assert not envelope.verify(key, signature, b"payload")


# Rotation.


def test_the_digest_of_a_rotation_is_as_daemons_in_the_field_compute_it() -> None:
    digest = envelope.rotation_digest(NODE, NEW_PUBLIC, NONCE)
    assert digest.hex() == "46f9095c1f37407110676c3d4aad8892e7d44bba8dc6df990ce5700e8aca2270"
    assert envelope.sign(NEW, digest).hex() == (
        "c1c6bf16dbc1c1ea5cd2c93d88565f4f92b24ed6ed5453c6e44306213cbab17b"
        "cedb2618faab619a4ab2fcbb20041a5fae0e5389a6c25fd11c3364a51054a10c"
    )


def test_the_old_key_signs_the_serialized_inner_request() -> None:
    inner = pb.RotateEdgeKeyInner(node_id=NODE, new_public_key=NEW_PUBLIC, nonce=NONCE)
    assert envelope.sign(OLD, inner.SerializeToString()).hex() == (
        "da53c43d682aff8c5b1203b932f42256fb076c746e238dcec0a795cb32a24a16"
        "93c8a25b703696f9543c78c5a488a64c496a96b3db747429d86dc64843bc7d07"
    )


def test_all_layouts_that_a_new_key_may_sign_are_known() -> None:
    digest, text, sixteen = envelope.rotation_messages(NODE, NEW_PUBLIC, NONCE)
    assert digest == envelope.rotation_digest(NODE, NEW_PUBLIC, NONCE)
    assert envelope.sign(NEW, text).hex() == (
        "35abed8475b495b6149249e7a502ec737b10ac899a91f0c054c37da4283a3070"
        "44a8f7cac9c16630585d10cfa4a7085021835082ba75a321f541d561a6823a0b"
    )
    assert envelope.sign(NEW, sixteen).hex() == (
        "c82b6277501584d64c95be7c1cd5705bb2e8d8252582a2f87c2d0627b59aaa8d"
        "8ea7b6eb214fffe8d8a02650c066d51bbc61171c793059d79078550492e66406"
    )


def test_without_a_nonce_only_the_documented_layouts_are_accepted() -> None:
    assert len(envelope.rotation_messages(NODE, NEW_PUBLIC, b"")) == 2
    assert len(envelope.rotation_messages(NODE, NEW_PUBLIC, b"short")) == 2


# The layout.


@given(
    kind=st.sampled_from(EventKind),
    timestamp_ms=st.integers(0, 2**64 - 1),
    node_id=st.text(max_size=32),
    stream_id=st.text(max_size=32),
    inner=st.binary(max_size=200),
)
def test_what_is_encoded_is_parsed_again(
    kind: EventKind, timestamp_ms: int, node_id: str, stream_id: str, inner: bytes
) -> None:
    found = envelope.parse(envelope.encode(kind, timestamp_ms, node_id, stream_id, inner))
    assert found == envelope.Canonical(
        kind=kind, timestamp_ms=timestamp_ms, node_id=node_id, stream_id=stream_id, inner=inner
    )


@given(cut=st.integers(0, 92))
def test_a_truncated_payload_is_not_canonical(cut: int) -> None:
    payload, _ = EVENTS["hello"]
    assert envelope.parse(payload[:cut]) is None


@given(st.binary(max_size=300))
def test_parsing_never_raises_and_loses_no_byte(payload: bytes) -> None:
    found = envelope.parse(payload)
    if found is not None:
        again = envelope.encode(found.kind, found.timestamp_ms, found.node_id, found.stream_id, found.inner)
        assert again == payload


def test_trailing_bytes_unknown_kinds_long_ids_and_broken_text_are_not_canonical() -> None:
    payload, _ = EVENTS["hello"]
    assert envelope.parse(payload + b"\0") is None
    assert envelope.parse(b"\x06" + payload[1:]) is None
    assert envelope.parse(envelope.encode(EventKind.HELLO, 0, "n" * 129, STREAM)) is None
    broken = struct.pack("<BQI", 1, 0, 1) + b"\xff" + struct.pack("<II", 0, 0)
    assert envelope.parse(broken) is None
    assert envelope.parse(struct.pack("<BQI", 1, 0, 2**32 - 1) + b"x") is None


# What ties a payload to its message.


def test_a_result_is_covered_by_its_digest_or_loosely_by_its_command() -> None:
    body = b"\x0a\x00"
    hashed = envelope.result_inner(COMMAND, body)
    assert hashed == COMMAND.encode() + hashlib.sha256(body).digest()
    assert envelope.covers_result(hashed, COMMAND, body)
    assert not envelope.covers_result(hashed, COMMAND, body + b"x")
    assert envelope.covers_result(COMMAND.encode(), COMMAND, b"whatever")
    assert not envelope.covers_result(COMMAND.encode(), COMMAND, b"whatever", digest_required=True)
    assert not envelope.covers_result(NODE.encode(), COMMAND, body)


def test_progress_is_covered_in_both_forms_to_the_last_bit() -> None:
    chunk = b"\x0a\x03abc"
    hashed = envelope.progress_inner(COMMAND, chunk)
    short = envelope.short_progress_inner(COMMAND, sequence=7, stderr=False, chunk=chunk)
    assert envelope.covers_progress(hashed, COMMAND, chunk=chunk)
    assert envelope.covers_progress(short, COMMAND, chunk=chunk, sequence=7)
    assert not envelope.covers_progress(short, COMMAND, chunk=chunk, sequence=8)
    assert not envelope.covers_progress(short, COMMAND, chunk=chunk, sequence=7, stderr=True)
    assert not envelope.covers_progress(hashed, COMMAND, chunk=chunk + b"d")


def test_capabilities_are_covered_by_their_digest_or_not_at_all() -> None:
    assert envelope.covers_capabilities(envelope.capabilities_inner(b"caps"), b"caps")
    assert not envelope.covers_capabilities(envelope.capabilities_inner(b"caps"), b"other")
    assert envelope.covers_capabilities(b"", b"caps")
    assert not envelope.covers_capabilities(b"", b"caps", digest_required=True)


def test_a_command_is_sealed_for_one_daemon_on_one_stream() -> None:
    command = pb.EdgeCommand(drain=pb.Drain()).SerializeToString()
    payload = envelope.command_payload(AT_MS, NODE, STREAM, command)
    assert envelope.covers_command(payload, NODE, STREAM, command)
    assert not envelope.covers_command(payload, NODE, NODE, command)
    assert not envelope.covers_command(payload, STREAM, STREAM, command)
    assert not envelope.covers_command(payload, NODE, STREAM, command + b"\0")
    event = envelope.encode(EventKind.HELLO, AT_MS, NODE, STREAM, hashlib.sha256(command).digest())
    assert not envelope.covers_command(event, NODE, STREAM, command)
