"""`fleetplane audit verify`, on databases that are whole, edited, damaged and absent."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from support.shared.cli_runner import Invoke, Outcome
from support.shared.server_process import running_server

from fleetplane.cli.exits import Exit


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    with running_server(tmp_path / "data", "--only", "gpus") as server:
        assert server.stop() == 0
    return tmp_path / "data"


def test_a_chain_is_verified_edited_and_found_out(invoke: Invoke, data_dir: Path) -> None:
    whole = invoke("audit", "verify", "--data-dir", str(data_dir))
    assert whole.code == 0
    assert re.fullmatch(r"intact: [1-9]\d* entries, up to revision \d+\n", whole.out)

    with closing(sqlite3.connect(data_dir / "fleetplane.db")) as database, database:
        database.execute("INSERT INTO resources VALUES ('gpu', 's', ?, 1, x'00')", ("evil\n\x1b[2J",))
    edited = invoke("audit", "verify", "--data-dir", str(data_dir))
    assert edited.code == 3
    assert edited.out.startswith("not intact: resource gpu s evil")
    assert edited.out.count("\n") == 1
    assert "\x1b" not in edited.out


def test_a_file_that_is_damaged_or_absent_is_told_in_one_line(invoke: Invoke, data_dir: Path) -> None:
    (data_dir / "fleetplane.db").write_bytes(b"garbage" * 1000)
    damaged = invoke("audit", "verify", "--data-dir", str(data_dir))
    assert (damaged.code, damaged.out, damaged.err.count("\n")) == (1, "", 1)
    assert "is damaged" in damaged.err

    absent = invoke("audit", "verify", "--data-dir", str(data_dir / "nowhere"))
    assert (absent.code, absent.out, absent.err.count("\n")) == (4, "", 1)


def test_a_server_elsewhere_verifies_its_own_log_for_who_may_read_all_of_it(
    invoke: Invoke, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    with running_server(folder, "--only", "gpus") as server:

        def verify(role: str, *more: str, tenant: str = "") -> Outcome:
            name = f"{role}-{tenant}"
            of = ("--tenant", tenant) if tenant else ()
            made = invoke("tokens", "create", name, "--role", role, *of, "--data-dir", str(folder))
            (tmp_path / name).write_text(made.out.split()[-1])
            return invoke(
                "audit", "verify", "--server", server.web, "--token-file", str(tmp_path / name), *more
            )

        whole = verify("fleet.auditor")
        assert (whole.code, whole.out[:8]) == (0, "intact: "), whole.err
        for refused in (verify("viewer"), verify("admin", tenant="acme")):
            assert (refused.code, refused.out) == (Exit.DENIED, ""), refused.err
        foreign = tmp_path / "kept.jsonl"
        foreign.write_text('{"no": "checkpoint"}\n')
        refused = verify("admin", "--anchor", str(foreign))
        assert (refused.code, refused.out) == (Exit.USAGE, ""), "it is of nobody's key"
        assert "anchors.0" in refused.err
        with closing(sqlite3.connect(folder / "fleetplane.db", timeout=60)) as database, database:
            database.execute("INSERT INTO resources VALUES ('gpu', 's', 'evil', 1, x'00')")
        edited = verify("owner")
        assert (edited.code, edited.out[:11]) == (Exit.CONDITION_NOT_MET, "not intact:"), edited.err
