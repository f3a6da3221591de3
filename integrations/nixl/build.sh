#!/bin/sh
# Builds the plug-in: OUTPUT/libplugin_HOISTWAY.so, which needs no other file of hoistway's.
# Usage: build.sh LIBRARY OUTPUT [INCLUDE…]
# LIBRARY is the static C library, as "just capi PREFIX" installs it: PREFIX/lib/libhoistway.a. INCLUDE are NIXL's folders
# of headers; without, the declarations for NIXL 1.5 that lie beside this are taken.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
library=$1
output=$2
shift 2
headers="-I$here/abi"
for include in "$@"; do
    test "$headers" != "-I$here/abi" || headers=
    headers="$headers -I$include"
done
mkdir -p "$output"
# Never unloaded: threads of the C library may end after NIXL closes the plug-in.
# shellcheck disable=SC2086
"${CXX:-c++}" -std=c++20 -O2 -Wall -fPIC -shared -fvisibility=hidden $headers "-I$here/../../crates/hoistway-capi/include" \
    -o "$output/libplugin_HOISTWAY.so" "$here/plugin.cpp" "$library" \
    -Wl,--exclude-libs,ALL -Wl,--gc-sections -Wl,--strip-debug -Wl,-z,nodelete -Wl,-z,relro,-z,now \
    -pthread -lm -ldl
