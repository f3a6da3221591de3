#!/usr/bin/env bash
# Checks that hoistway's files for llama.cpp compile for Windows, in a tree of llama.cpp that has the patch. Links nothing. Called
# by test.sh, in the root that setup.sh has made.
set -euo pipefail
tree=$1
for source in src/hoistway-{experts,library,streaming,weights}.cpp; do
    x86_64-w64-mingw32-g++ -std=c++17 -Wall -Wextra -Werror -D_WIN32_WINNT=0x0A00 -fsyntax-only \
        -I"$tree/include" -I"$tree/src" -I"$tree/ggml/include" -Icrates/hoistway-capi/include "$tree/$source"
    echo "ok: $source compiles"
done
