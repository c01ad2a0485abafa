"""Who depends on which authority, and who would be left behind by its next step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from fleetplane.domains.instances import trust
from fleetplane.domains.instances.kinds import Instance, InstanceSpec, InstanceStatus, OperatorRecord
from fleetplane.kernel.errors import FailedPrecondition
from fleetplane.kernel.identity.succession import Phase

OLD, NEW = "0" * 40, "1" * 40


class Trusting:
    """As much of an authority as is asked about here."""

    def __init__(self, phase: Phase) -> None:
        self.phase = phase
        self.trust_id = "both"
        self.trusted_since_ns = 100
        names = {Phase.STEADY: (OLD,), Phase.ANNOUNCED: (OLD, NEW), Phase.SWITCHED: (NEW, OLD)}[phase]
        self.members = [Named(key_id=name) for name in names]


@dataclass
class Named:
    key_id: str


def an_instance(name: str, *, created_at_ns: int = 1, **fields: Any) -> Instance:
    spec = InstanceSpec(cluster="c", shard="s", group="g", template="t", prefix="wkr")
    status = InstanceStatus(**{"registered_at_ns": 1, "provider_id": "p", **fields})
    return Instance(
        kind="instance", scope="tenant/acme", name=name, uid=name, labels={}, spec=spec, status=status,
        conditions=(), revision=1, created_revision=1, generation=1, created_at_ns=created_at_ns,
        updated_at_ns=1,
    )  # fmt: skip


def counted(phase: Phase, *instances: Instance, operators: Sequence[OperatorRecord] = ()) -> trust.Census:
    authority: Any = Trusting(phase)
    return trust.census(authority, instances, operators, now_ns=50)


def test_an_instance_is_unaware_until_it_was_made_later_or_says_otherwise() -> None:
    found = counted(
        Phase.ANNOUNCED,
        an_instance("old"),
        an_instance("younger", created_at_ns=100),
        an_instance("told", trust="both"),
        an_instance("told-long-ago", trust="one"),
        an_instance("never-came", registered_at_ns=None),
        an_instance("gone", deleting_at_ns=5),
    )
    assert list(found.unaware) == ["old", "told-long-ago"]


def test_records_that_name_no_authority_count_for_the_eldest() -> None:
    plain = an_instance("plain"), an_instance("renewed", certificate_authority=NEW)
    assert counted(Phase.STEADY, plain[0]).instances == Counter({OLD: 1})
    assert counted(Phase.ANNOUNCED, plain[0]).instances == Counter({OLD: 1})
    assert counted(Phase.SWITCHED, *plain).instances == Counter({OLD: 1, NEW: 1})


def test_certificates_of_operators_count_while_they_last() -> None:
    records = [
        OperatorRecord(
            client="c", key_digest="k", certificate_serial="1", registered_at_ns=1, expires_at_ns=ends,
            authority=authority,
        )
        for ends, authority in ((40, OLD), (60, OLD), (60, ""), (60, NEW))
    ]  # fmt: skip
    found = counted(Phase.SWITCHED, operators=records)
    assert found.operators == Counter({OLD: 2, NEW: 1})
    authority: Any = Trusting(Phase.SWITCHED)
    with pytest.raises(FailedPrecondition, match="0 instances and 2 operators"):
        trust.check_retire(authority, found)


@pytest.mark.parametrize(("unaware", "refused"), [((), False), (("a",), True), (tuple("abcdefg"), True)])
def test_nobody_is_left_behind_by_a_switch(unaware: tuple[str, ...], refused: bool) -> None:
    found = trust.Census(instances=Counter(), operators=Counter(), unaware=unaware)
    if not refused:
        trust.check_switch(found)
        return
    with pytest.raises(FailedPrecondition, match="a") as caught:
        trust.check_switch(found)
    assert ("2 more" in caught.value.message) == (len(unaware) == 7)
