#!/usr/bin/env bash
# Installs the C library for Windows into a folder and runs programs in C and C++ with it under Wine. Called by test.sh, in the
# root that setup.sh has made.
set -euo pipefail
at=target/windows/capi checkpoint=$1
BUILT=target/windows/x86_64-pc-windows-gnu/debug crates/hoistway-capi/install_windows.sh "$at"

# What the header promises, and nothing else.
diff <(crates/hoistway-capi/functions.sh) \
    <(x86_64-w64-mingw32-objdump -p "$at/bin/hoistway.dll" | sed -n 's/.* \(hoistway_[a-z0-9_]*\)$/\1/p' | sort -u) ||
    { echo 'hoistway.dll exports other functions than abi/1.txt lists' >&2; exit 1; }

for library in hoistway.lib libhoistway.dll.a; do
    for source in conformance.c conformance.cpp; do
        compiler=gcc standard=c11
        if [ "${source##*.}" = cpp ]; then
            compiler=g++ standard=c++17
        fi
        "x86_64-w64-mingw32-$compiler" -std=$standard -Wall -Wextra -Werror -O1 -D__USE_MINGW_ANSI_STDIO=1 -static -pthread \
            -I"$at/include" -o "$at/bin/$source.exe" "crates/hoistway-capi/c/$source" "$at/lib/$library"
        said=$(wine "$at/bin/$source.exe" "$checkpoint" | tr -d '\r')
        test "$said" = ok || { echo "$source with $library: $said" >&2; exit 1; }
        echo "ok: $source with $library"
    done
done
