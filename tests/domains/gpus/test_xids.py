from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetplane.domains.gpus import xids
from fleetplane.domains.gpus.xids import XidSeverity
from fleetplane.kernel.errors import InvalidArgument


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 68, 109])
def test_an_error_of_the_application_does_not_condemn_the_gpu(xid: int) -> None:
    assert not xids.condemns(xid)
    assert xids.severity(xid) is XidSeverity.IGNORED


@pytest.mark.parametrize("xid", [48, 63, 64, 74, 79, 94, 95, 119, 120])
def test_a_grave_error_condemns_and_is_called_critical(xid: int) -> None:
    assert xids.condemns(xid)
    assert xids.severity(xid) is XidSeverity.CRITICAL


@pytest.mark.parametrize("xid", [8, 62, 92, 999])
def test_an_error_nobody_knows_condemns_but_is_only_a_warning(xid: int) -> None:
    assert xids.condemns(xid)
    assert xids.severity(xid) is XidSeverity.WARNING


def test_every_application_and_critical_number_has_a_text_of_its_own() -> None:
    for xid in xids.APPLICATION_XIDS | xids.CRITICAL_XIDS:
        assert xids.describe(xid) != "Unknown XID"
    assert xids.describe(79) == "GPU has fallen off the bus"
    assert xids.describe(999) == "Unknown XID"


def test_the_operators_list_adds_to_the_usual_one() -> None:
    ignored = xids.ignored_xids({79})
    assert not xids.condemns(79, ignored)
    assert not xids.condemns(13, ignored)
    assert xids.condemns(48, ignored)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", set()),
        ("  ", set()),
        (",", set()),
        ("13", {13}),
        ("13,31", {13, 31}),
        ("13 31", {13, 31}),
        (" 13 , 31 ", {13, 31}),
        (",13,,31,", {13, 31}),
        ("13,13", {13}),
    ],
)
def test_a_list_may_have_blanks_and_surplus_commas(text: str, numbers: set[int]) -> None:
    assert xids.parse_xids(text) == numbers


@pytest.mark.parametrize("text", ["x", "13,abc", "-1", "1.5", "٣", "99999999999"])
def test_a_token_that_is_no_xid_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidArgument, match="is not an XID"):
        xids.parse_xids(text)


@given(st.frozensets(st.integers(0, xids.LARGEST_XID)), st.sampled_from([",", " ", ", ", " ,\t"]))
def test_any_set_of_numbers_reads_back(numbers: frozenset[int], separator: str) -> None:
    assert xids.parse_xids(separator.join(map(str, numbers))) == numbers


@pytest.mark.parametrize(
    ("xid", "action"),
    [
        (31, "RESTART_APP"),
        (48, "WORKFLOW_XID_48"),
        (63, "IGNORE"),
        (74, "WORKFLOW_NVLINK_ERR"),
        (79, "RESTART_BM"),
        (95, "RESET_GPU"),
        (119, "RESET_GPU"),
        (145, "WORKFLOW_NVLINK5_ERR"),
        (151, "RESTART_VM"),
        (154, ""),
        (1, "CONTACT_SUPPORT"),
        (999, "CONTACT_SUPPORT"),
    ],
)
def test_the_action_is_that_of_nvidias_catalogue(xid: int, action: str) -> None:
    assert xids.action(xid) == action


def test_every_number_of_the_catalogue_has_one_action() -> None:
    numbers = [xid for listed in xids.ACTIONS.values() for xid in listed]
    assert len(numbers) == len(set(numbers))
