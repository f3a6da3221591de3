#!/usr/bin/env bash
# Runs tests of the Python package, which lies in a folder as a wheel has it, by a Python for Windows under Wine. Called by test.sh
# and build.sh, in the root that setup.sh has made.
set -euo pipefail
package=$1 python=$2
# Where test.sh has put Microsoft's libraries.
libraries=$PWD/target/windows/directstorage
if test -e "$libraries/dstorage.dll"; then
    export HOISTWAY_TEST_DIRECTSTORAGE="Z:${libraries//\//\\}"
fi
# Nothing is written to where Python lies: others use it.
PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="Z:${package//\//\\}" \
    wine "$python/python.exe" -m pytest --quiet -p no:cacheprovider --noconftest --rootdir "$package" \
    --basetemp 'Z:\tmp\pytest' testkit/windows/test_package.py
