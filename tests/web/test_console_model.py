"""What the console makes of events, filters and schemas, run by a real JavaScript engine; and its types."""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest

import fleetplane.web
from fleetplane.cli.main import fleetplane as cli

FILES = Path(fleetplane.web.__file__).parent / "files"
TSC = Path(__file__).parents[2] / ".make" / "clients" / "node_modules" / ".bin" / "tsc"
SECONDS = 240.0
NODE = shutil.which("node")
MODULES = {
    "m": "model.mjs",
    "y": "yaml.mjs",
    "charts": "chart.mjs",
    "completion": "completion.mjs",
    "first": "first.mjs",
    "refusals": "refusals.mjs",
    "schema": "schema_form.mjs",
    "plots": "plot.mjs",
    "audit": "pages/audit.mjs",
    "history": "history.mjs",
    "hosts": "pages/host_editor.mjs",
    "lines": "json_lines.mjs",
    "logs": "logview.mjs",
    "observed": "observed.mjs",
    "overview": "overview.mjs",
    "programs": "pages/board_programs.mjs",
    "provisioning": "pages/board_provisioning.mjs",
    "edge": "pages/edge.mjs",
    "groups": "pages/groups.mjs",
    "proxies": "pages/proxies.mjs",
    "servers": "pages/servers.mjs",
}

pytestmark = pytest.mark.skipif(NODE is None, reason="there is no node on this machine")

SCRIPT = (Path(__file__).parents[1] / "support" / "web" / "console_model_checks.mjs").read_text()


