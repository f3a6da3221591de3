#!/bin/sh
# Links the C library for 64-bit Windows by mingw and installs it: bin/hoistway.dll, headers, and import libraries for mingw
# (libhoistway.dll.a) and Microsoft's linker (hoistway.lib).
# Usage: BUILT=DIRECTORY install_windows.sh PREFIX
# BUILT names a directory with libhoistway_capi.a, built for x86_64-pc-windows-gnu.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
tool=x86_64-w64-mingw32
mkdir -p "$1/bin" "$1/lib" "$1/include"
cp "$here/include/hoistway.h" "$here/include/hoistway.hpp" "$1/include/"

# Nothing else is exported, and nothing is taken that no exported function needs.
definition=$1/lib/hoistway.def
{ echo 'LIBRARY hoistway.dll' && echo EXPORTS && "$here/functions.sh"; } > "$definition"
undefined=$("$here/functions.sh" | sed 's/^/-Wl,-u,/')
# shellcheck disable=SC2086
$tool-gcc -shared -static -o "$1/bin/hoistway.dll" "$definition" $undefined "$BUILT/libhoistway_capi.a" \
    -Wl,--out-implib,"$1/lib/libhoistway.dll.a" -Wl,--gc-sections -Wl,--strip-debug \
    -lws2_32 -luserenv -lntdll -lbcrypt -ladvapi32 -lcrypt32
$tool-dlltool --input-def "$definition" --dllname hoistway.dll --output-lib "$1/lib/hoistway.lib"
