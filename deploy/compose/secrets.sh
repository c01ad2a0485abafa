#!/usr/bin/env bash
# Make the secrets of deploy/compose.yaml, once: `sudo deploy/compose/secrets.sh [FOLDER]`.
# Each is a file of the user that the servers run as in their containers (10001). Keep a copy of master.key: without it nobody
# can read what is encrypted in the database.
set -euo pipefail
folder=${1:-$(dirname "$0")/secrets}
owner=${SECRETS_OWNER:-10001:10001}
if [ -e "$folder" ]; then
    echo "secrets.sh: $folder is there already, and is left as it is" >&2
    exit 1
fi
umask 077
made=$folder.making
rm -rf "$made"
mkdir -p "$made"
random() { head -c "$1" /dev/urandom | base64 -w 0 | tr '+/' '-_' | tr -d '='; }
head -c 32 /dev/urandom | base64 -w 0 >"$made/master.key"
password=$(random 24)
token=$(random 24)
printf '%s' "$password" >"$made/postgres-password"
printf 'postgresql://fleetplane:%s@postgres:5432/fleetplane' "$password" >"$made/store-url"
printf '%s' "$token" >"$made/bus-token"
printf 'listen: 0.0.0.0:4222\nauthorization { token: "%s" }\n' "$token" >"$made/nats.conf"
chmod 0400 "$made"/*
chown "$owner" "$made"/*
mv "$made" "$folder"
echo "secrets.sh: made $folder" >&2
