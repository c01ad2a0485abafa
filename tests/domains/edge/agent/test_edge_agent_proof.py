"""Bytes that are signed: rotation requests as written down, and taking a field out of a message."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from fleetplane.domains.edge.agent.identity.keyring import DaemonIdentity
from fleetplane.domains.edge.agent.identity.rotation import ProofForm, request
from fleetplane.domains.edge.agent.server_proof import without_field
from fleetplane.domains.edge.wire.protobuf_types import struct_of
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb

NODE = "11111111-2222-4333-8444-555555555555"
OLD, NEW = (
    Ed25519PrivateKey.from_private_bytes(b"\x07" * 32),
    Ed25519PrivateKey.from_private_bytes(b"\x09" * 32),
)
ME = DaemonIdentity(node_id=NODE, tenant="t", key=OLD, token="a.b.c")
NONCE = bytes(range(32))


def test_rotation_requests_are_signed_over_the_bytes_written_down() -> None:
    made = request(ME, NEW, nonce=NONCE, issued_at_ms=0, with_token=False)
    assert made.signature_with_new_key.hex() == (
        "c1c6bf16dbc1c1ea5cd2c93d88565f4f92b24ed6ed5453c6e44306213cbab17b"
        "cedb2618faab619a4ab2fcbb20041a5fae0e5389a6c25fd11c3364a51054a10c"
    )
    assert made.current_envelope.signature.hex() == (
        "da53c43d682aff8c5b1203b932f42256fb076c746e238dcec0a795cb32a24a16"
        "93c8a25b703696f9543c78c5a488a64c496a96b3db747429d86dc64843bc7d07"
    )
    assert made.current_envelope.node_security_token == ""
    plain = request(ME, NEW, nonce=NONCE, issued_at_ms=0, form=ProofForm.PLAIN)
    assert plain.signature_with_new_key.hex() == (
        "35abed8475b495b6149249e7a502ec737b10ac899a91f0c054c37da4283a3070"
        "44a8f7cac9c16630585d10cfa4a7085021835082ba75a321f541d561a6823a0b"
    )
    assert plain.current_envelope.node_security_token == "a.b.c"


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
        max_size=5,
    ),
    st.binary(max_size=300),
    st.text(max_size=50),
)
def test_a_command_without_its_proof_is_the_bytes_that_were_signed(
    arguments: dict[str, float | str], signature: bytes, name: str
) -> None:
    bare = pb.EdgeCommand(
        invoke_tool=pb.InvokeTool(tool_name=name, args=struct_of(arguments))
    ).SerializeToString()
    proof = pb.EdgeCommand(envelope=pb.SealNodeEnvelope(signature=signature)).SerializeToString()
    assert without_field(bare + proof, 16) == (bare, 1)
    assert without_field(proof + bare, 16) == (bare, 1)
    assert without_field(bare, 16) == (bare, 0)


@given(st.binary(max_size=200))
def test_any_bytes_are_taken_apart_or_refused(raw: bytes) -> None:
    try:
        kept, found = without_field(raw, 16)
    except ValueError:
        return
    assert (kept == raw) is (found == 0)
