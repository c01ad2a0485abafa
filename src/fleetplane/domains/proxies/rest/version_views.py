"""What REST shows of versions of a configuration, and of what agents have of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from fleetplane.domains.proxies.kinds.records import (
    ConfigVersion,
    Deployment,
    SettingsSpec,
    StreamSpec,
    UpstreamSpec,
    VirtualHostSpec,
)
from fleetplane.domains.proxies.kinds.values import DeploymentState
from fleetplane.domains.proxies.rules.configuration import AgentConfig, Difference
from fleetplane.kernel.values.times import spelled, spelled_or_null
from fleetplane.web.rest.problems import Problem


class VersionView(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    digest: str
    cause: str
    subject: str
    actor: str
    restored_version: int | None
    virtual_hosts: int
    upstreams: int
    certificates: int
    created_at: str


class DiffView(msgspec.Struct, frozen=True, kw_only=True):
    from_version: int = msgspec.field(name="from")
    to_version: int = msgspec.field(name="to")
    differences: Sequence[Difference]


class DeploymentView(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    config_id: str
    state: DeploymentState | None
    error: str
    sent_at: str
    applied_at: str | None
    duration_ms: int | None
    attempt: int
    """How often it was sent."""
    set_aside: dict[str, str] | UnsetType = UNSET
    """Parts that are not in service although the version is, each with its error."""


class ServedCertificate(msgspec.Struct, frozen=True, kw_only=True):
    domain: str
    fingerprint: str
    expires_at: str


class AgentConfigView(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent gets of a version; objects by id, certificates without their keys."""

    version: int
    content_version: int
    config_id: str
    virtual_hosts: dict[str, VirtualHostSpec]
    upstreams: dict[str, UpstreamSpec]
    certificates: dict[str, ServedCertificate]
    settings: SettingsSpec
    withheld: Sequence[str]
    """Virtual hosts that wait for their certificate."""
    refused: dict[str, str]
    """What is not sent because it may not reach NGINX, and why."""
    streams: dict[str, StreamSpec] | UnsetType = UNSET


class RollbackView(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    """The new one."""
    restored_version: int | None


class ValidationView(msgspec.Struct, frozen=True, kw_only=True):
    valid: bool
    errors: Sequence[Problem]
    message: str | UnsetType = UNSET
    output: str | UnsetType = UNSET


def version(found: ConfigVersion) -> VersionView:
    spec = found.spec
    return VersionView(
        version=spec.version,
        digest=spec.digest,
        cause=spec.cause,
        subject=spec.subject,
        actor=spec.actor.partition("?")[0],
        restored_version=spec.restored_version,
        virtual_hosts=len(spec.virtual_hosts),
        upstreams=len(spec.upstreams),
        certificates=len(spec.certificates),
        created_at=spelled(found.created_at_ns),
    )


def deployment(found: Deployment) -> DeploymentView:
    status = found.status
    return DeploymentView(
        version=found.spec.version,
        config_id=found.spec.config_id,
        state=status.state if status else None,
        error=status.error if status else "",
        sent_at=spelled(found.spec.sent_at_ns),
        applied_at=spelled_or_null(status.applied_at_ns if status else None),
        duration_ms=status.duration_ms if status else None,
        attempt=found.spec.attempt,
        set_aside=(status.set_aside if status else {}) or UNSET,
    )


def share(found: AgentConfig) -> AgentConfigView:
    return AgentConfigView(
        version=found.version,
        content_version=found.content_version,
        config_id=found.config_id,
        virtual_hosts=dict(found.virtual_hosts),
        upstreams=dict(found.upstreams),
        certificates={
            identity: ServedCertificate(
                domain=one.domain, fingerprint=one.fingerprint, expires_at=spelled(one.expires_at_ns)
            )
            for identity, one in found.certificates.items()
        },
        settings=found.settings,
        withheld=found.withheld,
        streams=dict(found.streams) or UNSET,
        refused=dict(found.refused),
    )
