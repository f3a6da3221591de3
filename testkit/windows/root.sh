# Sourced from the root of the repository by scripts that run Windows programs.
#
# They run in a Debian of their own, with Wine, the linker of mingw and the compilers that cargo needs: a folder outside of the
# repository. HOISTWAY_WINDOWS_CACHE names another place for it.

windows_at=${HOISTWAY_WINDOWS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/hoistway/windows}
# A new number for another content.
windows_root=$windows_at/root-1
# CPython for Windows, with what tests of the package need.
windows_python=$windows_at/python-1
windows_target=x86_64-pc-windows-gnu
# Test programs that run on Windows; docs/windows.md says why others do not.
windows_programs=()
for program in runtime directstorage executor lanes slots system headers gguf_corpus windows conformance gguf toy_device \
    faults reader reader_faults streams experts replay trace command moe bench; do
    windows_programs+=(--test "$program")
done

# Runs a command there, for at most so many seconds, with standard output and errors of the caller. The repository and the folders
# of cargo and rustup are at their usual paths; everything else that the command writes is lost, and all that it starts ends
# with it. There is no network for cargo.
in_windows_root() {
    local seconds=$1
    shift
    timeout --kill-after=10 "$seconds" \
        unshare --mount --propagation private --pid --fork --kill-child \
        bash -euo pipefail -c "$enter_windows_root" in_windows_root \
        "$windows_at" "$windows_root" "$windows_python" "$PWD" "${CARGO_HOME:-$HOME/.cargo}" \
        "${RUSTUP_HOME:-$HOME/.rustup}" "$@"
}

enter_windows_root='
    at=$1 root=$2 python=$3 repository=$4 cargo=$5 rustup=$6
    shift 6
    mkdir -p "$at/mounts"
    mount -t tmpfs -o size=50% tmpfs "$at/mounts"
    mkdir "$at"/mounts/{upper,work,root}
    cd "$at/mounts"
    mount -t overlay -o lowerdir="$root",upperdir=upper,workdir=work overlay root
    mount -t proc proc root/proc
    mount --rbind /dev root/dev
    mount -t tmpfs tmpfs root/tmp
    if test -d root/root/.wine/drive_c; then
        mkdir -p root/root/.wine/drive_c/users/root/Temp root/root/.wine/drive_c/users/root/AppData/Local/Temp
        mount -t tmpfs tmpfs root/root/.wine/drive_c/users/root/AppData/Local/Temp
    fi
    for folder in "$repository" "$cargo" "$rustup" "$python"; do
        test -d "$folder" || continue
        mkdir -p "root$folder"
        mount --bind "$folder" "root$folder"
    done
    exec chroot root env -i \
        HOME=/root LANG=C.UTF-8 PATH="$cargo/bin:/usr/bin:/bin" XDG_RUNTIME_DIR=/tmp WINEARCH=win64 WINEDEBUG=-all \
        CARGO_HOME="$cargo" RUSTUP_HOME="$rustup" CARGO_NET_OFFLINE=true CARGO_INCREMENTAL=0 \
        CARGO_TARGET_DIR="$repository/target/windows" CARGO_PROFILE_DEV_DEBUG=false CARGO_PROFILE_DEV_OPT_LEVEL=1 \
        CARGO_TARGET_X86_64_PC_WINDOWS_GNU_LINKER=x86_64-w64-mingw32-gcc \
        CARGO_TARGET_X86_64_PC_WINDOWS_GNU_RUNNER=wine \
        bash -euo pipefail -c "cd \"\$0\" && exec \"\$@\"" "$repository" "$@"
'
