"""Every shell block of the pages, run as printed against a real server. See `page_runner` for how."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fleet.releases_kit import build_wheel
from support.shared.page_runner import ROOT, Do, commands_of, run_page
from support.shared.postgres_server import PostgresServer

import fleetplane

pytestmark = [pytest.mark.timeout(2000)]
"""Of which a page has `PAGE_SECONDS`; for the rest it waits until those of other workers are done."""

DOCS = ROOT / "docs"


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short one: what pages start has sockets below it, and their paths may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="fp", ignore_cleanup_errors=True) as made:
        yield Path(made)


CHECKSUM = "ab" * 32


def test_the_commands_of_a_page_are_found_whole_and_in_order() -> None:
    page = """
```
one   # with a comment
call -d '{
  "a": 1}' \\
  -x
```

```json
{"not": "a command"}
```

```console
$ shown --here
what it prints
$ next '{
    "b": 2
  }' there
{"more": "output"}
```
"""
    assert [one.text for one in commands_of(page)] == [
        "one   # with a comment",
        "call -d '{\n  \"a\": 1}' \\\n  -x",
        "shown --here",
        "next '{\n    \"b\": 2\n  }' there",
    ]


def test_a_plan_for_a_command_that_is_not_printed_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```\ntrue\n```\n")
    with pytest.raises(AssertionError, match=r"no command of page\.md begins with"):
        run_page(page, tmp_path, {"false": Do(skip="it is not there")})


def test_a_command_that_fails_is_told_with_the_pages_words(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```\nX=1\ntest $X = 1\necho to no avail >&2; false\n```\n")
    with pytest.raises(AssertionError, match="to no avail"):
        run_page(page, tmp_path, {})


SSHD = """
mkdir -p /run/sshd ~/.ssh
ssh-keygen -q -t ed25519 -N '' -f ~/.ssh/id_ed25519
ssh-keygen -q -t ed25519 -N '' -f ~/host_key
printf 'HostKey %s\\nPidFile none\\n' ~/host_key > ~/sshd
printf 'ListenAddress 192.168.1.%s\\n' 21 22 >> ~/sshd
/usr/sbin/sshd -f ~/sshd
"""


def example(page: str, language: str) -> str:
    """The first block of a page in a language."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return text.partition(f"```{language}\n")[2].partition("```")[0]


def board_config(folder: Path) -> Path:
    """The example of the page itself."""
    text = (DOCS / "boards.md").read_text(encoding="utf-8")
    example = text.partition("```toml\n[node]")[2].partition("```")[0]
    file = folder / "board.toml"
    file.write_text(f"[node]{example}")
    return file


def test_the_page_about_boards(tmp_path: Path) -> None:
    config = board_config(tmp_path)
    plan = {
        "fleetplane server --only boards --set listeners.boards.addresses=192.168.1.10:9090": Do(
            until="curl -fs http://127.0.0.1:8080/readyz"
        ),
        "fleetplane agent board join TOKEN": Do(
            before=f"export FLEETPLANE_BOARD_AGENT_SIMULATE=1 FLEETPLANE_BOARD_AGENT_CONFIG={config}",
            fill={"TOKEN": "fleetplane boards join-token create"},
        ),
        "fleetplane agent board run": Do(until="fleetplane boards list --status ready | grep attic"),
        "fleetplane boards list": Do(expect=r"attic\s+ready"),
        "fleetplane boards gpio read attic:17": Do(expect="high|1"),
        "fleetplane boards metrics attic": Do(
            before="wait_for 'fleetplane boards metrics attic | grep -q memory_usage'", expect="memory_usage"
        ),
        "fleetplane boards logs attic -f": Do(seconds=20),
        "fleetplane boards exec --label": Do(
            skip="i2cdetect and an I2C bus are not on the machines of tests"
        ),
        "fleetplane boards provision one --role master --cluster lab --worker two --request-id": Do(
            skip="it installs k3s on two machines; tests/domains/boards/provisioning does, with stand-ins"
        ),
        "fleetplane apply -f sensors.yaml": Do(
            before=f"cat > sensors.yaml <<'EOF'\n{example('boards.md', 'yaml')}EOF",
            expect=r"\+ board-set/sensors",
        ),
        "fleetplane get board-sets": Do(expect=r"sensors +room=attic"),
        "fleetplane describe board-set": Do(expect="/usr/local/bin/sensor"),
        "fleetplane boards certificate renew": Do(seconds=20),
        "fleetplane server --only boards --set listeners.boards-plain": Do(
            before="kill %1; wait %1 || true; mkdir original; cd original; unset ${!FLEETPLANE_BOARD_AGENT*}",
            until="curl -fs http://127.0.0.1:8080/readyz && ss -Htln | grep -q 127.0.0.1:9090",
        ),
    }
    told = run_page(
        DOCS / "boards.md",
        tmp_path,
        plan,
        setup=SSHD,
        environment={
            "FLEETPLANE_BOARDS__K3S_INSTALLERS": f"https://get.k3s.io#sha256={CHECKSUM}",
        },
    )
    assert CHECKSUM in next(told[text] for text in told if text.endswith("--dry-run"))


