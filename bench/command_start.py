"""How long the command line takes to say something, beside a Python that imports its parser alone.

Processor time, since a busy machine would be measured otherwise; of the best round.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence

from bench import population, servers
from bench.figures import Effort, Row, alone

GPUS = 16
MUST = 3.0
REFERENCE = (sys.executable, "-c", "import click")
COMMAND = (sys.executable, "-m", "fleetplane.cli.main")
ROUNDS = 3
"""Of these processes for each of the effort's rounds; one takes some 50 ms."""


def cpu_seconds(command: Sequence[str]) -> float:
    """The processor time of one process and what it started."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, env={**os.environ, "NO_COLOR": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(effort: Effort) -> Sequence[Row]:
    gpus = effort.gpus or GPUS
    with servers.load_core() as core, servers.scratch() as directory:
        data = directory / "data"
        with servers.fleetplane(data, core) as server:
            population.register(server, gpus)
            commands = {
                "`fleetplane --help`": (*COMMAND, "--help"),
                f"`fleetplane get gpus`, {gpus} of them": (*COMMAND, "get", "gpus", "--data-dir", str(data)),
            }
            return measured(commands, effort)


def measured(commands: Mapping[str, Sequence[str]], effort: Effort) -> Sequence[Row]:
    """Each command beside the reference, in turns."""
    best = dict.fromkeys((*commands, ""), float("inf"))
    for _ in range(ROUNDS * effort.rounds):
        for name, command in (("", REFERENCE), *commands.items()):
            best[name] = min(best[name], cpu_seconds(command))
    return [_row(name, best[name], best[""]) for name in commands]


def _row(name: str, ours: float, reference: float) -> Row:
    ratio = ours / reference
    return Row(
        figure=f"Start of {name}",
        ours=f"{ours * 1000:.0f} ms",
        reference=f"{reference * 1000:.0f} ms",
        ratio=ratio,
        must_reach=f"at most {MUST:g} ×",
        reached=ratio <= MUST,
    )


if __name__ == "__main__":
    alone(measure, __doc__)
