"""Where a foreign configuration is tested, NGINX reads nothing but what it is given, and reaches nobody."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.proxies.nginx_rig import NGINX
from support.shared.throwaway_ca import ThrowawayCa

from fleetplane.domains.proxies.agent.nginx import sandbox
from fleetplane.domains.proxies.agent.nginx.confinement import NONE, Confinement
from fleetplane.domains.proxies.agent.nginx.running import run
from fleetplane.domains.proxies.nginx.paths import ANYWHERE
from fleetplane.domains.proxies.nginx.reading import foreign_fault, text_to_test

HARNESS = """
import os, signal, socket, sys
sys.path.insert(0, sys.argv.pop(1))
import sandbox
given = sys.argv[sys.argv.index("--") + 1:]
options = sandbox.parsed(sys.argv[1:sys.argv.index("--")])
if os.environ.get("BECOME"):
    os.setgroups([])
    os.setgid(int(os.environ["BECOME"]))
    os.setuid(int(os.environ["BECOME"]))
sandbox.confine(options)
sys.argv[1:] = given
def tried(name, what):
    try:
        what()
        print(name, "done")
    except OSError as error:
        print(name, "refused")
folder, victim = sys.argv[1], int(sys.argv[2])
tried("own", lambda: open(folder + "/nginx.conf").read())
tried("write", lambda: open(folder + "/made", "w").write("x"))
for path in ("/etc/passwd", "/etc/hostname", "/proc/self/environ", "/proc/%d/environ" % victim, "/proc/1/fd",
             "/root", "/var/www", "/tmp", sys.argv[3]):
    tried("read " + path, lambda: os.listdir(path) if os.path.isdir(path) else open(path).read())
    tried("open " + path, lambda: os.close(os.open(path, os.O_RDONLY)))
