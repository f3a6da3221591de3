#!/usr/bin/env bash
# Checks that hoistway's files for llama.cpp compile for Windows. Links nothing, runs nothing, and installs nothing: where mingw's
# compiler is not installed, Debian's packages of it are unpacked.
set -euo pipefail
cd "$(dirname "$0")/../.."
source testkit/rust-std.sh

compiler=x86_64-w64-mingw32-g++
if ! command -v "$compiler" >/dev/null; then
    PATH=$debian_at/usr/bin:$PATH
    if ! command -v "$compiler" >/dev/null; then
        unpack_debian g++-mingw-w64-x86-64-posix gcc-mingw-w64-x86-64-posix gcc-mingw-w64-x86-64-posix-runtime \
            mingw-w64-x86-64-dev mingw-w64-common binutils-mingw-w64-x86-64 || {
            echo 'skipped: neither this machine nor Debian has a compiler for Windows' >&2
            exit
        }
        ln -sf "$compiler-posix" "$debian_at/usr/bin/$compiler"
    fi
fi
tree=$(cd integrations/llama.cpp && python3 -c 'import build; print(build.patched_tree())')
testkit/windows/llama_cpp.sh "$tree"
