"""Completion as shells do it: real bash with the real script, and what zsh and fish would ask."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.shared.cli_runner import Invoke, execute

BIN = Path(sys.executable).parent

ASK = """
set -eu
eval "$(fleetplane completion bash)"
entry=$(complete -p fleetplane)
function=${entry#*-F }; function=${function%% *}
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
"$function" fleetplane "${COMP_WORDS[COMP_CWORD]}" fleetplane
printf '%s\\n' ${COMPREPLY[@]+"${COMPREPLY[@]}"}
"""


def bash(*words: str, **more: str) -> list[str]:
    """What bash would offer for a line of these words."""
    found = shutil.which("bash")
    assert found is not None
    done = subprocess.run(
        [found, "--norc", "-c", ASK, "bash", *words],
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", **more},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_bash_completes_verbs_groups_and_options(tmp_path: Path) -> None:
    assert bash("fleetplane", "freez") == ["freeze", "freezes"]
    assert bash("fleetplane", "context", "l") == ["list"]
    assert "--context" in bash("fleetplane", "freezes", "--c")


def test_bash_completes_names_of_contexts(tmp_path: Path) -> None:
    file = tmp_path / "contexts.json"
    file.write_text(
        '{"current":"local","contexts":{"lab":{"server":"https://l"},"prod":{"server":"https://p"}}}'
    )
    file.chmod(0o600)
    assert bash("fleetplane", "context", "use", "p", FLEETPLANE_CONTEXTS=str(file)) == ["prod"]


def test_an_error_while_completing_reaches_no_terminal(tmp_path: Path) -> None:
    file = tmp_path / "contexts.json"
    file.write_text("{}")
    file.chmod(0o644)
    assert bash("fleetplane", "context", "use", "p", FLEETPLANE_CONTEXTS=str(file)) == []


def test_zsh_and_fish_get_answers_in_their_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMP_WORDS", "fleetplane freez")
    monkeypatch.setenv("COMP_CWORD", "1")
    monkeypatch.setenv("_FLEETPLANE_COMPLETE", "zsh_complete")
    assert execute().out.split("\n")[:2] == ["plain", "freeze"]
    monkeypatch.setenv("COMP_CWORD", "freez")
    monkeypatch.setenv("_FLEETPLANE_COMPLETE", "fish_complete")
    assert execute().out.split("\n")[0].startswith("plain")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_a_script_that_asks_us(invoke: Invoke, shell: str) -> None:
    outcome = invoke("completion", shell)
    assert outcome.code == 0
    assert f"_FLEETPLANE_COMPLETE={shell}_complete" in outcome.out
