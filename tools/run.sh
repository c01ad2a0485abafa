#!/usr/bin/env bash
# Start the server and a small simulated GPU provider, and stop both together.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$1
data=${FLEETPLANE_DATA_DIR:-./fleetplane-data}
ready=$(mktemp -u "${TMPDIR:-/tmp}/fleetplane-ready.XXXXXX")
"$bin/fleetplane" server --data-dir "$data" --ready-file "$ready" &
server=$!
agent=
stop() {
    trap - EXIT INT TERM
    [ -z "$agent" ] || kill "$agent" 2>/dev/null || true
    kill "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
    rm -f "$ready"
}
trap stop EXIT INT TERM

for _ in $(seq 150); do
    [ -s "$ready" ] && break
    kill -0 "$server" 2>/dev/null || { wait "$server"; exit $?; }
    sleep 0.1
done
[ -s "$ready" ] || { echo "run: the server did not become ready in 15 s" >&2; exit 1; }

address=$("$bin/python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["listeners"]["device-api"][0].removeprefix("http://"))' "$ready")
"$bin/fleetplane" agent gpu --simulate 4 --address "$address" &
agent=$!
cat <<TXT

Four simulated GPUs report to it; now and then one of them fails. In another terminal:
  .venv/bin/fleetplane gpus watch --address $address
  .venv/bin/fleetplane gpus conditions --address $address
  .venv/bin/fleetplane audit verify --data-dir $data
Ctrl-C ends both.

TXT
wait "$server"