tried("outside", lambda: open("/tmp/fleetplane-out", "w"))
tcp = socket.socket()
tried("tcp", lambda: tcp.connect(("127.0.0.1", int(sys.argv[4]))))
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
tried("udp", lambda: udp.sendto(b"x", ("127.0.0.1", 9)))
six = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
tried("message", lambda: six.sendmsg([b"x"], [], 0, ("::1", 9)))
local = socket.socket(socket.AF_UNIX)
tried("unix", lambda: local.connect(sys.argv[5]))
tried("bind", lambda: tcp.bind(("0.0.0.0", 80)))
tried("signal", lambda: os.kill(victim, signal.SIGTERM))
print("uid", os.getuid())
"""


async def behind(confinement: Confinement, *arguments: str, become: int = 0) -> dict[str, str]:
    """What a program comes to that tries everything; as another user from the start, if told so."""
    with confinement.folder() as folder:
        script = folder / "nginx.conf"
        script.write_text(HARNESS)
        confinement.hand_over(folder)
        if become:
            os.chown(folder, become, become)
            os.chown(script, become, become)
        options = confinement._prefix(write=(str(folder),))[4:]
        home = str(Path(sandbox.__file__).parent)
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-I", "-S", "-c", HARNESS, home, *options, "--", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            env={"BECOME": str(become or "")},
        )
        assert done.returncode == 0, done.stderr
        return dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())


@contextlib.contextmanager
def neighbour(user: int | None) -> Iterator[int]:
    """A process of somebody else, or of the same user."""
    with subprocess.Popen(["sleep", "600"], user=user) as process:
        yield process.pid
        assert process.poll() is None
        process.kill()


@pytest.mark.parametrize("agent", ["root", "an ordinary user"])
async def test_a_program_behind_the_walls_reads_nothing_and_reaches_nobody(
    tmp_path: Path, agent: str
) -> None:
    confinement = await Confinement.probe()
    if os.geteuid() != 0 or sandbox.landlock_version() < 6:
        pytest.skip("needs root, and a Landlock that keeps signals in")
    become = 0
    if agent != "root":
        become = pwd.getpwnam("nobody").pw_uid
        confinement = Confinement(walls=confinement.walls - {"user"})
    secret = tmp_path / "key.pem"
    secret.write_text("a key")
    sock = str(tmp_path / "s.sock")
    server = await asyncio.start_unix_server(lambda _, writer: writer.close(), sock)
    listener = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = str(listener.sockets[0].getsockname()[1])
    for path in (tmp_path, secret, Path(sock)):
        path.chmod(0o777)
    async with server, listener:
        with neighbour(become or None) as victim:
            found = await behind(confinement, str(victim), str(secret), port, sock, become=become)
    assert found.pop("own") == "done"
    assert found.pop("write") == "done"
    assert found.pop("bind") == "done", "it succeeds without taking the port"
    assert int(found.pop("uid")) == pwd.getpwnam("nobody").pw_uid
    assert set(found.values()) == {"refused"}, found
    assert not Path("/tmp/fleetplane-out").exists()


@pytest.mark.parametrize(
    ("without", "words"),
    [
        ((), "landlock+seccomp+user"),
        (("landlock",), "seccomp+user"),
        (("seccomp",), NONE),
        (("landlock", "seccomp"), NONE),
    ],
)
async def test_the_agent_says_which_walls_hold(without: tuple[str, ...], words: str) -> None:
    if os.geteuid() != 0 or sandbox.landlock_version() == 0:
        pytest.skip("what holds differs here")
    confinement = await Confinement.probe(without=without)
    assert (confinement.words, confinement.holds) == (words, words != NONE)


async def test_without_root_a_sandbox_of_the_kernels_is_needed() -> None:
    alone = Confinement(walls=frozenset({"seccomp"}))
    assert not alone.holds, "nothing keeps it from files"
    assert Confinement(walls=frozenset({"seccomp", "landlock"})).holds
    assert not Confinement(walls=frozenset({"user", "landlock"})).holds, "nothing keeps it from the network"


def test_nothing_is_run_where_the_walls_do_not_stand() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            sandbox.__file__,
            "--without",
            "landlock",
            "--without",
            "seccomp",
            "--",
            "/bin/true",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "does not hold" in done.stderr


async def nginx_says(text: str, confinement: Confinement) -> str:
    with confinement.folder() as folder:
        config = folder / "nginx.conf"
        config.write_text(text_to_test(text, folder))
        confinement.hand_over(folder)
        arguments = ("-p", str(folder), "-e", "stderr", "-c", str(config), "-t")
        _, output = await confinement.run(NGINX, *arguments, folder=folder)
        return output


async def test_a_real_nginx_tests_there_without_ports_names_or_certificates() -> None:
    text = """events {}
    http {
        upstream app { server no.such.host.invalid:80; }
        server { listen 80; listen 443 ssl; location / { proxy_pass http://app; } }
        server { listen 127.9.9.9:81; location /x { proxy_pass https://other.invalid:444/y; } }
    }"""
    assert "test is successful" in await nginx_says(text, await Confinement.probe())


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may read: what keeps a program out of it is not the user."""
    folder = Path(tempfile.mkdtemp(prefix="fp-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


async def test_what_the_table_would_let_through_by_mistake_is_not_opened_either(open_folder: Path) -> None:
    """The second wall, tried without the first: NGINX is asked to open what the table refuses."""
    confinement = await Confinement.probe()
    secret = open_folder / "key.pem"
    secret.write_text("a key")
    library = open_folder / "module.so"
    library.write_bytes(b"\\x7fELF")
    for one in (open_folder, secret, library):
        one.chmod(0o755)
    for line in (
        f"load_module {library};",
        f'http {{ server {{ ssl_certificate {secret}; ssl_certificate_key "engine:dynamic:x"; }} }}',
        f"http {{ include {secret}; }}",
        "http { include /etc/passwd; }",
        "error_log /tmp/fleetplane-error.log;",
    ):
        said = await nginx_says(f"events {{}} {line}", confinement)
        assert "[emerg]" in said, line
        assert "test is successful" not in said, line
    assert not Path("/tmp/fleetplane-error.log").exists()


ENGINE = """
#include <unistd.h>
__attribute__((constructor)) static void loaded(void) { (void)!write(2, "CODE RAN\\n", 9); }
"""


async def test_a_key_that_is_an_engine_runs_code_in_nginx_and_not_in_the_sandbox(open_folder: Path) -> None:
    """The attack as it was made: `nginx -t` loads a library that the name of a key leads to."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source, library = open_folder / "engine.c", open_folder / "engine.so"
    source.write_text(ENGINE)
    assert await run(compiler, "-shared", "-fPIC", "-o", str(library), str(source)) == (0, "")
    chain, _ = ThrowawayCa().server(open_folder)
    for one in (open_folder, library, chain):
        one.chmod(0o755)
    keys = f"ssl_certificate {chain}; ssl_certificate_key engine:{library}:x;"
    text = f"events {{}} http {{ server {{ listen 127.0.0.1:1 ssl; {keys} }} }}"
    bare = open_folder / "bare.conf"
    bare.write_text(text)
    outside, said = await run(str(NGINX), "-p", str(open_folder), "-e", "stderr", "-c", str(bare), "-t")
    assert (outside != 0, "CODE RAN" in said) == (True, True), "the attack must be real"

    confinement = await Confinement.probe()
    assert "ssl_certificate" in foreign_fault(text, ANYWHERE)
    with confinement.folder() as folder:
        shutil.copy(chain, folder / "chain.pem")
        config = folder / "nginx.conf"
        config.write_text(text_to_test(text, folder).replace(str(chain), f"{folder}/chain.pem"))
        confinement.hand_over(folder)
        arguments = ("-p", str(folder), "-e", "stderr", "-c", str(config), "-t")
        _, output = await confinement.run(NGINX, *arguments, folder=folder)
    assert "CODE RAN" not in output
    assert "test is successful" not in output
