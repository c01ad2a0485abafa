"""One contract for all object storage: files in a directory, and a real S3 server."""

from __future__ import annotations

import asyncio
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fleetplane.kernel.errors import (
    Conflict,
    FailedPrecondition,
    FleetplaneError,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from fleetplane.kernel.objects import LocalObjects, Objects, port, s3
from fleetplane.kernel.objects.s3 import S3Bucket, StoreObjects

SERVER = Path(__file__).parents[1] / "support" / "kernel" / "s3_server.py"
LIMIT_BYTES = 64 * 1024
DEADLINE_SECONDS = 60.0


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, str(SERVER)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait(DEADLINE_SECONDS)
        assert process.stdout is not None
        process.stdout.close()


def bucket_at(endpoint: str, name: str, **more: Any) -> S3Bucket:
    return S3Bucket(
        bucket=name,
        region="eu-central-1",
        access_key_id="key",
        secret_access_key="secret",
        endpoint=endpoint,
        **more,
    )


def make_bucket(endpoint: str, tmp_path: Path) -> str:
    name = tmp_path.name.replace("_", "-").lower()[-40:].strip("-") + "-bucket"
    headers = {"Authorization": "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request"}
    httpx.put(f"{endpoint}/{name}", headers=headers).raise_for_status()
    return name


@pytest.fixture(params=["local", "s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    if request.param == "local":
        return LocalObjects(tmp_path / "objects", limit_bytes=LIMIT_BYTES)
    endpoint = request.getfixturevalue("s3_endpoint")
    return StoreObjects(bucket_at(endpoint, make_bucket(endpoint, tmp_path)), limit_bytes=LIMIT_BYTES)


# The contract


async def test_what_is_put_is_got(objects: Objects) -> None:
    etag = await objects.put("shard/a/config.jsonc", b"{}")
    found = await objects.get("shard/a/config.jsonc")

    assert found is not None
    assert (found.body, found.etag) == (b"{}", etag)
    assert found.modified_at_ns > 1_700_000_000 * 10**9
    assert await objects.get("shard/a/other") is None
    assert await objects.get("shard/a") is None
    assert await objects.get("shard/a/config.jsonc/x") is None


@pytest.mark.parametrize("body", [b"", b"\0\xff\r\n", bytes(LIMIT_BYTES)])
async def test_bodies_come_back_byte_for_byte(objects: Objects, body: bytes) -> None:
    await objects.put("x", body)
    found = await objects.get("x")

    assert found is not None
    assert found.body == body


@pytest.mark.parametrize("path", ["a b", "ü/日本", "100%/%41", "a+b&c=d?e#f", "~.-_", ".hidden", "a" * 255])
async def test_paths_are_told_apart_and_listed_as_given(objects: Objects, path: str) -> None:
    await objects.put(path, b"x")

    assert await objects.list() == [path]
    assert await objects.get(path) is not None


async def test_a_put_replaces_and_the_etag_tells(objects: Objects) -> None:
    first = await objects.put("x", b"1")
    second = await objects.put("x", b"2")

    assert first != second
    found = await objects.get("x")
    assert found is not None
    assert (found.body, found.etag) == (b"2", second)


async def test_if_absent_never_replaces(objects: Objects) -> None:
    await objects.put("x", b"1", if_absent=True)

    with pytest.raises(Conflict):
        await objects.put("x", b"2", if_absent=True)
    found = await objects.get("x")
    assert found is not None
    assert found.body == b"1"


async def test_if_match_replaces_only_what_was_read(objects: Objects) -> None:
    first = await objects.put("x", b"1")
    second = await objects.put("x", b"2", if_match=first)

    with pytest.raises(Conflict):
        await objects.put("x", b"3", if_match=first)
    await objects.put("x", b"4", if_match=second)
    await objects.delete("x")
    with pytest.raises(Conflict):
        await objects.put("x", b"5", if_match=second)
    assert await objects.get("x") is None


async def test_of_many_who_create_one_wins(objects: Objects) -> None:
    answers = await asyncio.gather(
        *(objects.put("lock", str(number).encode(), if_absent=True) for number in range(16)),
        return_exceptions=True,
    )
    assert sum(isinstance(answer, str) for answer in answers) == 1
    assert sum(isinstance(answer, Conflict) for answer in answers) == 15
    found = await objects.get("lock")
    assert found is not None
    winner = next(number for number, answer in enumerate(answers) if isinstance(answer, str))
    assert found.body == str(winner).encode()


async def count_up(objects: Objects, times: int) -> None:
    """Read, add one, and write if nobody else did: the loop that conditions exist for."""
    for _ in range(times):
        while True:
            found = await objects.get("counter")
            assert found is not None
            try:
                await objects.put("counter", b"%d" % (int(found.body) + 1), if_match=found.etag)
            except Conflict:
                continue
            break


async def test_no_update_is_lost_between_concurrent_writers(objects: Objects) -> None:
    await objects.put("counter", b"0")
    async with asyncio.timeout(DEADLINE_SECONDS), asyncio.TaskGroup() as tasks:
        for _ in range(5):
            tasks.create_task(count_up(objects, 4))

    found = await objects.get("counter")
    assert found is not None
    assert found.body == b"20"


async def test_deleting_is_final_and_may_be_repeated(objects: Objects) -> None:
    await objects.put("a/b/c", b"x")
    await objects.delete("a/b/c")
    await objects.delete("a/b/c")
    await objects.delete("a/b")

    assert await objects.get("a/b/c") is None
    assert await objects.list() == []
    await objects.put("a", b"an object where a folder was")


async def test_a_list_is_of_whole_segments_sorted(objects: Objects) -> None:
    for path in ("b", "a/2", "a/1/x", "a/10", "ab/1"):
        await objects.put(path, b"")

    assert await objects.list() == ["a/1/x", "a/10", "a/2", "ab/1", "b"]
    for folder in ("a", "a/"):
        assert await objects.list(folder) == ["a/1/x", "a/10", "a/2"]
    assert await objects.list("nothing") == []
    assert await objects.list("b") == []


async def test_a_list_that_is_too_long_is_refused_not_cut(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port, "LIST_LIMIT", 3)
    for number in range(4):
        await objects.put(f"f/{number}", b"")

    with pytest.raises(ResourceExhausted):
        await objects.list("f")


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/etc/passwd",
        "..",
        "../x",
        "a/../../x",
        "a/./b",
        "a//b",
        "a/",
        "a\0b",
        "a\nb",
        "a\\b",
        ".objects/lock",
        "x" * 256,
        "/".join(["x" * 200] * 6),
    ],
)
async def test_a_path_that_leads_elsewhere_is_refused(objects: Objects, path: str) -> None:
    for call in (objects.get(path), objects.put(path, b""), objects.delete(path)):
        with pytest.raises(InvalidArgument):
            await call
    if path not in ("", "/", "a/"):
        with pytest.raises(InvalidArgument):
            await objects.list(path)


async def test_an_object_beyond_the_limit_is_neither_written_nor_read(
    objects: Objects, tmp_path: Path
) -> None:
    with pytest.raises(ResourceExhausted, match="more than the"):
        await objects.put("x", bytes(LIMIT_BYTES + 1))
    assert await objects.list() == []

    await objects.put("x", bytes(LIMIT_BYTES))
    objects._limit_bytes = LIMIT_BYTES - 1  # type: ignore[attr-defined]
    with pytest.raises(ResourceExhausted):
        await objects.get("x")


async def test_contradicting_conditions_are_refused(objects: Objects) -> None:
    with pytest.raises(InvalidArgument):
        await objects.put("x", b"", if_absent=True, if_match="e")


# A directory


async def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    await LocalObjects(tmp_path / "o").put("a/b", b"x")

    assert stat.S_IMODE((tmp_path / "o/a/b").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "o/a").stat().st_mode) == 0o700


