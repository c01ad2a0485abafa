#!/usr/bin/env bash
# Install what a step needs and is missing: `setup.sh python VENV`, `setup.sh product VENV`, `setup.sh image VENV`, `setup.sh audit VENV`, `setup.sh run`, `setup.sh console`,
# `setup.sh cluster`, `setup.sh test`, `setup.sh bench`.
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

# fetched COMMAND...: run what asks a registry, and again if that failed: registries do not answer now and then.
# What is not what was pinned stays refused.
fetched() {
    local told attempt ended
    told=$(mktemp)
    for attempt in 1 2 3; do
        ended=0
        "$@" 2>"$told" || ended=$?
        cat "$told" >&2
        if [ $ended = 0 ] || [ $attempt = 3 ] || grep -q HASHES "$told"; then break; fi
        say "that failed; trying again in $((5 * attempt)) s"
        sleep $((5 * attempt))
    done
    rm -f "$told"
    return $ended
}

install_packages() {
    say "installing $* with apt-get"
    if ! command -v apt-get >/dev/null; then
        say "this is no Debian; please install by hand: $*"; exit 1
    fi
    as_root true && fetched apt_install "$@" ||
        { say "could not install; please run as root: apt-get install $*"; exit 1; }
}

# apt_install PACKAGE...: waits for whoever else installs something.
apt_install() {
    local apt="env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3"
    as_root $apt update && as_root $apt install -y --no-install-recommends "$@" >/dev/null
}

# need_quiet COMMAND PACKAGE: the same for a service. Tests start their own; the system's must not start just
# because it was installed.
need_quiet() {
    local command=$1 package=$2
    command -v "$command" >/dev/null || [ -x "/usr/sbin/$command" ] && return
    forbid_services || { say "could not install; please run as root: apt-get install $package"; exit 1; }
    local installed=0
    (install_packages "$package") || installed=$?
    allow_services
    return $installed
}

# need_streams: NGINX's stream module, which Debian has in a package of its own.
need_streams() {
    local program options folder
    program=$(command -v nginx || echo /usr/sbin/nginx)
    options=$("$program" -V 2>&1)
    case " $options " in *" --with-stream "*) return ;; esac
    folder=$(printf '%s' "$options" | sed -n 's/.*--modules-path=\([^ ]*\).*/\1/p')
    [ -e "${folder:-/usr/lib/nginx/modules}/ngx_stream_module.so" ] && return
    forbid_services || { say "could not install; please run as root: apt-get install libnginx-mod-stream"; exit 1; }
    local installed=0
    (install_packages libnginx-mod-stream) || installed=$?
    allow_services
    return $installed
}

# Debian asks this file whether a service may start. Ours is taken away again however the script ends: left
# behind, it would keep every later package's service from starting.
POLICY=${POLICY_RC_D:-/usr/sbin/policy-rc.d}
OURS=
forbid_services() {
    [ -e "$POLICY" ] && return
    trap allow_services EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    OURS=yes
    printf '#!/bin/sh\nexit 101\n' | as_root tee "$POLICY" >/dev/null && as_root chmod 755 "$POLICY"
}
allow_services() {
    [ -z "$OURS" ] || as_root rm -f "$POLICY"
    OURS=
}

# empty_environment VENV: a Python environment with nothing but pip, unless there is one.
empty_environment() {
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
}

# Every file that is installed is checked against its hash.
install_pinned() {
    fetched env PIP_DISABLE_PIP_VERSION_CHECK=1 "$1/bin/pip" install --quiet --timeout 60 --require-hashes --no-deps \
        --requirement "$2"
}

# What makes the code installable: the generated part of it is made at build.
BUILD='editables grpcio-tools hatchling packaging pathspec pluggy setuptools trove-classifiers'

# only NAME... <requirements: the entries of these packages, with their hashes.
only() {
    awk -v names=" $* " '/^[^ #]/ { split($1, part, "=="); wanted = index(names, " " part[1] " ") } wanted'
}

# progress TOTAL: one line that counts what pip fetches and installs.
progress() {
    awk -v total="$1" -v terminal="$([ -t 2 ] && echo 1 || echo 0)" '
        function tell(text) {
            if (terminal) printf "\r\033[K%s", text > "/dev/stderr"; else print text > "/dev/stderr"
        }
        /^Collecting/ { seen++; if (terminal || seen % 10 == 0) tell("setup: " seen " of " total " packages: " $2) }
        /^Installing collected/ { tell("setup: unpacking " total " packages") }
        /^(ERROR|WARNING)/ { print > "/dev/stderr" }
        END { if (terminal) printf "\r\033[K" > "/dev/stderr" }'
}

# What running the product needs, and nothing of what developing it needs.
product_environment() {
    local venv=$1 wanted total
    empty_environment "$venv"
    wanted=$(mktemp)
    { cat requirements.txt; only $BUILD <requirements-dev.txt; } >"$wanted"
    total=$(grep -c '^[^ #].*==' "$wanted")
    say "installing $total packages into $venv; the first time takes a minute or two"
    PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv/bin/pip" install --progress-bar off --require-hashes --no-deps \
        --requirement "$wanted" | progress "$total"
    rm -f "$wanted"
    console_libraries || as_it_is
    say "building Fleetplane"
    install_ourselves "$venv"
}

