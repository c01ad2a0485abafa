"""Which commands are allowed: nothing but what was written down, whatever a caller tries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetplane.domains.boards.agent.commands.rules import (
    CommandPolicy,
    Free,
    ProgramJob,
    ProgramProfile,
    ProgramRequest,
    Rule,
    decide,
)
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument, PermissionDenied, SettingsError

DF = Rule(program="/usr/bin/df", forms=((), ("-[hi]",)))
SYSTEMCTL = Rule(program="/usr/bin/systemctl", forms=(("is-active", "[a-z0-9@.-]+"),))
LS = Rule(program="/bin/ls", forms=(("-l", "/var/log/[a-z]+", "..."),))
POLICY = CommandPolicy(profiles=(ProgramProfile(name="diagnostics", rules=(DF, SYSTEMCTL, LS)),))


def asked(command: str, *arguments: str, **more: object) -> ProgramRequest:
    return ProgramRequest(command=command, arguments=arguments, **more)  # type: ignore[arg-type]


def cause(error: FleetplaneError) -> str:
    return error.details.get("cause", "")


def test_without_a_configuration_nothing_is_run() -> None:
    with pytest.raises(PermissionDenied, match="runs no commands") as refused:
        decide(CommandPolicy(), asked("uptime"), free=False)
    assert cause(refused.value) == "off"


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("df", ()),
        ("/usr/bin/df", ("-h",)),
        ("df -i", ()),
        ("systemctl", ("is-active", "ssh.service")),
        ("ls", ("-l",)),
        ("ls", ("-l", "/var/log/syslog", "/var/log/messages")),
    ],
)
def test_what_was_written_down_is_allowed(command: str, arguments: tuple[str, ...]) -> None:
    job = decide(POLICY, asked(command, *arguments), free=False)
    assert job.program.startswith("/")
    assert job.profile == "diagnostics"
    assert (job.timeout_seconds, job.output_bytes, job.run_as) == (30, 256 * 1024, "nobody")


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("df; id", ()),
        ("df;id", ()),
        ("df", ("-h;id",)),
        ("df", ("-h\nid",)),
        ("df", ("$(id)",)),
        ("df", ("`id`",)),
        ("df", ("-h", "-h")),
        ("df", ("--help",)),
        ("df\n", ()),
        (" df", ("-h",)),
        ("../usr/bin/df", ()),
        ("/usr/bin/../bin/df", ()),
        ("//usr/bin/df", ()),
        ("./df", ()),
        ("DF", ()),
        ("sh", ("-c", "df")),
        ("/bin/sh", ()),
        ("systemctl", ("is-active", "ssh.service\n")),
        ("systemctl", ("stop", "ssh.service")),
        ("systemctl", ("is-active",)),
        ("ls", ("-l", "/var/log/../../etc/shadow")),
        ("ls", ("-l", "/var/log/syslog", "/etc/shadow")),
        ("ls", ()),
        ("*", ()),
        ("d?", ()),
    ],
)
def test_nothing_else_is(command: str, arguments: tuple[str, ...]) -> None:
    with pytest.raises(PermissionDenied):
        decide(POLICY, asked(command, *arguments), free=False)


@given(command=st.text(max_size=40), arguments=st.lists(st.text(max_size=20), max_size=4))
def test_whatever_is_asked_only_written_programs_come_out(command: str, arguments: list[str]) -> None:
    try:
        job = decide(POLICY, asked(command, *arguments), free=False)
    except (PermissionDenied, InvalidArgument):
        return
    rule = next(one for one in (DF, SYSTEMCTL, LS) if one.program == job.program)
    assert rule.allows(job.arguments)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"timeout_seconds": 301}, "timeout_seconds"),
        ({"max_output_bytes": 2 << 20}, "max_output_bytes"),
        ({"working_dir": "/root"}, "working_dir"),
        ({"environment": {"LD_PRELOAD": "/tmp/evil.so"}}, "environment"),
        ({"environment": {"PATH": "/tmp"}}, "environment"),
        ({"stdin": b"x"}, "stdin"),
    ],
)
def test_limits_and_surroundings_are_the_owners_to_decide(more: dict[str, object], field: str) -> None:
    with pytest.raises(FleetplaneError) as refused:
        decide(POLICY, asked("df", **more), free=False)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("command", "arguments", "field"),
    [
        ("", (), "command"),
        ("df\0", (), "command"),
        ("x" * 5000, (), "command"),
        ("df 'unclosed", (), "command"),
        ("df", ("\0",), "args"),
        ("df", ("x" * 5000,), "args"),
        ("df", ("-h",) * 65, "args"),
    ],
)
def test_what_no_program_could_take_is_named(command: str, arguments: tuple[str, ...], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        decide(POLICY, asked(command, *arguments), free=False)
    assert refused.value.field == field


def test_a_profile_that_is_named_is_the_only_one_looked_at() -> None:
    policy = CommandPolicy(
        profiles=(
            ProgramProfile(name="a", rules=(DF,)),
            ProgramProfile(name="b", rules=(SYSTEMCTL,), run_as="pi"),
        )
    )
    assert decide(policy, asked("systemctl", "is-active", "x", profile="b"), free=False).run_as == "pi"
    with pytest.raises(PermissionDenied):
        decide(policy, asked("df", profile="b"), free=False)
    with pytest.raises(PermissionDenied, match="no profile"):
        decide(policy, asked("df", profile="c"), free=True)


def test_free_commands_need_an_absolute_path_and_the_owners_word() -> None:
    policy = CommandPolicy(free=Free.ADMINS)

    job = decide(policy, asked("/usr/bin/id", "-u"), free=True)

    assert isinstance(job, ProgramJob)
    assert (job.program, job.arguments, job.profile) == ("/usr/bin/id", ("-u",), "")
    for command, free in (("id", True), ("/usr/bin/id", False)):
        with pytest.raises(PermissionDenied):
            decide(policy, asked(command), free=free)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rule(program="df"),
        lambda: Rule(program="/usr/bin/../bin/df"),
        lambda: Rule(program="/usr/bin/df", forms=(("...",),)),
        lambda: Rule(program="/usr/bin/df", forms=(("...", "a"),)),
        lambda: ProgramProfile(name="x", rules=(), timeout_seconds=400),
        lambda: ProgramProfile(name="x", rules=(), environment=("LD_PRELOAD",)),
        lambda: ProgramProfile(name="x", rules=(), environment=("PATH",)),
        lambda: ProgramProfile(name="x", rules=(), environment=("A=B",)),
        lambda: ProgramProfile(name="x", rules=(), working_dirs=("tmp",)),
        lambda: CommandPolicy(
            profiles=(ProgramProfile(name="x", rules=()), ProgramProfile(name="x", rules=()))
        ),
    ],
)
def test_a_policy_that_would_be_a_hole_is_no_policy(make: object) -> None:
    with pytest.raises(SettingsError):
        make()  # type: ignore[operator]


def test_a_pattern_that_does_not_parse_is_named() -> None:
    with pytest.raises(InvalidArgument) as refused:
        Rule(program="/usr/bin/df", forms=(("(",),))
    assert refused.value.field == "forms"
