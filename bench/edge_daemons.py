"""What connected daemons cost one server process, and one command to thousands of them.

Daemons have a connection each and real keys; see `edge_fleet` for how they are played, and
`edge_population` for how they came to be enrolled. The reference holds the same streams on the
same transport and looks at nothing (`edge_bare`), in the same minute; the least that verifying a
heartbeat can cost is one Ed25519 verification.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bench import servers
from bench.edge_population import Identity, enrolled
from bench.edge_subjects import Subject, bare, fleetplane, sample_command
from bench.figures import Effort, Row, alone
from bench.http2 import SPARE_FILES, files_for

LEVELS = (1_000, 5_000, 10_000)
TARGETS = 5_000
"""Of one command."""
BEATS = 20_000
BEAT_SECONDS = 30.0
"""Between two heartbeats of one daemon."""
PACED_SECONDS = 8.0
RUNS = 3
SPARE = 200
"""Connections beside those of daemons."""
COMMAND_BYTES = 2_000
"""Of a command as the product sends it, sealed twice."""
VERIFICATIONS = 5_000
PRINTERS, LINES = 500, 40
"""Daemons of the first generation, and lines of each: what HTTP/2 lets them send ahead."""
MUST_MEMORY, MUST_BEAT, MUST_LAST = 2.0, 2.5, 12.0
"""Ours to the reference; set after the first measurement, to notice when it gets worse."""
MUST_SHARE = 0.2
MUST_LINE = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    levels: Sequence[int]
    targets: int
    beats: int
    paced_seconds: float
    runs: int
    printers: int
    settle_seconds: float = 30.0
    """As long as that the server is waited for to come to rest."""

    @classmethod
    def of(cls, effort: Effort) -> Plan:
        if effort.gpus is not None:
            return cls(
                levels=(6, 12), targets=6, beats=50, paced_seconds=0.2, runs=1, printers=2, settle_seconds=2.0
            )
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = max(LEVELS) if hard == resource.RLIM_INFINITY else hard - SPARE_FILES - SPARE
        levels = tuple(level for level in LEVELS if level <= room)
        return cls(
            levels=levels,
            targets=TARGETS,
            beats=BEATS,
            paced_seconds=PACED_SECONDS,
            runs=RUNS,
            printers=PRINTERS,
        )


@dataclass(slots=True, kw_only=True)
class Seen:
    """What was measured of one server."""

    memory: dict[int, float] = field(default_factory=dict)
    """Bytes a daemon, by how many there were."""
    resident: dict[int, int] = field(default_factory=dict)
    opened_per_second: float = 0.0
    opening_cpu: float = 0.0
    beats_per_second: float = 0.0
    beat_cpu: float = 0.0
    paced_share: float = 0.0
    first_seconds: float = 0.0
    last_seconds: float = 0.0
    command_cpu: float = 0.0
    client_share: float = 0.0
    line_cpu: float = 0.0
    lines_per_second: float = 0.0


def _observe(subject: Subject, identities: Sequence[Identity], plan: Plan) -> Seen:
    seen = Seen()
    idle = subject.server.resident_bytes()
    for level in plan.levels:
        more = identities[len(subject.fleet.daemons) : level]
        cpu, begun = subject.server.cpu_seconds(), time.perf_counter()
        subject.fleet.grow(more)
        seen.opened_per_second = len(more) / (time.perf_counter() - begun)
        _settle(subject, plan)
        seen.opening_cpu = (subject.server.cpu_seconds() - cpu) / len(more)
        seen.resident[level] = subject.server.resident_bytes()
        seen.memory[level] = (seen.resident[level] - idle) / level
        if level == plan.targets:
            _command(subject, plan, seen)
    _beat(subject, plan, seen)
    _pace(subject, plan, seen)
    _print(subject, plan, identities[: plan.printers], seen)
    return seen


def _settle(subject: Subject, plan: Plan, *, quiet_seconds: float = 0.3) -> None:
    """Wait until the server has done what it does after everybody came."""
    deadline = time.monotonic() + plan.settle_seconds
    used = subject.server.cpu_seconds()
    while time.monotonic() < deadline:
        until = time.monotonic() + quiet_seconds
        subject.fleet.people.until(lambda until=until: time.monotonic() >= until)  # type: ignore[misc]
        before, used = used, subject.server.cpu_seconds()
        if used - before < quiet_seconds / 4:
            return


def _command(subject: Subject, plan: Plan, seen: Seen) -> None:
    tries = []
    for _ in range(plan.runs):
        cpu, own, begun = subject.server.cpu_seconds(), time.process_time(), time.perf_counter()
        first, last = subject.send()
        share = (time.process_time() - own) / (time.perf_counter() - begun)
        _settle(subject, plan)
        tries.append((last, first, subject.server.cpu_seconds() - cpu, share))
    seen.last_seconds, seen.first_seconds, cpu, seen.client_share = min(tries)
    seen.command_cpu = cpu / plan.targets


def _beat(subject: Subject, plan: Plan, seen: Seen) -> None:
    """As many heartbeats as the server takes."""
    ready = subject.fleet.heartbeats(plan.beats)
    wanted = subject.heard() + plan.beats
    cpu, begun = subject.server.cpu_seconds(), time.perf_counter()
    for daemon, message in ready:
        daemon.say(message)
    while subject.heard() < wanted:
        time.sleep(0.02)
    seen.beats_per_second = plan.beats / (time.perf_counter() - begun)
    seen.beat_cpu = (subject.server.cpu_seconds() - cpu) / plan.beats


def _pace(subject: Subject, plan: Plan, seen: Seen) -> None:
    """Heartbeats as daemons send them, each every `BEAT_SECONDS`."""
    rate = len(subject.fleet.daemons) / BEAT_SECONDS
    ready = iter(subject.fleet.heartbeats(max(1, round(rate * plan.paced_seconds))))
    cpu, begun = subject.server.cpu_seconds(), time.perf_counter()
    for number, (daemon, message) in enumerate(ready):
        time.sleep(max(0.0, begun + number / rate - time.perf_counter()))
        daemon.say(message)
    time.sleep(max(0.0, begun + plan.paced_seconds - time.perf_counter()))
    seen.paced_share = (subject.server.cpu_seconds() - cpu) / (time.perf_counter() - begun)


def _print(subject: Subject, plan: Plan, identities: Sequence[Identity], seen: Seen) -> None:
    """Output of daemons of the first generation, line by line, as fast as the server takes it."""
    printers = subject.fleet.replaced(identities)
    _settle(subject, plan)
    ready = [(printer, [*printer.lines(LINES), printer.heartbeat()]) for printer in printers]
    wanted = subject.heard() + len(printers) * (1 if subject.counts_heartbeats else LINES + 1)
    cpu, begun = subject.server.cpu_seconds(), time.perf_counter()
    for printer, messages in ready:
        printer.say(b"".join(messages))
    while subject.heard() < wanted:
        time.sleep(0.02)
    number = len(printers) * LINES
    seen.lines_per_second = number / (time.perf_counter() - begun)
    seen.line_cpu = (subject.server.cpu_seconds() - cpu) / number


def _verification_seconds() -> float:
    """One Ed25519 verification of a heartbeat's payload, alone."""
    key = Ed25519PrivateKey.generate()
    payload = os.urandom(93)
    signature, public = key.sign(payload), key.public_key()
    begun = time.process_time()
    for _ in range(VERIFICATIONS):
        public.verify(signature, payload)
    return (time.process_time() - begun) / VERIFICATIONS


