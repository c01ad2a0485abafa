#!/usr/bin/env bash
# Start the server with something to see in it, and stop everything together: four simulated GPUs, a group
# of two instances that are real agents on this computer, two real NGINX that serve one virtual host, an edge
# daemon that runs commands on this computer, and a simulated board.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$1
data=${FLEETPLANE_DATA_DIR:-./fleetplane-data}
ready=$(mktemp -u "${TMPDIR:-/tmp}/fleetplane-ready.XXXXXX")
config=$data/objects/shard/local/config.jsonc
if [ ! -e "$config" ]; then
    mkdir -p "$(dirname "$config")"
    cp docs/examples/instances/local.jsonc "$config"
fi

password=$data/admin-password
if [ ! -e "$password" ]; then
    (umask 077 && mkdir -p "$data" && "$bin/python" -c 'import secrets; print(secrets.token_urlsafe(18))' >"$password")
fi

# In sessions of their own: Ctrl-C is for this script, which asks each of them once. Asked twice,
# the server would not wait for its agents.
setsid "$bin/fleetplane" server --data-dir "$data" --ready-file "$ready" --set instances.advertise=listeners \
    --set "proxies.admin_password_file=$password" &
server=$!
gpus= proxies= daemon= board=
status=0
stop() {
    trap - EXIT
    trap '' INT TERM
    [ -z "$gpus" ] || kill "$gpus" 2>/dev/null || true
    if [ -n "$board" ]; then kill "$board" 2>/dev/null && wait "$board" 2>/dev/null || true; fi
    if [ -n "$daemon" ]; then kill "$daemon" 2>/dev/null && wait "$daemon" 2>/dev/null || true; fi
    if [ -n "$proxies" ]; then kill "$proxies" 2>/dev/null && wait "$proxies" 2>/dev/null || true; fi
    if kill "$server" 2>/dev/null; then echo "Stopping; instances end with the server." >&2; fi
    wait "$server" 2>/dev/null || true
    [ -z "$gpus" ] || wait "$gpus" 2>/dev/null || true
    rm -f "$ready"
    exit "$status"
}
trap stop EXIT
trap stop INT TERM

for _ in $(seq 150); do
    [ -s "$ready" ] && break
    kill -0 "$server" 2>/dev/null || { wait "$server" || status=$?; exit "$status"; }
    sleep 0.1
done
[ -s "$ready" ] || { echo "run: the server did not become ready in 15 s" >&2; status=1; exit 1; }

address=$("$bin/python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["listeners"]["device-api"][0].removeprefix("http://"))' "$ready")
setsid "$bin/fleetplane" agent gpu --simulate 4 --address "$address" &
gpus=$!
setsid "$bin/python" tools/demo_proxies.py "$ready" "$password" "$data/proxies" &
proxies=$!
# Enrolled anew at each start, as the same node: the server may listen elsewhere than the last time.
export FLEETPLANE_EDGE_AGENT_STATE_DIR=$data/edge FLEETPLANE_EDGE_AGENT_USER_CONFIG=$data/edge/user.yaml
if "$bin/fleetplane" edge token --name here --data-dir "$data" 2>/dev/null |
    "$bin/fleetplane" agent edge enroll --force - >/dev/null; then
    setsid "$bin/fleetplane" agent edge run --log-level warning &
    daemon=$!
else
    echo "run: no edge daemon: it could not be enrolled" >&2
fi
# So is the board: same folder, same key, same board.
export FLEETPLANE_BOARD_AGENT_STATE_DIR=$data/board FLEETPLANE_BOARD_AGENT_NAME=demo
boards=$("$bin/python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["listeners"]["boards"][0].removeprefix("https://"))' "$ready")
if "$bin/fleetplane" boards join-token create --name demo --data-dir "$data" 2>/dev/null |
    "$bin/fleetplane" agent board join --replace --simulate --server "$boards" - >/dev/null; then
    setsid "$bin/fleetplane" agent board run --simulate --address 127.0.0.1 --port 0 --log-level warning &
    board=$!
else
    echo "run: no board: it could not join" >&2
fi
where=
[ "$data" = ./fleetplane-data ] || where=" --data-dir $data"
cat <<TXT

Two instances come up, each a real agent on this computer. In another terminal:
  .venv/bin/fleetplane instances list$where
  .venv/bin/fleetplane instances scale workers 5 --wait$where
  .venv/bin/fleetplane instances watch$where
  .venv/bin/fleetplane explain default/workers$where
  ls -l $data/instances/local/*/recv
Four simulated GPUs report to it too; now and then one of them fails:
  .venv/bin/fleetplane gpus watch --address $address
  .venv/bin/fleetplane gpus conditions --address $address
Two NGINX serve one virtual host, demo.localhost; where is told below as soon as they do. The API and its page:
  admin@fleetplane.local, with the password in $password
An edge daemon takes commands for this computer, as its configuration in $data/edge allows:
  .venv/bin/fleetplane edge ls$where
  .venv/bin/fleetplane edge run --target all$where -- uname -a
  .venv/bin/fleetplane edge runs$where
A simulated board has joined, with pins to drive:
  .venv/bin/fleetplane boards gpio add demo:17 --direction output$where
  .venv/bin/fleetplane boards gpio write demo:17 high$where
  .venv/bin/fleetplane boards show demo$where
And all of it stands in the audit log:
  .venv/bin/fleetplane audit verify --data-dir $data
Ctrl-C ends everything, the instances included.

TXT
wait "$server" || status=$?
