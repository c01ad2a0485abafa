from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fleetplane.domains.instances.configuration import jsonc
from fleetplane.domains.instances.configuration.jsonc import SyntaxInvalid, TextPosition

scalars = (
    st.none()
    | st.booleans()
    | st.integers(min_value=-(10**300), max_value=10**300)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30
)


@given(values, st.sampled_from([None, 2]), st.booleans())
def test_what_json_writes_is_read_the_same(value: Any, indent: int | None, ascii_only: bool) -> None:
    assert jsonc.parse(json.dumps(value, indent=indent, ensure_ascii=ascii_only)).value == value


@given(st.text(alphabet='{}[]",:/*\\ \n0123eE+-.truefalsn', max_size=40))
@example('{"a": 1,}')
@example("[1 /* */ , // x\n]")
@example("1e333")
def test_any_text_is_read_or_refused_and_strict_json_is_always_read(text: str) -> None:
    try:
        strict, is_strict = json.loads(text, parse_constant=_refuse, parse_float=_finite), True
    except ValueError:
        strict, is_strict = None, False
    try:
        read = jsonc.parse(text).value
    except SyntaxInvalid as error:
        assert not is_strict
        assert 1 <= error.position.line <= text.count("\n") + 1
        assert error.position.column >= 1
    else:
        assert not is_strict or read == strict


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _finite(number: str) -> float:
    """Python reads a number that is too large as infinity, which JSON does not have."""
    if math.isinf(found := float(number)):
        _refuse(number)
    return found


def test_comments_and_trailing_commas_are_left_out_but_not_inside_strings() -> None:
    text = """\ufeff// head
    {
      "url": "https://x/*y*/", /* a
      b */ "list": [1, 2,], // c
      "empty": {}, "none": [ ],
    } // end"""

    assert jsonc.parse(text).value == {"url": "https://x/*y*/", "list": [1, 2], "empty": {}, "none": []}


def test_every_value_and_key_knows_its_place() -> None:
    read = jsonc.parse('{\n  "a": [\n    true,\n    {"é": 1}\n  ]\n}')

    assert read.position(()) == TextPosition(line=1, column=1)
    assert read.key_position(("a",)) == TextPosition(line=2, column=3)
    assert read.position(("a",)) == TextPosition(line=2, column=8)
    assert read.position(("a", 1, "é")) == TextPosition(line=4, column=11)
    assert read.position(("a", 1, "missing", 7)) == read.position(("a", 1))


def test_a_member_given_twice_is_noticed() -> None:
    read = jsonc.parse('{"a": 1,\n "a": 2}')

    assert read.value == {"a": 2}
    assert [(path, read.locate(offset).line) for path, offset in read.duplicates] == [(("a",), 2)]


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("", 1, 1, "expected a value, found the end"),
        ('{\n "a": 1\n "b": 2\n}', 2, 8, 'expected "," or "}" before \'"\''),
        ('{\n "a": 1,\n b: 2\n}', 3, 2, "expected a key in double quotes"),
        ('{"a" 1}', 1, 6, 'expected ":" after the key "a"'),
        ('{"a": [1, 2', 1, 12, "'[' was opened in line 1"),
        ('{"a": 1', 1, 8, "'{' was opened in line 1"),
        ("[1, 2]]", 1, 7, "more after the end"),
        ("[,]", 1, 2, "expected a value, found ','"),
        ("/* never", 1, 1, "never closed"),
        ("[1] / x", 1, 5, "begins with // or /*"),
        ('["a\n"]', 1, 2, "not closed before the end of its line"),
        ('["\\x41"]', 1, 3, "no escape sequence"),
        ('["a\tb"]', 1, 4, "control character"),
        ('["\\ud800"]', 1, 2, "surrogate"),
        ("[01]", 1, 2, "not a JSON number"),
        ("[1e999]", 1, 2, "too large"),
        ("[-]", 1, 2, "not a JSON number"),
        ("[1x]", 1, 2, "not a JSON number"),
        ("[True]", 1, 2, "'True' is no JSON value"),
        ("[NaN]", 1, 2, "'NaN' is no JSON value"),
        ("[" * 100, 1, 66, "deeper than 64"),
        ("[" + "1" * 500 + "]", 1, 2, "more than 400 characters"),
    ],
)
def test_the_first_thing_that_is_wrong_is_named_with_its_place(
    text: str, line: int, column: int, message: str
) -> None:
    with pytest.raises(SyntaxInvalid) as caught:
        jsonc.parse(text)

    assert message in caught.value.message
    assert caught.value.position == TextPosition(line=line, column=column)


def test_a_document_larger_than_the_limit_is_refused_unread() -> None:
    with pytest.raises(SyntaxInvalid, match="the limit is"):
        jsonc.parse(" " * (jsonc.MAX_CHARACTERS + 1))
