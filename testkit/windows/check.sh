#!/usr/bin/env bash
# Lints the crates that compile for Windows and the tests that run there, for that target, or for the one that is named. Links nothing and runs nothing.
#
# Where the standard library is compiled from source, its import libraries are made with Debian's dlltool.
set -euo pipefail
cd "$(dirname "$0")/../.."
source testkit/rust-std.sh
source testkit/windows/root.sh

target=${1:-$windows_target}
# Crates that compile C get no compiler: nothing is linked. One that makes an archive of what was compiled looks for the file.
export "CC_${target//-/_}=true" "CXX_${target//-/_}=true" "AR_${target//-/_}=$PWD/testkit/windows/archive.sh"
packages=(--target "$target")
for crate in hoistway-device hoistway-directstorage hoistway-io hoistway hoistway-experts hoistway-capi hoistway-cli hoistway-python; do
    packages+=(--package "$crate")
done

has_dlltool() {
    test -x "$debian_at/usr/bin/x86_64-w64-mingw32-dlltool" || unpack_debian binutils-mingw-w64-x86-64
}

if ! find_std "$target" || { ((${#std_flags[@]})) && ! has_dlltool; }; then
    echo "skipped: the Windows target is not checked, as neither rustup nor Debian has its library" >&2
    exit
fi
PATH=$debian_at/usr/bin:$PATH
cargo clippy --quiet "${packages[@]}" "${std_flags[@]}" -- -D warnings
cargo clippy --quiet "${packages[@]}" "${std_flags[@]}" --all-features "${windows_programs[@]}" -- -D warnings
