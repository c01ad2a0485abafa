"""A provider is found by its name, and what is wrong with one is said before the server starts."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest

from fleetplane.domains.instances.providers import registry
from fleetplane.domains.instances.providers.contract import (
    Provider,
    ProviderContext,
    ProviderStatus,
    ids_after,
)
from fleetplane.domains.instances.providers.mock.provider import MockProvider
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import SettingsError

MOCK = "fleetplane.domains.instances.providers.mock.provider:MockProvider"


@pytest.fixture
def context(tmp_path: Path) -> ProviderContext:
    return ProviderContext(clock=SystemClock(), state_directory=tmp_path, region="eu-west-1")


def offer(name: str, value: str) -> EntryPoint:
    return EntryPoint(name=name, value=value, group=registry.GROUP)


@pytest.mark.parametrize("kind", ["aws", "local", "mock"])
def test_a_shipped_provider_is_found_among_the_installed_packages(
    kind: str, context: ProviderContext
) -> None:
    provider = registry.load(kind, {}, context=context)
    assert isinstance(provider, Provider)
    assert provider.kind == provider.describe().name == kind


@pytest.mark.parametrize("kind", ["aws", "local", "mock"])
def test_every_option_of_a_shipped_provider_is_described(kind: str, context: ProviderContext) -> None:
    provider = registry.load(kind, {}, context=context)
    assert set(provider.describe().options) == set(type(provider._options).__struct_fields__)  # type: ignore[attr-defined]


def test_an_unknown_provider_is_refused_by_naming_the_known_ones(context: ProviderContext) -> None:
    with pytest.raises(SettingsError, match="'azure'; known are aws, local, mock"):
        registry.load("azure", {}, context=context)


def test_options_reach_the_provider_and_wrong_ones_are_refused(context: ProviderContext) -> None:
    provider = registry.load("mock", {"max_instances": 3}, context=context)
    assert isinstance(provider, MockProvider)
    with pytest.raises(SettingsError, match="max_instances"):
        registry.load("mock", {"max_instance": 3}, context=context)


def test_what_a_provider_finds_wrong_stops_it_from_loading(context: ProviderContext) -> None:
    with pytest.raises(SettingsError, match="cannot start: faults: there is no operation 'nap'"):
        registry.load("mock", {"faults": [{"operation": "nap"}]}, context=context)


def test_two_packages_may_not_offer_the_same_kind(context: ProviderContext) -> None:
    with pytest.raises(SettingsError, match="two packages"):
        registry.load("mock", {}, context=context, offers=[offer("mock", MOCK), offer("mock", "other:Thing")])
    # The same object listed twice is one package seen twice.
    registry.load("mock", {}, context=context, offers=[offer("mock", MOCK), offer("mock", MOCK)])


def test_a_package_that_does_not_import_is_named(context: ProviderContext) -> None:
    with pytest.raises(SettingsError, match=r"'far' .no_such_package:Far. cannot be loaded.*no_such_package"):
        registry.load("far", {}, context=context, offers=[offer("far", "no_such_package:Far")])


def test_an_object_that_is_no_provider_is_told_what_it_lacks(
    context: ProviderContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Half:
        kind = "half"

        def __init__(self, context: ProviderContext) -> None: ...

        def describe(self) -> None: ...

    module = ModuleType("half_a_provider")
    module.Half = Half  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "half_a_provider", module)
    with pytest.raises(SettingsError, match=r"lacks assign_leader_network, .*create_instance"):
        registry.load("half", {}, context=context, offers=[offer("half", "half_a_provider:Half")])


def test_a_machine_is_unhealthy_unless_it_runs_comes_or_cannot_be_told() -> None:
    well = {status for status in ProviderStatus if not status.unhealthy}
    assert well == {ProviderStatus.PENDING, ProviderStatus.RUNNING, ProviderStatus.UNKNOWN}


def test_pages_neither_skip_nor_repeat_when_the_list_changes_between_them() -> None:
    page, token = ids_after(["b", "d", "f"], "", 2)
    assert (page, token) == (["b", "d"], "d")
    # The last of the first page is deleted and one before it is made: the rest is unmoved.
    assert ids_after(["a", "b", "f"], token, 2) == (["f"], "")
    assert ids_after([], token, 2) == ([], "")
