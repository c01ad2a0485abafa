"""`fleetplane run`, and what verbs about runs share: options, watching, tables.

A domain whose routes are those of `fleet.runs.rest` adds what to run, and where: the path above `/runs`.
`fleetplane run` selects agents of one kind; the domain of the kind applies its permissions and limits.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fleetplane.cli.clients.rest_client import rest_options
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
from fleetplane.domains.declaration import Runner
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


_WHERE = re.compile(r"\s*(?P<kind>[a-z-]+)(?:\s+where\s+(?P<selector>\S.*))?\s*", re.DOTALL)
_NAMED = re.compile(r"\s*(?P<kind>[a-z-]+)/(?P<name>\S+)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRun:
    """What somebody wants run, and on whom."""

    kind: str
    """As it was written, such as `boards`."""
    names: tuple[str, ...]
    selector: str
    """In the language of every fleet; empty, like `names`, for all agents of the kind."""
    command: tuple[str, ...]
    policy: Mapping[str, Any]
    """The options of `cli.running.runs.policy_options`."""
    tenant: str
    detach: bool
    where: Mapping[str, Any]
    """Which server, as `Place` takes it."""


@click.command("run")
@click.option(
    "--on",
    "targets",
    multiple=True,
    required=True,
    metavar="KIND[/NAME | where SELECTOR]",
    help="On whom: 'boards where role=sensor', edge-nodes, board/attic. Names can be given often.",
)
@policy_options_alone
@click.option("--tenant", default="default", show_default=True, help="Whose agents, where tenants have some.")
@click.option("--detach", is_flag=True, help="Only start it, and print its id.")
@click.argument("command", nargs=-1, required=True)
@rest_options
def run(targets: tuple[str, ...], tenant: str, detach: bool, command: tuple[str, ...], **rest: Any) -> None:
    """Run a command on boards or edge daemons, and show what comes of it.

    \b
        fleetplane run --on 'boards where role=sensor' --mode rolling=2 -- uname -a
        fleetplane run --on edge-nodes -- uptime
        fleetplane run --on edge-group/web --on-error continue -- systemctl is-active nginx

    The command runs as it stands, without a shell, as far as each agent's own rules allow it. The exit code
    is 7 if it failed on some or was halted, 3 with fewer than --require-min, 8 if none could be reached, 124
    if the time was over everywhere.
    """
    from fleetplane.domains import discovery
    from fleetplane.domains.declaration import load

    chosen = {name: rest.pop(name) for name in POLICY}
    kind, names, selector = parsed(targets)
    runners = [one for domain in discovery.installed().declarations for one in domain.runners]
    runner = runner_of(kind, runners)
    code = load(runner.target)(
        FleetRun(
            kind=kind,
            names=names,
            selector=selector,
            command=command,
            policy=chosen,
            tenant=tenant,
            detach=detach,
            where=rest,
        )
    )
    raise click.exceptions.Exit(code)


def parsed(targets: Sequence[str]) -> tuple[str, tuple[str, ...], str]:
    """The kind, the names and the selector of what stands after `--on`. Pure."""
    named = [_NAMED.fullmatch(one) for one in targets]
    if all(named):
        kinds = {one["kind"] for one in named if one is not None}
        if len(kinds) > 1:
            raise click.UsageError(f"--on names {' and '.join(sorted(kinds))}; a run is for one kind.")
        return kinds.pop(), tuple(one["name"] for one in named if one is not None), ""
    if len(targets) > 1:
        raise click.UsageError("--on is given once, or as KIND/NAME for each.")
    found = _WHERE.fullmatch(targets[0])
    if found is None:
        raise click.UsageError(f"--on {targets[0]!r} is not KIND, KIND/NAME or KIND where SELECTOR.")
    return found["kind"], (), (found["selector"] or "").strip()


def runner_of(kind: str, runners: Sequence[Runner]) -> Runner:
    """Who runs commands on agents of a kind. Pure."""
    for one in runners:
        if kind in one.kinds:
            return one
    known = ", ".join(one.kinds[0] for one in runners)
    raise click.UsageError(f"commands do not run on {kind!r}; there are: {known}.")
