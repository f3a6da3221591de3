#!/usr/bin/env bash
# Lints the crates that compile for Windows, for that target. Links nothing and runs nothing.
#
# rustup brings the standard library for the target. Where it cannot, the library is compiled from Debian's package of
# this compiler's sources, and its import libraries with Debian's dlltool; neither is installed.
set -euo pipefail
cd "$(dirname "$0")/../.."

target=x86_64-pc-windows-gnu
# Crates that compile C get no compiler: nothing is linked.
export CC_x86_64_pc_windows_gnu=true AR_x86_64_pc_windows_gnu=true
at=$PWD/target/windows-std
release=$(rustc -vV | sed -n 's/^release: //p')
sources=$at/usr/src/rustc-$release/library
arguments=(clippy --quiet --target "$target")
for crate in windlass-device windlass-io windlass windlass-capi windlass-cli; do
    arguments+=(--package "$crate")
done

has_library() {
    compgen -G "$(rustc --print target-libdir --target "$target")/libstd-*" >/dev/null
}

debian() {
    apt-get -qq -o Dir::Etc::SourceList="$at/sources.list" -o Dir::Etc::SourceParts=/dev/null \
        -o Dir::State="$at/state" -o Dir::State::Lists="$at/lists" -o Dir::State::Status="$at/status" \
        -o Dir::Cache="$at/cache" "$@"
}

unpack_sources() {
    local keyring=/usr/share/keyrings/debian-archive-keyring.gpg mirror suite
    mirror=$(sed -n 's/^URIs: *//p; s/^deb .*\(http[^ ]*\) .*/\1/p' /etc/apt/sources.list.d/debian.sources \
        /etc/apt/sources.list 2>/dev/null | head -1)
    test -n "$mirror" && rm -rf "$at" && mkdir -p "$at"/{cache/archives/partial,lists/partial,state} &&
        touch "$at/status" || return
    for suite in trixie-backports "$(. /etc/os-release && echo "$VERSION_CODENAME")"; do
        echo "deb [signed-by=$keyring] $mirror $suite main"
    done >"$at/sources.list"
    debian update && cd "$at" && debian download "rust-src=$release*" binutils-mingw-w64-x86-64 || return
    for package in *.deb; do
        dpkg -x "$package" . || return
    done
}

if has_library || { rustup target add "$target" && has_library; }; then
    exec cargo "${arguments[@]}" -- -D warnings
elif test -d "$sources" || (unpack_sources); then
    PATH=$at/usr/bin:$PATH __CARGO_TESTS_ONLY_SRC_ROOT=$sources RUSTC_BOOTSTRAP=1 \
        exec cargo "${arguments[@]}" -Zbuild-std=std,panic_unwind -- -D warnings
else
    echo "skipped: the Windows target is not checked, as neither rustup nor Debian has its library for $release" >&2
fi
