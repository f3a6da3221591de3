#!/usr/bin/env bash
# Vets the Go package for Windows and links its tests, with the C library that capi.sh has installed. Called by test.sh, which runs
# them under Wine.
set -euo pipefail
capi=$PWD/target/windows/capi
export CGO_ENABLED=1 GOOS=windows GOARCH=amd64 CC=x86_64-w64-mingw32-gcc
export CGO_CFLAGS="-O2 -I$capi/include" CGO_LDFLAGS="-L$capi/lib"
cd go/hoistway
go vet ./...
go test -c -o "$capi/bin/go.test.exe" .
