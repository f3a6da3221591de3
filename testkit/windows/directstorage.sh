#!/usr/bin/env bash
# Fetches Microsoft's DirectStorage 1.3.0 from the package index of Python, and prints the folder of its two libraries below target/.
# They are in a package of somebody else's, and are compared with what is known of them. Prints nothing where the index is not
# reached. Called by test.sh.
set -euo pipefail
cd "$(dirname "$0")/../.."
source testkit/windows/root.sh

kept=$windows_at/directstorage-1.3.0
sums='cae65787f61514bec6f012f44546e68b19e39d8854a9ab52af813370d44b272a  dstorage.dll
cf85b19a92a8276f8baca0db9bbcd60735bad50768deb303d310e84d5f4fdd11  dstoragecore.dll'
is_known() {
    (cd "$kept" && sha256sum --check --status <<<"$sums") 2>/dev/null
}

if ! is_known; then
    new=$(mktemp -d)
    trap 'rm -rf "$new"' EXIT
    echo 'dstorage-gpu==1.0.0 --hash=sha256:145cb39f6e98d106557d6ce10f155ea69e1ebaf4c697fb6602cff28a44a27d5a' >"$new/requirements.txt"
    python3 -m pip download --quiet --disable-pip-version-check --timeout 30 --no-deps --only-binary=:all: --require-hashes \
        --platform win_amd64 --python-version 312 --dest "$new" --requirement "$new/requirements.txt" >&2 || exit 0
    mkdir -p "$kept"
    python3 -c 'import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as package:
    for name in "dstorage.dll", "dstoragecore.dll":
        open(f"{sys.argv[2]}/{name}", "wb").write(package.read(f"dstorage_gpu/{name}"))' "$new"/*.whl "$kept"
    is_known || { echo 'the package has other libraries than are known' >&2; exit 1; }
fi
at=target/windows/directstorage
mkdir -p "$at"
cp "$kept"/*.dll "$at"
echo "$PWD/$at"
