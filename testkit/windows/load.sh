#!/usr/bin/env bash
# Loads a checkpoint by the command under Wine, every way that it has there, and compares with a manifest. Called by test.sh.
set -euo pipefail
hoistway() {
    wine target/windows/x86_64-pc-windows-gnu/debug/hoistway.exe "$@"
}

# What carried the bytes must be what was asked for.
load() {
    local ways=$1 report
    shift
    report=$(hoistway load "$model" --manifest "$manifest" --report "$@")
    for way in $ways; do
        grep -q "^ *$way " <<<"$report" || { echo "'$way' carried nothing: $*: $report" >&2; exit 1; }
    done
    echo "equal: $model $*"
}

model=$1 manifest=$2
hoistway --version
load overlapped
for route in overlapped threads; do
    for direct in auto always never; do
        load "$route" --route "$route" --direct "$direct"
    done
    for layout in packed tensor; do
        load "$route" --route "$route" --layout "$layout" --chunk 64KiB
    done
done
load mapped --route mapped
load mapped --route mapped --populate
for route in io_uring cached usrbio gds; do
    if hoistway load "$model" --route "$route" >/dev/null 2>&1; then
        echo "route $route should be refused" >&2
        exit 1
    fi
done
