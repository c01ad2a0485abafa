"""How commands fared, counted by tool, outcome and reason, for metrics.

Tools and reasons are words of operators and daemons, so only a bounded number of them gets a count of its
own: the first tools that come, and the reasons that the protocol knows. The rest is counted together.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from fleetplane.domains.edge.streams.call_encoding import ToolOutcome
from fleetplane.fleet.runs.records import TargetOutcome, outcome_of
from fleetplane.kernel.commands import CommandTarget

TOOLS_LIMIT = 32
OTHER = "other"
REASONS = frozenset(
    {
        "envelope_invalid",
        "security_context_not_found",
        "policy_violation",
        "tool_not_locally_supported",
        "tool_not_found",
        "invalid_arguments",
        "internal",
        "nonzero_exit",
        "draining",
        "busy",
        "interrupted",
        "timeout",
        "cancelled",
        "protocol_error",
        "result_cut",
        "edge_disconnected",
    }
)


class Tallies:
    def __init__(self) -> None:
        self.commands: Counter[tuple[str, str, str]] = Counter()
        """By tool, outcome and reason."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Durations of commands by tool, as reported by daemons."""
        self.skipped: Counter[str] = Counter()
        """Daemons that were meant and left out, by reason."""
        self._tools: set[str] = set()

    def __repr__(self) -> str:
        return f"<Tallies {self.commands.total()} commands>"

    def ended(self, tool: str, target: CommandTarget, kept: ToolOutcome) -> None:
        """One target of a run has its outcome."""
        name, outcome = self._tool(tool), outcome_of(target)
        detail = target.status.detail if target.status is not None else ""
        self.commands[name, outcome, reason_of(outcome, kept.code or detail)] += 1
        if kept.duration_seconds:
            self.seconds[name] += kept.duration_seconds

    def _tool(self, tool: str) -> str:
        if tool not in self._tools and len(self._tools) < TOOLS_LIMIT:
            self._tools.add(tool)
        return tool if tool in self._tools else OTHER


def reason_of(outcome: TargetOutcome, code: str) -> str:
    """Why, in a word that the protocol knows; empty where nothing failed. Pure."""
    if outcome is TargetOutcome.OK:
        return ""
    return code if code in REASONS else OTHER
