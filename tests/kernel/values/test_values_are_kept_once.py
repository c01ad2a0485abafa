"""Values that every room needs are made in one place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fleetplane
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.values.ids import check_uuid, new_uuid
from fleetplane.kernel.values.times import DAY_NS, NS, spelled, spelled_or_null
from fleetplane.kernel.values.timestamps import timestamp
from fleetplane.sim.clock import VirtualClock

PACKAGE = Path(fleetplane.__file__).parent
VALUES = PACKAGE / "kernel" / "values"


@pytest.mark.parametrize(
    ("pattern", "home"),
    [
        (r"^class Nothing\(msgspec", "kernel/resources.py"),
        (r"^class Nothing\(Spec", ""),
        (r"^_?NS(_PER_SECOND)?(: Final)? = ", "kernel/values/times.py"),
        (r"Timestamp\(seconds=at_ns", "kernel/values/timestamps.py"),
        (r"uuid\.UUID\(bytes=\w*\.?_?clock\.token_bytes", "kernel/values/ids.py"),
        (r"^def (parse_nanoseconds|parse_typed)", "kernel/values/durations.py"),
    ],
)
def test_nobody_else_makes_it(pattern: str, home: str) -> None:
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "gen" not in path.relative_to(PACKAGE).parts[:1]
        and re.search(pattern, path.read_text(), re.MULTILINE)
    }
    assert found == ({home} if home else set())


def test_moments_are_spelled_in_utc_and_to_the_second() -> None:
    assert spelled(DAY_NS + 1) == "1970-01-02T00:00:00Z"
    assert (spelled_or_null(None), spelled_or_null(0)) == (None, "1970-01-01T00:00:00Z")
    made = timestamp(5 * NS + 7)
    assert (made.seconds, made.nanos) == (5, 7)
    assert timestamp(None) is None


def test_ids_are_made_by_the_clock_and_taken_in_one_form() -> None:
    made = new_uuid(VirtualClock())
    assert check_uuid(made.upper(), field="id") == made == new_uuid(VirtualClock())
    for text in ("", "x", f"{{{made}}}", made.replace("-", ""), f"urn:uuid:{made}", "1" * 10_000):
        with pytest.raises(InvalidArgument) as refused:
            check_uuid(text, field="id")
        assert refused.value.field == "id"
