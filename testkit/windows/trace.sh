#!/usr/bin/env bash
# Loads a checkpoint by route overlapped under Wine, in reads of 64 KiB, of which so many may be in flight. Writes what strace sees
# of each thread to a folder. Called by test.sh.
set -euo pipefail
model=$1 reads=$2 traces=$3 program=target/windows/x86_64-pc-windows-gnu/debug/hoistway.exe
# Wine's server is started before, and not traced.
wine "$program" --version
strace -ff --output "$traces/thread" -xx -s 4 -e trace=pread64,read,write \
    wine "$program" load "$model" --route overlapped --direct always --rings 1 --chunk 64KiB --in-flight "$((reads * 64))KiB"
