"""What a user types is what NGINX reads, or it is refused: shown on a real NGINX."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.proxies.nginx_rig import Rig, host, state_folder
from support.shared.free_ports import free_port

from fleetplane.domains.proxies.agent.nginx.applier import VersionApplier
from fleetplane.domains.proxies.agent.nginx.confirmation import VersionState
from fleetplane.domains.proxies.agent.nginx.http_get import get_unix
from fleetplane.domains.proxies.nginx import judging
from fleetplane.domains.proxies.nginx.blocks import Directive, Unrenderable, argument, split_arguments
from fleetplane.domains.proxies.nginx.paths import ANYWHERE
from fleetplane.domains.proxies.nginx.rendering import checksum
from fleetplane.domains.proxies.nginx.table import DirectiveContext
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb


def custom(directives: dict[str, str]) -> list[Directive]:
    return judging.raw(directives, {DirectiveContext.LOCATION}, ANYWHERE, where="here")


HOSTILE = [
    "#x",
    "a\\",
    '"; } server {',
    "'",
    '"',
    "\\\\",
    "\\n",
    '\\"',
    "{",
    "}",
    ";",
    " ",
    "",
    "a b",
    "a#b",
    "# ;",
    "${",
    "é∂ß漢",
    "\\'",
    'a\\"b',
    "} http {",
    "//",
    "~ ^",
    "x;",
    "\\;",
    "'; return 500;",
    '" "',
    "\u2028",
    "a  b",
]
LETTERS = "\\\"'{};#~^ abnrtx$é\u00a0"


class Echo:
    """An NGINX whose answers are texts that were written into its configuration."""

    def __init__(self, folder: Path) -> None:
        self._rig = Rig(folder)
        self._runner = asyncio.Runner()
        self._applier: VersionApplier = self._rig.applier()
        self._runner.run(self._applier.open())
        self._version = 0

    def close(self) -> None:
        self._runner.close()

    def read_back(self, texts: list[str]) -> list[str]:
        """As values of a header: the way of most that a user types."""
        return self._runner.run(self._read_back(texts))

    async def _read_back(self, texts: list[str]) -> list[str]:
        self._version += 1
        port = free_port()
        locations = [
            pb.Location(
                path=f"= /{number}",
                custom_headers=[pb.Header(name="X-Text", value=text, always=True)],
                custom_directives={"return": "204"},
            )
            for number, text in enumerate(texts)
        ]
        update = pb.ConfigUpdate(version=self._version, virtual_hosts=[host(port, *locations)])
        outcome = await self._applier.apply(update, self._rig.report)
        assert outcome.state is VersionState.SUCCESS, outcome.error
        return [await self._ask(port, number) for number in range(len(texts))]

    async def _ask(self, port: int, number: int) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET /{number} HTTP/1.0\r\nHost: a.test\r\n\r\n".encode())
        head = await reader.read()
        writer.close()
        for line in head.split(b"\r\n"):
            name, _, value = line.partition(b": ")
            if name == b"X-Text":
                return value.decode()
        return ""  # NGINX leaves out a header whose value is empty


@pytest.fixture(scope="module")
def echo() -> Iterator[Echo]:
    with state_folder() as folder, contextlib.closing(Echo(folder)) as made:
        yield made


def test_hostile_texts_come_back_as_they_were_typed(echo: Echo) -> None:
    texts = [text for text in HOSTILE if "$" not in text]
    assert echo.read_back(texts) == texts


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.text(LETTERS.replace("$", ""), max_size=30)
        | st.text(st.characters(exclude_categories=("Cc", "Cs"), exclude_characters="$"), max_size=30),
        min_size=20,
        max_size=40,
    )
)
def test_whatever_text_comes_back_as_it_was_typed(echo: Echo, texts: list[str]) -> None:
    assert echo.read_back(texts) == texts


@given(st.lists(st.text(LETTERS, max_size=20), max_size=5))
def test_arguments_are_taken_apart_as_they_were_put_together(values: list[str]) -> None:
    assert list(split_arguments(" ".join(argument(value) for value in values))) == values


@given(st.text(LETTERS, max_size=30))
def test_a_users_directive_is_refused_or_stays_one_directive(text: str) -> None:
    try:
        (made,) = custom({"add_header": text})
    except Unrenderable:
        return
    assert split_arguments(" ".join(map(argument, made.arguments))) == made.arguments


@pytest.mark.parametrize("text", ["a\nb", "\x00", "a\rb", "\x7f", "\ud800", "x" * 5000])
def test_what_cannot_be_written_is_refused(text: str) -> None:
    with pytest.raises(Unrenderable):
        argument(text)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("301 https://$host$request_uri", ("301", "https://$host$request_uri")),
        ('200 "a;b {}"', ("200", "a;b {}")),
        ("~ ${x}y \\.php$", ("~", "${x}y", "\\.php$")),
        ("'it''s'", None),
        ("a; evil", None),
        ("a {", None),
        ("# rest", None),
        ('"open', None),
        ("end\\", None),
        ("a\\nb", None),
    ],
)
def test_a_users_value_is_read_as_nginx_reads_it(text: str, arguments: tuple[str, ...] | None) -> None:
    if arguments is None:
        with pytest.raises(Unrenderable):
            split_arguments(text)
    else:
        assert split_arguments(text) == arguments


@pytest.mark.parametrize(
    "name", ["include", "load_module", "content_by_lua_block", "js_import", "Add", "a b", "perl"]
)
def test_directives_that_reach_beyond_are_refused(name: str) -> None:
    with pytest.raises(Unrenderable):
        custom({name: "x"})


def test_sockets_of_the_machine_are_out_of_reach() -> None:
    with pytest.raises(Unrenderable):
        custom({"fastcgi_pass": "unix:/run/docker.sock"})
    with pytest.raises(Unrenderable):
        custom({"proxy_pass": "http://unix:/run/docker.sock:/"})


def test_both_sides_take_the_same_checksum() -> None:
    from fleetplane.domains.proxies import wire

    update = pb.ConfigUpdate(
        config_id="c",
        version=3,
        virtual_hosts=[host(80, pb.Location(path="/é"))],
        global_settings=pb.GlobalSettings(env_vars={"B": "2", "A": "1"}),
    )
    assert checksum(update) == wire.checksum(update)


async def test_the_smallest_client_gives_up_in_time(tmp_path: Path) -> None:
    assert await get_unix(tmp_path / "none.sock", "/", timeout=0.5) is None
