"""Rollouts of a server: at its own socket for its owner, over REST for anyone else. Both answer alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleetplane.cli.clients.owner_client import OwnerClient
from fleetplane.cli.clients.rest_client import connect
from fleetplane.client.places import Place, is_remote, owner_directory
from fleetplane.gen.fleetplane.fleet.v1 import rollouts_pb2 as pb
from fleetplane.gen.fleetplane.fleet.v1 import rollouts_pb2_grpc

PREFIX = "/v1/fleet"
_LARGE = ("revision",)
"""JSON of protobuf writes numbers of 64 bits as text."""


class OwnerRollouts(OwnerClient):
    stub = rollouts_pb2_grpc.RolloutAdminStub


class RolloutClient:
    """Calls by the name of the gRPC method; over REST each is one route."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def call(self, method: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one call, in the shape of the REST answer."""
        place = self._place
        if is_remote(place):
            return self._over_rest(method, dict(request))
        from google.protobuf.json_format import MessageToDict, ParseDict

        message = ParseDict(dict(request), getattr(pb, f"{method}Request", pb.StartRolloutRequest)())
        with OwnerRollouts(owner_directory(place), call_seconds=place.timeout) as owner:
            answer = owner.call(method, message)
        made: dict[str, Any] = MessageToDict(
            answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        return _numbers(made)

    def _over_rest(self, method: str, request: dict[str, Any]) -> dict[str, Any]:
        verb, path, sends = _ROUTES[method]
        path = path.format(id=request.pop("id", ""), verb=request.pop("verb", ""))
        given = {name: value for name, value in request.items() if value not in ("", None)}
        with connect(self._place) as client:
            if sends:
                found = client.call(verb, f"{PREFIX}{path}", body=given)
            else:
                found = client.call(verb, f"{PREFIX}{path}", query=list(given.items()) or None)
        return found or {}


_ROUTES = {
    "ListSubjects": ("GET", "/rollout-subjects", False),
    "StartRollout": ("POST", "/rollouts", True),
    "PlanRollout": ("POST", "/rollout-plans", True),
    "GetRollout": ("GET", "/rollouts/{id}", False),
    "ListRollouts": ("GET", "/rollouts", False),
    "OrderRollout": ("POST", "/rollouts/{id}/{verb}", True),
    "SetRolloutPolicy": ("PUT", "/rollout-policies", True),
    "RemoveRolloutPolicy": ("DELETE", "/rollout-policies", False),
    "ListRolloutPolicies": ("GET", "/rollout-policies", False),
}


def _numbers(found: dict[str, Any]) -> dict[str, Any]:
    for one in (found, *found.get("rollouts", ())):
        for name in _LARGE:
            if name in one:
                one[name] = int(one[name])
        if "started_at" in one:
            one["ended_at"] = one["ended_at"] or None
    return found