python_environment() {
    local venv=$1
    empty_environment "$venv"
    say "installing Fleetplane and its dependencies into $venv"
    install_pinned "$venv" requirements-dev.txt
    console_libraries || as_it_is
    install_ourselves "$venv"
}

# What draws the console's charts, from npm, checked against the hash in the lock file. Where the system has no Node, one
# from PyPI fetches it, in an environment of its own, which is not kept.
console_libraries() {
    local python=${PYTHON:-python3}
    "$python" tools/console/libraries.py --there && return
    say "fetching the library that draws the console's charts"
    if ! command -v npm >/dev/null || ! command -v node >/dev/null; then
        say "there is no Node here; fetching one for that, 60 MB"
        (empty_environment .make/node) && install_pinned .make/node tools/console/requirements.txt || return 1
        python=.make/node/bin/python
    fi
    fetched "$python" tools/console/libraries.py >/dev/null || return 1
    rm -rf .make/node
}

# The console works without it. The build, which looks for it too, is not to wait for a registry once more.
as_it_is() {
    say "the console will show numbers instead of charts; to get them once npm reaches its registry: tools/setup.sh console"
    export npm_config_offline=true
}

install_ourselves() {
    local venv=$1
    # In this order: an environment made before there were two distributions has all files in the first one,
    # and loses them when that is replaced.
    local project
    for project in packages/fleetplane "${HOW-"--editable "}."; do
        # shellcheck disable=SC2086  # two words are meant
        PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv/bin/pip" install --quiet --no-deps --no-build-isolation $project
    done
}

# Helm, and the schemas of what its charts are rendered to. They are read from the packages that bring them.
chart_tools() {
    if [ "$(uname -m)" != x86_64 ]; then
        say "there is no Helm here for $(uname -m): charts are not linted"
        return
    fi
    rm -rf .make/charts
    mkdir -p .make/charts.making
    fetched env PIP_DISABLE_PIP_VERSION_CHECK=1 "${VENV:-.venv}/bin/pip" download --quiet --timeout 60 --require-hashes --no-deps \
        --only-binary :all: --dest .make/charts.making --requirement tools/charts/requirements.txt
    mv .make/charts.making .make/charts
}

# What makes TypeScript clients of the OpenAPI documents; every package is checked against the hash in the lock file.
client_generators() {
    need npm npm
    mkdir -p .make/clients
    cp tools/clients/package.json tools/clients/package-lock.json .make/clients/
    fetched npm ci --prefix .make/clients --ignore-scripts --no-audit --no-fund --loglevel=error --fetch-retries=5 >/dev/null
}

# An authority that suggests when to renew: Debian's has no opinion yet. Built with a compiler from a package.
newer_authority() {
    empty_environment .make/go
    say "building a newer ACME authority; the first time takes a few minutes"
    install_pinned .make/go tools/authority/requirements.txt
    GOBIN="$PWD/.make/authority" GOPATH="$PWD/.make/go/path" GOFLAGS=-modcacherw \
        .make/go/bin/go install github.com/letsencrypt/pebble/v2/cmd/pebble@v2.10.1
}

case ${1:-} in
    python) python_environment "$2" ;;
    product) product_environment "$2" ;;
    image) console_libraries; HOW='' product_environment "$2" ;;
    console) console_libraries ;;
    audit) empty_environment "$2"; install_pinned "$2" requirements-audit.txt; touch "$2" ;;
    cluster) need_quiet pg_ctlcluster postgresql; need_quiet haproxy haproxy; need_quiet nats-server nats-server ;;
    test)
        need gcc gcc libc6-dev  # builds the stand-in NVML library that the real bindings are tested on
        need_quiet nginx nginx  # the proxy agent is tested on a real one
        need_streams            # and passes on TCP and UDP
        need pebble pebble      # certificates are tested with a real authority
        need h2load nghttp2-client  # the benchmarks are tried, each for a moment
        need_quiet sshd openssh-server  # boards are provisioned over a real one
        need_quiet pg_ctlcluster postgresql  # the store is tested on a real one
        need_quiet haproxy haproxy  # several servers are tried behind a real balancer
        need_quiet nats-server nats-server  # their bell is tried on a real one
        need chromium chromium  # the live page is tested in a real browser
        need docker-compose docker-compose  # what is deployed is rendered; no daemon is needed
        chart_tools             # and linted
        console_libraries       # charts are drawn in that browser
        client_generators       # clients are made of the OpenAPI documents, and compiled
        ;;
    faults) newer_authority ;;
    run) need_quiet nginx nginx ;;  # `make run` shows two of them
    bench)
        need h2load nghttp2-client; need taskset util-linux
        need_quiet pg_ctlcluster postgresql; need_quiet nats-server nats-server
        ;;
    *) say "usage: setup.sh python VENV | product VENV | image VENV | audit VENV | console | run | cluster | test | faults | bench"; exit 2 ;;
esac
