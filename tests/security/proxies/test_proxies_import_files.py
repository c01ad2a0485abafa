"""A hostile nginx.conf is refused in words, whatever it includes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetplane.domains.proxies.importing.reading import read
from fleetplane.kernel.errors import InvalidArgument


@pytest.mark.parametrize("included", ["nginx.conf", "*.conf", "other.conf"])
def test_a_configuration_that_includes_itself_is_refused(tmp_path: Path, included: str) -> None:
    path = tmp_path / "nginx.conf"
    path.write_text(f"http {{ include {tmp_path}/{included}; }}\n")
    (tmp_path / "other.conf").write_text(f"include {tmp_path}/nginx.conf;\n")
    with pytest.raises(InvalidArgument, match="includes itself"):
        read(path)


def test_files_that_double_each_other_are_refused_before_they_fill_the_memory(tmp_path: Path) -> None:
    for number in range(30):
        following = f"include {tmp_path}/{number + 1}.conf;\n"
        (tmp_path / f"{number}.conf").write_text(following * 2)
    (tmp_path / "30.conf").write_text("")
    with pytest.raises(InvalidArgument, match="more than 20000 times"):
        read(tmp_path / "0.conf")
    many = "charset utf-8;\n" * 400
    (tmp_path / "30.conf").write_text(many)
    (tmp_path / "nginx.conf").write_text(f"http {{ include {tmp_path}/15.conf; }}")
    with pytest.raises(InvalidArgument, match="more than 200000 directives"):
        read(tmp_path / "nginx.conf")


def test_too_many_and_too_large_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "nginx.conf"
    path.write_text("include big.conf;")
    with (tmp_path / "big.conf").open("wb") as big:
        big.truncate(17 << 20)
    with pytest.raises(InvalidArgument, match="16 MiB together"):
        read(path)
    path.write_text("include /dev/zero;")
    with pytest.raises(InvalidArgument, match="is not a file"):
        read(path)
    path.write_text("include d/*.conf;")
    (tmp_path / "d").mkdir()
    for number in range(2_001):
        (tmp_path / "d" / f"{number}.conf").touch()
    with pytest.raises(InvalidArgument, match="more than 2000 files"):
        read(path)


def test_what_is_included_stands_in_the_place_of_the_include(tmp_path: Path) -> None:
    path = tmp_path / "nginx.conf"
    path.write_text(
        "http { include sites/*.conf; include same.conf; include same.conf; include none/*.conf; }"
    )
    (tmp_path / "sites").mkdir()
    for name in ("b", "a"):
        (tmp_path / "sites" / f"{name}.conf").write_text(f"charset {name};")
    (tmp_path / "same.conf").write_text("etag on;")
    (http,) = read(path)
    told = [(one.words, Path(one.file).name) for one in http.block or ()]
    assert told == [
        ("charset a", "a.conf"),
        ("charset b", "b.conf"),
        ("etag on", "same.conf"),
        ("etag on", "same.conf"),
    ]
    path.write_text("include missing.conf;")
    with pytest.raises(InvalidArgument, match="missing"):
        read(path)
