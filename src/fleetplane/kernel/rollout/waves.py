"""Which targets a wave has. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fleetplane.kernel.rollout import amounts
from fleetplane.kernel.rollout.facts import Select
from fleetplane.kernel.rollout.policy import LABEL, REST


def members(
    wave: str,
    unassigned: Iterable[str],
    labels: Mapping[str, Mapping[str, str]],
    *,
    total: int,
    select: Select,
) -> list[str]:
    """The targets of a wave out of those that no earlier wave has, in their order.

    `total` is the number of all targets, of which percentages are taken.
    """
    if wave == REST:
        return list(unassigned)
    if wave.startswith(LABEL):
        selector = wave.removeprefix(LABEL).strip()
        return [name for name in unassigned if select(selector, labels.get(name, {}))]
    return list(unassigned)[: amounts.room(wave, total)]


def preview(
    waves: Iterable[str], targets: Mapping[str, Mapping[str, str]], *, select: Select
) -> list[list[str]]:
    """The waves as they would be if all started now, from each target's labels."""
    left = list(targets)
    found = []
    for wave in waves:
        chosen = members(wave, left, targets, total=len(targets), select=select)
        found.append(chosen)
        taken = set(chosen)
        left = [name for name in left if name not in taken]
    return found
