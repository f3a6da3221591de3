#!/usr/bin/env bash
# Runs a command, and prints all that it printed once it has ended: the output of commands side by side stays readable.
# Usage: whole.sh COMMAND…
set -euo pipefail

output=$(mktemp)
trap 'rm -f "$output"' EXIT
status=0
"$@" >"$output" 2>&1 || status=$?
cat "$output"
exit "$status"
