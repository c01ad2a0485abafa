"""How Python's collector is set once a server has come up."""

from __future__ import annotations

import subprocess
import sys


def test_a_server_that_is_up_does_not_have_everything_looked_through_for_every_few_objects() -> None:
    # In a process of its own: the collector belongs to the whole process.
    asked = (
        "import gc\n"
        "from fleetplane.cli import server\n"
        "before = gc.get_threshold()[0]\n"
        "server._announce({'web': ['http://127.0.0.1:1']}, ['a notice'])\n"
        "print(gc.isenabled(), gc.get_threshold()[0] >= 10 * before, gc.get_freeze_count() > 1000)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "True True True", done.stderr
