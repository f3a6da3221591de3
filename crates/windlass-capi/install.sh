#!/bin/sh
# Builds the C library and installs it: headers, libwindlass.so with versioned symbols, libwindlass.a, windlass.pc.
# Usage: [DESTDIR=STAGE] install.sh PREFIX [LIBDIR]
# LIBDIR is relative to PREFIX: lib, unless told otherwise. What is put under STAGE says that it lies under PREFIX.
# BUILT names a directory with libwindlass_capi.a, for another target perhaps, that is installed instead of a new build. CC
# links; LDFLAGS are added.
set -eu

mkdir -p "${DESTDIR:-}$1"
prefix=$(cd "${DESTDIR:-}$1" && pwd)
prefix=${prefix#"${DESTDIR:-}"}
libdir=$prefix/${2:-lib}
here=$(cd "$(dirname "$0")" && pwd)
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$here/../../Cargo.toml" | head -n 1)
abi=$(sed -n 's/^#define WINDLASS_ABI_VERSION \([0-9]*\)/\1/p' "$here/include/windlass.h")
built=${BUILT:-${CARGO_TARGET_DIR:-"$here/../../target"}/release}
libraries="-lgcc_s -lpthread -lm -ldl -lc"
to_include=${DESTDIR:-}$prefix/include
to_lib=${DESTDIR:-}$libdir

if [ -z "${BUILT:-}" ]; then
    cargo build --quiet --release --manifest-path "$here/Cargo.toml"
fi
mkdir -p "$to_include" "$to_lib/pkgconfig"
cp "$here/include/windlass.h" "$here/include/windlass.hpp" "$to_include/"
cp "$built/libwindlass_capi.a" "$to_lib/libwindlass.a"

# Linked here and not by rustc, which gives its own list of symbols, without versions.
script=$(mktemp)
trap 'rm -f "$script"' EXIT
printf 'WINDLASS_%s {\n  global: windlass_*;\n  local: *;\n};\n' "$abi" > "$script"
${CC:-cc} -shared -o "$to_lib/libwindlass.so.$version" -Wl,-soname,"libwindlass.so.$abi" \
    -Wl,--version-script,"$script" -Wl,--whole-archive "$built/libwindlass_capi.a" -Wl,--no-whole-archive \
    -Wl,--gc-sections -Wl,--strip-debug -Wl,-z,relro,-z,now ${LDFLAGS:-} $libraries
ln -sf "libwindlass.so.$version" "$to_lib/libwindlass.so.$abi"
ln -sf "libwindlass.so.$abi" "$to_lib/libwindlass.so"

cat > "$to_lib/pkgconfig/windlass.pc" <<END
prefix=$prefix
includedir=\${prefix}/include
libdir=$libdir

Name: windlass
Description: Moves tensors between storage and memory at the speed of the hardware
Version: $version
Cflags: -I\${includedir}
Libs: -L\${libdir} -lwindlass
Libs.private: $libraries
END
