#!/usr/bin/env bash
# Runs recipes of `just` one after the other, and ends with a table of how long each took.
# Usage: steps.sh [--keep-going] RECIPE…
# RECIPE may have arguments: 'fuzz 60'. A recipe that fails ends the run, or with --keep-going is listed as failed at its end.
set -uo pipefail
cd "$(dirname "$0")/../.."

keep_going=
if [ "${1:-}" = --keep-going ]; then
    keep_going=yes
    shift
fi

failed=0
rows=()
for step in "$@"; do
    echo "== just $step"
    start=$SECONDS
    # shellcheck disable=SC2086
    if just $step; then verdict=passed; else verdict=FAILED failed=1; fi
    rows+=("$(printf '%6d s  %-6s  just %s' $((SECONDS - start)) "$verdict" "$step")")
    [ "$failed" = 0 ] || [ -n "$keep_going" ] || break
done
printf '\n'
printf '%s\n' "${rows[@]}"
printf '%6d s  in all; the checkout takes %s of the disk\n' "$SECONDS" "$(du -sh . 2>/dev/null | cut -f1)"
exit "$failed"
