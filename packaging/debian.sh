#!/usr/bin/env bash
# Packs the command and the C library for Debian: hoistway, libhoistway1 and libhoistway-dev.
# Usage: debian.sh ARCHITECTURE COMMAND LIBRARY OUTPUT
# COMMAND is a directory with the command, its manual pages and its completions, as in its tarball; LIBRARY is one that
# crates/hoistway-capi/install.sh has filled. The packages are for Debian 10 and later: glibc is that of manylinux_2_28.
set -euo pipefail
machine=$1 command=$2 library=$3 output=$4
here=$(cd "$(dirname "$0")/.." && pwd)
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$here/Cargo.toml" | head -n 1)
# A version before a release comes before it here too.
version=${version/-/\~}
abi=$(sed -n 's/^#define HOISTWAY_ABI_VERSION \([0-9]*\)/\1/p' "$here/crates/hoistway-capi/include/hoistway.h")
# Times in the packages, too.
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$here" log -1 --format=%ct)}
date=$(date --utc --rfc-email --date "@$SOURCE_DATE_EPOCH")
maintainer="The hoistway authors <hoistway@users.noreply.invalid>"
case $machine in
x86_64) arch=amd64 multiarch=x86_64-linux-gnu ;;
aarch64) arch=arm64 multiarch=aarch64-linux-gnu ;;
*) echo "Debian has no name for $machine here" >&2 && exit 2 ;;
esac
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
umask 022

# Writes what each package has, and packs it: NAME SECTION DEPENDS SUMMARY DESCRIPTION NOTICES [RECOMMENDS].
# NOTICES are the licenses of the crates that it is linked with.
package() {
    local name=$1 root=$stage/$1
    local doc=$root/usr/share/doc/$name
    mkdir -p "$root/DEBIAN" "$doc"
    {
        printf 'Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\nUpstream-Name: hoistway\n\n'
        printf 'Files: *\nCopyright: 2026 The hoistway authors\nLicense: Apache-2.0\n'
        printf ' The text of this license is in /usr/share/common-licenses/Apache-2.0.\n\n'
        cat "$6"
    } >"$doc/copyright"
    printf 'hoistway (%s) unstable; urgency=medium\n\n  * See CHANGELOG.md of the project.\n\n -- %s  %s\n' \
        "$version" "$maintainer" "$date" | gzip --best --no-name >"$doc/changelog.gz"
    local size
    size=$(du --summarize --apparent-size --block-size=1024 "$root/usr" | cut -f 1)
    cat >"$root/DEBIAN/control" <<END
Package: $name
Source: hoistway
Version: $version
Architecture: $arch
Maintainer: $maintainer
Installed-Size: $size
Depends: $3
${7:+Recommends: $7
}Section: $2
Priority: optional
Multi-Arch: $(test "$name" = hoistway && echo foreign || echo same)
Description: $4
$(printf '%s\n' "$5" | sed 's/^/ /')
END
    (cd "$root" && find usr -type f -print0 | sort --zero-terminated | xargs --null md5sum >DEBIAN/md5sums)
    dpkg-deb --build --root-owner-group -Zxz "$root" "$output/${name}_${version}_$arch.deb" >/dev/null
}

root=$stage/hoistway/usr
install -D "$command/hoistway" "$root/bin/hoistway"
if [ -d "$command/man" ]; then
    mkdir -p "$root/share/man/man1"
    for page in "$command"/man/*.1; do
        gzip --best --no-name --stdout "$page" >"$root/share/man/man1/$(basename "$page").gz"
    done
    install -D -m 644 "$command/completions/hoistway" "$root/share/bash-completion/completions/hoistway"
    install -D -m 644 "$command/completions/_hoistway" "$root/share/zsh/vendor-completions/_hoistway"
    install -D -m 644 "$command/completions/hoistway.fish" "$root/share/fish/vendor_completions.d/hoistway.fish"
fi
package hoistway utils 'libc6 (>= 2.28), libgcc-s1 | libgcc1' 'load, inspect and verify model checkpoints' \
    'The command hoistway loads safetensors and GGUF checkpoints at the speed of
the hardware, and reports the route of each byte. It also verifies and warms
checkpoints, examines the machine, and looks after stores of KV-cache blocks.' "$command/NOTICES" ca-certificates

root=$stage/libhoistway$abi/usr/lib/$multiarch
mkdir -p "$root"
cp --no-dereference "$library"/lib/libhoistway.so.* "$root/"
chmod 644 "$root"/libhoistway.so.*.*
mkdir -p "$stage/libhoistway$abi/DEBIAN"
printf 'libhoistway %s libhoistway%s (>= %s)\n' "$abi" "$abi" "$version" >"$stage/libhoistway$abi/DEBIAN/shlibs"
printf 'activate-noawait ldconfig\n' >"$stage/libhoistway$abi/DEBIAN/triggers"
package "libhoistway$abi" libs 'libc6 (>= 2.28), libgcc-s1 | libgcc1' 'C library that loads tensors from checkpoints' \
    'The library reads tensors of safetensors and GGUF checkpoints into memory of
the caller, of the host or of a device, and opens stores of KV-cache blocks.' "$library/NOTICES" ca-certificates

root=$stage/libhoistway-dev/usr
mkdir -p "$root/include" "$root/lib/$multiarch/pkgconfig"
install -m 644 "$library"/include/* "$root/include/"
cp --no-dereference "$library/lib/libhoistway.so" "$library/lib/libhoistway.a" "$root/lib/$multiarch/"
chmod 644 "$root/lib/$multiarch/libhoistway.a"
sed "s|^prefix=.*|prefix=/usr|; s|^libdir=.*|libdir=\${prefix}/lib/$multiarch|" "$library/lib/pkgconfig/hoistway.pc" \
    >"$root/lib/$multiarch/pkgconfig/hoistway.pc"
package libhoistway-dev libdevel "libhoistway$abi (= $version)" 'C library that loads tensors from checkpoints (headers)' \
    'Headers, the static library and the file for pkg-config, to compile programs
that use libhoistway.' "$library/NOTICES"