@cache
def results() -> Any:
    imports = "".join(
        f"import * as {name} from {json.dumps((FILES / 'console' / module).as_uri())};\n"
        for name, module in MODULES.items()
    )
    done = subprocess.run(
        [NODE or "", "--input-type=module", "--eval", imports + SCRIPT],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_page_of_servers_says_first_whether_something_is_wrong() -> None:
    assert results()["servers"] == [
        "1 server; none needs attention.",
        "1 server; a does not write.",
        "2 servers, one stands by; nobody lags.",
        "3 servers, 2 stand by; b lags by 340 groups, 12.3 s.",
        "1 server, one stands by; no server is active; a is gone, and was last heard of 30s ago.",
        "1 server; none needs attention.",
        "2 servers, one stands by; a was last heard of 6s ago.",
        "2 servers, one stands by; b is cut off from the bus.",
    ]
    assert results()["buses"] == ["none", "nats", "nats, cut: refused"]
    assert results()["serverLags"] == ["1 group", "-"]


def test_series_of_the_resource_api_become_charts() -> None:
    assert results()["charts"] == [
        ["Sent", " KB/s", [{"at": 60_000, "value": 2.5}], None, None],
        ["Processor", " %", [], 100, 90],
        ["Drops", "/s", [], None, None],
    ]


def test_the_model_follows_events_filters_and_schemas() -> None:
    found = results()
    assert found["beforeBookmark"] == [False, "", 0]
    assert found["after"] == [True, "4", ["a"], ["deleted b", "modified a"]]
    assert found["marked"] == 1001
    assert (found["again"], found["begins"]) == ([True, False], "")
    assert found["measured"] == [2, ""]
    assert found["resynced"] == [["c"], 1, "9"]
    assert found["related"] == [{"plural": "rooms", "name": "attic", "scope": "/"}]

    assert found["selected"] == ["acb", "b", "a", "cb", "a", "cb", "ab", "b", "", "b", "cba"]
    assert "role~web" in found["refused"]
    assert (
        found["sentence"] == "1 of 3 lamps needs attention: b, state failed; Ready is False (Dark): no light"
    )
    assert found["calm"] == "1 lamp; none needs attention."

    assert found["place"] == {"plural": "lamps", "name": "a/b c", "query": {"scope": "/tenants/acme"}}
    assert found["bad"]["plural"] == "lamps"
    assert found["ages"] == ["1h", "in 2d"]
    assert found["fields"] == [
        ["size", "integer", True],
        ["note", "text", False],
        ["force", "boolean", False],
        ["words", "words", False],
        ["more", "json", False],
    ]
    assert found["quoted"] == ["role=web", "'it'\\''s here'"]


def test_pages_say_what_runs_scaling_expiry_and_figures_mean() -> None:
    found = results()
    assert found["run"] == [
        9,
        [
            ["a", "ok", "one\ntwo\n", "exit code 0"],
            ["b", "err", "", "internal: no"],
            ["c", "cancelled", "", "cancelled: by operator"],
        ],
    ]
    assert found["scaling"] == [
        "It has 2 already; nothing would change.",
        "1 more instance is created: 2 become 3.",
        "3 instances are drained and deleted: 5 become 2.",
    ]
    assert found["expiry"] == [
        ["expires in 59d", "good"],
        ["expires in 10d", "waiting"],
        ["expires in 1d", "bad"],
        ["expired 1d ago", "bad"],
        ["not issued", "waiting"],
    ]
    # Moments of both series; a null cuts a line, and what the other series has at a moment does not.
    assert found["aligned"] == [
        [0, 10, 20, 27.5, 45, 55, 72.5, 90, 100],
        [1, 11, 21, "none", "none", None, "none", 91, 101],
        ["none", 11, "none", None, 46, "none", None, "none", 101],
    ]
    assert found["alone"] == [[3], [], [1], [], []]
    assert found["scales"] == [[0, 7], [0, 100], [-5, 80], [0, 120], [0, 1]]
    assert found["figures"] == {"entries": 85, "anchors": [{"anchor": "file:/a", "behind": 13}]}


def test_what_a_server_refuses_is_shown_at_the_line_that_says_it() -> None:
    found = results()
    assert found["parsed"]
    assert found["fieldLines"] == [2, 4, 3, 8, 7, 1, 1]  # of what is around a field that is not there
    assert found["wrongLines"] == [
        [3, "expected a text in double quotes"],
        [2, 'expected ,, not "'],
        [3, "did not expect x"],
        [3, "a is there twice"],
        [1, '"\\q" has an escape that JSON does not know'],
        [1, "expected ,, not 1"],
        [2, "did not expect 1 after the end"],
        [1, "the text ends too early"],
    ]


def test_pages_say_what_traffic_programs_and_history_come_to() -> None:
    found = results()
    assert found["valueAt"] == [0, 20, None]  # nothing where nothing was measured
    assert found["rest"] == {
        "server_name": "a",
        "ssl_certificate_id": "certificates:a.example",
        "tls": None,
        "locations": [
            {"path": "/", "upstream_id": "upstreams:backend", "headers": {"X-Frame-Options": "DENY"}}
        ],
        "http2_enabled": True,
        "custom_directives": {"client_max_body_size": "1m"},
        "target_agents": {"type": "agents", "agent_ids": ["agents:one", "agents:two"]},
        "access": {"list_ids": ["access-lists:staff"]},
    }
    assert found["about"] == [True, True, False]
    assert found["moments"] == [
        ["2026-01-01T00:00:00Z", "Ready became True (Ok)"],
        ["2026-01-02T00:00:00Z", "became online"],
    ]
    assert found["traffic"] == [
        (
            "200 requests; the day before 100, 5.0 % answered with an error. Half took at most 1 ms,"
            " 95 of 100 at most 9 ms, 99 of 100 at most 10 ms."
        ),
        "No requests.",
    ]
    assert found["outcomes"] == ["failed: no", "done, exit code 0 after 0.5 s"]
    assert found["operation"] == "check: failed, 1 of 2 steps are over; no route."
    assert found["tones"] == ["bad", "bad", "waiting", None, None]
    assert found["deployments"] == [
        "",
        "serves version 3",
        "version 3: applying, attempt 2",
        "version 3 failed: port 443 is taken",
    ]
    assert found["sets"] == ["attic: no; cellar: ended", ""]
    assert found["organizations"] == ["o", "", ""]
    assert found["today"] == [["9", "account/ada", "hosts.put", 2]]
    again = [["modified", "a", 2], ["added", "a", 1], ["modified", "b", 1], ["modified", "a", 1]]
    assert found["folded"] == again
    assert found["groups"] == ["os=linux; tools: git; x=1; 1 named", "all"]
    assert found["server"] == [
        ["objects", "57"],
        ["waiting to be written", "3"],
        [{"domain": "edge", "open": 2, "opened": 0, "refused": 1, "queued": 0}],
        [
            {
                "controller": "instances/groups",
                "queued": 4,
                "running": 0,
                "passes": 0,
                "failures": 0,
                "lost": 1,
            }
        ],
    ]


def test_a_selector_is_completed_by_keys_by_what_may_follow_and_by_values() -> None:
    assert results()["completed"] == [
        ["env", "role", "tags", "zone"],
        ["role"],
        ["role=", "role!=", "role in (", "role notin ("],
        ["role=db", "role=web"],
        ["role!=web"],
        ["env=test, tags"],
        ["role in (web, db"],
        ["!zone"],
        [],
        ["all"],
        ["tags=a role"],
    ]


def test_what_needs_attention_is_counted_in_machines() -> None:
    assert results()["attention"] == [
        "1 machine needs attention",
        "1 of 4 machines needs attention",
        "2 of 4 machines need attention",
        "1 object needs attention",
        "1 of 1 machine and 2 other objects need attention",
        "1 of 1 machine needs attention",
    ]


def test_a_switch_that_the_server_has_a_default_for_is_not_set_to_no_unasked() -> None:
    assert [one["autoRenew"] for one in results()["unset"]] == [None, False, True]


def test_fields_have_controls_by_their_schema_and_are_found_by_the_name_that_the_server_has() -> None:
    found = results()
    assert found["fieldNames"] == [
        ["programs[1].command", "programs[1]", "programs", "command"],
        ["name"],
        ["master_node_id", "masterNodeId"],
        [],
        [],
    ]
    assert found["shapes"] == [
        "text",
        "integer?",
        "lines",
        "list",
        "object",
        "choice",
        "pairs",
        "json",
        "json",
        "boolean",
    ]
    assert (found["pairs"], found["noPair"]) == ({"A": "1", "B": " x=y"}, "“=x” is no KEY=VALUE")
    assert found["stale"] == ["2026-01-01T00:00:00Z", "", "", ""]


def test_empty_pages_name_commands_that_there_are() -> None:
    commands = [text.split() for text in results()["firsts"] if text]
    assert len(commands) >= 15
    for program, *given in commands:
        assert program == "fleetplane"
        words = given
        command: click.Command = cli
        context = click.Context(cli, info_name=program)
        while isinstance(command, click.Group):
            name, found, words = command.resolve_command(context, words)
            assert found is not None, name
            context, command = click.Context(found, info_name=name, parent=context), found
        command.make_parser(context).parse_args(args=list(words))  # raises for an option that is none


def test_objects_are_shown_as_yaml_that_reads_back_the_same() -> None:
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load(results()["yaml"]) == {
        "a": {"b": [1, {"c": "x: y", "d": []}], "e": None, "f": "yes"},
        "g h": "plain words",
        "i": "7",
    }


@pytest.mark.skipif(not TSC.exists(), reason="set-up has not installed the TypeScript compiler")
def test_the_modules_of_the_console_keep_to_their_types(tmp_path: Path) -> None:
    assert (FILES / "libraries").is_dir(), "the libraries are missing; run: tools/setup.sh console"
    project = tmp_path / "tsconfig.json"
    options = {
        "allowJs": True,
        "checkJs": True,
        "strict": True,
        "noEmit": True,
        "target": "ES2022",
        "module": "ES2022",
        "moduleResolution": "bundler",
        "lib": ["ES2023", "DOM", "DOM.Iterable", "DOM.AsyncIterable"],
        "types": [],
    }
    project.write_text(
        json.dumps({"compilerOptions": options, "include": [str(FILES / "console" / "**" / "*.mjs")]})
    )
    done = subprocess.run(
        [TSC, "-p", project], capture_output=True, text=True, timeout=SECONDS, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout
