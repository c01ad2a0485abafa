#!/usr/bin/env bash
# Start the server with something to see in it, and stop everything together: four simulated GPUs,
# and a group of two instances that are real agents on this computer.
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

# In sessions of their own: Ctrl-C is for this script, which asks each of them once. Asked twice,
# the server would not wait for its agents.
setsid "$bin/fleetplane" server --data-dir "$data" --ready-file "$ready" --set instances.advertise=listeners &
server=$!
gpus=
status=0
stop() {
    trap - EXIT
    trap '' INT TERM
    [ -z "$gpus" ] || kill "$gpus" 2>/dev/null || true
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
And all of it stands in the audit log:
  .venv/bin/fleetplane audit verify --data-dir $data
Ctrl-C ends everything, the instances included.

TXT
wait "$server" || status=$?
