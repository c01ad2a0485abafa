"""`fleetplane plan`, `apply`, `diff`, `edit` and `export`: what should be, seen before it is done."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from fleetplane.cli.clients.rest_client import rest_options
from fleetplane.cli.output import flat, say
from fleetplane.cli.parameters import DURATION
from fleetplane.cli.resources.get import WAIT_SECONDS, connected
from fleetplane.cli.resources.kinds import Kinds, complete_targets, named_target, scope_of, scope_options
from fleetplane.cli.resources.show import OutputForm, emit_data, form_option, safe_json
from fleetplane.kernel.errors import Conflict, InvalidArgument, PermissionDenied

if TYPE_CHECKING:
    from fleetplane.client.requests import Plan
    from fleetplane.client.sync import Fleet

SUFFIXES = (".json", ".yaml", ".yml")
FILE_LIMIT_BYTES = 8 * 1024 * 1024
"""Of one file: several times what a plan takes."""
POLICY_KIND = "rollout-policy"
SIGNS = {"create": ("+", "green"), "change": ("~", "yellow"), "delete": ("-", "red"), "nothing": ("=", "dim")}


def plan_options(command: Any) -> Any:
    """Which objects, and whose they are."""
    for option in (
        click.option("--take-over", is_flag=True, help="Change also what belongs to another owner."),
        click.option(
            "--prune", is_flag=True, help="Delete what this owner made at the scope and is not given."
        ),
        click.option("--owner", default="", help="Whose these objects are; written to each as a label."),
        click.option(
            "-f",
            "--file",
            "files",
            multiple=True,
            type=click.Path(path_type=Path, allow_dash=True),
            help="A file of objects in YAML or JSON, a folder of such, or - for standard input; repeatable.",
        ),
    ):
        command = option(command)
    return command


def objects_of(files: Sequence[Path]) -> list[Mapping[str, Any]]:
    """The objects of files, in the order in which they are given; raises with file and place."""
    found: list[Mapping[str, Any]] = []
    for file, text in _texts(files):
        for number, document in enumerate(_documents(file, text), start=1):
            inside = document.get("objects", document.get("items")) if isinstance(document, Mapping) else None
            for one in inside if isinstance(inside, list) else [document]:
                if not isinstance(one, Mapping) or not one.get("kind"):
                    raise InvalidArgument(
                        f"{file}: document {number} is no object",
                        hint="each has kind, metadata.name and spec",
                    )
                found.append(one)
    return found


def _texts(files: Sequence[Path]) -> Iterator[tuple[str, str]]:
    for file in files:
        if str(file) == "-":
            yield "standard input", _whole_input()
        elif file.is_dir():
            inside = sorted(one for one in file.rglob("*") if one.suffix in SUFFIXES and one.is_file())
            if not inside:
                raise InvalidArgument(f"{file} has no files that end in {', '.join(SUFFIXES)}", field="file")
            yield from ((str(one), _read(one)) for one in inside)
        else:
            yield str(file), _read(file)


def _whole_input() -> str:
    """Standard input to its end: what is cut off would be objects that are missing."""
    try:
        text = sys.stdin.read(FILE_LIMIT_BYTES + 1)
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"cannot read standard input: {error}", field="file") from error
    if len(text) > FILE_LIMIT_BYTES:
        raise InvalidArgument(f"standard input is longer than {FILE_LIMIT_BYTES} bytes", field="file")
    return text


def _read(file: Path) -> str:
    try:
        if not file.is_file() and file.exists():
            raise InvalidArgument(f"{file} is neither a file nor a folder", field="file")
        if file.stat().st_size > FILE_LIMIT_BYTES:
            raise InvalidArgument(f"{file} is longer than {FILE_LIMIT_BYTES} bytes", field="file")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"cannot read {file}: {error}", field="file") from error


def _documents(file: str, text: str) -> Iterator[Any]:
    import yaml

    try:
        for document in yaml.safe_load_all(text):
            if document is not None:
                yield document
    except (yaml.YAMLError, RecursionError) as error:
        raise InvalidArgument(f"{file} is no YAML: {' '.join(str(error).split())}", field="file") from error


class Planner(Protocol):
    """Has the server plan objects, always with the same owner, at the same scope."""

    def __call__(self, objects: Sequence[Mapping[str, Any]]) -> Plan: ...


def planner(
    fleet: Fleet, files: Sequence[Path], scope: str, *, owner: str, prune: bool, take_over: bool
) -> tuple[Planner, list[Mapping[str, Any]]]:
    """How to plan, and the objects of files: read once, since standard input cannot be read again."""
    if not files and not prune:
        raise click.UsageError("say what should be: -f FILE.")
    if prune and not owner:
        raise click.UsageError("--prune needs --owner: only what that owner made is deleted.")

    def plan(objects: Sequence[Mapping[str, Any]]) -> Plan:
        return fleet.plan(list(objects), owner=owner, scope=scope, prune=prune, take_over=take_over)

    return plan, objects_of(files)


def planned_as_rollout(
    fleet: Fleet, plan: Planner, objects: Sequence[Mapping[str, Any]], policy: Mapping[str, Any]
) -> Plan:
    """Plan objects with a policy for one change, for every scope whose version they would change.

    All of it is applied in one transaction: nothing reaches anybody before its wave. What would change is
    asked twice, without the policies and with them. If somebody has changed something in between, the
    policies may not be for all of it, and nothing happens.
    """
    looked = plan(objects)
    fleet.forget_plan(looked)
    changed = _changes(looked)
    if not changed:
        return plan(objects)
    made = plan([*objects, *(_policy_object(*one, policy) for one in _holders(fleet, changed))])
    if _changes(made) != changed:
        fleet.forget_plan(made)
        raise Conflict("somebody has changed something meanwhile", hint="nothing was applied; try again")
    return made


def _changes(made: Plan) -> list[tuple[str, str, str]]:
    """Kind, scope and name of what a plan changes, but for policies for one change."""
    return sorted(
        (str(step["kind"]), str(step.get("scope", "")), str(step["name"]))
        for step in made.steps
        if step["operation"] in ("create", "change", "delete") and step["kind"] != POLICY_KIND
    )


def _holders(fleet: Fleet, changed: Sequence[tuple[str, str, str]]) -> Sequence[tuple[str, str]]:
    """Subjects and scopes of which changed objects are part."""
    from fleetplane.client.calls import Request
    from fleetplane.client.requests import mapping

    objects = [{"kind": kind, "scope": scope, "name": name} for kind, scope, name in changed]
    request = Request(method="POST", path="/v1/fleet/rollout-holders", body={"objects": objects})
    answer = mapping(fleet.call(request))
    if answer.get("hidden"):
        raise PermissionDenied(
            "some of this is rolled out at a scope where you may not see rollouts",
            hint="ask for the role fleet.operator there, or apply that part without --rollout",
        )
    if not answer["holders"]:
        raise click.UsageError("nothing of this can be rolled out; leave --rollout out.")
    return [(str(one["subject"]), str(one["scope"])) for one in answer["holders"]]


def _policy_object(subject: str, at: str, policy: Mapping[str, Any]) -> Mapping[str, Any]:
    parts = at.split("/")
    lies = f"/tenants/{parts[1]}" if parts[0] == "tenant" and len(parts) > 1 else "/"
    name = f"{at.replace('/', '.') or 'everywhere'}:{subject}"
    return {
        "kind": POLICY_KIND,
        "metadata": {"name": name, "scope": lies},
        "spec": {"subject": subject, "at": at, "policy": policy, "once": True},
    }


@click.command()
@plan_options
@scope_options
@form_option
@rest_options
def plan(
    files: tuple[Path, ...],
    owner: str,
    prune: bool,
    take_over: bool,
    scope: str,
    tenant: str,
    all_scopes: bool,
    output: OutputForm,
    **where: Any,
) -> None:
    """Show what applying objects would change, and keep that as a plan.

    Nothing is changed. `fleetplane apply --plan ID` carries it out, unless something that it was based on has
    been changed since.
    """
    with connected(where) as fleet:
        place = scope_of(fleet, scope, tenant, all_scopes)
        make, objects = planner(fleet, files, place, owner=owner, prune=prune, take_over=take_over)
        made = make(objects)
    if not output.is_table:
        emit_data(output, {**made.raw, "metadata": {"name": made.id}})
        return
    show_plan(made)
    if not made.is_empty:
        say(f"apply it with: fleetplane apply --plan {made.id}")


@click.command()
@plan_options
@scope_options
@rest_options
def diff(
    files: tuple[Path, ...],
    owner: str,
    prune: bool,
    take_over: bool,
    scope: str,
    tenant: str,
    all_scopes: bool,
    **where: Any,
) -> None:
    """Show how objects differ from what is there. Exits 0 if they do not, 3 if they do."""
    from fleetplane.cli.exits import Exit

    with connected(where) as fleet:
        place = scope_of(fleet, scope, tenant, all_scopes)
        make, objects = planner(fleet, files, place, owner=owner, prune=prune, take_over=take_over)
        made = make(objects)
        fleet.forget_plan(made)
    show_plan(made)
    if not made.is_empty:
        raise click.exceptions.Exit(Exit.CONDITION_NOT_MET)


@click.command()
@plan_options
@scope_options
@click.option("--plan", "plan_id", default="", metavar="ID", help="Carry out a plan that was made before.")
@click.option(
    "--rollout",
    "policy_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="POLICY",
    help="Let the changes go out in waves, by this policy for rollouts in YAML or JSON.",
)
@click.option("--wait", is_flag=True, help="Until what was written is Ready, where it has such a condition.")
@click.option("--wait-timeout", type=DURATION, default=WAIT_SECONDS, show_default="5m", help="For --wait.")
@form_option
@rest_options
def apply(
    files: tuple[Path, ...],
    owner: str,
    prune: bool,
    take_over: bool,
    scope: str,
    tenant: str,
    all_scopes: bool,
    plan_id: str,
    policy_file: Path | None,
    wait: bool,
    wait_timeout: float,
    output: OutputForm,
    **where: Any,
) -> None:
    """Make things as files say, all of it or nothing: plan and apply together, or a plan by its id.

    With --rollout, what is changed waits where a rollout takes it out, which starts by itself; see
    `fleetplane rollout status`. What no rollout is for is changed at once.
    """
    from fleetplane.cli.rollouts import read_policy
    from fleetplane.client.requests import Plan

    if plan_id and (files or prune or policy_file):
        raise click.UsageError("--plan has its objects already; leave -f, --prune and --rollout out.")
    policy = read_policy(policy_file) if policy_file is not None else None
    with connected(where) as fleet:
        if not plan_id:
            place = scope_of(fleet, scope, tenant, all_scopes)
            make, objects = planner(fleet, files, place, owner=owner, prune=prune, take_over=take_over)
            if policy is None:
                plan_id = make(objects).id
            else:
                plan_id = planned_as_rollout(fleet, make, objects, policy).id
        done = Plan.of(fleet.apply_plan(plan_id))
        if not output.is_table:
            emit_data(output, {**done.raw, "metadata": {"name": done.id}})
        else:
            show_plan(done, done=True)
        if wait:
            _await(fleet, done, wait_timeout)


def _await(fleet: Fleet, done: Plan, seconds: float) -> None:
    """Wait for everything that was written and tells whether it is ready."""
    kinds = Kinds(fleet)
    for step in done.steps:
        if step["operation"] not in ("create", "change"):
            continue
        resources = fleet.resource(str(kinds.named(str(step["kind"]))["plural"]))
        found = resources.get(str(step["name"]), scope=str(step["scope"]))
        if found.condition("Ready") is not None:
            say(f"waiting for {step['kind']}/{step['name']}")
            resources.wait_for(found.name, "Ready", scope=found.metadata.scope, seconds=seconds)


def show_plan(made: Plan, *, done: bool = False) -> None:
    """A plan for people: a line an object, a line a field."""
    colour = sys.stdout.isatty()

    def line(text: str, style: str) -> None:
        fg = style if colour and style != "dim" else None
        click.echo(click.style(flat(text), fg=fg, dim=colour and style == "dim"))

    for step in made.steps:
        sign, style = SIGNS.get(str(step["operation"]), ("?", ""))
        pruned = " (pruned)" if step.get("pruned") else ""
        line(f"{sign} {step['kind']}/{step['name']}  {step.get('scope', '')}{pruned}", style)
        for change in step.get("changes") or ():
            old = safe_json(change["old"]) if "old" in change else ""
            new = safe_json(change["new"]) if "new" in change else ""
            arrow = f"{old} -> {new}" if old and new else new or f"{old} ->"
            line(f"    {change.get('field')}: {arrow}", style)
        for word in ("warnings", "disturbs"):
            for text in step.get(word) or ():
                line(f"    {'warning' if word == 'warnings' else 'disturbs'}: {text}", "yellow")
    counts = made.raw.get("summary") or {}
    told = ", ".join(f"{count} {word}" for word, count in counts.items() if count) or "nothing"
    say(f"{'applied' if done else 'would be'}: {told}")


@click.command()
@click.argument("what", nargs=-1, required=True, metavar="KIND/NAME", shell_complete=complete_targets)
@scope_options
@rest_options
def edit(what: tuple[str, ...], scope: str, tenant: str, all_scopes: bool, **where: Any) -> None:
    """Change one object in an editor ($VISUAL, $EDITOR): its labels and spec, as YAML.

    What somebody else changed in the meantime is not overwritten: the edited text is kept in a file then.
    """
    import yaml

    from fleetplane.cli.output import yaml_text

    kind, name = named_target(what)
    with connected(where) as fleet:
        kinds = Kinds(fleet)
        resources = fleet.resource(str(kinds.named(kind)["plural"]))
        found = resources.get(name, scope=scope_of(fleet, scope, tenant, all_scopes))
        metadata = {"name": found.name, "scope": found.metadata.scope, "labels": dict(found.metadata.labels)}
        before = yaml_text({"kind": found.kind, "metadata": metadata, "spec": dict(found.spec)})
        text = click.edit(before, extension=".yaml")
        if text is None or text.strip() == before.strip():
            say("nothing was changed")
            return
        try:
            wanted = yaml.safe_load(text)
            if not isinstance(wanted, dict) or (wanted.get("metadata") or {}).get("name") != found.name:
                raise InvalidArgument(
                    "kind and name are not edited here", hint="`fleetplane apply -f` makes another"
                )
            resources.put(wanted, etag=found.etag)
        except Exception:
            say(f"the edited text is kept in {_kept(text)}")
            raise
    click.echo(flat(f"{found.kind}/{found.name} is changed"))


def _kept(text: str) -> str:
    import tempfile

    with tempfile.NamedTemporaryFile("w", prefix="fleetplane-edit-", suffix=".yaml", delete=False) as file:
        file.write(text)
    return file.name


@click.command()
@click.option("--kinds", "words", default="", metavar="KINDS", help="Only these, separated by commas.")
@scope_options
@click.option("-o", "--output", type=click.Choice(["yaml", "json"]), default="yaml", show_default=True)
@rest_options
def export(words: str, scope: str, tenant: str, all_scopes: bool, output: str, **where: Any) -> None:
    """Print all desired state, without secrets, in a form that `apply -f` takes elsewhere."""
    from fleetplane.client import requests

    with connected(where) as fleet:
        place = scope_of(fleet, scope, tenant, all_scopes)
        told = requests.mapping(fleet.call(requests.export(place, words)))
    emit_data(OutputForm(name=output), {"kind": "export", "objects": told.get("objects", [])})
