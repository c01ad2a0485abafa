"""What a security context permits: pure, without a file or a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetplane.domains.edge.agent.commands.policy import (
    CapabilityLimiter,
    CapabilityRate,
    Permit,
    PolicyCapability,
    PolicyRefusal,
    PolicyRequest,
    SecurityContext,
    decide,
    matches,
)
from fleetplane.domains.edge.agent.tools.contract import Claims


def context(*capabilities: PolicyCapability, deny: tuple[str, ...] = ()) -> SecurityContext:
    return SecurityContext(name="c", capabilities=capabilities, deny_list=deny)


def ask(
    held: SecurityContext, tool: str, claims: Claims | None = None, **paths: str
) -> Permit | PolicyRefusal:
    found = {name: Path(path) for name, path in paths.items()}
    return decide(
        held,
        PolicyRequest(tool=tool, claims=claims or Claims(), paths=found),
        roots={},
        protected=[Path("/keys")],
    )


@pytest.mark.parametrize(
    ("pattern", "tool", "fits"),
    [
        ("*", "anything", True),
        ("fs.*", "fs.read", True),
        ("fs.*", "fsx.read", False),
        ("fs.*", "fs", False),
        ("fs.read", "fs.read", True),
        ("fs.read", "fs.readlink", False),
        ("", "fs.read", False),
    ],
)
def test_patterns(pattern: str, tool: str, fits: bool) -> None:
    assert matches(pattern, tool) is fits


def test_what_is_denied_is_denied_whatever_else_permits_it() -> None:
    held = context(PolicyCapability(tool_pattern="*"), deny=("fs.*",))
    assert isinstance(ask(held, "cmd.run"), Permit)
    assert ask(held, "fs.read") == PolicyRefusal(reason="fs.read is denied by 'fs.*'")


def test_a_context_without_capabilities_permits_nothing() -> None:
    assert isinstance(ask(context(), "cmd.run"), PolicyRefusal)


def test_the_first_capability_that_permits_all_of_a_call_permits_it() -> None:
    held = context(
        PolicyCapability(tool_pattern="fs.*", path_allowlist=("/srv",)),
        PolicyCapability(tool_pattern="fs.read", path_allowlist=("/etc",)),
    )
    first, second = ask(held, "fs.read", path="/srv/x"), ask(held, "fs.read", path="/etc/hosts")
    assert isinstance(first, Permit)
    assert isinstance(second, Permit)
    assert (first.index, second.index) == (0, 1)
    assert isinstance(ask(held, "fs.write", path="/etc/hosts"), PolicyRefusal)


@pytest.mark.parametrize("path", ["/srvx/a", "/", "/etc/passwd", "/sr"])
def test_a_path_is_within_a_folder_or_it_is_not(path: str) -> None:
    held = context(PolicyCapability(tool_pattern="fs.*", path_allowlist=("/srv",)))
    assert isinstance(ask(held, "fs.read", path=path), PolicyRefusal)


def test_the_daemons_own_folder_is_nobodys() -> None:
    assert isinstance(
        ask(context(PolicyCapability(tool_pattern="*")), "fs.read", path="/keys/node.key"), PolicyRefusal
    )


def test_an_empty_list_permits_nothing_and_a_missing_one_limits_nothing() -> None:
    run = Claims(command="ls")
    assert isinstance(
        ask(context(PolicyCapability(tool_pattern="cmd.run", command_allowlist=())), "cmd.run", run),
        PolicyRefusal,
    )
    assert isinstance(ask(context(PolicyCapability(tool_pattern="cmd.run")), "cmd.run", run), Permit)


@pytest.mark.parametrize(
    ("claims", "permitted"),
    [
        (Claims(command="git", subcommand="status"), True),
        (Claims(command="git", subcommand="push"), False),
        (Claims(command="git"), False),
        (Claims(command="/usr/bin/git", subcommand="status"), False),
        (Claims(command="git status", subcommand="status"), False),
        (Claims(command="git", subcommand="status", variables=("LD_PRELOAD",)), False),
    ],
)
def test_programs_and_their_first_argument_are_taken_to_the_letter(claims: Claims, permitted: bool) -> None:
    limited = PolicyCapability(
        tool_pattern="cmd.run", command_allowlist=("git",), subcommand_allowlist=("status",)
    )
    assert isinstance(ask(context(limited), "cmd.run", claims), Permit) is permitted


@pytest.mark.parametrize(
    ("name", "permitted"),
    [
        ("APP_MODE", True),
        ("LANG", True),
        ("PATH", False),
        ("APP_PAGER", False),
        ("LC_ALL", False),
    ],
)
def test_variables_are_set_only_as_listed(name: str, permitted: bool) -> None:
    held = context(PolicyCapability(tool_pattern="cmd.run", env_allowlist=("APP_*", "LANG")))
    claims = Claims(command="env", variables=(name,))
    assert isinstance(ask(held, "cmd.run", claims), Permit) is permitted


@pytest.mark.parametrize(
    ("domain", "permitted"),
    [
        ("example.com", True),
        ("api.EXAMPLE.com", True),
        ("notexample.com", False),
        ("example.com.evil.net", False),
    ],
)
def test_domains_are_the_same_or_below(domain: str, permitted: bool) -> None:
    held = context(PolicyCapability(tool_pattern="web.*", domain_allowlist=("example.com",)))
    assert isinstance(ask(held, "web.get", Claims(domains=(domain,))), Permit) is permitted


def test_calls_are_counted_where_a_capability_limits_them() -> None:
    limiter = CapabilityLimiter()
    permit = Permit(
        capability=PolicyCapability(
            tool_pattern="*", rate_limit=CapabilityRate(calls=2, per_seconds=10), max_concurrent=1
        ),
        index=0,
    )
    assert limiter.admit("c", permit, now=0.0) == ""
    assert "are running" in limiter.admit("c", permit, now=1.0)
    limiter.leave("c", permit)
    assert limiter.admit("c", permit, now=2.0) == ""
    limiter.leave("c", permit)
    assert "within 10 s" in limiter.admit("c", permit, now=3.0)
    assert limiter.admit("another", permit, now=3.0) == ""
    assert limiter.admit("c", permit, now=10.5) == ""
