"""Is it safe to let `nginx -t` look at a whole configuration that somebody sent? Pure.

Testing is not harmless: modules are loaded, logs and pid files are opened for writing and folders
made, all as the user NGINX is started as. So whatever runs code, reads other files or names a path
outside the folder of the test is refused before NGINX sees it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

CONTENT_LIMIT_BYTES: Final = 1024 * 1024
_CODE: Final = frozenset({"load_module", "include", "ssl_engine", "perl_modules", "perl_require", "user"})
_CODE_PREFIXES: Final = ("js_", "lua_", "perl")
_WRITES: Final = frozenset({"pid", "error_log", "access_log", "lock_file", "working_directory"})
_WRITES_PARTS: Final = ("_temp_path", "_cache_path", "_store")
_SCRATCH: Final = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
_HARMLESS: Final = frozenset({"off", "stderr"})


def foreign_fault(content: str) -> str:
    """Why a configuration may not be tested; empty if it may."""
    if len(content.encode("utf-8", "replace")) > CONTENT_LIMIT_BYTES:
        return f"The configuration is longer than {CONTENT_LIMIT_BYTES} bytes"
    for words in statements(content):
        name = words[0]
        if name in _CODE or name.startswith(_CODE_PREFIXES) or "_by_lua" in name:
            return f"The directive {name} is not allowed in a configuration to be tested"
        writes = name in _WRITES or any(part in name for part in _WRITES_PARTS)
        if writes and len(words) > 1 and not _stays_inside(words[1]):
            return f"{name} must name a path inside the folder of the test, not {words[1][:200]!r}"
        if name == "listen" and len(words) > 1 and words[1].startswith("unix:"):
            return "listen must not name a socket of the machine"
    return ""


def names_pid(content: str) -> bool:
    return any(words[0] == "pid" for words in statements(content))


def _stays_inside(path: str) -> bool:
    return path in _HARMLESS or not (
        path.startswith(("/", "syslog:", "memory:")) or ".." in path or "$" in path
    )


def with_scratch(content: str, folder: Path) -> str:
    """The same configuration with what NGINX would open by default moved into the folder of the test.

    Added on the line of `http {`, so that the lines NGINX complains about keep their numbers.
    """
    named = {words[0] for words in statements(content)}
    own = [f"{kind}_temp_path {folder}/{kind};" for kind in _SCRATCH if f"{kind}_temp_path" not in named]
    if "access_log" not in named:
        own.append("access_log off;")
    for words, end, after in _parsed(content):
        if words == ["http"] and end == "{":
            return f"{content[:after]} {' '.join(own)} {content[after:]}"
    return content


def statements(content: str) -> Iterator[list[str]]:
    """The words of each directive and each block's head, as NGINX's tokeniser would part them."""
    return (words for words, _, _ in _parsed(content))


def _parsed(content: str) -> Iterator[tuple[list[str], str, int]]:
    """Also the character that ends each, and the position after it."""
    words: list[str] = []
    position = 0
    while position < len(content):
        character = content[position]
        if character in " \t\r\n":
            position += 1
        elif character == "#":
            position = content.find("\n", position)
            if position < 0:
                break
        elif character in ";{}":
            position += 1
            if words:
                yield words, character, position
            words = []
        else:
            word, position = _word(content, position)
            words.append(word)
    if words:
        yield words, "", position


def _word(content: str, start: int) -> tuple[str, int]:
    quote = content[start] if content[start] in "\"'" else ""
    position = start + len(quote)
    found: list[str] = []
    variable = False
    while position < len(content):
        character = content[position]
        if character == "\\" and position + 1 < len(content):
            found.append(content[position + 1])
            position += 2
            continue
        if quote and character == quote:
            return "".join(found), position + 1
        if not quote and (character in " \t\r\n;" or (character == "{" and not variable)):
            break
        variable = character == "$" or (character == "{" and variable)
        found.append(character)
        position += 1
    return "".join(found), position
