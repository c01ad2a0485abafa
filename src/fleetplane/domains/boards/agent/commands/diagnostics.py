"""The profile of commands that comes with the agent: what helps to find out what is wrong, and changes
nothing. Off until the node's owner turns it on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from fleetplane.domains.boards.agent.commands.rules import REPEAT, ProgramProfile, Rule

NAME: Final = "diagnostics"
_UNIT: Final = r"[A-Za-z0-9][A-Za-z0-9@._:-]{0,127}"
_COUNT: Final = "[0-9]{1,4}"
_NETWORK: Final = "addr|address|link|route|neigh"

RULES: Final = (
    ("/usr/bin/uptime", ((), ("-p|-s",))),
    ("/usr/bin/df", ((), ("-[hiTkP]{1,5}",))),
    ("/usr/bin/free", ((), ("-[bkmght]{1,4}",))),
    ("/usr/bin/uname", ((), ("-[asnrvmpio]{1,5}",))),
    ("/usr/sbin/ip", ((_NETWORK,), ("-[46sbd]{1,2}", _NETWORK))),
    ("/usr/bin/ip", ((_NETWORK,), ("-[46sbd]{1,2}", _NETWORK))),
    ("/usr/bin/ss", ((), ("-[tulnapsie46]{1,8}",))),
    (
        "/usr/bin/journalctl",
        (
            ("--no-pager", "-n", _COUNT),
            ("--no-pager", "-n", _COUNT, "-u", _UNIT),
            ("--no-pager", "-k", "-n", _COUNT),
        ),
    ),
    (
        "/usr/bin/vcgencmd",
        (("get_throttled|measure_temp|version",), ("measure_volts|measure_clock", "[a-z0-9]{2,8}")),
    ),
    ("/usr/local/bin/k3s", (("kubectl", "get", "nodes|pods|services|events", "-A|-o|wide", REPEAT),)),
    (
        "/usr/bin/systemctl",
        (
            ("--no-pager", "status", _UNIT),
            ("is-active|is-enabled|is-failed", _UNIT),
            ("--no-pager", "--failed"),
        ),
    ),
)


def diagnostics(exists: Callable[[Path], bool] = Path.exists) -> ProgramProfile:
    """The diagnostic programs that this machine has."""
    rules = (Rule(program=program, forms=forms) for program, forms in RULES if exists(Path(program)))
    return ProgramProfile(name=NAME, rules=tuple(rules))