# The table.


def _rows(transport: str, ours: Seen, reference: Seen, plan: Plan, floor: float) -> Iterator[Row]:
    for level in plan.levels:
        resident, theirs = ours.resident[level] / 1e6, reference.resident[level] / 1e6
        yield _at_most(
            f"Memory of a connected daemon, {level:,} of them, {transport}",
            ours.memory[level],
            reference.memory[level],
            MUST_MEMORY,
            lambda size: f"{size / 1000:.0f} KB",
            note=f"{resident:,.0f} MB resident, the reference {theirs:,.0f}",
        )
    yield from _heard(transport, ours, reference, plan, floor)
    yield _at_most(
        f"One command to {plan.targets:,} daemons, first result, {transport}",
        ours.first_seconds,
        reference.first_seconds,
        None,
        lambda seconds: f"{seconds:.2f} s",
    )
    yield _at_most(
        f"One command to {plan.targets:,} daemons, last result, {transport}",
        ours.last_seconds,
        reference.last_seconds,
        MUST_LAST,
        lambda seconds: f"{seconds:.2f} s",
        note=f"{ours.command_cpu * 1e6:.0f} µs of processor time a daemon, the reference "
        f"{reference.command_cpu * 1e6:.0f}; the client's core was busy {ours.client_share:.0%} of the time, "
        f"with the reference {reference.client_share:.0%}",
    )


