"""Which environment variables somebody else may set for a program on this machine. Pure.

A variable can choose the code that a program runs: its libraries, its start-up files, its helpers.
So the question is which names are harmless, never which are not: `SAFE` is the list that holds without
anybody's word. The machine's owner may add names and prefixes. A prefix never covers a variable that is
known to steer other programs or to name whom they trust: such a one is added by its name. One that chooses
code outright is never allowed, whoever asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

SAFE: Final = ("COLUMNS", "LANG", "LANGUAGE", "LC_*", "LINES", "NO_COLOR", "TERM", "TZ")
"""How a program formats what it says, and no more."""

_CHOOSES_CODE: Final = re.compile(
    r"""
    # shells
    PATH | ENV | IFS | SHELLOPTS | BASHOPTS | BASH_.* | PS[0-9] | PROMPT_COMMAND | FPATH | ZDOTDIR | INPUTRC
    # the loader and the C library
    | LD_.* | DYLD_.* | GLIBC_TUNABLES | GCONV_PATH | LOCPATH | NLSPATH | MALLOC_.*
    # interpreters
    | PYTHON.* | PERL.* | RUBY.* | GEM_.* | BUNDLE_.* | NODE_.* | NPM_CONFIG_.* | npm_config_.*
    | JAVA_TOOL_OPTIONS | JAVA_OPTS | _JAVA_.* | JDK_.* | CLASSPATH | LUA_.* | TCL.*PATH | PHP.* | GUILE_.*
    | GOFLAGS | RUSTC.* | CARGO_.* | DOTNET_STARTUP_HOOKS | COMPlus_.* | CORECLR_.*
    # programs that other programs start
    | LESSOPEN | LESSCLOSE | GIT_(?!AUTHOR_|COMMITTER_).* | SSH_ASKPASS | SUDO_ASKPASS | TAR_OPTIONS
    | RSYNC_RSH | MAKEFLAGS | OPENSSL_CONF | OPENSSL_ENGINES | OPENSSL_MODULES
    """,
    re.VERBOSE,
)
_STEERS: Final = re.compile(
    r"""
    HOME | SHELL | TMPDIR | CDPATH | XDG_.* | TERMINFO.* | TERMCAP | HOSTALIASES | RES_OPTIONS | LOCALDOMAIN
    | (.*_)?PAGER | (.*_)?EDITOR | VISUAL | BROWSER | (.*_)?ASKPASS | LESS.* | SSH_.* | RSYNC_.* | GZIP
    | MAKE.* | CC | CXX | CPP | LD | AR | .*FLAGS | PKG_CONFIG.* | .*_HOME | .*_PATH | .*_OPTS | .*_OPTIONS
    | DOCKER_.* | KUBE.* | ANSIBLE_.* | SUDO_.* | SYSTEMD_.* | DBUS_.* | NOTIFY_SOCKET | LISTEN_.* | DISPLAY
    | SSL_.* | CURL_.* | REQUESTS_CA_BUNDLE | (.*_)?PROXY | (.*_)?proxy
    """,
    re.VERBOSE,
)


def chooses_code(name: str) -> bool:
    """Whether a variable is known to decide which code a program runs."""
    return _CHOOSES_CODE.fullmatch(name) is not None


def allowed(name: str, patterns: Iterable[str]) -> bool:
    """Whether `NAME` or `PREFIX_*` among the patterns permits a variable. One that chooses code never is."""
    if chooses_code(name):
        return False
    steers = _STEERS.fullmatch(name) is not None
    return any(
        name.startswith(entry[:-1]) and not steers if entry.endswith("*") else name == entry
        for entry in patterns
    )