RUN = {
    "README.md",
    "docs/api.md",
    "docs/boards.md",
    "docs/cli.md",
    "docs/clustering.md",
    "docs/edge-daemon.md",
    "docs/edge.md",
    "docs/gpus.md",
    "docs/instances.md",
    "docs/operations.md",
    "docs/proxies.md",
    "docs/rollouts.md",
    "docs/tutorial.md",
    "docs/upgrades.md",
}
"""Pages that a test below runs; drawings and files have a language behind their fence that is no shell."""


def test_every_page_with_a_shell_block_is_run() -> None:
    pages = [*ROOT.glob("*.md"), *DOCS.glob("*.md")]
    found = {
        str(page.relative_to(ROOT)) for page in pages if any(commands_of(page.read_text(encoding="utf-8")))
    }
    assert found == RUN


UP = "curl -fs http://127.0.0.1:8080/readyz"
PATIENT_CURL = "curl -f --retry 90 --retry-delay 1 --retry-all-errors"
"""While NGINX reloads, a worker of before may still be the one that answers, and one of now the next time."""


def test_the_page_about_running_a_server(tmp_path: Path) -> None:
    server = f"fleetplane server --only boards > $OUT/server 2>&1 &\nwait_for '{UP}'"
    run_page(DOCS / "operations.md", tmp_path, {}, setup=server)


def test_the_page_about_standby_servers(tmp_path: Path, postgres: PostgresServer) -> None:
    """The database is reached by its socket: the page has a network of its own."""
    name = postgres.database().rpartition("/")[2]
    url = f"postgresql://postgres@/{name}?host={postgres.folder}&port={postgres.port}"
    here = {"/etc/fleetplane/": ""}
    setup = f"""
umask 077
printf 'data_dir = "%s"\n' $PWD/data > fleetplane.toml
fleetplane server --config fleetplane.toml --only gpus > $OUT/server 2>&1 &
wait_for '{UP}'
kill %1; wait %1 || true
printf '[store]\nurl = "%s"\n' '{url}' >> fleetplane.toml
"""
    active = "fleetplane servers --config fleetplane.toml | grep -qw active"
    daemon = Do(skip="there is no Docker; what it would do is rendered in tests/test_deployments.py")
    cluster = Do(skip="there is no Kubernetes; what it would get is rendered in tests/test_deployments.py")
    plan = {
        "sudo deploy/compose/secrets.sh": Do(
            before=f"cp -r {ROOT}/deploy . && rm -rf deploy/compose/secrets",
            replace={"sudo ": "SECRETS_OWNER=$(id -u):$(id -g) "},
        ),
        "docker": daemon,
        "kubectl": cluster,
        "helm": cluster,
        "fleetplane migrate": Do(replace=here, expect=r"migrated: revision \d+ of lineage \w+"),
        "fleetplane servers": Do(
            replace=here,
            before="fleetplane server --config fleetplane.toml --only gpus > $OUT/again 2>&1 &\n"
            f"wait_for '{active}'",
            expect=r"NAME +STATE +TERM.*\n.* active +1 ",
        ),
    }
    run_page(DOCS / "clustering.md", tmp_path, plan, setup=setup)


