"""Verbs about runs that the domains with the routes of `fleet.runs.rest` share: options, watching, tables.

A domain adds what is to be run, and where: the path above `/runs`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fleetplane.cli.exits import CommandFailed, Exit
from fleetplane.cli.output import Cell, Format, PrintedTable, emit
from fleetplane.cli.parameters import DURATION
from fleetplane.cli.running.run_view import (
    STYLES,
    RunDone,
    RunNotice,
    ShownEvent,
    TargetBegan,
    TargetDone,
    TargetPrinted,
    state_cell,
    watch,
)
from fleetplane.kernel.errors import FailedPrecondition

if TYPE_CHECKING:
    from fleetplane.cli.clients.rest_client import RestClient

F = TypeVar("F", bound=Callable[..., Any])
POLICY = ("mode", "max_concurrency", "on_error", "require_min", "deadline", "deliver_by")
_WITH_NUMBER = re.compile(r"([a-z-]+)=(\d{1,6})")
_NUMBERED = {"rolling": "batch", "stop-after": "stop_after"}

target_option = click.option(
    "--target",
    "targets",
    multiple=True,
    required=True,
    metavar="@NAME|SELECTOR|all",
    help="On whom: @NAME (can be given often), a selector such as 'site=attic,tier!=db', or all.",
)


def policy_options(command: F) -> F:
    """On whom, and how a run goes through its targets."""
    return target_option(policy_options_alone(command))


def policy_options_alone(command: F) -> F:
    """How a run goes through its targets."""
    for option in (
        click.option(
            "--deliver-by",
            type=DURATION,
            help="Wait this long for those that are away, instead of leaving them out.",
        ),
        click.option("--deadline", type=DURATION, help="For each target, from when it has the command."),
        click.option(
            "--require-min", type=click.IntRange(min=0), default=0, help="Start nothing with fewer targets."
        ),
        click.option(
            "--on-error",
            default="fail-fast",
            show_default=True,
            metavar="fail-fast|continue|stop-after=N",
            help="What a failure means for the rest.",
        ),
        click.option("--max-concurrency", type=click.IntRange(min=1), help="At once, at most."),
        click.option(
            "--mode",
            default="parallel",
            show_default=True,
            metavar="parallel|sequential|rolling=N",
            help="In which order.",
        ),
    ):
        command = option(command)
    return command


def target_of(targets: Sequence[str]) -> dict[str, Any]:
    """The body's target, from what was given."""
    names = [one[1:] for one in targets if one.startswith("@")]
    rest = [one for one in targets if not one.startswith("@")]
    if rest == ["all"] and not names:
        return {"all": True}
    if len(rest) > 1 or "all" in rest or "" in names:
        raise click.UsageError("--target takes all, or names and at most one selector")
    return {"names": names, "selector": rest[0] if rest else ""}


