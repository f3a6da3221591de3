#!/usr/bin/env bash
# Has rustdoc check the documentation of all crates, and write it as JSON, which is unstable, in target/doc.
# Usage: document.sh [--after-clippy]
#
# With the features of clippy's dependencies, which are compiled already: the example has cargo enable what tests need of them.
# --after-clippy takes the crates of the workspace from clippy too. Only rustdoc sees RUSTC_BOOTSTRAP: build scripts that watch it
# would run again, and everything on them be compiled anew.
set -euo pipefail
cd "$(dirname "$0")/../.."

# Clippy hands its options, `-D warnings`, to its compiler in this form. Where it does not, crates are checked once more.
driver=$(rustc --print sysroot)/bin/clippy-driver
if [ "${1:-}" = --after-clippy ] && test -x "$driver"; then
    export RUSTC_WORKSPACE_WRAPPER=$driver CLIPPY_ARGS=-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__
fi

# A program that has the name of a library is left out, as cargo does where no targets are named.
programs=$(cargo metadata --no-deps --format-version 1 | python3 -c '
import json, sys
targets = [target for package in json.load(sys.stdin)["packages"] for target in package["targets"] if target["doc"]]
libraries = {target["name"] for target in targets if target["kind"] != ["bin"]}
print(*sorted("--bin=" + target["name"] for target in targets if target["name"] not in libraries))
')
# shellcheck disable=SC2086
RUSTDOC=$PWD/testkit/api-listings/rustdoc \
    RUSTDOCFLAGS='-D warnings -Zunstable-options --output-format=json' \
    cargo doc --quiet --workspace --no-deps --all-features --lib $programs --example raw
