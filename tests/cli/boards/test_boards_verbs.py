"""`fleetplane boards` as processes, against a real server and a real agent with simulated pins."""

from __future__ import annotations

import json
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from support.boards.boards_processes import BoardProcess, Place, boards_place, config_of
from support.shared.cli_runner import Outcome, execute, spawn

from fleetplane.cli.exits import Exit

DEADLINE_SECONDS = 60.0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    installer = f"boards.k3s_installers=https://get.k3s.io#sha256={'ab' * 32}"
    settings = ("--set", "boards.heartbeat_seconds=5", "--set", installer)
    with boards_place(tmp_path_factory.mktemp("boards"), *settings) as made:
        yield made


@pytest.fixture(scope="module")
def attic(place: Place) -> Iterator[BoardProcess]:
    with place.board("attic", config=config_of(place.folder)) as made:
        yield made


def boards(place: Place, *arguments: str) -> Outcome:
    """As the owner of the server."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return execute("boards", *arguments[:end], "--data-dir", str(place.data), *arguments[end:])


def told(place: Place, *arguments: str) -> Any:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    done = boards(place, *arguments[:end], "-o", "json", *arguments[end:])
    assert done.code == Exit.OK, done.err
    return json.loads(done.out)


# Looking.


def test_boards_are_listed_and_shown_for_people_and_programs(place: Place, attic: BoardProcess) -> None:
    table = boards(place, "list")
    assert table.out.splitlines()[0].split() == [
        "ID",
        "NAME",
        "STATUS",
        "ROLE",
        "CLUSTER",
        "ADDRESS",
        "MODEL",
        "SEEN",
    ]
    assert "attic" in table.out
    (listed,) = [one for one in told(place, "list", "--status", "ready") if one["name"] == "attic"]
    assert listed["id"] == attic.number
    shown = boards(place, "show", "attic", "-o", "yaml")
    assert yaml.safe_load(shown.out)["id"] == attic.number
    assert "certificate until" in boards(place, "show", str(attic.number)).out


def test_what_is_not_there_is_four_and_what_is_misspelt_is_two(place: Place) -> None:
    missing = boards(place, "show", "cellar")
    assert (missing.code, missing.out) == (Exit.NOT_FOUND, "")
    assert "no board is named 'cellar'" in missing.err
    assert boards(place, "list", "--status", "splendid").code == Exit.USAGE
    assert "Did you mean 'gpio'?" in boards(place, "gpoi").err


def test_a_server_that_is_not_there_is_eight(tmp_path: Path) -> None:
    done = execute("boards", "list", "--data-dir", str(tmp_path))
    assert done.code == Exit.UNAVAILABLE
    gone = execute("boards", "list", "--server", "http://127.0.0.1:1", "--token", "x")
    assert gone.code == Exit.UNAVAILABLE


def test_a_token_from_elsewhere_may_what_its_role_says(place: Place) -> None:
    server = ("--server", place.server.web, "--token", place.role("boards.viewer"))
    assert execute("boards", "list", *server).code == Exit.OK
    denied = execute("boards", "cluster", "create", "x", *server)
    assert denied.code == Exit.DENIED
    assert "may not boards.operate" in denied.err


# Pins.


def test_a_pin_is_driven_by_its_place(place: Place, attic: BoardProcess) -> None:
    assert boards(place, "gpio", "write", "attic:17", "high").out == "1\n"
    assert boards(place, "gpio", "read", "attic:17").out == "1\n"
    (device,) = [one for one in told(place, "gpio", "list", "attic") if one["pin_number"] == 17]
    assert (device["value"], device["direction"]) == (1, "output")
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not told(place, "gpio", "readings", "attic:17"):  # nobody waits until they are kept
        assert time.monotonic() < deadline

    protected = boards(place, "gpio", "write", "attic:2", "high")
    assert protected.code == Exit.DENIED
    assert "protected" in protected.err
    assert boards(place, "gpio", "write", "attic:17", "purple").code == Exit.USAGE
    assert boards(place, "gpio", "remove", "attic:17").code == Exit.OK
    assert boards(place, "gpio", "readings", "attic:17").code == Exit.NOT_FOUND


def test_a_reserved_pin_is_a_conflict_for_others(place: Place, attic: BoardProcess) -> None:
    assert boards(place, "gpio", "reserve", "attic:27", "--for", "1m", "--as", "panel").code == Exit.OK
    refused = boards(place, "gpio", "write", "attic:27", "on", "--as", "other")
    assert refused.code == Exit.CONFLICT
    assert "reserved by operator/local#panel" in refused.err
    assert boards(place, "gpio", "write", "attic:27", "on", "--as", "panel").out == "1\n"
    assert boards(place, "gpio", "release", "attic:27", "--as", "panel").code == Exit.OK


# Programs.


def test_a_program_prints_here_what_it_prints_there(place: Place, attic: BoardProcess) -> None:
    done = boards(place, "exec", "--board", "attic", "--", "echo", "hello; not a shell")
    assert (done.code, done.out) == (Exit.OK, "hello; not a shell\n")
    (outcome,) = told(place, "exec", "--board", "attic", "--", "echo", "x")
    assert (outcome["state"], outcome["exit_code"], outcome["stdout"]) == ("ok", 0, "x\n")


def test_a_run_is_previewed_watched_listed_and_shown(place: Place, attic: BoardProcess) -> None:
    found = told(place, "preview", "--target", "name=attic")
    assert found == {"resolved": [str(attic.number)], "skipped": []}
    assert boards(place, "preview", "--target", "@nobody").out.split()[-2:] == ["no:", "NotFound"]
    many = ("--target", "name in (attic,cellar)", "--mode", "rolling=1")
    done = boards(place, "run", *many, "--", "echo", "hi; ls")
    assert done.code == Exit.OK, done.err
    assert done.out.splitlines() == [f"{attic.number}  hi; ls", f"{attic.number}  ok exit=0"]
    assert done.err.startswith("complete: ok=1")
    newest = told(place, "runs")[0]
    assert (newest["command"], newest["args"], newest["state"]) == ("echo", ["hi; ls"], "complete")
    shown = told(place, "runs", newest["id"])
    assert [(one["outcome"], one["stdout"]) for one in shown["results"]] == [("ok", "hi; ls\n")]


def test_a_run_is_cancelled_and_ends_with_a_code_of_its_own(place: Place, attic: BoardProcess) -> None:
    started = boards(place, "run", "--target", "@attic", "--detach", "--", "sleep", "120")
    assert started.code == Exit.OK, started.err
    run_id = started.out.strip()
    told_so = boards(place, "cancel", run_id)
    assert (told_so.code, told_so.err) == (Exit.OK, "1 cancelled\n")
    assert boards(place, "cancel", run_id).err == "it had ended already\n"
    refused = boards(place, "run", "--target", "@attic", "--", "rm", "-rf", "/")
    assert refused.code == Exit.FAILURE
    assert "not on this node's allow list" in refused.out
    few = boards(place, "run", "--target", "all", "--require-min", "99", "--", "echo", "x")
    assert (few.code, "99 are required" in few.err) == (Exit.CONDITION_NOT_MET, True)
    assert boards(place, "run", "--target", "@nobody", "--", "echo", "x").code == Exit.UNAVAILABLE
    assert boards(place, "run", "--target", "site in (", "--", "echo", "x").code == Exit.USAGE
    assert boards(place, "run", "--target", "all", "--target", "@attic", "--", "echo", "x").code == Exit.USAGE


def test_how_a_command_ends_is_its_exit_code(place: Place, attic: BoardProcess) -> None:
    refused = boards(place, "exec", "--board", "attic", "--", "rm", "-rf", "/")
    assert refused.code == Exit.FAILURE
    assert "not on this node's allow list" in refused.err
    slow = boards(place, "exec", "--board", "attic", "--run-for", "1s", "--", "sleep", "60")
    assert slow.code == Exit.TIMEOUT
    place.did("POST", "/nodes", {"name": "nowhere"})
    try:
        assert boards(place, "exec", "--board", "nowhere", "--", "echo", "x").code == Exit.UNAVAILABLE
        some = boards(place, "exec", "--all", "--", "echo", "x")
        assert some.code == Exit.PARTIAL
        assert f"[{attic.number}] x" in some.out
    finally:
        assert boards(place, "delete", "nowhere", "--yes").code == Exit.OK
    assert boards(place, "exec", "--", "echo", "x").code == Exit.USAGE, "nobody was meant"


# Logs and figures.


def test_logs_are_read_and_followed(place: Place, attic: BoardProcess) -> None:
    log = place.folder / "app.log"
    log.write_text("one\ntwo\n")
    done = boards(place, "logs", "attic", "--source", "file:app", "-n", "1")
    assert (done.code, [line.split()[-1] for line in done.out.splitlines()]) == (Exit.OK, ["two"]), done
    following = spawn(
        "boards", "logs", "attic", "-f", "--source", "file:app", "-o", "json", "--data-dir", str(place.data)
    )
    try:
        heard = _until(following, "three", log)
        assert heard["source"] == "file:app"
    finally:
        following.kill()
        following.wait(DEADLINE_SECONDS)
        assert following.stdout is not None
        following.stdout.close()
        assert following.stderr is not None
        following.stderr.close()


def _until(following: subprocess.Popen[str], word: str, log: Path) -> dict[str, Any]:
    """The entry that is written while somebody follows."""
    assert following.stdout is not None
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        with log.open("a") as file:
            file.write(f"{word}\n")
        if select.select([following.stdout], [], [], 0.2)[0]:
            heard = json.loads(following.stdout.readline())
            if heard["message"] == word:
                return dict(heard)
    raise AssertionError(f"nothing was heard: {following.poll()}")


def test_a_log_that_is_not_there_is_a_usage_error(place: Place, attic: BoardProcess) -> None:
    done = boards(place, "logs", "attic", "--source", "file:passwd")
    assert done.code == Exit.USAGE
    assert "there is no source" in done.err


def test_figures_are_told_now_and_of_the_fleet(place: Place, attic: BoardProcess) -> None:
    assert "memory_usage" in boards(place, "metrics", "attic").out
    assert told(place, "metrics", "attic")["memory"]["total_bytes"] > 0
    assert str(attic.number) in boards(place, "metrics").out
    assert told(place, "metrics", "attic", "--series", "memory_usage")["series"] == "memory_usage"
    assert boards(place, "metrics", "--series", "cpu_usage").code == Exit.USAGE


# Provisioning.


@pytest.fixture(scope="module")
def written_down(place: Place) -> None:
    """Two boards that are nothing but an address, a cluster, and a way to log in."""
    for name in ("one", "two"):
        place.did("POST", "/nodes", {"name": name, "ip_address": "127.0.0.1"})
    assert boards(place, "cluster", "create", "lab").code == Exit.OK
    (place.folder / "password").write_text("secret\n")
    (place.folder / "known_hosts").write_text("127.0.0.1 ssh-ed25519 AAAA\n")
    done = boards(
        place,
        "credential",
        "set",
        "--port",
        "1",
        "--password-file",
        str(place.folder / "password"),
        "--known-hosts",
        str(place.folder / "known_hosts"),
    )
    assert done.code == Exit.OK, done.err
    assert told(place, "credential", "list") == [{"name": "default"}]


@pytest.mark.usefixtures("written_down")
def test_a_rehearsal_prints_the_very_commands(place: Place) -> None:
    before = told(place, "operation", "list")
    done = boards(
        place,
        "provision",
        "one",
        "--role",
        "master",
        "--cluster",
        "lab",
        "--worker",
        "two",
        "--version",
        "v1.31.4+k3s1",
        "--k3s",
        "tls_san=lab.example",
        "--dry-run",
    )
    assert done.code == Exit.OK, done.err
    assert "# board" in done.out
    assert "INSTALL_K3S_VERSION=v1.31.4+k3s1" in done.out
    assert "--tls-san=lab.example" in done.out
    assert "systemctl enable --now k3s-agent" in done.out, "the worker's part too"
    assert "Nothing was done" in done.err
    assert told(place, "operation", "list") == before


@pytest.mark.usefixtures("written_down")
def test_what_fails_says_where_and_how_to_go_on(place: Place) -> None:
    done = boards(place, "provision", "one", "--role", "master", "--cluster", "lab", "--request-id", "r1")
    assert done.code == Exit.FAILURE
    assert "-- preflight" in done.out
    assert "cannot be reached over SSH" in done.err
    (operation,) = told(place, "operation", "list", "--board", "one")
    assert f"boards operation resume {operation['id']}" in done.err
    again = boards(place, "operation", "resume", operation["id"])
    assert again.code == Exit.FAILURE
    shown = told(place, "operation", "show", operation["id"])
    assert (shown["state"], shown["request_id"]) == ("failed", "r1")
    assert boards(place, "operation", "cancel", operation["id"]).code == Exit.OK
    assert boards(place, "operation", "log", "none").code == Exit.NOT_FOUND
    assert boards(place, "cluster", "kubeconfig", "lab").code == Exit.NOT_FOUND


@pytest.mark.usefixtures("written_down")
@pytest.mark.parametrize(
    "arguments",
    [("--check", "--undo"), ("--k3s", "nonsense"), ("--worker", "two"), ("--k3s", "colour=red", "--dry-run")],
)
def test_orders_that_make_no_sense_are_usage_errors(place: Place, arguments: tuple[str, ...]) -> None:
    assert boards(place, "provision", "one", *arguments).code == Exit.USAGE


# Revocation.


def test_an_operators_certificate_is_made_renewed_and_its_revocation_seen_to_arrive(
    place: Place, attic: BoardProcess
) -> None:
    folder = place.folder / "ann"
    made = boards(place, "certificate", "create", "ann", str(folder), "--role", "operator")
    assert made.code == Exit.OK, made.err
    assert (folder / "identity.key").stat().st_mode & 0o077 == 0
    assert (
        boards(place, "certificate", "create", "ann", str(folder), "--role", "viewer").code == Exit.CONFLICT
    )
    first = (folder / "identity.crt").read_bytes()
    renew = ("boards", "certificate", "renew", str(folder), "--connect", place.address)
    assert execute(*renew).code == Exit.OK
    assert (folder / "identity.crt").read_bytes() == first, "it is not due yet"
    assert execute(*renew, "--force").code == Exit.OK
    assert (folder / "identity.crt").read_bytes() != first

    issued = place.did("GET", "/ca/certificates?limit=1000")["certificates"]
    number = next(one["id"] for one in issued if one["common_name"] == "ann")
    place.did("POST", f"/ca/certificates/{number}/revoke", {"reason": "gone"})
    seen = execute("revocations", "--wait", "60s", "-o", "json", "--data-dir", str(place.data))
    assert seen.code == Exit.OK, seen.err
    uptake = json.loads(seen.out)
    (agent,) = [one for one in uptake["agents"] if one["agent"] == f"board/{attic.number}"]
    assert (agent["state"], agent["number"]) == ("current", uptake["number"])
    assert execute(*renew, "--force").code == Exit.DENIED


# Letting in.


def test_clusters_are_made_filled_and_forgotten(place: Place, attic: BoardProcess) -> None:
    number = boards(place, "cluster", "create", "home", "--description", "d").out.strip()
    assert boards(place, "cluster", "create", "home").code == Exit.CONFLICT
    assert boards(place, "cluster", "add", "home", "attic").code == Exit.OK
    assert [one["name"] for one in told(place, "cluster", "show", "home")["nodes"]] == ["attic"]
    assert [one["name"] for one in told(place, "list", "--cluster", "home")] == ["attic"]
    assert boards(place, "cluster", "delete", "home").code == Exit.CONFLICT
    assert boards(place, "cluster", "remove", number, "attic").code == Exit.OK
    assert boards(place, "cluster", "delete", number).code == Exit.OK
    assert "home" not in boards(place, "cluster", "list").out


def test_join_tokens_are_shown_once(place: Place) -> None:
    made = boards(place, "join-token", "create", "--name", "cellar", "--ttl", "10m")
    assert made.out.startswith("fpb_")
    assert "agent board join" in made.err
    (listed,) = [one for one in told(place, "join-token", "list") if one["name"] == "cellar"]
    assert "token" not in listed
    assert boards(place, "join-token", "revoke", listed["id"]).code == Exit.OK
    assert boards(place, "join-token", "revoke", listed["id"]).code == Exit.NOT_FOUND
    assert boards(place, "join-token", "create", "--controller").code == Exit.USAGE
    assert boards(place, "approve").err.startswith("nobody asks")
    assert boards(place, "approve", "none").code == Exit.NOT_FOUND
    assert boards(place, "approve", "--reject").code == Exit.USAGE


def test_people_are_made_and_log_in(place: Place) -> None:
    password = boards(place, "user", "add", "ann", "--role", "operator").out.strip()
    assert len(password) == 24
    body = {"username": "ann", "password": password}
    with httpx.Client(base_url=f"{place.server.web}/api/v1", trust_env=False) as http:
        answer = http.post("/auth/login", json=body)
        assert (answer.status_code, answer.json()["user"]["role"]) == (200, "operator")
        assert boards(place, "user", "set", "ann", "--inactive").code == Exit.OK
        assert http.post("/auth/login", json=body).status_code == 403
    assert [one["username"] for one in told(place, "user", "list")] == ["ann"]
    assert boards(place, "user", "passwd", "ann").code == Exit.OK
    assert boards(place, "user", "set", "ann").code == Exit.USAGE
    short = place.folder / "short"
    short.write_text("short")
    weak = boards(place, "user", "add", "bob", "--password-file", str(short))
    assert weak.code == Exit.USAGE
    assert "at least 12 characters" in weak.err
    assert boards(place, "user", "delete", "ann").code == Exit.OK
    assert boards(place, "user", "delete", "ann").code == Exit.NOT_FOUND
