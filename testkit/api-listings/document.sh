#!/usr/bin/env bash
# Has rustdoc check the documentation of all crates, and write it as JSON, which is unstable, in target/doc.
#
# With the features and dependencies of clippy, which are compiled already. Only rustdoc sees RUSTC_BOOTSTRAP: build scripts that
# watch it would run again, and everything on them be compiled anew.
set -euo pipefail
cd "$(dirname "$0")/../.."
RUSTDOC=$PWD/testkit/api-listings/rustdoc \
    RUSTDOCFLAGS='-D warnings -Zunstable-options --output-format=json' \
    cargo doc --quiet --workspace --no-deps --all-features
