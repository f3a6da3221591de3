#!/usr/bin/env bash
# Builds tests and the command for Windows and runs them under Wine, in what setup.sh has made. With arguments, runs only the
# tests whose names contain them.
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
# There is no network where it is built.
cargo fetch --quiet --locked --target "$windows_target"

# Test programs that run on Windows; docs/windows.md says why others do not.
packages=(--package hoistway-directstorage --package hoistway-io --package hoistway --package hoistway-experts --lib)
for program in runtime directstorage executor lanes slots system headers gguf_corpus windows \
    conformance gguf toy_device replay trace; do
    packages+=(--test "$program")
done
# What Wine 10 cannot do: replace a file that is open, tell its new name, tell the cores of a NUMA node.
skipped=()
for test in a_file_that_is_read_can_be_replaced a_save_replaces_a_file_that_is_read other_names_change_no_bytes \
    a_file_replaced_while_it_is_read a_file_replaced_after_opening pooled_and_huge_and_bound_memory; do
    skipped+=(--skip "$test")
done
# Two threads: the server of Wine is one for all.
in_windows_root 3600 cargo test --quiet --locked "${std_flags[@]}" --target "$windows_target" --no-fail-fast \
    "${packages[@]}" -- --test-threads 2 "${skipped[@]}" "$@"

if (($# == 0)); then
    # What wheels are built for.
    testkit/windows/check.sh x86_64-pc-windows-msvc
    cargo build --quiet --package hoistway-cli --all-features
    in_windows_root 3600 cargo build --quiet --locked "${std_flags[@]}" --target "$windows_target" \
        --package hoistway-cli --package hoistway-capi --package hoistway-python --package fake-cuda
    models=(target/windows/generated)
    python3 testkit/windows/checkpoint.py "${models[0]}"
    test -e .demo/model/model.safetensors && models+=(.demo/model)
    for model in "${models[@]}"; do
        # What the bytes are is found out on Linux.
        manifest=target/windows/${model//\//-}.json
        target/debug/hoistway verify --save "$manifest" "$model" >/dev/null
        in_windows_root 300 testkit/windows/load.sh "$model" "$manifest"
    done
    # Microsoft's own libraries, where they can be had.
    libraries=$(testkit/windows/directstorage.sh)
    if test -n "$libraries"; then
        in_windows_root 600 env HOISTWAY_TEST_DIRECTSTORAGE=1 HOISTWAY_DIRECTSTORAGE_DIR="Z:$libraries" \
            cargo test --quiet --locked "${std_flags[@]}" --target "$windows_target" --package hoistway-directstorage --test runtime
        for model in "${models[@]}"; do
            in_windows_root 600 testkit/windows/load_directstorage.sh \
                "$model" "target/windows/${model//\//-}.json" "Z:$libraries"
        done
    else
        echo 'skipped: Microsoft'\''s DirectStorage was not tried, as its package cannot be fetched' >&2
    fi
    python3 testkit/windows/checkpoint.py target/windows/small 100000
    in_windows_root 600 testkit/windows/capi.sh target/windows/small/model-1.safetensors
    if tree=$(cd integrations/llama.cpp && python3 -c 'import build; print(build.patched_tree())'); then
        in_windows_root 300 testkit/windows/llama_cpp.sh "$tree"
    else
        echo 'skipped: the sources of llama.cpp cannot be had' >&2
    fi
    # As a wheel has it.
    rm -rf target/windows/package
    mkdir target/windows/package
    cp -r python/hoistway target/windows/package/
    rm -f target/windows/package/hoistway/*.so
    cp target/windows/$windows_target/debug/_native.dll target/windows/package/hoistway/_native.pyd
    in_windows_root 600 testkit/windows/package.sh "$PWD/target/windows/package" "$windows_python"
fi