def policy_of(chosen: dict[str, Any]) -> dict[str, Any]:
    """The body's policy, from the options of `policy_options`."""
    policy: dict[str, Any] = {
        "max_concurrency": chosen["max_concurrency"],
        "require_min": chosen["require_min"],
        "deadline_seconds": chosen["deadline"],
        "deliver_within_seconds": chosen["deliver_by"] or 0.0,
    }
    for option, field in (("mode", "mode"), ("on_error", "on_failure")):
        word = chosen[option]
        if (found := _WITH_NUMBER.fullmatch(word)) is not None and found[1] in _NUMBERED:
            word = found[1]
            policy[_NUMBERED[word]] = int(found[2])
        policy[field] = word
    return policy


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVerbs:
    """What verbs do, on one server."""

    server: RestClient
    base: str
    """The path above `/runs`."""

    def start(self, body: dict[str, Any], *, detach: bool) -> Exit:
        """Start a run and watch it to its end, or only print its id."""
        try:
            run_id = self.server.call("POST", f"{self.base}/runs", body=body)["id"]
        except FailedPrecondition as error:  # fewer targets than required is the one condition of a run
            raise CommandFailed(Exit.CONDITION_NOT_MET, error.message) from error
        if detach:
            click.echo(run_id)
            return Exit.OK
        ended = watch(
            self.server,
            f"{self.base}/runs/{run_id}/events",
            shown,
            title=f"run {run_id}",
            fancy=sys.stdout.isatty(),
        )
        return verdict(ended)

    def list(self, limit: int, output: Format) -> None:
        found = self.server.call("GET", f"{self.base}/runs", query={"limit": str(limit)})["items"]
        rows = [
            [
                Cell(text=one["id"]),
                Cell(text=" ".join((one["command"], *one["args"]))[:60]),
                Cell(text=one["started_at"]),
                state_cell(one["state"], one["summary"]),
                Cell(text=" ".join(f"{name}={number}" for name, number in one["summary"].items() if number)),
            ]
            for one in found
        ]
        columns = ("RUN", "COMMAND", "STARTED", "STATE", "TARGETS")
        emit(output, found, PrintedTable(columns=columns, rows=rows, empty="no runs"))

    def show(self, run_id: str, output: Format) -> None:
        found = self.server.call("GET", f"{self.base}/runs/{run_id}")
        rows = [
            [
                Cell(text=one["name"]),
                Cell(text=one["outcome"], style=STYLES.get(one["outcome"], "")),
                Cell(text="" if one["exit_code"] is None else str(one["exit_code"])),
                Cell(text="" if one["duration_seconds"] is None else f"{one['duration_seconds']:.3f} s"),
                Cell(text=(one["message"] or one["stderr"] or one["stdout"]).strip()[-80:]),
            ]
            for one in found["results"]
        ]
        columns = ("TARGET", "OUTCOME", "EXIT", "TOOK", "WORDS")
        emit(output, found, PrintedTable(columns=columns, rows=rows, empty="nothing is kept of it"))

    def cancel(self, run_id: str) -> None:
        told = self.server.call("POST", f"{self.base}/runs/{run_id}/cancel")
        words = "it had ended already" if told["already_ended"] else f"{told['cancelled']} cancelled"
        if told["told_to_stop"]:
            words += f", {told['told_to_stop']} asked to stop; may finish"
        click.echo(words, err=True)

    def preview(self, targets: Sequence[str], *, wait: bool, output: Format) -> None:
        body = {"target": target_of(targets), "wait": wait}
        found = self.server.call("POST", f"{self.base}/runs/preview", body=body)
        rows = [
            *([Cell(text=name), Cell(text="yes", style="green")] for name in found["resolved"]),
            *(
                [Cell(text=one["name"]), Cell(text=f"no: {one['reason']}", style="yellow")]
                for one in found["skipped"]
            ),
        ]
        emit(output, found, PrintedTable(columns=("TARGET", "TAKES PART"), rows=rows, empty="nobody"))


def shown(kind: str, data: dict[str, Any]) -> Iterator[ShownEvent]:
    """Events of `fleet.runs.rest`."""
    match kind:
        case "target_started":
            yield TargetBegan(name=data["name"])
        case "target_output":
            yield TargetPrinted(name=data["name"], **{data["stream"]: data["text"]})
        case "target_ended":
            if data["stdout"] or data["stderr"]:
                yield TargetPrinted(name=data["name"], stdout=data["stdout"], stderr=data["stderr"])
            words = "" if data["outcome"] == "ok" else data["message"]
            yield TargetDone(
                name=data["name"], outcome=data["outcome"], words=words, exit_code=data["exit_code"]
            )
        case "missing":
            yield RunNotice(message=data["message"])
        case "run_ended":
            yield RunDone(state=data["state"], summary=data["summary"])


def verdict(ended: RunDone) -> Exit:
    """What a script should make of how a run ended; the same for edge."""
    if ended.state in ("halted", "cancelled"):
        return Exit.PARTIAL if ended.state == "halted" else Exit.FAILURE
    bad = {name: number for name, number in ended.summary.items() if name != "ok" and number}
    if not bad:
        return Exit.OK
    if ended.summary["ok"]:
        return Exit.PARTIAL
    if bad.keys() == {"not_started"}:
        return Exit.UNAVAILABLE
    return Exit.TIMEOUT if bad.keys() == {"timed_out"} else Exit.FAILURE
