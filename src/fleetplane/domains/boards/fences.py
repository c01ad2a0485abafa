"""The place of an order among all orders, by which a board tells a late one from a newer one. Pure.

Where several servers call boards, each writes down that it is about to, and the revision of that write goes
along with the call. A board that has carried out a newer order refuses an older one, however late it comes:
from a server that was stopped, or whose call was held up on its way. Revisions of another lineage, such as
before a backup was restored, are not comparable; there the order that comes last counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from fleetplane.kernel.errors import InvalidArgument

_SPELLED: Final = re.compile(r"([0-9A-Za-z-]{1,64})/([0-9]{1,19})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    lineage: str
    revision: int

    def __str__(self) -> str:
        return f"{self.lineage}/{self.revision}"

    def is_older_than(self, other: Fence | None) -> bool:
        return other is not None and self.lineage == other.lineage and self.revision < other.revision


def parsed(text: str, *, field: str) -> Fence:
    """The fence that a header spells, or the error that names it."""
    found = _SPELLED.fullmatch(text)
    if found is None:
        raise InvalidArgument("must be a lineage and a revision, as in 9f2c/4711", field=field)
    return Fence(lineage=found[1], revision=int(found[2]))
