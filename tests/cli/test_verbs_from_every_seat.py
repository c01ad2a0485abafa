"""Verbs of every group on one server with all domains: at the owner's socket, and over TLS from elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.shared.seats import SOCKET, TLS, Seat, seated
from support.shared.server_process import ServerProcess, running_server

from fleetplane.cli.exits import Exit

pytestmark = [pytest.mark.timeout(400)]  # a server with every domain starts in the first
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "instances"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    """A server with every domain, a group of no instances, a board that never joined and a GPU."""
    data = tmp_path_factory.mktemp("seats") / "d"
    config = data / "objects" / "shard" / "local" / "config.jsonc"
    data.mkdir(mode=0o700)
    config.parent.mkdir(parents=True)
    config.write_text((EXAMPLES / "local.jsonc").read_text().replace('"size": 2', '"size": 0'))
    settings = ("listeners.web.addresses=0.0.0.0:0", "instances.advertise=listeners")
    with running_server(data, *(word for one in settings for word in ("--set", one))) as server:
        here = Seat(folder=data, variables={"FLEETPLANE_DATA_DIR": str(data)}, server=server, is_owner=True)
        for words in (
            ("gpus", "register", "gpu-a", "--uuid", "GPU-A", "--address", f"{data}/d.sock"),
            ("boards", "add", "attic", "--address", "127.0.0.1"),
        ):
            done = here(*words)
            assert done.code == 0, (words, done.err)
        yield server, data


@pytest.fixture(scope="module", params=[SOCKET, TLS])
def seat(
    request: pytest.FixtureRequest,
    house: tuple[ServerProcess, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Seat:
    server, data = house
    return seated(request.param, server, data, tmp_path_factory.mktemp(f"at-{request.param}"), ("owner",))


def test_objects_are_explained_by_kind_and_name(seat: Seat) -> None:
    found = seat("explain", "gpu/gpu-a")
    assert found.code == 0, found.err
    assert "NO_CONDITIONS" in found.out
    told = json.loads(seat("explain", "board", "attic", "-o", "json").out)
    assert told["object"]["name"] == "attic"
    assert seat("explain", "gpu/none").code == Exit.NOT_FOUND
    assert seat("explain", "edge-config/x").code == Exit.USAGE
    unknown = seat("explain", "gpuz/gpu-a")
    assert unknown.code == Exit.NOT_FOUND
    assert seat.is_owner or "did you mean gpu" in unknown.err


def test_tokens_are_made_listed_and_revoked(seat: Seat) -> None:
    name = f"made-{seat.folder.name}"
    made = seat("tokens", "create", name, "--role", "gpus.viewer", "--tenant", "acme", "--expires", "1h")
    assert made.code == 0, made.err
    assert made.out.startswith("fp_")
    found = [one for one in json.loads(seat("tokens", "list", "-o", "json").out) if one["name"] == name]
    assert [(one["roles"], one["tenant"]) for one in found] == [(["gpus.viewer"], "acme")]
    again = seat("tokens", "create", name, "--role", "gpus.viewer", "--expires", "1h")
    assert again.code == Exit.CONFLICT
    assert seat("tokens", "create", "more", "--role", "no.such", "--expires", "1h").code == Exit.USAGE
    assert seat("tokens", "revoke", name).code == 0
    assert seat("tokens", "revoke", name).code == Exit.NOT_FOUND
    if not seat.is_owner:
        endless = seat("tokens", "create", "endless", "--role", "gpus.viewer")
        assert (endless.code, "--expires" in endless.err) == (Exit.USAGE, True)


def test_the_audit_log_is_listed_oldest_first_and_followed(seat: Seat) -> None:
    name = f"audited-{seat.folder.name}"
    assert seat("tokens", "create", name, "--role", "gpus.viewer", "--expires", "1h").code == 0
    listed = seat("audit", "list", "-n", "3")
    assert listed.code == 0, listed.err
    numbers = [int(line.split()[0]) for line in listed.out.splitlines()]
    assert numbers == sorted(numbers)
    assert len(numbers) == 3
    assert seat("audit", "list", "-n", "0").out == ""
    lines = seat.first_lines(
        2, "audit", "list", "-f", "-n", "1", "-o", "json",
        once_there=lambda: seat("tokens", "revoke", name),
    )  # fmt: skip
    before, after = (json.loads(line) for line in lines)
    assert after["kind"] == "audit-entry"
    assert int(after["metadata"]["name"]) > int(before["metadata"]["name"])


def test_commands_run_by_kind_and_selector(seat: Seat) -> None:
    away = seat("run", "--on", "board/attic", "--", "uname")
    assert (away.code, away.out) == (Exit.UNAVAILABLE, "")
    assert seat("run", "--on", "boards where role=none", "--", "uname").code == Exit.UNAVAILABLE
    few = seat("run", "--on", "boards", "--require-min", "1", "--", "uname")
    assert few.code == Exit.CONDITION_NOT_MET, few.err
    assert seat("run", "--on", "edge-nodes where os=linux", "--", "uname").code == Exit.UNAVAILABLE
    assert seat("run", "--on", "edge-nodes", "--require-min", "1", "--", "uname").code == 3
    assert seat("run", "--on", "edge-group/none", "--", "uname").code == Exit.NOT_FOUND
    wrong = seat("run", "--on", "gpus", "--", "uname")
    assert (wrong.code, "boards, edge-nodes" in wrong.err) == (Exit.USAGE, True)


def test_logs_are_read_of_what_has_some(seat: Seat) -> None:
    assert seat("logs", "group/workers").code == 0
    away = seat("logs", "board/attic")
    assert (away.code, away.out) == (Exit.UNAVAILABLE, ""), away.err
    assert seat("logs", "board/none").code == Exit.NOT_FOUND
    assert seat("logs", "board/attic", "--level", "loud").code == Exit.USAGE
    none = seat("logs", "gpu/gpu-a")
    assert (none.code, "board, group, instance, proxy-agent, run" in none.err) == (Exit.USAGE, True)


def test_machines_and_gpus_are_shown_with_their_state(seat: Seat) -> None:
    shown = seat("top")
    assert shown.code == 0, shown.err
    assert re.search(r"^NAME +STATE +SEEN$", shown.out, re.MULTILINE)
    assert re.search(r"^board/attic +\w+", shown.out, re.MULTILINE)
    assert re.search(r"^gpu/gpu-a +unknown", shown.out, re.MULTILINE)
    assert "gpu/" not in seat("top", "boards", "--once").out
    assert seat("top", "tokens").code == Exit.USAGE
    told = json.loads(seat("top", "g", "-o", "json").out)["items"]
    assert [one["kind"] for one in told] == ["gpu"]
    assert told[0]["figures"] in ({}, {"unhealthyConditions": 0.0})  # once a minute they are taken down


def test_instances_are_operated_and_administered(seat: Seat) -> None:
    groups = json.loads(seat("instances", "groups", "-o", "json").out)
    assert [(one["key"], one["size"]) for one in groups] == [("workers", 0)]
    scaled = seat("instances", "scale", "workers", "0", "--wait")
    assert (scaled.code, scaled.out.splitlines()[-1]) == (0, "workers has 0 instances"), scaled.err
    assert seat("instances", "scale", "none", "1").code == Exit.NOT_FOUND
    assert seat("instances", "list").code == 0
    assert seat("instances", "status", "wkr06gybkf995y5z3ys2dr1kk1pac").code == Exit.NOT_FOUND
    assert seat("instances", "drain", "none").code == Exit.NOT_FOUND
    assert "awake" in seat("instances", "tenant").out
    assert seat("instances", "wake").out == "default was awake already\n"
    changed = seat("instances", "set", "workers", "--var", "Colour=green")
    assert changed.code == 0, changed.err

    frozen = seat("instances", "freeze", "--tenant", "default", "--reason", "a look around")
    assert frozen.code == 0, frozen.err
    assert "a look around" in seat("instances", "freezes").out
    assert seat("instances", "unfreeze", "--tenant", "default").code == 0
    assert seat("instances", "unfreeze", "--tenant", "default").code == Exit.NOT_FOUND

    assert seat("instances", "nonce").out.count(".") == 2
    folder = seat.folder / "identity"
    made = seat("instances", "operator-identity", "--output-dir", str(folder))
    assert made.code == 0, made.err
    assert (folder / "identity.crt").read_bytes().startswith(b"-----BEGIN CERTIFICATE")
    (seat.folder / "secret").write_text("hush")
    assert seat("instances", "secret", "put", "word", "secret", "--tenant", "acme").code == 0
    assert seat("instances", "ca", "status").code == 0
    assert seat("instances", "config", "refresh").out.startswith("unchanged")
    exported = seat("instances", "ca", "export", "keys.pem")
    assert exported.code == (0 if seat.is_owner else Exit.USAGE), exported.err
    assert seat("instances", "watch", "groups", "--for", "100ms").code == 0


@pytest.mark.parametrize(
    ("role", "tenant", "words", "code"),
    [
        ("viewer", "", ("groups",), 0),
        ("viewer", "", ("scale", "workers", "0"), Exit.DENIED),
        ("instances.viewer", "default", ("groups",), 0),
        ("instances.viewer", "default", ("list",), 0),
        ("instances.viewer", "default", ("list", "--tenant", "acme"), Exit.DENIED),
        ("instances.viewer", "acme", ("groups",), Exit.DENIED),
        ("operator", "default", ("scale", "workers", "0"), 0),
        ("operator", "default", ("freeze", "--reason", "x"), Exit.DENIED),
        ("operator", "", ("secret", "put", "word", "token"), Exit.DENIED),
        ("operator", "", ("operator-identity", "--output-dir", "never"), Exit.DENIED),
        ("admin", "default", ("ca", "status"), Exit.DENIED),
        ("admin", "acme", ("nonce",), Exit.DENIED),
    ],
)
def test_roles_and_tenants_bound_what_is_done_to_instances_from_elsewhere(
    house: tuple[ServerProcess, Path],
    tmp_path: Path,
    role: str,
    tenant: str,
    words: tuple[str, ...],
    code: int,
) -> None:
    server, data = house
    here = Seat(folder=tmp_path, variables={"FLEETPLANE_DATA_DIR": str(data)}, server=server, is_owner=True)
    name = f"{tmp_path.name}-bounded"
    made = here("tokens", "create", name, "--role", role, *(("--tenant", tenant) if tenant else ()))
    assert made.code == 0, made.err
    (tmp_path / "token").write_text(made.out)
    away = Seat(folder=tmp_path, variables={}, server=server, is_owner=False)
    (tmp_path / "ca.pem").write_text(here("instances", "ca", "show").out)
    url = f"https://localhost:{server.web.rpartition(':')[2]}"
    done = away("instances", *words, "--server", url, "--token-file", "token", "--ca", "ca.pem")
    assert done.code == code, done.err


RUN_ID = "00000000-0000-4000-8000-000000000000"
EXITS: list[tuple[Exit, str]] = [
    (Exit.OK, "get gpus,edge-nodes,boards"),
    (Exit.OK, "edge ls"),
    (Exit.OK, "edge group ls"),
    (Exit.OK, "edge runs"),
    (Exit.OK, "edge tokens"),
    (Exit.OK, "edge preview --target all"),
    (Exit.OK, "boards list"),
    (Exit.OK, "boards cluster list"),
    (Exit.OK, "boards runs"),
    (Exit.OK, "boards preview --target all"),
    (Exit.OK, "rollout subjects"),
    (Exit.OK, "freezes"),
    (Exit.OK, "can-i get gpus"),
    (Exit.USAGE, "get gpus -o xml"),
    (Exit.USAGE, "delete gpus"),
    (Exit.USAGE, "freeze"),
    (Exit.USAGE, "tokens create nameless"),
    (Exit.USAGE, "edge run --target all --args nonsense"),
    (Exit.USAGE, "edge run --target labels=( -- true"),
    (Exit.USAGE, "boards run --target all --target @attic -- true"),
    (Exit.USAGE, "boards gpio add attic:17 --direction sideways"),
    (Exit.USAGE, "boards metrics --series cpu_usage"),
    (Exit.USAGE, "instances scale workers many"),
    (Exit.USAGE, "instances set workers"),
    (Exit.USAGE, "rollout start no.such /tenants/default"),
    (Exit.USAGE, "run --on everything -- true"),
    (Exit.CONDITION_NOT_MET, "edge run --target all --require-min 1 -- true"),
    (Exit.CONDITION_NOT_MET, "boards run --target all --require-min 1 -- true"),
    (Exit.CONDITION_NOT_MET, "diff -f wanted.yaml"),
    (Exit.NOT_FOUND, "get gpu/none"),
    (Exit.NOT_FOUND, "describe board/none"),
    (Exit.NOT_FOUND, "delete edge-config/none --tenant none"),
    (Exit.NOT_FOUND, "edit edge-config/none --tenant none"),
    (Exit.NOT_FOUND, "unfreeze --domain edge --scope tenant/none"),
    (Exit.NOT_FOUND, "edge drain none"),
    (Exit.NOT_FOUND, "edge run --target @none -- true"),
    (Exit.NOT_FOUND, f"edge runs {RUN_ID}"),
    (Exit.NOT_FOUND, f"edge cancel {RUN_ID}"),
    (Exit.NOT_FOUND, "edge group rm none"),
    (Exit.NOT_FOUND, f"edge withdraw {RUN_ID}"),
    (Exit.NOT_FOUND, "boards show none"),
    (Exit.NOT_FOUND, "boards delete none --yes"),
    (Exit.NOT_FOUND, "boards logs none"),
    (Exit.NOT_FOUND, "boards metrics none"),
    (Exit.NOT_FOUND, "boards gpio read none:17"),
    (Exit.NOT_FOUND, "boards runs none"),
    (Exit.NOT_FOUND, "boards cluster show none"),
    (Exit.NOT_FOUND, "instances delete none"),
    (Exit.NOT_FOUND, "rollout status none"),
    (Exit.CONFLICT, "boards add attic --address 127.0.0.1"),
    (Exit.CONFLICT, "boards cluster create attic-twice"),
    (Exit.CONFLICT, "edge group create twice"),
    (Exit.PARTIAL, "delete edge-config/none edge-config/neither --tenant none"),
    (Exit.UNAVAILABLE, "edge run --target all -- true"),
    (Exit.UNAVAILABLE, "boards run --target all -- true"),
    (Exit.UNAVAILABLE, "boards logs attic"),
    (Exit.TIMEOUT, "get gpu/gpu-a --wait-for Ready --wait-timeout 10ms"),
]
CONFIG = """
kind: edge-config
metadata: {name: tenant, scope: /tenants/compared}
spec: {config: {log: {level: info}}}
"""


def test_every_verb_ends_as_the_one_table_says(seat: Seat) -> None:
    """All of it in one test: it is the table that is looked at."""
    (seat.folder / "wanted.yaml").write_text(CONFIG)
    for words in ("boards cluster create attic-twice", "edge group create twice"):
        assert seat(*words.split()).code in (0, Exit.CONFLICT)
    found = [(code, text, seat(*text.split())) for code, text in EXITS]
    wrong = [
        f"{text}: {done.code} and not {int(code)}: {done.err[-200:]}"
        for code, text, done in found
        if done.code != code
    ]
    assert wrong == []
    noisy = [text for code, text, done in found if code not in (Exit.OK, Exit.CONDITION_NOT_MET) and done.out]
    assert noisy == [], "what went wrong is told on stderr"


GROUPS = (
    "get gpus",
    "describe board/attic",
    "explain gpu/gpu-a",
    "logs board/attic",
    "top",
    "audit list",
    "tokens list",
    "freezes",
    "whoami",
    "export",
    "edge ls",
    "boards list",
    "instances groups",
    "instances list",
    "rollout status",
    "run --on boards -- true",
    "proxies agents --workspace w",
)


def test_strangers_are_denied_and_a_server_that_is_away_is_unavailable_in_every_group(
    house: tuple[ServerProcess, Path], tmp_path: Path
) -> None:
    server, data = house
    owner = Seat(folder=tmp_path, variables={"FLEETPLANE_DATA_DIR": str(data)}, server=server, is_owner=True)
    (tmp_path / "ca.pem").write_text(owner("instances", "ca", "show").out)
    (tmp_path / "token").write_text("fp_not-one-that-anybody-made")
    nobody = Seat(folder=tmp_path, variables={}, server=server, is_owner=False)
    there = f"https://localhost:{server.web.rpartition(':')[2]}"
    for url, code in ((there, Exit.DENIED), ("https://localhost:1", Exit.UNAVAILABLE)):
        where = ("--server", url, "--token-file", "token", "--ca", "ca.pem")
        for text in GROUPS:
            verb, dashes, command = text.partition(" -- ")
            done = nobody(*verb.split(), *where, *(("--", command) if dashes else ()))
            assert (done.code, done.out) == (code, ""), (text, done.err)
            assert done.err.startswith("fleetplane: ")
            assert done.err.count("\n") == 1
