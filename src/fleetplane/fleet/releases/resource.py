"""Releases and agents' versions in the resource API, and their Prometheus metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.fleet.releases.check_in import CheckIns
from fleetplane.fleet.releases.records import (
    AGENT_VERSION,
    PREFIX,
    RELEASE,
    AgentVersion,
    Release,
    agents_scope,
)
from fleetplane.fleet.resources.common import VIEW, NoStatus, at_root
from fleetplane.fleet.resources.declaration import (
    READING,
    Column,
    PublicResource,
    ResourceShape,
    ResourceView,
    ViewReader,
)
from fleetplane.kernel.access import who
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.times import spelled, spelled_or_null


class ReleaseCollector(Collector):
    def __init__(self, store: Store, check_ins: CheckIns) -> None:
        self._store = store
        self._check_ins = check_ins

    def collect(self) -> Iterator[Metric]:
        found = self._check_ins
        yield GaugeMetricFamily(
            "fleetplane_releases", "Releases of agents that this server has", len(found.releases.list())
        )
        versions = GaugeMetricFamily(
            "fleetplane_agents_running",
            "Agents by the version that they said they run",
            labels=["domain", "version"],
        )
        for domain in sorted(found.registers):
            said = (one.status for one in self._store.list(AGENT_VERSION, agents_scope(domain)))
            for version, number in sorted(Counter(one.version for one in said if one is not None).items()):
                versions.add_metric([domain, version], number)
        yield versions
        for name, words, numbers in (
            ("check_ins", "Check-ins of agents with their version", found.check_ins),
            ("failures", "Upgrades that agents refused or took back", found.failures),
            ("sent_bytes", "Bytes of releases that agents fetched", found.sent_bytes),
        ):
            counter = CounterMetricFamily(f"fleetplane_releases_{name}", words, labels=["domain"])
            for domain in sorted(found.registers):
                counter.add_metric([domain], numbers[domain])
            yield counter


class ReleaseFileShape(ResourceShape, frozen=True):
    name: str
    sha256: str
    size: int


class ReleaseSpecShape(ResourceShape, frozen=True):
    files: Sequence[ReleaseFileShape]
    size: int
    """Bytes of all files."""
    floor: str | None
    """Agents that had this release install nothing older than this."""
    ignores_floor: bool
    hello_seconds: float | None
    """The time that it has to say hello; null for the server's setting."""
    notes: str
    added_by: str
    added_at: str


def release_view(release: Release, _reading: ViewReader) -> ResourceView[ReleaseSpecShape, NoStatus]:
    """What is shown of a release."""
    spec = release.spec
    return ResourceView(
        spec=ReleaseSpecShape(
            files=[ReleaseFileShape(name=one.name, sha256=one.sha256, size=one.size) for one in spec.files],
            size=sum(one.size for one in spec.files),
            floor=spec.floor or None,
            ignores_floor=spec.ignores_floor,
            hello_seconds=spec.hello_seconds or None,
            notes=spec.notes,
            added_by=who(spec.actor),
            added_at=spelled(spec.added_at_ns),
        ),
        status=NoStatus(),
    )


RELEASES = PublicResource(
    name="release",
    plural="releases",
    summary="A version of the agents that this server serves to them",
    kind=RELEASE,
    spec=ReleaseSpecShape,
    status=NoStatus,
    view=release_view,
    place=at_root,
    permission=VIEW,
    columns=(
        Column(title="VERSION", value=".metadata.name"),
        Column(title="SIZE", value=".spec.size", type="number"),
        Column(title="FLOOR", value=".spec.floor"),
        Column(title="ADDED", value=".spec.addedAt", type="age"),
        Column(title="BY", value=".spec.addedBy"),
        Column(title="NOTES", value=".spec.notes", wide=True),
    ),
    verbs=READING,
    search=(".metadata.name", ".spec.notes"),
)


class AgentVersionSpecShape(ResourceShape, frozen=True):
    domain: str
    version: str | None
    """The version that a rollout wants it to run; null for the default of its domain."""


class AgentVersionStatusShape(ResourceShape, frozen=True):
    version: str
    since: str | None
    kept: Sequence[str]
    """Other versions that it can go back to without a download."""
    can_upgrade: bool
    python: str
    platform: str
    failed_version: str | None
    """The version that it last refused or took back."""
    failed_reason: str | None
    failed_at: str | None


def agent_version_view(
    agent: AgentVersion, _reading: ViewReader
) -> ResourceView[AgentVersionSpecShape, AgentVersionStatusShape]:
    """What is shown of an agent's version."""
    said = agent.status
    assert said is not None
    return ResourceView(
        spec=AgentVersionSpecShape(domain=_domain(agent), version=agent.spec.version or None),
        status=AgentVersionStatusShape(
            version=said.version,
            since=spelled_or_null(said.since_ns or None),
            kept=said.kept,
            can_upgrade=said.can_upgrade,
            python=said.python,
            platform=said.platform,
            failed_version=said.failed_version or None,
            failed_reason=said.failed_reason or None,
            failed_at=spelled_or_null(said.failed_at_ns or None),
        ),
    )


def agent_version_name(agent: AgentVersion, _reading: ViewReader) -> str:
    """The domain, and the id of the agent in it."""
    return f"{_domain(agent)}:{agent.name.replace('/', ':')}"


def _domain(agent: AgentVersion) -> str:
    return agent.scope.removeprefix(f"{PREFIX}/")


AGENT_VERSIONS = PublicResource(
    name="agent-version",
    plural="agent-versions",
    summary="The version of our own software that an agent runs",
    kind=AGENT_VERSION,
    spec=AgentVersionSpecShape,
    status=AgentVersionStatusShape,
    view=agent_version_view,
    place=at_root,
    permission=VIEW,
    named=agent_version_name,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="VERSION", value=".status.version"),
        Column(title="WANTED", value=".spec.version"),
        Column(title="SINCE", value=".status.since", type="age"),
        Column(title="FAILED", value=".status.failedVersion"),
        Column(title="REASON", value=".status.failedReason", wide=True),
        Column(title="PLATFORM", value=".status.platform", wide=True),
    ),
    verbs=READING,
    search=(".metadata.name", ".status.version"),
)