def _heard(transport: str, ours: Seen, reference: Seen, plan: Plan, floor: float) -> Iterator[Row]:
    most = plan.levels[-1]
    yield _at_most(
        f"Processor time of a verified heartbeat, against bare and Ed25519, {transport}",
        ours.beat_cpu,
        reference.beat_cpu + floor,
        MUST_BEAT,
        lambda seconds: f"{seconds * 1e6:.0f} µs",
        note=f"a bare message {reference.beat_cpu * 1e6:.0f} µs, an Ed25519 verification {floor * 1e6:.0f}; "
        f"{ours.beats_per_second:,.0f} verified heartbeats/s of {most:,} daemons, "
        f"{reference.beats_per_second:,.0f} messages/s on bare streams",
    )
    yield _at_most(
        f"Processor time of a line of output, an event each, against bare, {transport}",
        ours.line_cpu,
        reference.line_cpu,
        MUST_LINE,
        lambda seconds: f"{seconds * 1e6:.0f} µs",
        note=f"{ours.lines_per_second:,.0f} lines/s; one signature in 32 is checked, by chance",
    )
    yield _at_most(
        f"Opening a stream, against a bare one, {transport}",
        ours.opening_cpu,
        reference.opening_cpu,
        None,
        lambda seconds: f"{seconds * 1e3:.2f} ms",
        note=f"of processor time; {ours.opened_per_second:,.0f} streams/s came up, "
        f"of the reference {reference.opened_per_second:,.0f}",
    )
    yield Row(
        figure=f"{most:,} daemons, a heartbeat every {BEAT_SECONDS:g} s each, {transport}",
        ours=f"{ours.paced_share:.1%} of a core",
        reference=f"{reference.paced_share:.1%}",
        ratio=None,
        must_reach=f"under {MUST_SHARE:.0%}",
        reached=ours.paced_share < MUST_SHARE,
    )


def _at_most(
    figure: str,
    ours: float,
    reference: float,
    must: float | None,
    show: Callable[[float], str],
    *,
    note: str = "",
) -> Row:
    ratio = ours / reference if reference > 0 else 0.0
    return Row(
        figure=figure,
        ours=show(ours),
        reference=show(reference),
        ratio=ratio,
        must_reach="" if must is None else f"at most {must:g} ×",
        reached=must is None or ratio <= must,
        note=note,
    )


def measure(effort: Effort) -> Sequence[Row]:
    plan = Plan.of(effort)
    connections = plan.levels[-1] + SPARE
    rows: list[Row] = []
    with (
        files_for(connections),
        servers.load_core() as core,
        servers.scratch() as directory,
    ):
        people = enrolled(directory / "data", plan.levels[-1])
        floor = _verification_seconds()
        for tls in (False, True):
            with fleetplane(
                directory / "data", people.operator, core, tls=tls, connections=connections
            ) as subject:
                ours = _observe(subject, people.daemons, plan)
            with bare(
                directory, core, sample_command(COMMAND_BYTES), tls=tls, connections=connections
            ) as subject:
                reference = _observe(subject, people.daemons, plan)
            rows += _rows("TLS" if tls else "plain", ours, reference, plan, floor)
    return rows


if __name__ == "__main__":
    alone(measure, __doc__)
