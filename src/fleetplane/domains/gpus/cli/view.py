"""GPUs as people and programs read them: rows, colours, ages, JSON. Pure; `now` is an argument."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

from google.protobuf.json_format import MessageToDict

from fleetplane.cli.clients.client import name_of
from fleetplane.cli.output import Cell, PrintedTable, flat
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2


class ShownHealth(StrEnum):
    HEALTHY = "Healthy"
    UNHEALTHY = "Unhealthy"
    UNKNOWN = "Unknown"


STYLES = {"True": "green", "False": "bold red", "Unknown": "yellow"}
HEALTH_STYLES = {
    ShownHealth.HEALTHY: "green",
    ShownHealth.UNHEALTHY: "bold red",
    ShownHealth.UNKNOWN: "yellow",
}

NO_GPUS = "No GPUs are registered."


def health(gpu: gpu_pb2.Gpu) -> ShownHealth:
    """One word from all conditions: a False one condemns, one that is not True casts doubt."""
    statuses = {condition.status for condition in gpu.status.conditions}
    if "False" in statuses:
        return ShownHealth.UNHEALTHY
    return ShownHealth.HEALTHY if statuses == {"True"} else ShownHealth.UNKNOWN


def age(condition: gpu_pb2.Condition, now: float) -> str:
    """How long the condition has had its status, in one or two units."""
    if not condition.HasField("last_transition_time"):
        return "-"
    seconds = max(0, int(now - condition.last_transition_time.ToNanoseconds() / 1e9))
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if seconds < 120:
        return f"{seconds}s"
    if minutes < 120:
        return f"{minutes}m"
    return f"{hours}h" if hours < 48 else f"{days}d"


def gpu_dict(gpu: gpu_pb2.Gpu) -> dict[str, Any]:
    return dict(MessageToDict(gpu))


def list_dict(listed: gpu_pb2.GpuList) -> dict[str, Any]:
    return {**({"metadata": {}} | MessageToDict(listed)), "items": [gpu_dict(gpu) for gpu in listed.items]}


def condition_dicts(gpus: Iterable[gpu_pb2.Gpu]) -> list[dict[str, Any]]:
    return [
        {"gpu": name_of(gpu), **MessageToDict(condition)}
        for gpu in gpus
        for condition in gpu.status.conditions
    ]


def gpu_table(gpus: Iterable[gpu_pb2.Gpu], now: float) -> PrintedTable:
    return PrintedTable(
        columns=("NAME", "HEALTH", "CONDITIONS", "SINCE", "ACTION", "VERSION"),
        rows=[_gpu_row(gpu, now) for gpu in gpus],
        empty=NO_GPUS,
    )


def condition_table(gpus: Iterable[gpu_pb2.Gpu], now: float) -> PrintedTable:
    return PrintedTable(
        columns=("GPU", "TYPE", "STATUS", "SINCE", "REASON", "MESSAGE"),
        rows=[
            (
                Cell(text=name_of(gpu)),
                Cell(text=condition.type),
                Cell(text=condition.status, style=STYLES.get(condition.status, "yellow")),
                Cell(text=age(condition, now)),
                Cell(text=condition.reason or "-"),
                Cell(text=condition.message or "-"),
            )
            for gpu in gpus
            for condition in gpu.status.conditions
        ],
        empty="No conditions are set.",
    )


def change_line(kind: str, gpu: gpu_pb2.Gpu) -> str:
    """One event for a log file: fixed fields first, conditions last."""
    conditions = " ".join(_condition_word(condition) for condition in gpu.status.conditions) or "-"
    return flat(f"{kind:8}  {name_of(gpu)}  v{gpu.resource_version}  {health(gpu)}  {conditions}")


def _gpu_row(gpu: gpu_pb2.Gpu, now: float) -> Sequence[Cell]:
    worst = _most_telling(gpu)
    words = " ".join(_condition_word(condition) for condition in gpu.status.conditions)
    verdict = health(gpu)
    return (
        Cell(text=name_of(gpu)),
        Cell(text=verdict, style=HEALTH_STYLES[verdict]),
        Cell(text=words or "-", style=HEALTH_STYLES[verdict]),
        Cell(text=age(worst, now) if worst is not None else "-"),
        Cell(text=gpu.status.recommended_action or "-"),
        Cell(text=str(gpu.resource_version)),
    )


def _condition_word(condition: gpu_pb2.Condition) -> str:
    word = f"{condition.type}={condition.status}"
    return word if condition.status == "True" or not condition.reason else f"{word}({condition.reason})"


def _most_telling(gpu: gpu_pb2.Gpu) -> gpu_pb2.Condition | None:
    """The condition that decides the row's health; of several, the one that changed last."""
    rank = {"False": 2, "True": 0}
    return max(
        gpu.status.conditions,
        key=lambda entry: (rank.get(entry.status, 1), entry.last_transition_time.ToNanoseconds()),
        default=None,
    )
