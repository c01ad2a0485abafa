"""Who depends on which authority, and who would be left behind by its next step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from fleetplane.domains.instances.kinds import Instance, InstanceSpec, InstanceStatus, OperatorRecord
from fleetplane.domains.instances.rules import trust
from fleetplane.kernel.errors import FailedPrecondition
from fleetplane.kernel.identity.roots import SuccessionPhase

OLD, NEW = "0" * 40, "1" * 40


class Trusting:
    """As much of an authority as is asked about here."""

    def __init__(self, phase: SuccessionPhase, *, vouches: bool = False) -> None:
        self.phase = phase
        self.trust_id = "both"
        self.trusted_since_ns = 100
        self.signing_since_ns = 200
        self.vouches = vouches
        names = {
            SuccessionPhase.STEADY: (OLD,),
            SuccessionPhase.ANNOUNCED: (OLD, NEW),
            SuccessionPhase.SWITCHED: (NEW, OLD),
        }[phase]
        self.members = [Named(key_id=name) for name in names]


@dataclass
class Named:
    key_id: str


def an_instance(name: str, *, created_at_ns: int = 1, **fields: Any) -> Instance:
    spec = InstanceSpec(cluster="c", shard="s", group="g", template="t", prefix="wkr")
    status = InstanceStatus(**{"registered_at_ns": 1, "provider_id": "p", **fields})
    return Instance(
        kind="instance",
        scope="tenant/acme",
        name=name,
        uid=name,
        labels={},
        spec=spec,
        status=status,
        conditions=(),
        revision=1,
        created_revision=1,
        generation=1,
        created_at_ns=created_at_ns,
        updated_at_ns=1,
    )


def counted(
    phase: SuccessionPhase, *instances: Instance, operators: Sequence[OperatorRecord] = ()
) -> trust.Census:
    authority: Any = Trusting(phase)
    return trust.census(authority, instances, operators, now_ns=50)


def test_an_instance_is_unaware_until_it_says_otherwise_whatever_it_was_sent() -> None:
    found = counted(
        SuccessionPhase.ANNOUNCED,
        an_instance("old"),
        an_instance("younger", created_at_ns=100),
        an_instance("told", trust="both"),
        an_instance("told-long-ago", trust="one"),
        an_instance("never-came", registered_at_ns=None),
        an_instance("gone", deleting_at_ns=5),
    )
    assert list(found.unaware) == ["old", "younger", "told-long-ago"]


def test_an_instance_made_after_the_switch_has_verified_the_new_authority() -> None:
    found = counted(
        SuccessionPhase.SWITCHED,
        an_instance("before", created_at_ns=199),
        an_instance("after", created_at_ns=200),
    )
    assert list(found.unaware) == ["before"]
    authority: Any = Trusting(SuccessionPhase.SWITCHED)
    with pytest.raises(FailedPrecondition, match="before"):
        trust.check_retire(authority, found)


def test_without_a_second_authority_nobody_is_unaware() -> None:
    assert list(counted(SuccessionPhase.STEADY, an_instance("old")).unaware) == []


def test_records_that_name_no_authority_count_for_the_eldest() -> None:
    plain = an_instance("plain"), an_instance("renewed", certificate_authority=NEW)
    assert counted(SuccessionPhase.STEADY, plain[0]).instances == Counter({OLD: 1})
    assert counted(SuccessionPhase.ANNOUNCED, plain[0]).instances == Counter({OLD: 1})
    assert counted(SuccessionPhase.SWITCHED, *plain).instances == Counter({OLD: 1, NEW: 1})


def test_certificates_of_operators_count_while_they_last() -> None:
    records = [
        OperatorRecord(
            client="c",
            key_digest="k",
            certificate_serial="1",
            registered_at_ns=1,
            expires_at_ns=ends,
            authority=authority,
        )
        for ends, authority in ((40, OLD), (60, OLD), (60, ""), (60, NEW))
    ]
    found = counted(SuccessionPhase.SWITCHED, operators=records)
    assert found.operators == Counter({OLD: 2, NEW: 1})
    authority: Any = Trusting(SuccessionPhase.SWITCHED)
    with pytest.raises(FailedPrecondition, match="0 instances and 2 operators"):
        trust.check_retire(authority, found)


@pytest.mark.parametrize(("unaware", "refused"), [((), False), (("a",), True), (tuple("abcdefg"), True)])
def test_nobody_is_left_behind_by_a_switch(unaware: tuple[str, ...], refused: bool) -> None:
    found = trust.Census(instances=Counter(), operators=Counter(), unaware=unaware)
    vouching: Any = Trusting(SuccessionPhase.ANNOUNCED, vouches=True)
    trust.check_switch(vouching, found)
    authority: Any = Trusting(SuccessionPhase.ANNOUNCED)
    if not refused:
        trust.check_switch(authority, found)
        return
    with pytest.raises(FailedPrecondition, match="a") as caught:
        trust.check_switch(authority, found)
    assert ("2 more" in caught.value.message) == (len(unaware) == 7)
