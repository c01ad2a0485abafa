"""The functions of the template language, with the meaning they have in Go, and how values print.

Strings are counted and cut in bytes of UTF-8, as Go does. Where Go would print a complaint into the output
(`%!d(string=x)`), these refuse instead: a file with a complaint in it is worse than none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from urllib.parse import quote_plus

from fleetplane.kernel.errors import InvalidArgument

MAX_OUTPUT_CHARACTERS = 1 << 20  # a quarter of the message that a rendered file has to fit into
MAX_PRINTF_WIDTH = 1024
MAX_PLAIN_EXPONENT = 6  # Go prints a million as 1e+06

Value = object
Arguments = Sequence[Value]

_VERB = re.compile(
    r"%(?P<flags>[-+# 0]*)(?P<width>[0-9]*)(?:\.(?P<precision>[0-9]*))?(?P<verb>.?)", re.DOTALL
)
_QUOTED = {"\a": "\\a", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\v": "\\v"}
_HTML = str.maketrans({"'": "&#39;", '"': "&#34;", "&": "&amp;", "<": "&lt;", ">": "&gt;", "\0": "\ufffd"})
_JS = {"\\": "\\\\", "'": "\\'", '"': '\\"', "<": "\\u003C", ">": "\\u003E", "&": "\\u0026", "=": "\\u003D"}


class TemplateInvalid(InvalidArgument):
    """The template cannot be read, or cannot be rendered with the data at hand."""

    def __init__(self, message: str, *, line: int) -> None:
        super().__init__(f"template line {line}: {message}")
        self.complaint = message
        self.line = line


class Fields(dict[str, object]):
    """A map with a fixed set of keys: asking it for another one is a mistake, not nothing."""


class FunctionRefusal(Exception):
    """A function refuses its arguments; the caller adds the line."""


def kind(value: Value) -> str:
    match value:
        case None:
            return "nothing"
        case Fields():
            return "a record"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case Mapping():
            return "a map"
        case _:
            return "a list"


def truth(value: Value) -> bool:
    """Go's truth and ours agree: zero and empty are false."""
    return bool(value)


def display(value: Value, *, nested: bool = False) -> str:
    """As `%v` prints it; nothing at all prints as nothing."""
    match value:
        case None:
            return "<nil>" if nested else ""
        case str():
            return value
        case bool():
            return "true" if value else "false"
        case float():
            return _display_float(value)
        case int():
            return str(value)
        case Fields():
            raise FunctionRefusal(f"a single value is wanted here: one of .{', .'.join(value)}")
        case Mapping():
            items = (f"{display(key)}:{display(value[key], nested=True)}" for key in sorted(value))
            return f"map[{' '.join(items)}]"
        case Sequence():
            return f"[{' '.join(display(item, nested=True) for item in value)}]"
        case _:
            raise FunctionRefusal(f"cannot print a {type(value).__name__}")


def _display_float(value: float) -> str:
    if value != value or value in (float("inf"), float("-inf")):
        return {"inf": "+Inf", "-inf": "-Inf"}.get(str(value), "NaN")
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int)
    scientific = exponent + len(digits) - 1
    if value == 0 or -5 < scientific < MAX_PLAIN_EXPONENT:
        text = format(Decimal(repr(value)), "f")
        return text.rstrip("0").rstrip(".") if "." in text else text
    mantissa = "".join(map(str, digits))
    point = f".{mantissa[1:]}" if len(mantissa) > 1 else ""
    return f"{'-' if sign else ''}{mantissa[0]}{point}e{scientific:+03d}"


def _sprint(arguments: Arguments) -> str:
    """Spaces only between neighbours of which neither is a string."""
    text, before = "", True
    for argument in arguments:
        is_string = isinstance(argument, str)
        text += f"{'' if before or is_string else ' '}{display(argument)}"
        before = is_string
    return text


def _println(arguments: Arguments) -> str:
    return " ".join(map(display, arguments)) + "\n"


def quote(text: str) -> str:
    """Go's `%q`."""

    def escaped(character: str) -> str:
        code = ord(character)
        if character in '"\\':
            return "\\" + character
        if character in _QUOTED:
            return _QUOTED[character]
        if character.isprintable():
            return character
        return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

    return f'"{"".join(map(escaped, text))}"'


def _printf(arguments: Arguments) -> str:
    if not arguments or not isinstance(arguments[0], str):
        raise FunctionRefusal("printf wants a format string first")
    waiting = list(arguments[1:])

    def formatted(match: re.Match[str]) -> str:
        if match["verb"] == "%":
            return "%"
        if not waiting:
            raise FunctionRefusal(f"printf has no argument left for {match[0]!r}")
        if int(match["width"] or 0) > MAX_PRINTF_WIDTH or int(match["precision"] or 0) > MAX_PRINTF_WIDTH:
            raise FunctionRefusal(f"printf pads to at most {MAX_PRINTF_WIDTH} characters")
        return _verb(match, waiting.pop(0))

    text = _VERB.sub(formatted, arguments[0])
    if waiting:
        raise FunctionRefusal(f"printf was given {len(waiting)} arguments more than its format names")
    return text


