"""Patches of a GPU in Kubernetes' JSON: merge, strategic merge, and JSON patch (RFC 7396 and 6902).

Pure. A strategic merge differs from a merge in one list: conditions are merged by their type. A patch changes
the spec; with the subresource `status` it changes the status and nothing else, as it does in Kubernetes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import msgspec
from google.protobuf.timestamp_pb2 import Timestamp

from fleetplane.domains.gpus import wire
from fleetplane.domains.gpus.kinds import Gpu, Replacement
from fleetplane.fleet.plans.documents import Json, merge_patch
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.resources import Condition
from fleetplane.kernel.values.times import NS

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"

UNSUPPORTED, UNPROCESSABLE = "unsupported media type:", "unprocessable content:"
"""How refusals begin that clients show as HTTP's 415 and 422."""


class _Meta(msgspec.Struct, rename="camel"):
    name: str
    uid: str
    resource_version: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class _Condition(msgspec.Struct, rename="camel"):
    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None


class _Spec(msgspec.Struct, frozen=True):
    uuid: str | None = None


class _Status(msgspec.Struct, frozen=True, rename="camel"):
    conditions: tuple[_Condition, ...] = ()
    recommended_action: str = ""


class _Document(msgspec.Struct):
    metadata: _Meta
    spec: _Spec = _Spec()
    status: _Status = _Status()


class _StrategicStatus(msgspec.Struct):
    conditions: list[dict[str, Any]] | None = None


class _Strategic(msgspec.Struct):
    status: _StrategicStatus | None = None


class _Operation(msgspec.Struct):
    op: Literal["add", "remove", "replace", "move", "copy", "test"]
    path: str
    source: str = msgspec.field(name="from", default="")
    value: Any = None


def replacement(gpu: Gpu, kind: str, data: bytes, subresources: Sequence[str]) -> Replacement:
    """What a patch makes of a GPU."""
    if kind not in (JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH):
        raise InvalidArgument(f"{UNSUPPORTED} patch type: {kind[:64]}", field="patch_type")
    if len(data) > wire.MAX_REPORT_BYTES:
        raise InvalidArgument(f"data is larger than {wire.MAX_REPORT_BYTES} bytes", field="data")
    before = _document(gpu)
    try:
        patch = msgspec.json.decode(data)
        if kind == STRATEGIC_PATCH:
            patch = _conditions_merged(before, patch)
        if kind == JSON_PATCH:
            after = _operated(before, msgspec.convert(patch, list[_Operation]))
        else:
            after = merge_patch(before, patch)
        wanted = msgspec.convert(after, _Document)
    except RecursionError:
        raise InvalidArgument(f"{UNPROCESSABLE} data is nested too deep", field="data") from None
    except (msgspec.MsgspecError, ValueError, KeyError, IndexError, TypeError) as error:
        raise InvalidArgument(f"{UNPROCESSABLE} data is no {kind} of a GPU: {error}", field="data") from error
    if wanted.metadata.name != gpu.name:
        raise InvalidArgument("name cannot be changed", field="data.metadata.name")
    if wanted.metadata.labels or wanted.metadata.annotations:
        raise InvalidArgument("GPUs have no labels and annotations here; patch none", field="data.metadata")
    meta = wanted.metadata
    version = wire.written_version(meta.resource_version, "data.metadata.resourceVersion")
    if "status" not in subresources:
        return Replacement(uid=meta.uid, version=version, uuid=wanted.spec.uuid)
    report = wire.report(_status(wanted.status), writer="")
    kept = {_told(said): said for said in gpu.conditions}
    conditions = tuple(kept.get(_told(said), said) for said in report.conditions)
    return Replacement(uid=meta.uid, version=version, report=replace(report, conditions=conditions))


def _told(said: Condition) -> tuple[object, ...]:
    """A condition but for who wrote it: one that a patch leaves as it is stays its writer's."""
    return (said.type, said.status, said.reason, said.message, said.changed_at_ns)


