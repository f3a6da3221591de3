#!/usr/bin/env bash
# Builds what a release consists of into dist/: wheels and the sdist, the command, the C library, Debian packages of both, the
# bill of materials, checksums. Usage: build.sh [ARCHITECTURE]...; by default that of this machine, then aarch64 if it can be compiled for, then
# `windows`, the wheel for Windows on x86-64, if `just windows-setup` has made what that takes.
#
# Zig links, against the glibc of manylinux_2_28: what is built here runs on distributions that are older than this one.
set -euo pipefail
cd "$(dirname "$0")/.."
source testkit/rust-std.sh
source testkit/windows/root.sh

glibc=2.28
here=$(uname -m)
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
work=$PWD/target/packaging
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH

build() {
    local arch=$1 target=$1-unknown-linux-gnu
    local built=$work/target/$target/dist command=hoistway-$version-$arch-linux library=libhoistway-$version-$arch-linux

    maturin build --profile dist --zig --target "$target" --compatibility "manylinux_${glibc/./_}" --out dist \
        "${std_flags[@]}"
    add_notices dist/*"_$arch.whl" "$target"
    # In a directory of its own: cargo would compile all crates anew each time that the other links.
    cargo zigbuild --profile dist --target "$target.$glibc" --target-dir "$work/target" --package hoistway-cli \
        --package hoistway-capi "${std_flags[@]}"

    mkdir "$work/$command"
    cp "$built/hoistway" LICENSE README.md CHANGELOG.md "$work/$command/"
    python packaging/notices.py hoistway-cli "$target" >"$work/$command/NOTICES"
    # The text is the same for all architectures.
    if [ "$arch" = "$here" ]; then
        document "$built/hoistway"
    fi
    if [ -d "$work/documented" ]; then
        cp -r "$work/documented/." "$work/$command/"
    fi
    pack "$command"

    BUILT=$built CC="python -m ziglang cc -target $arch-linux-gnu.$glibc" LDFLAGS=-Wl,--strip-all \
        crates/hoistway-capi/install.sh "$work/$library"
    # The library may be unpacked anywhere.
    sed -i 's|^prefix=.*|prefix=${pcfiledir}/../..|; s|^libdir=.*|libdir=${prefix}/lib|' \
        "$work/$library/lib/pkgconfig/hoistway.pc"
    cp LICENSE docs/c-abi.md "$work/$library/"
    python packaging/notices.py hoistway-capi "$target" >"$work/$library/NOTICES"
    pack "$library"
    if command -v dpkg-deb >/dev/null; then
        packaging/debian.sh "$arch" "$work/$command" "$work/$library" dist
    else
        echo "Debian packages for $arch are left out: dpkg-deb is missing" >&2
    fi
}

# The wheel alone. There is no network: cargo has fetched what it needs.
build_windows() {
    cargo fetch --quiet --locked --target "$windows_target"
    in_windows_root 7200 env CARGO_TARGET_DIR="$work/windows" SOURCE_DATE_EPOCH="$SOURCE_DATE_EPOCH" \
        "$work/venv/bin/maturin" build --profile dist --target "$windows_target" --out dist "${std_flags[@]}"
    add_notices dist/*-win_amd64.whl "$windows_target"
    rm -rf "$work/unpacked"
    python -m zipfile -e dist/*-win_amd64.whl "$work/unpacked"
    in_windows_root 600 testkit/windows/package.sh "$work/unpacked" "$windows_python"
}

# Adds the notices of the crates that a wheel is linked with to its licenses: WHEEL TARGET.
add_notices() {
    local information
    rm -rf "$work/unpacked"
    python -m wheel unpack --dest "$work/unpacked" "$1"
    information=$(echo "$work"/unpacked/*/*.dist-info)
    python packaging/notices.py hoistway-python "$2" >"$information/licenses/NOTICES"
    sed -i 's/^License-File: LICENSE$/&\nLicense-File: NOTICES/' "$information/METADATA"
    python -m wheel pack --dest-dir dist "$work"/unpacked/*
}

# Writes the manual pages and the completions of a command that runs here.
document() {
    local name=(bash hoistway zsh _hoistway fish hoistway.fish)
    mkdir -p "$work/documented/completions"
    "$1" man --directory "$work/documented/man"
    for ((i = 0; i < ${#name[@]}; i += 2)); do
        "$1" completions "${name[i]}" >"$work/documented/completions/${name[i + 1]}"
    done
}

pack() {
    tar --create --gzip --file "dist/$1.tar.gz" --directory "$work" --sort=name --mtime="@$SOURCE_DATE_EPOCH" \
        --owner=0 --group=0 --numeric-owner "$1"
}

rm -rf "$work"/{hoistway-*,libhoistway-*,documented} dist/{*.whl,*.tar.gz,*.deb,*.cdx.json,SHA256SUMS}
mkdir -p dist "$work"
architectures=("$@")
if [ $# = 0 ]; then
    mapfile -t architectures < <(printf '%s\n' "$here" aarch64 windows | uniq)
fi
for arch in "${architectures[@]}"; do
    (
        if [ "$arch" = windows ]; then
            if ! test -d "$windows_root" || ! test -d "$windows_python" || test "$(id -u)" != 0 || ! find_std "$windows_target"; then
                echo "windows is left out: run 'just windows-setup' first, and be root" >&2
                test $# = 0
                exit
            fi
            build_windows
            exit
        fi
        if ! find_std "$arch-unknown-linux-gnu"; then
            echo "$arch is left out: neither rustup nor Debian has its standard library" >&2
            test $# = 0
            exit
        fi
        build "$arch"
    )
done
maturin sdist --out dist

cd dist
# maturin lists the crates of the wheel, among them all those of the command and of the C library.
for wheel in *.whl; do
    unzip -p "$wheel" '*.dist-info/sboms/*.cyclonedx.json' >"${wheel%.whl}.cdx.json"
done
# Where there is no dpkg-deb, there are no packages for Debian.
debian=$(compgen -G '*.deb' || true)
# shellcheck disable=SC2086
sha256sum -- *.whl *.tar.gz *.cdx.json $debian >SHA256SUMS
