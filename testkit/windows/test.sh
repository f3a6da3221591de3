#!/usr/bin/env bash
# Builds tests, the command and the libraries for Windows and runs them under Wine, in what setup.sh has made. With arguments, runs
# only the tests whose names contain them.
#
# Wine is not Windows: it serves transfers of a handle side by side where Windows does not, and takes any address, offset and
# length where a handle without a cache needs whole sectors. Debug builds assert the latter. No speed is measured here.
set -euo pipefail
cd "$(dirname "$0")/../.."
source testkit/rust-std.sh
source testkit/windows/root.sh

test -d "$windows_root" && test -d "$windows_python" || { echo "run 'just windows-setup' first" >&2; exit 1; }
test "$(id -u)" = 0 || { echo 'windows-test needs root, for mounts' >&2; exit 1; }
find_std "$windows_target"

# Everything is compiled once, with one set of features.
packages=(--locked "${std_flags[@]}" --target "$windows_target" --all-features)
for package in fake-cuda hoistway hoistway-{capi,cli,device,directstorage,experts,io,python}; do
    packages+=(--package "$package")
done
programs=(--lib --bins "${windows_programs[@]}")
models=(target/windows/large target/windows/many)
test -e .demo/model/model.safetensors && models+=(.demo/model)

# Runs a function, and says how long it took.
step() {
    local begin=$SECONDS
    "$@"
    echo "windows-test: $1 took $((SECONDS - begin)) s" >&2
}

compile() {
    # There is no network where it is built.
    cargo fetch --quiet --locked --target "$windows_target"
    in_windows_root 3600 cargo build --quiet "${packages[@]}" "${programs[@]}"
    in_windows_root 3600 cargo test --quiet "${packages[@]}" "${programs[@]}" --no-run
}

run_tests() {
    # What Wine 10 cannot do: replace a file that is open, tell its new name, tell the cores of a NUMA node.
    local test skipped=()
    for test in a_file_that_is_read_can_be_replaced a_save_replaces_a_file_that_is_read other_names_change_no_bytes \
        a_file_replaced_while_it_is_read a_file_replaced_after_opening pooled_and_huge_and_bound_memory; do
        skipped+=(--skip "$test")
    done
    # Two threads: the server of Wine is one for all. The test program of the Python package, which is empty, needs Python's library.
    in_windows_root 3600 env WINEPATH="Z:$windows_python" cargo test --quiet "${packages[@]}" "${programs[@]}" --no-fail-fast -- \
        --test-threads 2 "${skipped[@]}" "$@"
}

# What wheels are built for.
check_msvc() {
    testkit/windows/check.sh x86_64-pc-windows-msvc
}

# What the bytes are is found out on Linux.
load_by_command() {
    local model manifest
    cargo build --quiet --workspace --all-features --bin hoistway
    python3 testkit/windows/checkpoint.py large target/windows/large
    python3 testkit/windows/checkpoint.py many target/windows/many
    for model in "${models[@]}"; do
        manifest=$(manifest_of "$model")
        target/debug/hoistway verify --save "$manifest" "$model" >/dev/null
        in_windows_root 300 testkit/windows/load.sh "$model" "$manifest"
    done
}

manifest_of() {
    echo "target/windows/${1//\//-}.json"
}

count_reads_in_flight() {
    local reads found traces=target/windows/traces
    for reads in 16 64; do
        rm -rf "$traces"
        mkdir "$traces"
        in_windows_root 300 testkit/windows/trace.sh target/windows/large "$reads" "$traces"
        found=$(python3 testkit/windows/depth.py 65536 "$traces"/*)
        test "$found" = "$reads" || { echo "$found reads were in flight, where $reads may be" >&2; exit 1; }
        echo "in flight: $found reads of route overlapped"
    done
}

# Microsoft's own libraries, where they can be had.
load_by_directstorage() {
    local model libraries
    libraries=$(testkit/windows/directstorage.sh)
    if test -z "$libraries"; then
        echo 'skipped: Microsoft'\''s DirectStorage was not tried, as its package cannot be fetched' >&2
        return
    fi
    in_windows_root 600 env HOISTWAY_TEST_DIRECTSTORAGE=1 HOISTWAY_DIRECTSTORAGE_DIR="Z:$libraries" \
        cargo test --quiet "${packages[@]}" --test runtime
    for model in "${models[@]}"; do
        in_windows_root 600 testkit/windows/load_directstorage.sh "$model" "$(manifest_of "$model")" "Z:$libraries"
    done
}

use_c_library() {
    python3 testkit/windows/checkpoint.py small target/windows/small
    in_windows_root 600 testkit/windows/capi.sh target/windows/small/model-1.safetensors
}

use_go_package() {
    if ! command -v go >/dev/null || ! command -v x86_64-w64-mingw32-gcc >/dev/null; then
        echo 'skipped: tests of the Go package, which need golang and gcc-mingw-w64-x86-64-posix' >&2
        return
    fi
    testkit/windows/go.sh
    in_windows_root 600 env -C go/hoistway wine "$PWD/target/windows/capi/bin/go.test.exe"
}

compile_for_llama_cpp() {
    local tree
    if tree=$(cd integrations/llama.cpp && python3 -c 'import build; print(build.patched_tree())'); then
        in_windows_root 300 testkit/windows/llama_cpp.sh "$tree"
    else
        echo 'skipped: the sources of llama.cpp cannot be had' >&2
    fi
}

# As a wheel has it.
use_python_package() {
    rm -rf target/windows/package
    mkdir target/windows/package
    cp -r python/hoistway target/windows/package/
    rm -f target/windows/package/hoistway/*.so
    cp target/windows/$windows_target/debug/_native.dll target/windows/package/hoistway/_native.pyd
    in_windows_root 600 testkit/windows/package.sh "$PWD/target/windows/package" "$windows_python"
}

step compile
step run_tests "$@"
if (($# == 0)); then
    for name in check_msvc load_by_command count_reads_in_flight load_by_directstorage use_c_library use_go_package \
        compile_for_llama_cpp use_python_package; do
        step "$name"
    done
fi