async def test_a_link_does_not_lead_out(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"s")
    (tmp_path / "o").mkdir()
    (tmp_path / "o/door").symlink_to(tmp_path)
    (tmp_path / "o/link").symlink_to(tmp_path / "secret")
    objects = LocalObjects(tmp_path / "o")

    for path in ("door/secret", "link"):
        with pytest.raises(FleetplaneError):
            await objects.get(path)
    with pytest.raises(InvalidArgument):
        await objects.put("door/new", b"x")
    with pytest.raises(InvalidArgument):
        await objects.list("door")
    assert not (tmp_path / "new").exists()
    assert await objects.list() == ["link"]


async def test_an_object_cannot_lie_below_another(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path)
    await objects.put("a", b"x")
    with pytest.raises(FailedPrecondition):
        await objects.put("a/b", b"x")
    await objects.put("c/d", b"x")
    with pytest.raises(FailedPrecondition):
        await objects.put("c", b"x")


async def test_what_a_crash_left_behind_is_no_object(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path)
    await objects.put("a", b"whole")
    (tmp_path / ".objects/staging").write_bytes(b"ha")

    assert await objects.list() == ["a"]
    await objects.put("b", b"later")
    found = await objects.get("b")
    assert found is not None
    assert found.body == b"later"


async def test_no_update_is_lost_between_processes(tmp_path: Path) -> None:
    await LocalObjects(tmp_path).put("counter", b"0")
    program = (
        "import asyncio, sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]);"
        "from test_objects import count_up; from fleetplane.kernel.objects import LocalObjects;"
        "asyncio.run(count_up(LocalObjects(Path(sys.argv[2])), 20))"
    )
    arguments = [sys.executable, "-c", program, str(Path(__file__).parent), str(tmp_path)]
    async with asyncio.timeout(DEADLINE_SECONDS):
        processes = [await asyncio.create_subprocess_exec(*arguments) for _ in range(3)]
        assert [await process.wait() for process in processes] == [0, 0, 0]

    found = await LocalObjects(tmp_path).get("counter")
    assert found is not None
    assert found.body == b"60"


