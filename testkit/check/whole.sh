#!/usr/bin/env bash
# Runs a command, and prints all that it printed once it has ended: the output of commands side by side stays readable.
# The command is no background job of this shell: those ignore Ctrl-C, which tests send to what they start.
# Usage: whole.sh COMMAND…
set -euo pipefail

output=$(mktemp)
trap 'cat "$output"; rm -f "$output"' EXIT
status=0
"$@" >"$output" 2>&1 || status=$?
if ((status != 0)); then
    echo "FAILED with $status: $*" >>"$output"
fi
exit "$status"