def _verb(match: re.Match[str], value: Value) -> str:
    verb, flags = match["verb"], match["flags"]
    is_int = isinstance(value, int) and not isinstance(value, bool)
    precision = None if match["precision"] is None else int(match["precision"] or 0)
    number = f"%{flags}{match['width']}{'' if precision is None else f'.{precision}'}"
    match verb, value:
        case "d" | "x" | "X" | "o", int() if is_int and precision is None and "#" not in flags:
            return f"{number}{verb}" % value
        case "f" | "F" | "e" | "E", float():
            return f"{number}{verb}" % value
        case "v", _ if precision is None and "+" not in flags and "#" not in flags:
            text = display(value)
        case "s", str():
            text = value if precision is None else value[:precision]
        case "q", str() if precision is None and not set(flags) & {"#", "+", " "}:
            text = quote(value)
        case "t", bool():
            text = display(value)
        case "x" | "X", str() if precision is None and not set(flags) & {"#", " "}:
            text = value.encode().hex()
            text = text.upper() if verb == "X" else text
        case _:
            raise FunctionRefusal(f"printf cannot print {kind(value)} with {match[0]!r}")
    if "0" in flags:
        raise FunctionRefusal(f"printf pads only numbers with zeros, not {kind(value)}")
    width = int(match["width"] or 0)
    return text.ljust(width) if "-" in flags else text.rjust(width)


def _text(arguments: Arguments) -> str:
    match arguments:
        case [str() as only]:
            return only
        case _:
            return _sprint(arguments)


def _js(arguments: Arguments) -> str:
    def escaped(character: str) -> str:
        if character in _JS:
            return _JS[character]
        if character.isprintable():
            return character
        return f"\\u{ord(character):04X}"

    return "".join(map(escaped, _text(arguments)))


def _length(arguments: Arguments) -> int:
    match arguments:
        case [str() as text]:
            return len(text.encode())
        case [Mapping() | list() | tuple() as items] if not isinstance(items, Fields):
            return len(items)
        case [other]:
            raise FunctionRefusal(f"len of {kind(other)}")
        case _:
            raise FunctionRefusal("len wants one argument")


def _index(arguments: Arguments) -> Value:
    if not arguments:
        raise FunctionRefusal("index wants something to look into")
    value, *keys = arguments
    for key in keys:
        match value, key:
            case Fields(), _:
                raise FunctionRefusal(f"index cannot look into this; write .{key}")
            case Mapping(), str():
                value = value.get(key, "")
            case ((list() | tuple() | str()), int()) if not isinstance(key, bool):
                items = value.encode() if isinstance(value, str) else value
                if not 0 <= key < len(items):
                    raise FunctionRefusal(f"index {key} is out of range")
                value = items[key]
            case _:
                raise FunctionRefusal(f"cannot index {kind(value)} by {kind(key)}")
    return value


def _slice(arguments: Arguments) -> Value:
    match arguments:
        case [(str() | list() | tuple()) as value, *bounds] if len(bounds) <= 2:
            items = value.encode() if isinstance(value, str) else value
            low = bounds[0] if bounds else 0
            high = bounds[1] if len(bounds) == 2 else len(items)
            if not (type(low) is int and type(high) is int and 0 <= low <= high <= len(items)):
                raise FunctionRefusal(f"slice from {low} to {high} of {len(items)} is out of range")
            if not isinstance(items, bytes):
                return items[low:high]
            try:
                return items[low:high].decode()
            except UnicodeDecodeError:
                raise FunctionRefusal("slice would cut a character in two") from None
        case _:
            raise FunctionRefusal("slice wants a string or a list and at most two numbers")


def _basic(value: Value) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, (int, float, str)):
        return type(value).__name__
    raise FunctionRefusal(f"{kind(value)} cannot be compared")


def _same(one: Value, other: Value) -> bool:
    if _basic(one) != _basic(other):
        raise FunctionRefusal(f"cannot compare {kind(one)} with {kind(other)}")
    return one == other


def _equal(arguments: Arguments) -> bool:
    if len(arguments) < 2:
        raise FunctionRefusal("eq wants two arguments or more")
    first, *others = arguments
    return any(_same(first, other) for other in others)


def _two(name: str, arguments: Arguments) -> tuple[Value, Value]:
    if len(arguments) != 2:
        raise FunctionRefusal(f"{name} wants two arguments")
    return arguments[0], arguments[1]


def _not_equal(arguments: Arguments) -> bool:
    return not _same(*_two("ne", arguments))


def _less(name: str, arguments: Arguments) -> tuple[bool, bool]:
    """Whether the first is less, and whether both are the same."""
    one, other = _two(name, arguments)
    same = _same(one, other)
    match one, other:
        case bool(), _:
            raise FunctionRefusal("booleans have no order")
        case str(), str():
            return one < other, same
        case ((int() | float()), (int() | float())):
            return one < other, same
        case _:
            raise FunctionRefusal(f"{kind(one)} has no order")


def _not(arguments: Arguments) -> bool:
    if len(arguments) != 1:
        raise FunctionRefusal("not wants one argument")
    return not truth(arguments[0])


def _call(_: Arguments) -> Value:
    raise FunctionRefusal("there are no functions in the data to call")


def _lazy(_: Arguments) -> Value:
    raise AssertionError("and, or: evaluated where their arguments are")


FUNCTIONS: Mapping[str, Callable[[Arguments], Value]] = {
    "and": _lazy,
    "or": _lazy,
    "not": _not,
    "eq": _equal,
    "ne": _not_equal,
    "lt": lambda arguments: _less("lt", arguments)[0],
    "le": lambda arguments: any(_less("le", arguments)),
    "gt": lambda arguments: not any(_less("gt", arguments)),
    "ge": lambda arguments: not _less("ge", arguments)[0],
    "len": _length,
    "index": _index,
    "slice": _slice,
    "print": _sprint,
    "printf": _printf,
    "println": _println,
    "html": lambda arguments: _text(arguments).translate(_HTML),
    "js": _js,
    "urlquery": lambda arguments: quote_plus(_text(arguments), safe=""),
    "call": _call,
}
