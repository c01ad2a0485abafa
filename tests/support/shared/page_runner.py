"""Running the shell blocks of a documentation page as they are printed, against real servers.

Every page runs in namespaces of its own (network, mounts, processes, host name), so that its addresses and
ports are free whatever runs beside it, nothing is left behind, and the host name is one that the page does
not know. What a reader would replace or wait for is said in a plan, by the beginning of the printed command;
a command without an entry is run and must succeed, an entry without a command fails the test, and a command
that cannot be run here is left out with a reason.
"""

from __future__ import annotations

import fcntl
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
PAGE_SECONDS = 600.0
SHOWN_SECONDS = 90.0
"""In which a command that goes on prints what is expected, on a busy machine."""
APART = ("--net", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc")
_FENCE = re.compile(r"^```(?P<language>\w*)[^\n`]*\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_SHELLS = frozenset({"", "sh", "bash", "console", "shell"})
_PROMPT = "$ "


@dataclass(frozen=True, slots=True, kw_only=True)
class Do:
    """How a printed command is run."""

    skip: str = ""
    """Why it is not run here."""
    until: str = ""
    """It goes on beside the others; a shell condition that says when it is up."""
    seconds: float = 0.0
    """It has no end of its own, and is interrupted after so long; as soon as it printed what is expected, if
    something is."""
    expect: str = ""
    """A regular expression that what it prints must match."""
    fill: Mapping[str, str] = field(default_factory=dict)
    """Words of the page that a reader replaces, and the beginning of the command whose output does it."""
    replace: Mapping[str, str] = field(default_factory=dict)
    """Words of the page that a reader replaces, and by what."""
    before: str = ""
    """Shell commands that make what the page takes for granted."""
    stdin: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    number: int
    text: str


def commands_of(page: str) -> Iterator[Printed]:
    """The commands of a page, in order; of a block with prompts, those behind them."""
    number = 0
    for match in _FENCE.finditer(page):
        if match["language"] not in _SHELLS:
            continue
        for text in _split(match["text"]):
            yield Printed(number=number, text=text)
            number += 1


def _split(block: str) -> Iterator[str]:
    lines = block.splitlines()
    prompted = any(line.startswith(_PROMPT) for line in lines)
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if not line.strip() or (prompted and not line.startswith(_PROMPT)):
            continue
        text = line.removeprefix(_PROMPT) if prompted else line
        while not _is_complete(text) and at < len(lines):
            text += "\n" + lines[at]
            at += 1
        yield text


def _is_complete(text: str) -> bool:
    if text.endswith("\\"):
        return False
    return subprocess.run(["bash", "-n", "-c", text], capture_output=True, check=False).returncode == 0


def _done_with(text: str, plan: Mapping[str, Do], used: set[str]) -> Do:
    for beginning, do in plan.items():
        if text.startswith(beginning):
            used.add(beginning)
            return do
    return Do()


def run_page(
    page: Path | Sequence[Path],
    folder: Path,
    plan: Mapping[str, Do],
    *,
    setup: str = "",
    environment: Mapping[str, str] | None = None,
) -> Mapping[str, str]:
    """Run a page, or several one after the other in one place; what each command printed, by its text.

    Raises with the page's words where one failed.
    """
    _require_namespaces()
    pages = [page] if isinstance(page, Path) else page
    texts = [one for each in pages for one in commands_of(each.read_text(encoding="utf-8"))]
    printed = [Printed(number=number, text=one.text) for number, one in enumerate(texts)]
    assert printed, f"{pages} have no shell blocks"
    out, home = folder / "out", folder / "home"
    for place in (out, home, folder / "work"):
        place.mkdir()
    used: set[str] = set()
    steps = [(one, _done_with(one.text, plan, used)) for one in printed]
    names = " and ".join(one.name for one in pages)
    assert used == set(plan), f"no command of {names} begins with {sorted(set(plan) - used)}"
    (folder / "run.sh").write_text(_script(folder, steps, setup))
    variables = {"HOME": str(home), "PATH": f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
    try:
        with _one_at_a_time():
            done = subprocess.run(
                ["unshare", *APART, "bash", str(folder / "run.sh")],
                env={**variables, **(environment or {})},
                capture_output=True,
                text=True,
                check=False,
                timeout=PAGE_SECONDS,
            )
    except subprocess.TimeoutExpired as error:
        raise AssertionError(_explained(out, steps, f"it took longer than {PAGE_SECONDS:g} s")) from error
    told = {one.text: _output(out, one.number) for one, do in steps if not do.skip}
    if done.returncode != 0:
        raise AssertionError(_explained(out, steps, done.stderr))
    for one, do in steps:
        if do.expect and not do.skip:
            assert re.search(do.expect, told[one.text]), f"{one.text}\nprinted:\n{told[one.text]}"
    return told


def _require_namespaces() -> None:
    if subprocess.run(["unshare", *APART, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("pages run in namespaces of their own, with addresses of their own: that needs root")


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Two whole demonstrations beside each other keep one another waiting on a small machine."""
    with (Path(tempfile.gettempdir()) / "fleetplane-pages.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _script(folder: Path, steps: list[tuple[Printed, Do]], setup: str) -> str:
    out = shlex.quote(str(folder / "out"))
    lines = [
        "set -eum",  # what goes on beside the others is a group of its own, and ends as one
        f"OUT={out}; export OUT",
        "ip link set lo up",
        "for address in 10 21 22; do ip address add 192.168.1.$address/32 dev lo; done",
        "hostname raspberrypi",
        "mount -t tmpfs tmpfs /var/lib; mount -t tmpfs tmpfs /run",
        f"cd {shlex.quote(str(folder / 'work'))}; ln -s {shlex.quote(str(BIN.parent))} .venv",
        "wait_for() {",
        "    local deadline=$((SECONDS + 120))",
        '    while [ $SECONDS -lt $deadline ]; do if eval "$1" >"$OUT/last" 2>&1; then return 0; fi',
        "        kill -0 ${beside:-$!} 2>/dev/null || { echo 'it ended before it was up' >&2; return 1; }",
        "        sleep 0.4; done",  # each look may start a process
        '    echo "gave up waiting for: $1" >&2; cat "$OUT/last" >&2; return 1',
        "}",
        f"echo setup > {out}/current",
        setup,
    ]
    for one, do in steps:
        if not do.skip:
            lines += _step(one, do, steps)
    return "\n".join([*lines, f"echo done > {out}/current", "exit 0", ""])


def _step(one: Printed, do: Do, steps: list[tuple[Printed, Do]]) -> Iterator[str]:
    yield f'echo {one.number} > "$OUT/current"'
    if do.before:
        yield do.before
    text = one.text
    for word, beginning in do.fill.items():
        source = next(other for other, _ in steps if other.text.startswith(beginning))
        assert word in text, f"{word} is not in {text}"
        text = text.replace(word, f'$(tail -n 1 "$OUT/{source.number}.out")')
    for word, other in do.replace.items():
        assert word in text, f"{word} is not in {text}"
        text = text.replace(word, other)
    files = f'> "$OUT/{one.number}.out" 2> "$OUT/{one.number}.err"'
    given = f" <<< {shlex.quote(do.stdin)}" if do.stdin else " < /dev/null"
    if do.until:
        yield f"{{ {text}\n}} {files} {given} &"
        yield "unset beside"
        yield f"wait_for {shlex.quote(do.until)}"
    elif do.seconds and do.expect:
        expected = shlex.quote(do.expect)
        yield "beside=${beside:-${!:-$$}}"  # what goes on beside it is still waited for, not what is shown
        yield f"timeout --signal=INT {SHOWN_SECONDS:g} bash -c {shlex.quote(text)} {files} {given} & shown=$!"
        yield f'while kill -0 $shown && ! grep -qsE {expected} "$OUT/{one.number}".*; do sleep 0.2; done'
        yield "kill -INT $shown || true; wait $shown || true"
    elif do.seconds:
        # A group of its own, interrupted as by Ctrl-C; what it ends with then is its own affair.
        yield f"timeout --signal=INT {do.seconds:g} bash -c {shlex.quote(text)} {files} {given} || true"
    else:
        # In this shell, so that what a block sets is there for the next.
        yield f"{{ {text}\n}} {files} {given}"


def _output(out: Path, number: int) -> str:
    return "".join(
        path.read_text(errors="replace")
        for kind in ("out", "err")
        if (path := out / f"{number}.{kind}").exists()
    )


def _explained(out: Path, steps: list[tuple[Printed, Do]], stderr: str) -> str:
    current = (out / "current").read_text().strip() if (out / "current").exists() else "setup"
    if not current.isdecimal():
        return f"{current}: {stderr[-3000:]}"
    failed = next(one for one, _ in steps if one.number == int(current))
    return f"as printed:\n{failed.text}\nit failed:\n{_output(out, failed.number)[-3000:]}\n{stderr[-1000:]}"
