# Sourced from the root of the repository by scripts that compile for other targets.
#
# rustup brings the standard library for a target. Where it cannot, cargo compiles the library from Debian's package of this
# compiler's sources. Nothing is installed.

debian_at=$PWD/target/debian

# Lets cargo compile for a target: sets std_flags, which cargo needs for that, and what it reads from the environment. Fails if
# neither rustup nor Debian has the library.
find_std() {
    local release
    release=$(rustc -vV | sed -n 's/^release: //p')
    std_flags=()
    if has_std "$1" || { rustup target add "$1" && has_std "$1"; }; then
        return
    fi
    export __CARGO_TESTS_ONLY_SRC_ROOT=$debian_at/usr/src/rustc-$release/library RUSTC_BOOTSTRAP=1
    std_flags=(-Zbuild-std=std,panic_unwind)
    test -d "$__CARGO_TESTS_ONLY_SRC_ROOT" || unpack_debian "rust-src=$release*"
}

# Tests need more than the library itself.
has_std() {
    compgen -G "$(rustc --print target-libdir --target "$1")/libtest-*" >/dev/null
}

# Where this machine gets its packages from; nothing on a machine without apt.
debian_mirror() {
    # A system has one of these files or both. sed fails for one that is missing.
    sed -n 's/^URIs: *//p; s/^deb .*\(http[^ ]*\) .*/\1/p' /etc/apt/sources.list.d/debian.sources \
        /etc/apt/sources.list 2>/dev/null | head -1 || true
}

# Unpacks packages of Debian below debian_at.
unpack_debian() (
    keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    mirror=$(debian_mirror)
    test -n "$mirror" && mkdir -p "$debian_at"/{cache/archives/partial,lists/partial,state} && cd "$debian_at" &&
        touch status || exit
    for suite in trixie-backports "$(. /etc/os-release && echo "$VERSION_CODENAME")"; do
        echo "deb [signed-by=$keyring] $mirror $suite main"
    done >sources.list
    debian update && debian download "$@" || exit
    for package in *.deb; do
        dpkg -x "$package" . && rm "$package" || exit
    done
)

debian() {
    apt-get -qq -o Dir::Etc::SourceList="$debian_at/sources.list" -o Dir::Etc::SourceParts=/dev/null \
        -o Dir::State="$debian_at/state" -o Dir::State::Lists="$debian_at/lists" -o Dir::State::Status="$debian_at/status" \
        -o Dir::Cache="$debian_at/cache" "$@"
}
