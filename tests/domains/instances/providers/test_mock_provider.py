"""The mock provider keeps the contract, and misbehaves exactly as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from fleetplane.domains.instances.providers.conformance import (
    CHECKS,
    Check,
    Subject,
    name_of,
    new_instance_id,
)
from fleetplane.domains.instances.providers.contract import (
    BalancerTargetState,
    CapacityExhausted,
    CreateRequest,
    ImageQuery,
    InstanceGone,
    LoadBalancer,
    NatRoute,
    ProviderContext,
    ProviderError,
    ProviderRefused,
    ProviderStatus,
    QuotaExhausted,
)
from fleetplane.domains.instances.providers.mock.provider import MockFault, MockProvider, read_state
from fleetplane.domains.instances.providers.without_extras import WithoutExtras
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import SettingsError, Unimplemented

MakeMock = Callable[..., MockProvider]


@pytest.fixture
def make_mock(tmp_path: Path) -> MakeMock:
    def make(**options: object) -> MockProvider:
        provider = MockProvider(ProviderContext(clock=SystemClock(), state_directory=tmp_path))
        provider.configure(options)
        assert provider.validate() == []
        return provider

    return make


def request(instance_id: str = "", *, subnet: str = "") -> CreateRequest:
    return CreateRequest(
        cluster="c",
        shard="s",
        tenant="t",
        group="g",
        template="web",
        prefix="web",
        instance_id=instance_id or new_instance_id("web"),
        subnet=subnet,
        nonce="secret-nonce",
    )


@pytest.mark.parametrize("options", [{}, {"state_file": "mock.jsonl"}], ids=["in-memory", "durable"])
@pytest.mark.parametrize("check", CHECKS, ids=name_of)
async def test_the_mock_provider_conforms(
    check: Check, options: dict[str, object], make_mock: MakeMock
) -> None:
    await check(Subject(factory=lambda: make_mock(**options), request=request(), settle_seconds=60))


async def test_a_lost_answer_leaves_an_instance_that_the_retry_finds(make_mock: MakeMock) -> None:
    mock = make_mock()
    mock.script(MockFault(operation="create_instance", after=True))
    wanted = request()

    with pytest.raises(ProviderError, match="answer was lost"):
        await mock.create_instance(wanted)
    assert list(mock.instances) == [wanted.instance_id]

    created = await mock.create_instance(wanted)
    assert created.provider_id == mock.instances[wanted.instance_id].provider_id
    assert len(mock.instances) == 1
    assert mock.calls["create_instance"] == 2


async def test_scripted_failures_happen_as_often_as_scripted_and_leave_nothing(make_mock: MakeMock) -> None:
    mock = make_mock(faults=[{"operation": "create_instance", "count": 2, "error": "quota"}])
    wanted = request()
    for _ in range(2):
        with pytest.raises(QuotaExhausted):
            await mock.create_instance(wanted)
    assert mock.instances == {}
    assert (await mock.create_instance(wanted)).status is ProviderStatus.RUNNING


async def test_a_fault_without_a_count_lasts_until_healed(make_mock: MakeMock) -> None:
    mock = make_mock()
    mock.script(MockFault(operation="list_instances", count=0, error="refused"))
    for _ in range(3):
        with pytest.raises(ProviderRefused) as refusal:
            await mock.list_instances("c", "s", limit=10)
        assert not refusal.value.retryable
    mock.heal()
    assert (await mock.list_instances("c", "s", limit=10)).items == ()


async def test_a_slow_answer_can_be_abandoned_after_the_deed(make_mock: MakeMock) -> None:
    mock = make_mock()
    mock.script(MockFault(operation="create_instance", after=True, delay_seconds=60, error=""))
    wanted = request()
    asking = asyncio.create_task(mock.create_instance(wanted))
    async with asyncio.timeout(60):
        while not mock.instances:
            await asyncio.sleep(0.005)
    assert not asking.done()
    asking.cancel()
    await asyncio.wait([asking])
    assert list(mock.instances) == [wanted.instance_id]


async def test_a_vanished_instance_is_gone_and_a_scripted_status_is_seen(make_mock: MakeMock) -> None:
    mock = make_mock()
    first, second = request(), request()
    await mock.create_instance(first)
    await mock.create_instance(second)
    mock.vanish(first.instance_id)
    mock.set_status(second.instance_id, ProviderStatus.STOPPED)

    with pytest.raises(InstanceGone):
        await mock.get_instance_status(first.instance_id, "")
    assert (await mock.get_instance_status(second.instance_id, "")).status.unhealthy


async def test_a_full_subnet_says_so_before_and_at_creation(make_mock: MakeMock) -> None:
    mock = make_mock(full_subnets=["a"])
    assert not await mock.check_subnet_capacity("a")
    assert await mock.check_subnet_capacity("b")
    with pytest.raises(CapacityExhausted):
        await mock.create_instance(request(subnet="a"))
    await mock.create_instance(request(subnet="b"))


async def test_a_quota_counts_what_exists_and_not_what_was_deleted(make_mock: MakeMock) -> None:
    mock = make_mock(max_instances=1)
    first = await mock.create_instance(request())
    with pytest.raises(QuotaExhausted):
        await mock.create_instance(request())
    await mock.delete_instance(first.instance_id, first.provider_id)
    await mock.create_instance(request())


async def test_every_machine_that_is_made_calls_the_hook_once(make_mock: MakeMock) -> None:
    mock = make_mock()
    booted: list[str] = []

    async def boot(made: CreateRequest) -> None:
        booted.append(made.nonce)

    mock.on_create = boot
    mock.script(MockFault(operation="create_instance", after=True))
    wanted = request()
    with pytest.raises(ProviderError):
        await mock.create_instance(wanted)
    await mock.create_instance(wanted)
    assert booted == ["secret-nonce"]


async def test_a_state_file_with_a_torn_end_gives_everything_before_it(
    make_mock: MakeMock, tmp_path: Path
) -> None:
    mock = make_mock(state_file="mock.jsonl")
    await mock.start()
    kept = await mock.create_instance(request())
    dropped = await mock.create_instance(request())
    await mock.delete_instance(dropped.instance_id, "")
    # No close: the process was killed while it wrote.
    with (tmp_path / "mock.jsonl").open("ab") as file:
        file.write(b'{"put":{"instance_id":"we')
    assert list(read_state(tmp_path / "mock.jsonl")) == [kept.instance_id]

    successor = make_mock(state_file="mock.jsonl")
    await successor.start()
    assert list(successor.instances) == [kept.instance_id]
    another = await successor.create_instance(request())
    assert set(read_state(tmp_path / "mock.jsonl")) == {kept.instance_id, another.instance_id}
    await successor.close()
    await mock.close()


async def test_a_load_balancers_targets_come_and_go_with_their_machines(make_mock: MakeMock) -> None:
    mock = make_mock()
    created = await mock.create_instance(request())
    balancer = LoadBalancer(key="front")
    await mock.register_with_lb(created.provider_id, balancer)
    assert await mock.get_lb_target_state(created.provider_id, balancer) is BalancerTargetState.HEALTHY
    assert await mock.list_lb_instances(balancer) == (created.provider_id,)
    await mock.delete_instance(created.instance_id, created.provider_id)
    assert await mock.get_lb_target_state(created.provider_id, balancer) is BalancerTargetState.DEREGISTERED


async def test_what_a_provider_lacks_is_unimplemented() -> None:
    route = NatRoute(cluster="c", tenant="t", subnet="s", provider_id="p")
    for call, lacking in (
        (WithoutExtras().ensure_nat_route(route), "nat routes"),
        (WithoutExtras().find_image(ImageQuery(filters={})), "images"),
        (WithoutExtras().list_lb_instances(LoadBalancer(key="front")), "load balancers"),
    ):
        with pytest.raises(Unimplemented, match=lacking):
            await call


async def test_images_are_found_by_name_newest_or_oldest_first(make_mock: MakeMock) -> None:
    mock = make_mock(images={"debian-2": "ami-b", "debian-1": "ami-a", "other": "ami-c"})
    named = ImageQuery(filters={"name": ("debian-*",)})
    assert await mock.find_image(named) == "ami-a"
    assert await mock.find_image(msgspec.structs.replace(named, sort="name")) == "ami-b"
    assert await mock.find_image(msgspec.structs.replace(named, newest_first=False)) == "ami-b"
    assert await mock.find_image(ImageQuery(filters={"name": ("nothing",)})) == ""


async def test_a_route_of_somebody_else_is_not_taken(make_mock: MakeMock) -> None:
    mock = make_mock()
    await mock.ensure_nat_route(NatRoute(cluster="c", tenant="t", subnet="s", provider_id="one"))
    with pytest.raises(ProviderRefused, match="leads through one"):
        await mock.ensure_nat_route(NatRoute(cluster="c", tenant="t", subnet="s", provider_id="two"))
    await mock.ensure_nat_route(
        NatRoute(cluster="c", tenant="t", subnet="s", provider_id="two", previous_provider_id="one")
    )
    await mock.remove_nat_route(NatRoute(cluster="c", tenant="t", subnet="s", provider_id="one"))
    assert [route.provider_id for route in mock.routes.values()] == ["two"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"statefile": "x"}, "did you mean 'state_file'"),
        ({"max_instances": "many"}, "max_instances"),
        ({"faults": [{"operation": "create_instance", "error": "boom"}]}, "boom"),
    ],
)
def test_options_that_make_no_sense_are_named(
    options: dict[str, object], complaint: str, make_mock: MakeMock
) -> None:
    with pytest.raises(SettingsError, match=complaint):
        make_mock(**options)


def test_a_fault_of_an_unknown_operation_is_a_problem(tmp_path: Path) -> None:
    provider = MockProvider(ProviderContext(clock=SystemClock(), state_directory=tmp_path))
    provider.configure({"faults": [{"operation": "create"}]})
    assert provider.validate() == ["faults: there is no operation 'create'"]


def test_a_request_keeps_its_secrets_out_of_its_repr() -> None:
    assert "secret-nonce" not in repr(request())
