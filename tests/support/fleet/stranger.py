"""A program that asks for releases without being anybody's agent: `stranger.py ADDRESSES CA`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import grpc

from fleetplane.gen.fleetplane.fleet.v1 import releases_pb2 as pb
from fleetplane.gen.fleetplane.fleet.v1 import releases_pb2_grpc


def answer(address: str, ca: bytes, *, connects: bool) -> str:
    """The code with which both calls are refused."""
    limits = {"timeout": 60.0, "wait_for_ready": connects}
    target = address.partition("://")[2]
    if address.startswith("https"):
        channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(ca))
    else:
        channel = grpc.insecure_channel(target)
    codes = set()
    with channel:
        stub = releases_pb2_grpc.AgentReleasesStub(channel)
        for call in (
            lambda: stub.CheckIn(pb.CheckInRequest(name="x", version="1.0", nonce=bytes(16)), **limits),
            lambda: list(stub.Fetch(pb.FetchRequest(sha256="0" * 64), **limits)),
        ):
            try:
                call()
            except grpc.RpcError as error:
                codes.add(error.code().name)
            else:
                codes.add("OK")
    return " ".join(sorted(codes))


if __name__ == "__main__":
    trust = Path(sys.argv[2]).read_bytes()
    asked = json.loads(sys.argv[1]).items()
    print(json.dumps({domain: answer(one, trust, connects=domain != "instances") for domain, one in asked}))
