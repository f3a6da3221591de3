#!/bin/sh
# Builds the C library and installs it: headers, libhoistway.so with versioned symbols, libhoistway.a, hoistway.pc.
# Usage: [DESTDIR=STAGE] install.sh PREFIX [LIBDIR]
# LIBDIR is relative to PREFIX: lib, unless told otherwise. What is put under STAGE says that it lies under PREFIX.
# BUILT names a directory with libhoistway_capi.a, for another target perhaps, that is installed instead of a new build. CC
# links; LDFLAGS are added.
set -eu

mkdir -p "${DESTDIR:-}$1"
prefix=$(cd "${DESTDIR:-}$1" && pwd)
prefix=${prefix#"${DESTDIR:-}"}
libdir=$prefix/${2:-lib}
here=$(cd "$(dirname "$0")" && pwd)
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$here/../../Cargo.toml" | head -n 1)
abi=$(sed -n 's/^#define HOISTWAY_ABI_VERSION \([0-9]*\)/\1/p' "$here/include/hoistway.h")
built=${BUILT:-${CARGO_TARGET_DIR:-"$here/../../target"}/release}
libraries="-lgcc_s -lpthread -lm -ldl -lc"
to_include=${DESTDIR:-}$prefix/include
to_lib=${DESTDIR:-}$libdir

if [ -z "${BUILT:-}" ]; then
    cargo build --release --manifest-path "$here/Cargo.toml"
fi
mkdir -p "$to_include" "$to_lib/pkgconfig"
cp "$here/include/hoistway.h" "$here/include/hoistway.hpp" "$to_include/"
cp "$built/libhoistway_capi.a" "$to_lib/libhoistway.a"

# Linked here and not by rustc, which gives its own list of symbols, without versions.
script=$(mktemp)
trap 'rm -f "$script"' EXIT
printf 'HOISTWAY_%s {\n  global: hoistway_*;\n  local: *;\n};\n' "$abi" > "$script"
${CC:-cc} -shared -o "$to_lib/libhoistway.so.$version" -Wl,-soname,"libhoistway.so.$abi" \
    -Wl,--version-script,"$script" -Wl,--whole-archive "$built/libhoistway_capi.a" -Wl,--no-whole-archive \
    -Wl,--gc-sections -Wl,--strip-debug -Wl,-z,relro,-z,now ${LDFLAGS:-} $libraries
ln -sf "libhoistway.so.$version" "$to_lib/libhoistway.so.$abi"
ln -sf "libhoistway.so.$abi" "$to_lib/libhoistway.so"

cat > "$to_lib/pkgconfig/hoistway.pc" <<END
prefix=$prefix
includedir=\${prefix}/include
libdir=$libdir

Name: hoistway
Description: Moves tensors between storage and memory at the speed of the hardware
Version: $version
Cflags: -I\${includedir}
Libs: -L\${libdir} -lhoistway
Libs.private: $libraries
END
