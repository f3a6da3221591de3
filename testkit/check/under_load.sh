#!/usr/bin/env bash
# Runs a command while other programs keep every core and the drive busy.
# Usage: under_load.sh COMMAND…
set -euo pipefail

work=$(mktemp -d -p "${LOAD_DIRECTORY:-target}")
pids=()
finish() {
    kill "${pids[@]}" 2>/dev/null || true
    wait 2>/dev/null || true
    rm -rf "$work"
}
trap finish EXIT

for _ in $(seq "$(nproc)"); do
    (while :; do :; done) &
    pids+=($!)
done
(while :; do dd if=/dev/zero of="$work/file" bs=1M count=512 conv=fsync status=none; done) &
pids+=($!)

"$@"
