from __future__ import annotations

import pytest

from fleetplane.domains.gpus.agent import health
from fleetplane.domains.gpus.agent.health import (
    ConditionStatus,
    GpuSighting,
    GpuUuid,
    HealthReason,
    HealthVerdict,
)
from fleetplane.domains.gpus.xids import APPLICATION_XIDS

GPU = GpuUuid("GPU-1")
OTHER = GpuUuid("GPU-2")
SOUND = GpuSighting(uuid=GPU, product="NVIDIA A100-SXM4-40GB", memory_bytes=40 * 1024**3)
RETIRING = GpuSighting(uuid=GPU, product="A100", memory_bytes=1, retirement_pending=True)
SILENT = GpuSighting(uuid=GPU, product="A100", memory_bytes=None, answering=False)
GONE = GpuSighting(uuid=GPU, product="A100", memory_bytes=None, answering=False, lost=True)


def ready(since_ns: int = 10) -> HealthVerdict:
    return health.on_enumeration(SOUND, now_ns=since_ns)


def condemned(since_ns: int = 5) -> HealthVerdict:
    return health.on_xid(ready(1), 79, ignored=APPLICATION_XIDS, now_ns=since_ns)


def test_an_enumerated_gpu_is_ready_and_says_what_it_is() -> None:
    assert ready() == HealthVerdict(
        status=ConditionStatus.TRUE,
        reason="Initialized",
        message="GPU enumerated via NVML: NVIDIA A100-SXM4-40GB (40.0 GB)",
        since_ns=10,
    )


def test_a_gpu_that_does_not_answer_is_not_called_ready() -> None:
    assert health.on_enumeration(SILENT, now_ns=1).status is ConditionStatus.UNKNOWN
    assert health.on_enumeration(GONE, now_ns=1).reason == HealthReason.GPU_LOST


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (40 * 1024**3, "40.0 GB"),
        (1536 * 1024**2, "1.5 GB"),
        (512 * 1024**2, "512.0 MB"),
        (2048, "2.0 KB"),
        (5, "5 B"),
        (None, "memory size unknown"),
    ],
)
def test_sizes_have_one_decimal_by_powers_of_1024(size: int | None, text: str) -> None:
    assert health.format_size(size) == text


@pytest.mark.parametrize(
    ("xid", "message", "action"),
    [
        (79, "Critical XID error 79 (GPU has fallen off the bus) detected", "RESTART_BM"),
        (999, "Critical XID error 999 (Unknown XID) detected", "CONTACT_SUPPORT"),
    ],
)
def test_an_xid_makes_the_gpu_unready_in_the_known_words(xid: int, message: str, action: str) -> None:
    verdict = health.on_xid(ready(), xid, ignored=APPLICATION_XIDS, now_ns=20)
    assert verdict == HealthVerdict(
        status=ConditionStatus.FALSE, reason="XidError", message=message, since_ns=20, action=action
    )


def test_of_several_xids_the_gravest_says_what_to_do_until_the_gpu_recovers() -> None:
    verdict = ready()
    for xid, action in ((94, "RESTART_APP"), (62, "RESET_GPU"), (94, "RESET_GPU"), (151, "RESTART_VM")):
        verdict = health.on_xid(verdict, xid, ignored=APPLICATION_XIDS, now_ns=20)
        assert verdict.action == action
    assert health.on_lost(verdict, now_ns=30).action == "RESTART_BM"
    again = health.on_enumeration(SOUND, now_ns=40)
    assert health.reconcile(again, SOUND, verdict).action == ""
    kept = health.reconcile(health.on_enumeration(RETIRING, now_ns=40), RETIRING, verdict)
    assert kept.action == "RESTART_VM"


def test_an_ignored_xid_changes_nothing() -> None:
    assert health.on_xid(ready(), 13, ignored=APPLICATION_XIDS, now_ns=20) == ready()


def test_a_second_xid_renews_the_message_but_not_the_time() -> None:
    verdict = health.on_xid(condemned(5), 48, ignored=APPLICATION_XIDS, now_ns=30)
    assert "48" in verdict.message
    assert verdict.since_ns == 5


def test_a_lost_gpu_stays_lost_whatever_xid_follows() -> None:
    lost = health.on_lost(ready(), now_ns=20)
    assert (lost.status, lost.reason, lost.message) == (
        ConditionStatus.FALSE,
        "GPULost",
        "GPU is lost error detected",
    )
    assert health.on_xid(lost, 48, ignored=APPLICATION_XIDS, now_ns=30) == lost
    assert health.on_lost(lost, now_ns=40) == lost


def test_only_gpus_that_stopped_answering_are_lost() -> None:
    assert list(health.lost_among({GPU: True, OTHER: False})) == [OTHER]


def test_when_all_answer_none_of_ours_may_be_called_healthy() -> None:
    assert list(health.lost_among({GPU: True, OTHER: True})) == [GPU, OTHER]


def test_nothing_said_before_means_nothing_to_reconcile() -> None:
    assert health.reconcile(ready(), SOUND, None) == ready()


def test_a_ready_gpu_keeps_the_time_it_has_been_ready_since() -> None:
    assert health.reconcile(ready(10), SOUND, ready(3)) == ready(3)


def test_a_sound_gpu_that_was_condemned_has_recovered() -> None:
    verdict = health.reconcile(ready(10), SOUND, condemned(5))
    assert (verdict.status, verdict.reason, verdict.since_ns) == (ConditionStatus.TRUE, "Recovered", 10)


def test_a_sound_gpu_of_a_silent_provider_has_recovered() -> None:
    unknown = HealthVerdict(status=ConditionStatus.UNKNOWN, reason="ProviderSilent", message="", since_ns=1)
    assert health.reconcile(ready(10), SOUND, unknown).reason == HealthReason.RECOVERED


def test_pending_page_retirement_keeps_a_condemned_gpu_condemned() -> None:
    own = health.on_enumeration(RETIRING, now_ns=10)
    assert health.reconcile(own, RETIRING, condemned(5)) == condemned(5)


def test_an_error_seen_since_the_enumeration_outweighs_what_was_said_before() -> None:
    assert health.reconcile(condemned(20), SOUND, ready(3)) == condemned(20)
