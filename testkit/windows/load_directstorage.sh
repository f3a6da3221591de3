#!/usr/bin/env bash
# Loads a checkpoint by Microsoft's DirectStorage under Wine, and compares with a manifest. Called by test.sh.
set -euo pipefail
model=$1 manifest=$2 libraries=$3
hoistway() {
    HOISTWAY_DIRECTSTORAGE_DIR=$libraries wine target/windows/x86_64-pc-windows-gnu/debug/hoistway.exe "$@"
}

load() {
    local report
    report=$(hoistway load "$model" --manifest "$manifest" --report --route directstorage "$@" | tr -d '\r')
    grep -q 'directstorage (staged by the runtime): DirectStorage 1\.3\.' <<<"$report" &&
        test "$(grep -c '^ *[a-z_]* *\(direct\|buffered\)' <<<"$report")" = 1 &&
        grep -q '^ *directstorage *direct.*100\.0 %' <<<"$report" ||
        { echo "directstorage carried not all: $*: $report" >&2; exit 1; }
    echo "equal: $model --route directstorage $*"
}

load
for layout in packed tensor; do
    load --layout "$layout" --chunk 64KiB
done
# Longer than a request.
load --chunk 64MiB
# To the stand-in of NVIDIA's driver, by pinned memory: Wine shares no heap. What else is in this System32 is lost when this ends.
cp target/windows/x86_64-pc-windows-gnu/debug/fake_cuda.dll ~/.wine/drive_c/windows/system32/nvcuda.dll
report=$(hoistway load "$model" --manifest "$manifest" --report --route directstorage --device cuda | tr -d '\r')
for part in '^ *directstorage *direct, staged .*100\.0 %' 'not used: directstorage by D3D12' 'on cuda:0'; do
    grep -q "$part" <<<"$report" || { echo "'$part' is not in the report: $report" >&2; exit 1; }
done
echo "equal: $model --route directstorage --device cuda"
hoistway doctor | grep -q 'DirectStorage: 1\.3\.'
if HOISTWAY_DIRECTSTORAGE_DIR=Z:/absent wine target/windows/x86_64-pc-windows-gnu/debug/hoistway.exe \
    load "$model" --route directstorage >/dev/null 2>&1; then
    echo 'directstorage without its libraries should be refused' >&2
    exit 1
fi