def test_the_page_about_the_command_line(tmp_path: Path) -> None:
    server = (
        "fleetplane server --only gpus,edge,proxies --set listeners.web.addresses=0.0.0.0:8443"
        " > $OUT/server 2>&1 &\n"
        "wait_for 'curl -fsk https://127.0.0.1:8443/readyz'"
    )
    site = example("cli.md", "yaml")
    name = "$(fleetplane get gpus -o name | head -1 | cut -d/ -f2)"
    plan = {
        "fleetplane tokens create ops": Do(before="umask 077"),
        "fleetplane get gpus -o wide": Do(expect="healthy"),
        "fleetplane describe": Do(replace={"NAME": name}),
        "fleetplane get gpu/NAME": Do(replace={"NAME": name}),
        "fleetplane watch": Do(seconds=15, expect="added +gpu/"),
        "fleetplane explain": Do(replace={"NAME": name}),
        "fleetplane top": Do(expect="gpu/.* healthy"),
        "fleetplane audit list -f": Do(seconds=3, expect="tokens|secret.put|lease"),
        "fleetplane run": Do(
            replace={"uname -a": "uname -a || test $? = 8"}  # no daemon has enrolled on this page
        ),
        "fleetplane plan": Do(before=f"cat > site.yaml <<'EOF'\n{site}EOF", expect="level"),
        "fleetplane login https://fleet.example": Do(
            replace={"https://fleet.example": "https://localhost:8443", "SHA256:…": "$SHOWN"},
            before="SHOWN=$(fleetplane login https://localhost:8443 --token-file ops.token 2>&1 |"
            " grep -o 'SHA256:[0-9A-F:]*' | head -1)",
        ),
    }
    simulated = "\nfleetplane agent gpu --simulate 2 --address unix:///var/run/device-api/device.sock &\n"
    found = "wait_for 'test $(fleetplane get gpus -o wide | grep -cw healthy) = 2'"
    run_page(DOCS / "cli.md", tmp_path, plan, setup=server + simulated + found)


def test_the_page_about_the_resource_api(tmp_path: Path) -> None:
    server = (
        f"fleetplane server --only gpus,edge > $OUT/server 2>&1 &\nwait_for '{UP}'\n"
        "fleetplane gpus register gpu-0 --uuid GPU-0\n"
        "fleetplane gpus set-condition gpu-0 Ready=False --reason FellOffTheBus"
    )
    plan = {
        "curl -sN": Do(seconds=3, expect="event: bookmark"),
        "call /apis/v1/gpus/gpu-0/explain": Do(expect="FellOffTheBus"),
        "call '/apis/v1/table/gpus": Do(expect="unhealthy"),
        "call /apis/v1/gpuz": Do(expect="NotFound"),
    }
    run_page(DOCS / "api.md", tmp_path, plan, setup=server)


def test_the_page_about_gpus(tmp_path: Path) -> None:
    plan = {
        "fleetplane server --only gpus": Do(until="test -S /var/run/device-api/device.sock"),
        "fleetplane agent gpu": Do(seconds=20),
        "fleetplane gpus watch": Do(seconds=20),
        "grpcurl": Do(
            skip="grpcurl is not installed here; the same calls are made by test_server_interop.py"
        ),
    }
    run_page(DOCS / "gpus.md", tmp_path, plan)


