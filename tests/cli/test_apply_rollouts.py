"""`fleetplane apply --rollout` with bad files, foreign scopes and interruptions: all of it or nothing."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.shared.cli_runner import COMMAND, execute
from support.shared.seats import SOCKET, Seat, seated
from support.shared.server_process import ServerProcess, running_server

from fleetplane.cli.exits import Exit
from fleetplane.cli.resources.plans import planned_as_rollout
from fleetplane.client.requests import Plan
from fleetplane.kernel.errors import Conflict, PermissionDenied

GOOD = "waves: [1, rest]\n"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    data = tmp_path_factory.mktemp("rollouts") / "d"
    with running_server(data, "--only", "edge") as server:
        yield server, data


@pytest.fixture
def seat(house: tuple[ServerProcess, Path], tmp_path: Path) -> Seat:
    server, data = house
    (tmp_path / "policy.yaml").write_text(GOOD)
    return seated(SOCKET, server, data, tmp_path, ())


def layer(tenant: str, level: str) -> str:
    metadata = {"name": "tenant", "scope": f"/tenants/{tenant}"}
    return yaml.safe_dump({"kind": "edge-config", "metadata": metadata, "spec": {"config": {"level": level}}})


def write(seat: Seat, *texts: str) -> str:
    path = seat.folder / "objects.yaml"
    path.write_text("---\n".join(texts))
    return str(path)


def level(seat: Seat, tenant: str) -> str:
    """What is there of a tenant's layer; empty without one."""
    found = seat("get", "edge-config/tenant", "--tenant", tenant, "-o", "json")
    return str(json.loads(found.out)["spec"]["config"]["level"]) if found.code == 0 else ""


def policies(seat: Seat) -> int:
    found = seat("get", "rollout-policies", "-A", "-o", "json")
    assert found.code == 0, found.err
    return len(json.loads(found.out)["items"])


def test_objects_from_standard_input_go_out_with_their_policy(seat: Seat) -> None:
    words = [*COMMAND, "apply", "-f", "-", "--rollout", "policy.yaml"]
    given: dict[str, Any] = {"cwd": seat.folder, "env": seat.environment, "text": True}
    done = subprocess.run(
        words, input=layer("piped", "info"), capture_output=True, timeout=60, check=False, **given
    )
    assert done.returncode == 0, done.stderr
    assert "+ rollout-policy/tenant.piped:edge.config" in done.stdout
    assert "+ edge-config/tenant" in done.stdout
    assert level(seat, "piped") == "info"


