"""Names and versions of Debian packages, as far as they may be asked for. Pure; both sides check by it.

Stricter than Debian's own grammar where apt-get would read something else into a word: a `-` or `+` at its
end means "remove" and "install", and one at its beginning an option.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fleetplane.kernel.errors import InvalidArgument

PACKAGES_LIMIT = 32
NAME = re.compile(r"[a-z0-9][a-z0-9+.-]{0,98}[a-z0-9]")
VERSION = re.compile(r"(?:[0-9]{1,9}:)?[0-9][A-Za-z0-9.+~-]{0,126}")


def check_packages(packages: Sequence[tuple[str, str]]) -> None:
    """Refuse names and versions that are none, by their field. An empty version stands for any."""
    if len(packages) > PACKAGES_LIMIT:
        raise InvalidArgument(f"has {len(packages)} entries, more than {PACKAGES_LIMIT}", field="packages")
    names = [name for name, _ in packages]
    for at, (name, version) in enumerate(packages):
        if NAME.fullmatch(name) is None or names.count(name) > 1:
            raise InvalidArgument(
                f"{name[:80]!r} is no name of a package, or is there twice",
                field=f"packages[{at}].name",
                hint="write a-z, 0-9 and between them + - . as well",
            )
        if version and VERSION.fullmatch(version) is None:
            raise InvalidArgument(
                f"{version[:80]!r} is no version of a package",
                field=f"packages[{at}].version",
                hint="write it as `apt-cache policy` shows it; leave it out for any",
            )