def test_the_page_about_edge(tmp_path: Path) -> None:
    plan = {
        "fleetplane server --only edge": Do(until=UP),
        "fleetplane agent edge run": Do(until="fleetplane edge ls --tenant acme | grep -w Connected"),
        "fleetplane edge ls": Do(expect="build-7"),
        "fleetplane edge run --": Do(expect="Linux"),
        'call "$API/hosts?tag=prod': Do(expect="build-7"),
        "call -N $API/fleet/invoke": Do(expect="succeeded|ok"),
    }
    run_page(DOCS / "edge.md", tmp_path, plan)


def test_the_page_about_proxies(tmp_path: Path) -> None:
    backend = """
mkdir ~/site; echo it works > ~/site/index.html
(cd ~/site; exec python3 -m http.server --bind 127.0.0.1 9000) > /dev/null 2>&1 &
wait_for 'curl -fs http://127.0.0.1:9000'
"""
    plan = {
        "fleetplane server --only proxies": Do(until=UP),
        "TOKEN=$(curl": Do(
            before="PASSWORD=$(awk '$1 == \"password\" {print $2}' $OUT/0.out)",
            replace={"PASSWORD": "'$PASSWORD'"},
        ),
        "fleetplane agent proxy": Do(until="call $API/workspaces/$WS/agents | grep -q online"),
        "curl -H 'Host: example.com'": Do(replace={"curl": PATIENT_CURL}, expect="it works"),
    }
    run_page(DOCS / "proxies.md", tmp_path, plan, setup=backend)


WORKSPACE = f"""
export FLEETPLANE_PROXIES__ADMIN_PASSWORD='a very long password'
fleetplane server --only proxies > $OUT/server 2>&1 &
wait_for '{UP}'
API=http://127.0.0.1:8080/v1
field() {{ python3 -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' $1; }}
LOGIN='{{"email": "admin@fleetplane.local", "password": "a very long password"}}'
TOKEN=$(curl -fs $API/auth/login -H 'content-type: application/json' -d "$LOGIN" | field access_token)
call() {{ curl -fs -H "authorization: Bearer $TOKEN" -H 'content-type: application/json' "$@"; }}
ORG=$(call $API/organizations -d '{{"name": "Acme", "slug": "acme"}}' | field id)
WORKSPACE=$(call $API/organizations/$ORG/workspaces -d '{{"name": "Production", "slug": "prod"}}' | field id)
call $API/workspaces/$WORKSPACE/agents/tokens -d '{{"name": "web-1"}}' > $OUT/agent
"""


def test_the_page_about_rollouts(tmp_path: Path) -> None:
    plan = {
        "fleetplane rollout subjects": Do(expect="proxies.config"),
        "fleetplane rollout start proxies.config $WORKSPACE --dry-run": Do(expect="web-1"),
        "fleetplane rollout policy list": Do(expect="label ring=canary, 10%, 50%, rest"),
        "fleetplane rollout start proxies.config $WORKSPACE --policy": Do(expect="started with 1 targets"),
        "fleetplane rollout status": Do(expect="proxies.config"),
        "fleetplane rollout pause": Do(expect="is paused"),
        "fleetplane rollout abort": Do(expect="is abort"),
    }
    run_page(DOCS / "rollouts.md", tmp_path, plan, setup=WORKSPACE)


DEMO = f"""
export FLEETPLANE_DATA_DIR=$PWD/fleetplane-data
fleetplane demo > $OUT/demo 2>&1 &
wait_for '{UP}'
wait_for 'fleetplane instances list | grep -c registered | grep -q 2'
wait_for 'fleetplane edge ls | grep -w Connected'
wait_for 'fleetplane gpus list | grep GPU-'
wait_for 'fleetplane boards list --status ready | grep demo'
wait_for "curl -fs -H 'Host: demo.localhost' http://127.0.0.1:8081/"
"""
"""What `make run` starts, once it is installed."""


