#!/usr/bin/env bash
# Makes what test.sh runs in: a Debian with Wine 10, mingw and the compilers that cargo needs, in 5 minutes and 2.4 GB.
#
# Needs root, and Debian or a system with its apt-get. Nothing is installed on the machine, and nothing stays running.
set -euo pipefail
cd "$(dirname "$0")/../.."
source testkit/rust-std.sh
source testkit/windows/root.sh

find_std "$windows_target" || { echo "neither rustup nor Debian has the standard library for $windows_target" >&2; exit 1; }
if test -d "$windows_root"; then
    echo "is there: $windows_root"
    exit
fi
test "$(id -u)" = 0 || { echo 'windows-setup needs root, for the root of a Debian and for mounts' >&2; exit 1; }

PATH=$debian_at/usr/bin:$PATH
command -v mmdebstrap >/dev/null || unpack_debian mmdebstrap
mirror=$(debian_mirror)
mkdir -p "$windows_at"
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
