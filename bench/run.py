"""Measure every published figure beside its reference and print the table.

python bench/run.py                      everything; about fourteen minutes
python bench/run.py --only get_gpu       one figure
python bench/run.py --quick              show that everything works; the numbers mean nothing
python bench/run.py --write FILE         also put the table into FILE, between its two markers
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIGURES = (
    "get_gpu",
    "standby_reads",
    "list_gpus",
    "fan_out",
    "fan_out_effort",
    "durable_writes",
    "group_commit",
    "bells",
    "cluster_writes",
    "cluster_agents",
    "telemetry_rows",
    "registrations",
    "memory",
    "cold_start",
    "command_start",
    "instances_pass",
    "instances_agents",
    "proxies_rest",
    "proxies_logs",
    "proxies_traffic",
    "proxies_rollout",
    "rollout_pass",
    "proxies_nginx",
    "edge_daemons",
    "boards_fleet",
    "console",
)
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"


def main() -> int:
    # Run as a file, only this file's own directory can be imported from.
    sys.path.insert(0, str(ROOT))
    from bench import figures, machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", action="append", choices=FIGURES, metavar="NAME", help=", ".join(FIGURES))
    parser.add_argument("--quick", action="store_true", help="try everything out; the numbers mean nothing")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table between FILE's markers")
    options = parser.parse_args()
    effort = figures.QUICK if options.quick else figures.Effort()
    rows: list[figures.Row] = []
    for name in options.only or FIGURES:
        print(f"{name} ...", file=sys.stderr, flush=True)
        rows += import_module(f"bench.{name}").measure(effort)
    print(machine.described())
    figures.show(rows)
    if options.write is not None:
        _write(options.write, f"{machine.described()}\n\n{figures.table(rows)}")
    return 0 if options.quick or all(row.reached for row in rows) else 1


def _write(file: Path, text: str) -> None:
    before, _, rest = file.read_text().partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{file} has no {BEGIN} and {END}")
    file.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main())