def _document(gpu: Gpu) -> dict[str, Json]:
    conditions: list[Json] = []
    for said in gpu.conditions:
        entry: dict[str, Json] = {"type": said.type, "status": said.status}
        entry |= {"reason": said.reason, "message": said.message}
        if said.changed_at_ns is not None:
            seconds, nanos = divmod(said.changed_at_ns, NS)
            entry["lastTransitionTime"] = Timestamp(seconds=seconds, nanos=nanos).ToJsonString()
        conditions.append(entry)
    action = gpu.status.recommended_action if gpu.status is not None else ""
    spec: dict[str, Json] = {} if gpu.spec.uuid is None else {"uuid": gpu.spec.uuid}
    return {
        "apiVersion": wire.GPU_API_VERSION,
        "kind": wire.GPU_KIND,
        "metadata": {"name": gpu.name, "uid": gpu.uid, "resourceVersion": str(gpu.revision)},
        "spec": spec,
        "status": {"conditions": conditions, "recommendedAction": action},
    }


def _status(wanted: _Status) -> gpu_pb2.GpuStatus:
    status = gpu_pb2.GpuStatus(recommended_action=wanted.recommended_action)
    for said in wanted.conditions:
        entry = status.conditions.add(
            type=said.type, status=said.status, reason=said.reason, message=said.message
        )
        if said.last_transition_time:
            try:
                entry.last_transition_time.FromJsonString(said.last_transition_time)
            except ValueError as error:
                raise InvalidArgument(
                    f"{UNPROCESSABLE} {error}", field="data.status.conditions.lastTransitionTime"
                ) from error
    return status


def _conditions_merged(before: dict[str, Json], patch: Any) -> Any:
    """The patch with its list of conditions as it is to be: those present, changed by type."""
    given = msgspec.convert(patch, _Strategic).status
    if given is None or given.conditions is None:
        return patch
    status = cast("dict[str, Any]", before["status"])
    merged: dict[str, Json] = {entry["type"]: entry for entry in status["conditions"]}
    for entry in given.conditions:
        if entry.get("$patch") == "delete":
            merged.pop(entry["type"], None)
        else:
            merged[entry["type"]] = merge_patch(merged.get(entry["type"]), entry)
    return patch | {"status": patch["status"] | {"conditions": list(merged.values())}}


def _operated(document: Json, operations: list[_Operation]) -> Json:
    """The document after the operations of a JSON patch, in order."""
    root: dict[str, Any] = {"": document}
    copied_bytes = 0
    for operation in operations:
        path, value = operation.path, operation.value
        if operation.op in ("move", "copy"):
            encoded = msgspec.json.encode(_at(root, operation.source))
            copied_bytes += len(encoded)
            if copied_bytes > wire.MAX_REPORT_BYTES:  # copies of copies would fill the memory
                raise ValueError(f"more than {wire.MAX_REPORT_BYTES} bytes are copied")
            value = msgspec.json.decode(encoded)
        if operation.op == "move":
            _remove(root, operation.source)
        # What is removed or replaced must be there, as what is tested must.
        if operation.op in ("remove", "replace", "test"):
            present = _at(root, path)
            if operation.op == "test" and present != value:
                raise ValueError(f"{path} is not what the test says")
        if operation.op == "remove":
            _remove(root, path)
        elif operation.op != "test":
            _put(root, path, value, insert=operation.op != "replace")
    return cast("Json", root[""])


def _steps(path: str) -> list[str]:
    if path and not path.startswith("/"):
        raise ValueError(f"{path!r} is no JSON pointer")
    return [step.replace("~1", "/").replace("~0", "~") for step in path.split("/")]


def _within(root: Any, steps: Sequence[str]) -> Any:
    for step in steps:
        root = root[_index(step, root) if isinstance(root, list) else step]
    return root


def _index(step: str, items: list[Any]) -> int:
    if not (step.isascii() and step.isdecimal()) or int(step) > len(items):
        raise ValueError(f"{step!r} is no place in a list of {len(items)}")
    return int(step)


def _at(root: Any, path: str) -> Any:
    return _within(root, _steps(path))


def _remove(root: Any, path: str) -> None:
    *parents, last = _steps(path)
    holder = _within(root, parents)
    del holder[_index(last, holder) if isinstance(holder, list) else last]


def _put(root: Any, path: str, value: Json, *, insert: bool) -> None:
    *parents, last = _steps(path)
    holder = _within(root, parents)
    if not isinstance(holder, list):
        holder[last] = value
    elif insert:
        holder.insert(len(holder) if last == "-" else _index(last, holder), value)
    else:
        holder[_index(last, holder)] = value
