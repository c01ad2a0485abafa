from __future__ import annotations

from fleetplane.domains.gpus.agent.health import ConditionStatus, GpuSighting, GpuUuid, HealthReason
from fleetplane.domains.gpus.agent.ledger import Ledger
from fleetplane.domains.gpus.xids import APPLICATION_XIDS

A, B = GpuUuid("GPU-A"), GpuUuid("GPU-B")


def sighting(uuid: GpuUuid, *, retirement_pending: bool = False) -> GpuSighting:
    return GpuSighting(uuid=uuid, product="A100", memory_bytes=1024, retirement_pending=retirement_pending)


def ledger(*uuids: GpuUuid, lower_case_names: bool = False) -> Ledger:
    made = Ledger(ignored_xids=APPLICATION_XIDS, lower_case_names=lower_case_names)
    made.adopt([sighting(uuid) for uuid in uuids], now_ns=1)
    return made


def tell_all(held: Ledger, *, created: bool = False) -> None:
    for gpu in held.owed():
        held.told(gpu, gpu.verdict, created=created)


def test_a_gpu_is_named_by_its_uuid_as_it_is_or_in_lower_case() -> None:
    assert ledger(A).names == ["GPU-A"]
    assert ledger(A, lower_case_names=True).names == ["gpu-a"]


def test_everything_is_owed_until_told_and_again_in_a_new_session() -> None:
    held = ledger(A, B)
    assert len(held.owed()) == 2
    tell_all(held)
    assert held.owed() == []
    held.begin_session()
    assert len(held.owed()) == 2


def test_bad_news_is_told_first() -> None:
    held = ledger(A, B)
    held.on_xid(B, 79, now_ns=2)
    assert [gpu.uuid for gpu in held.owed()] == [B, A]


def test_a_change_while_telling_is_owed_again() -> None:
    held = ledger(A)
    (gpu,) = held.owed()
    before = gpu.verdict
    held.on_xid(A, 79, now_ns=2)
    held.told(gpu, before)
    assert held.owed() == [gpu]


def test_an_event_of_a_gpu_that_is_not_ours_changes_nothing() -> None:
    held = ledger(A)
    assert held.on_xid(B, 79, now_ns=2) == []
    held.on_lost({A: True, B: False}, now_ns=3)
    assert held.names == ["GPU-A"]


def test_a_loss_marks_only_the_silent_gpu() -> None:
    held = ledger(A, B)
    changed = held.on_lost({A: True, B: False}, now_ns=2)
    assert [gpu.uuid for gpu in changed] == [B]
    assert held.gpus[0].verdict.status is ConditionStatus.TRUE


def test_a_new_enumeration_lets_a_sound_gpu_recover() -> None:
    held = ledger(A)
    held.on_xid(A, 79, now_ns=2)
    held.adopt([sighting(A)], now_ns=3)
    assert held.gpus[0].verdict.reason == HealthReason.RECOVERED


def test_a_new_enumeration_does_not_help_while_pages_wait_to_be_retired() -> None:
    held = ledger(A)
    held.on_xid(A, 63, now_ns=2)
    held.adopt([sighting(A, retirement_pending=True)], now_ns=3)
    assert held.gpus[0].verdict.reason == HealthReason.XID_ERROR
    assert held.gpus[0].verdict.since_ns == 2


def test_only_a_gpu_that_we_registered_is_ours_to_remove_when_it_vanishes() -> None:
    held = ledger(A, B)
    first, second = held.gpus
    held.told(first, first.verdict, created=True)
    held.told(second, second.verdict)
    held.adopt([], now_ns=2)
    assert [held.is_ours_to_remove(gpu) for gpu in held.gone()] == [True, False]
    assert all(gpu.verdict.status is ConditionStatus.FALSE for gpu in held.gone())


def test_a_gpu_that_comes_back_before_we_took_leave_is_not_gone() -> None:
    held = ledger(A)
    held.adopt([], now_ns=2)
    held.adopt([sighting(A)], now_ns=3)
    assert held.gone() == []
    assert held.gpus[0].verdict.reason == HealthReason.RECOVERED


def test_what_the_server_held_is_taken_into_account_once() -> None:
    held = ledger(A)
    (gpu,) = held.gpus
    other = ledger(A)
    other.on_xid(A, 79, now_ns=0)
    held.reconcile(gpu, other.gpus[0].verdict)
    assert gpu.verdict.reason == HealthReason.RECOVERED
    held.on_xid(A, 48, now_ns=5)
    held.reconcile(gpu, other.gpus[0].verdict)
    assert "48" in gpu.verdict.message