async def test_a_directory_that_cannot_be_used_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FleetplaneError):
        await LocalObjects(tmp_path / "file").put("a", b"")


# S3


async def test_two_folders_of_one_bucket_are_two_storages(s3_endpoint: str, tmp_path: Path) -> None:
    name = make_bucket(s3_endpoint, tmp_path)
    one, two = (StoreObjects(bucket_at(s3_endpoint, name, prefix=prefix)) for prefix in ("one", "two"))
    await one.put("x", b"1")

    assert await two.get("x") is None
    assert await one.list() == ["x"]
    assert await StoreObjects(bucket_at(s3_endpoint, name)).list() == ["one/x"]


async def test_a_missing_bucket_is_not_taken_for_a_missing_object(s3_endpoint: str) -> None:
    objects = StoreObjects(bucket_at(s3_endpoint, "nobody-made-this"))
    for call in (objects.get("x"), objects.put("x", b""), objects.list()):
        with pytest.raises(Unavailable, match="no bucket"):
            await call


async def test_the_environment_does_not_decide_where_objects_go(
    s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9",
        "AWS_REGION": "mars",
        "AWS_ACCESS_KEY_ID": "theirs",
        "AWS_SECRET_ACCESS_KEY": "theirs",
        "AWS_SESSION_TOKEN": "theirs",
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_CONDITIONAL_PUT": "disabled",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true",
        "AWS_S3_EXPRESS": "true",
        "AWS_REQUEST_PAYER": "true",
    }.items():
        monkeypatch.setenv(name, value)
    objects = StoreObjects(bucket_at(s3_endpoint, make_bucket(s3_endpoint, tmp_path)))

    await objects.put("x", b"1", if_absent=True)
    with pytest.raises(Conflict):
        await objects.put("x", b"2", if_absent=True)


class OneAnswer(asyncio.Protocol):
    """A storage that says the same to every request, and what it was asked."""

    requests: list[str] = []  # noqa: RUF012  # replaced by each test
    answer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.requests.append(data.decode("latin-1"))
        self.transport.write(self.answer)
        self.transport.close()


async def asked(answer: str) -> tuple[list[str], FleetplaneError]:
    class Double(OneAnswer):
        requests: list[str] = []  # noqa: RUF012

    # Without saying so, a connection that ends a moment later is used again, and that try is not heard.
    Double.answer = f"HTTP/1.1 {answer}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
    server = await asyncio.get_running_loop().create_server(Double, "127.0.0.1", 0)
    async with asyncio.timeout(DEADLINE_SECONDS), server:
        port_number = server.sockets[0].getsockname()[1]
        objects = StoreObjects(bucket_at(f"http://127.0.0.1:{port_number}", "bucket", session_token="tok"))
        with pytest.raises(FleetplaneError) as refused:
            await objects.get("x")
    return Double.requests, refused.value


async def test_requests_are_signed_as_whom_we_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "theirs")
    requests, error = await asked("403 Forbidden")

    assert isinstance(error, PermissionDenied)
    assert "Credential=key/" in requests[0]
    assert "/eu-central-1/s3/" in requests[0]
    assert "x-amz-security-token: tok" in requests[0].lower()


async def test_a_storage_that_fails_is_unavailable_after_a_few_tries() -> None:
    requests, error = await asked("500 Oh")

    assert isinstance(error, Unavailable)
    assert len(requests) == s3.RETRIES + 1


def test_secrets_do_not_show() -> None:
    bucket = bucket_at("http://x", "b", session_token="tok")

    assert "secret" not in repr(bucket).replace("secret_access_key", "")
    assert "tok" not in repr(bucket)
    assert repr(StoreObjects(bucket)) == "<StoreObjects s3://b/>"