def test_the_pages_that_use_the_demonstration(tmp_path: Path) -> None:
    """The README, the page about instances and the tutorial, in one demonstration."""
    plan = {
        "make run": Do(skip="it installs from a package index; what it runs then is the setup"),
        "make test": Do(skip="it is what runs this test"),
        ".venv/bin/fleetplane instances watch": Do(seconds=3, expect="workers"),
        ".venv/bin/fleetplane gpus get GPU-…": Do(
            replace={"GPU-…": "$(fleetplane gpus list | grep -o 'GPU-[^ ]*' | head -1)"}
        ),
        ".venv/bin/fleetplane audit verify": Do(expect="intact"),
        "fleetplane demo": Do(skip="the setup of these pages starts it, as printed"),
        "fleetplane get gpus,instances,proxy-agents,edge-nodes,boards": Do(expect="boards/demo +ready"),
        "fleetplane top": Do(expect="proxy-agent/nginx-0"),
        "fleetplane watch gpus": Do(replace={"5s": "90s"}, seconds=5, expect="added +gpu/"),
        "fleetplane explain group/workers": Do(  # which tells of the last pass over it
            before="wait_for 'fleetplane explain group/workers | grep -q \"finding my way\"'",
            expect="finding my way",
        ),
        "curl -s -H 'Host: demo": Do(replace={"curl": PATIENT_CURL}, expect="hello"),
        "fleetplane plan": Do(expect="NGINX of 2 agents reloads"),
        "curl -s -H 'Host: shop": Do(replace={"curl": PATIENT_CURL}, expect="hello"),
        "fleetplane logs proxy-agent": Do(
            before="wait_for 'fleetplane logs proxy-agent/nginx-0 | grep shop.localhost'", expect="shop"
        ),
        "fleetplane run --on edge-nodes -- uname": Do(expect="Linux"),
        "fleetplane logs -f run": Do(expect=r"\d\d:\d\d"),
        # What fleets do by themselves may be newer than what the page has done.
        "fleetplane audit list": Do(replace={"-n 10": "-n 100"}, expect="secret.delete"),
        "fleetplane audit verify": Do(expect="intact"),
        "rm -r fleetplane-data": Do(before="kill -INT %1; wait %1 || true"),
    }
    pages = (ROOT / "README.md", DOCS / "instances.md", DOCS / "tutorial.md")
    told = run_page(pages, tmp_path, plan, setup=DEMO)
    assert "Traceback" not in "".join(told.values())


def test_the_pages_about_edge_daemons_and_upgrades(tmp_path: Path) -> None:
    """The daemon that has enrolled on the first page is upgraded on the second."""
    released = "0.2.0"
    wheel = build_wheel(tmp_path, released)
    server = (
        "export FLEETPLANE_RELEASES__CHECK_IN_SECONDS=1\n"
        f"fleetplane server --only edge > $OUT/server 2>&1 &\nwait_for '{UP}'"
    )
    checked_in = "fleetplane get agent-versions -o json | grep -q "
    plan = {
        "fleetplane agent edge enroll TOKEN": Do(fill={"TOKEN": "fleetplane edge token"}),
        "fleetplane agent edge service install": Do(skip="it needs systemd as the first process"),
        "fleetplane agent launch --releases /var/lib/fleetplane-edge": Do(
            until=f"{checked_in} {fleetplane.__version__}"
        ),
        "fleetplane agent launch --releases /var/lib/fleetplane-proxy": Do(
            skip="it is of another fleet; test_agents_upgraded.py launches all five"
        ),
        "make wheel": Do(skip="it builds the version that is installed; the test has built another"),
        "fleetplane releases add": Do(before=f"mkdir dist; cp {wheel} dist/"),
        "fleetplane releases list": Do(expect=released),
        "fleetplane rollout start agents.version edge": Do(
            before="printf 'waves: [1, rest]\\nsoak_seconds: 0\\n' > canary.yaml",
            expect="started with 1 targets",
        ),
        "fleetplane get agent-versions": Do(
            before=f"wait_for '{checked_in} '\\''\"version\": *\"{released}\"'\\'", expect=released
        ),
        "fleetplane releases show": Do(expect="fleetplane_agent"),
    }
    run_page((DOCS / "edge-daemon.md", DOCS / "upgrades.md"), tmp_path, plan, setup=server)
