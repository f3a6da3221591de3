#!/usr/bin/env bash
# Checks that hoistway's files for llama.cpp compile for Windows, and the files that the patch changes most, in a tree of llama.cpp
# that has the patch. Links nothing. Called by test.sh, in the root that setup.sh has made, and by check_llama_cpp.sh.
set -euo pipefail
tree=$1
compile() {
    x86_64-w64-mingw32-g++ -std=c++17 -D_WIN32_WINNT=0x0A00 -fsyntax-only \
        -I"$tree/include" -I"$tree/src" -I"$tree/ggml/include" -Icrates/hoistway-capi/include "$tree/$1" "${@:2}"
    echo "ok: $1 compiles"
}
for source in src/hoistway-{experts,library,streaming,weights}.cpp; do
    compile "$source" -Wall -Wextra -Werror
done
# What llama.cpp is warned of is not ours.
for source in src/llama-{context,model-loader}.cpp; do
    compile "$source" -w
done
