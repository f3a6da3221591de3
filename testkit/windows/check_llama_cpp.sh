#!/usr/bin/env bash
# Checks that hoistway's files for llama.cpp compile for Windows. Links nothing, runs nothing, and installs nothing: where mingw's
# compiler is not installed, Debian's packages of it are unpacked.
set -euo pipefail
cd "$(dirname "$0")/../.."
source testkit/rust-std.sh

compiler=x86_64-w64-mingw32-g++
mingw=$debian_at/mingw
if ! command -v "$compiler" >/dev/null; then
    if ! test -d "$mingw"; then
        if ! command -v apt-get >/dev/null; then
            echo 'skipped: this machine has no compiler for Windows, and no apt to get one by' >&2
            exit
        fi
        # Aside, so that what was unpacked in part is never used.
        rm -rf "$mingw.new"
        debian_at=$mingw.new
        unpack_debian g++-mingw-w64-x86-64-posix gcc-mingw-w64-x86-64-posix gcc-mingw-w64-x86-64-posix-runtime \
            mingw-w64-x86-64-dev mingw-w64-common binutils-mingw-w64-x86-64 || {
            echo 'no compiler for Windows: its packages could not be had from Debian' >&2
            exit 1
        }
        ln -sf "$compiler-posix" "$mingw.new/usr/bin/$compiler"
        mv "$mingw.new" "$mingw"
    fi
    PATH=$mingw/usr/bin:$PATH
fi
tree=$(cd integrations/llama.cpp && python3 -c 'import build; print(build.patched_tree())')
testkit/windows/llama_cpp.sh "$tree"
