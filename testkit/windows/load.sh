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
# To the stand-in of NVIDIA's driver, as a program finds the driver. What else is in this System32 is lost when this ends.
cp target/windows/x86_64-pc-windows-gnu/debug/fake_cuda.dll ~/.wine/drive_c/windows/system32/nvcuda.dll
for direct in auto always never; do
    report=$(hoistway load "$model" --manifest "$manifest" --report --device cuda --route staged --direct "$direct")
    if ! grep -q ', staged ' <<<"$report" || ! grep -q 'on cuda:0' <<<"$report"; then
        echo "staged carried nothing to the device: $direct: $report" >&2
        exit 1
    fi
    echo "equal: $model --device cuda --route staged --direct $direct"
done
for route in io_uring cached usrbio gds; do
    if hoistway load "$model" --route "$route" >/dev/null 2>&1; then
        echo "route $route should be refused" >&2
        exit 1
    fi
done