def test_who_is_interrupted_has_changed_nothing(seat: Seat) -> None:
    with subprocess.Popen(
        [*COMMAND, "apply", "-f", "-", "--rollout", "policy.yaml"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=seat.folder,
        env={**seat.environment, "PYTHONUNBUFFERED": "1"},
    ) as going:
        assert going.stdin is not None
        # More than a pipe holds: once it is written, the command has begun to read.
        going.stdin.write(b"#" + b"x" * 200_000 + b"\n" + layer("broken-off", "info").encode())
        going.stdin.flush()
        going.send_signal(signal.SIGINT)
        going.wait(60)
    assert going.returncode == Exit.INTERRUPTED
    assert level(seat, "broken-off") == ""


def test_what_is_pruned_goes_out_in_a_rollout_as_well(seat: Seat) -> None:
    owned = ("--owner", "pruner", "--tenant", "pruned")
    assert seat("apply", "-f", write(seat, layer("pruned", "info")), *owned).code == 0
    done = seat("apply", "--prune", *owned, "--rollout", "policy.yaml")
    assert done.code == 0, done.err
    assert "- edge-config/tenant  /tenants/pruned (pruned)" in done.out
    assert "+ rollout-policy/tenant.pruned:edge.config" in done.out


def test_the_same_again_changes_nothing_and_leaves_no_policy(seat: Seat) -> None:
    file = write(seat, layer("again", "info"))
    assert seat("apply", "-f", file).code == 0
    before = policies(seat)
    for _ in range(2):
        done = seat("apply", "-f", file, "--rollout", "policy.yaml")
        assert (done.code, "rollout-policy" in done.out) == (0, False), done.err
    assert policies(seat) <= before, "those of others may have gone by themselves"


BOMB = "a: &a [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" + "".join(
    f"{name}: &{name} [{', '.join(f'*{last}' for _ in range(9))}]\n"
    for last, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "policy",
    [
        b"",
        b"[1, 2]",
        b"waves",
        b"waves: [1]\n",  # some would never have it
        b"waves: [-1, rest]\n",
        b"waves: [1, rest]\nno_such: 1\n",
        b"waves: [1, rest]\nmax_failures: lots\n",
        b"waves: [1, rest]\ngates: [{name: a, query: no_such, min: 1}]\n",
        b"waves: [1, rest]\ngates: [{name: a, query: 'webhook http://127.0.0.1:1/', min: 1}]\n",
        b"waves: [1, rest",
        b"\xff\xfe",
        b"!!python/object/apply:os.system [id]\n",
        b"[" * 3000,
        BOMB.encode(),
        b"# " + b"x" * 70_000,
        None,
    ],
)
def test_a_policy_that_is_refused_leaves_everything_as_it_was(seat: Seat, policy: bytes | None) -> None:
    assert seat("apply", "-f", write(seat, layer("kept", "info"))).code == 0
    path = seat.folder / "policy.yaml"
    path.unlink()
    if policy is not None:
        path.write_bytes(policy)
    refused = seat("apply", "-f", write(seat, layer("kept", "debug")), "--rollout", "policy.yaml")
    assert refused.code in (2, 3), refused
    assert "Traceback" not in refused.err
    assert level(seat, "kept") == "info"
    assert seat("get", "rollout-policy/tenant.kept:edge.config", "--tenant", "kept").code == 4


@pytest.mark.parametrize(
    "objects", ["", "a", "[1]", "kind: edge-config\n", "kind: nonsense\nmetadata: {name: a}\nspec: {}\n", "{"]
)
def test_objects_that_are_refused_leave_no_policy(seat: Seat, objects: str) -> None:
    text = f"{layer('clean', 'info')}---\n{objects}"
    if not objects:
        text = objects
    done = seat("apply", "-f", write(seat, text), "--rollout", "policy.yaml")
    assert done.code != 0 or not objects, done.out
    assert level(seat, "clean") == ""
    assert seat("get", "rollout-policy/tenant.clean:edge.config", "--tenant", "clean").code == 4


def test_a_rollout_is_explained(seat: Seat) -> None:
    assert seat("explain", "rollout/nobody").code == 4
    assert seat("explain", "fleetwide", "rollout", "nobody").code == 4
    assert "why a rollout waits" in seat("explain", "--kinds").out


def test_a_lasting_policy_at_the_very_scope_counts_and_nothing_is_changed(seat: Seat) -> None:
    assert seat("apply", "-f", write(seat, layer("lasting", "info"))).code == 0
    lasting = {
        "kind": "rollout-policy",
        "metadata": {"name": "tenant.lasting:edge.config", "scope": "/tenants/lasting"},
        "spec": {"subject": "edge.config", "at": "tenant/lasting", "policy": {"waves": ["1", "rest"]}},
    }
    assert seat("apply", "-f", write(seat, yaml.safe_dump(lasting))).code == 0
    refused = seat("apply", "-f", write(seat, layer("lasting", "debug")), "--rollout", "policy.yaml")
    assert refused.code != 0
    assert "lasting policy" in refused.err
    assert level(seat, "lasting") == "info"


def test_a_tenants_token_rolls_nothing_out_elsewhere(seat: Seat, house: tuple[ServerProcess, Path]) -> None:
    server, data = house
    assert seat("apply", "-f", write(seat, layer("theirs", "info"))).code == 0
    roles = ("--role", "edge.admin", "--role", "operator", "--role", "fleet.operator")
    made = execute("tokens", "create", "mallory", *roles, "--tenant", "mallory", "--data-dir", str(data))
    assert made.code == 0, made.err
    (seat.folder / "token").write_text(made.out)
    away = ("--server", server.web, "--token-file", "token")
    mallory = Seat(folder=seat.folder, variables={}, server=server, is_owner=False)
    for texts in (
        (layer("theirs", "debug"),),
        (layer("mallory", "debug"), layer("theirs", "debug")),  # their own beside it
    ):
        refused = mallory("apply", "-f", write(seat, *texts), "--rollout", "policy.yaml", *away)
        assert refused.code not in (0, 2), refused
        assert level(seat, "theirs") == "info"
        assert level(seat, "mallory") == ""
    own = mallory("apply", "-f", write(seat, layer("mallory", "debug")), "--rollout", "policy.yaml", *away)
    assert own.code == 0, own.err


class Answers:
    """A server as `apply` sees it: plans one after the other, and who holds what."""

    def __init__(self, *plans: Sequence[str], hidden: int = 0) -> None:
        self._plans = list(plans)
        self._hidden = hidden
        self.forgotten = 0

    def plan(self, objects: Sequence[Mapping[str, Any]]) -> Plan:
        steps = [
            {"operation": "change", "kind": "edge-config", "scope": "/tenants/a", "name": name}
            for name in self._plans.pop(0)
        ]
        steps += [
            {"operation": "create", "kind": one["kind"], "scope": "/", "name": "p"}
            for one in objects
            if one["kind"] == "rollout-policy"
        ]
        return Plan.of({"id": "1", "steps": steps})

    def forget_plan(self, _plan: Plan) -> None:
        self.forgotten += 1

    def call(self, _request: object) -> dict[str, Any]:
        held = [{"subject": "edge.config", "scope": "tenant/a"}]
        return {"holders": held, "hidden": self._hidden}


def test_what_somebody_else_changes_meanwhile_is_not_changed_without_its_rollout() -> None:
    def made(answers: Answers) -> Plan:
        return planned_as_rollout(answers, answers.plan, [], {"waves": ["rest"]})  # type: ignore[arg-type]

    calm = Answers(["tenant"], ["tenant"])
    assert len(made(calm).steps) == 2
    assert calm.forgotten == 1
    disturbed = Answers(["tenant"], ["tenant", "global"])
    with pytest.raises(Conflict):
        made(disturbed)
    assert disturbed.forgotten == 2
    with pytest.raises(PermissionDenied):
        made(Answers(["tenant"], ["tenant"], hidden=1))
