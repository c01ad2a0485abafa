#!/usr/bin/env bash
# Install what a step needs and is missing: `setup.sh python VENV`, `setup.sh run`, `setup.sh test`, `setup.sh bench`.
# System packages come from Debian; without root or sudo the script names what to install and fails.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*" >&2; }

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"
    elif command -v sudo >/dev/null; then sudo "$@"
    else return 1
    fi
}

# need COMMAND PACKAGE...: make sure COMMAND exists.
need() {
    local command=$1; shift
    command -v "$command" >/dev/null && return
    install_packages "$@"
    command -v "$command" >/dev/null || { say "$command is still missing after installing $*"; exit 1; }
}

install_packages() {
    say "installing $* with apt-get"
    if ! command -v apt-get >/dev/null; then
        say "this is no Debian; please install by hand: $*"; exit 1
    fi
    as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq &&
        as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null ||
        { say "could not install; please run as root: apt-get install $*"; exit 1; }
}

# need_quiet COMMAND PACKAGE: the same for a service. Tests start their own; the system's must not start just
# because it was installed.
need_quiet() {
    local command=$1 package=$2
    command -v "$command" >/dev/null || [ -x "/usr/sbin/$command" ] && return
    local policy=/usr/sbin/policy-rc.d ours=
    if ! [ -e $policy ]; then
        ours=yes
        printf '#!/bin/sh\nexit 101\n' | as_root tee $policy >/dev/null && as_root chmod 755 $policy ||
            { say "could not install; please run as root: apt-get install $package"; exit 1; }
    fi
    local installed=0
    (install_packages "$package") || installed=$?
    [ -z "$ours" ] || as_root rm -f $policy
    return $installed
}

python_environment() {
    local venv=$1 python=${PYTHON:-python3}
    need "$python" python3
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        { say "$python is older than 3.11; name a newer one with PYTHON=..."; exit 1; }
    if ! [ -x "$venv/bin/pip" ]; then
        rm -rf "$venv"
        "$python" -m venv "$venv" 2>/dev/null || {
            rm -rf "$venv"
            install_packages python3-venv
            "$python" -m venv "$venv"
        }
    fi
    say "installing Fleetplane and its dependencies into $venv"
    PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
        "$venv/bin/pip" install --quiet --editable '.[dev]'
}

case ${1:-} in
    python) python_environment "$2" ;;
    test)
        need gcc gcc libc6-dev  # builds the stand-in NVML library that the real bindings are tested on
        need_quiet nginx nginx  # the proxy agent is tested on a real one
        need pebble pebble      # certificates are tested with a real authority
        need h2load nghttp2-client  # the benchmarks are tried, each for a moment
        need_quiet sshd openssh-server  # boards are provisioned over a real one
        need chromium chromium  # the live page is tested in a real browser
        ;;
    run) need_quiet nginx nginx ;;  # `make run` shows two of them
    bench) need h2load nghttp2-client; need taskset util-linux ;;
    *) say "usage: setup.sh python VENV | run | test | bench"; exit 2 ;;
esac
