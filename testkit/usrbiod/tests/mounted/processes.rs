//! Several processes on one mount, killed ones, forked ones, and such that live in another /dev/shm.

use crate::fixture::{Fixture, clients, eventually, library_path};
use requirements::{Requirement, skip};
use std::{
    collections::BTreeSet,
    ffi::OsString,
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
};

fn reader(fixture: &Fixture, client: &OsString) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_usrbio-read"));
    command.args([fixture.path("file"), fixture.behind("file")]).arg(client);
    command
}

/// As arguments of the reader.
fn client_names() -> [OsString; 2] {
    ["native".into(), library_path().into()]
}

fn shared_memory() -> BTreeSet<OsString> {
    let names = std::fs::read_dir("/dev/shm").unwrap().map(|entry| entry.unwrap().file_name());
    names.filter(|name| name.to_string_lossy().starts_with("hf3fs-iov-")).collect()
}

#[test]
fn eight_processes_read_the_same_file() {
    let Some(fixture) = Fixture::start() else { return };
    fixture.write("file", 20 << 20);
    let readers: Vec<Child> = (0..4)
        .flat_map(|_| client_names())
        .map(|client| reader(&fixture, &client).stderr(Stdio::piped()).spawn().unwrap())
        .collect();
    assert_eq!(readers.len(), 8);
    for reader in readers {
        let output = reader.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    eventually("the deregistration", || fixture.daemon.registrations().unwrap().is_empty());
}

#[test]
fn a_client_that_is_killed_leaves_nothing_behind() {
    let Some(fixture) = Fixture::start() else { return };
    fixture.write("file", 20 << 20);
    let before = shared_memory();
    for client in client_names() {
        let mut child = reader(&fixture, &client).arg("again").stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "reading\n");
        let registered = fixture.daemon.registrations().unwrap();
        assert_eq!(registered.len(), 2);
        child.kill().unwrap();
        child.wait().unwrap();
        eventually("the deregistration", || fixture.daemon.registrations().unwrap().is_empty());
    }
    // Other tests' names exist only for the moment of registering.
    eventually("the end of new names in /dev/shm", || shared_memory().is_subset(&before));
}

#[test]
fn a_process_with_its_own_shared_memory_is_told_so() {
    let Some(fixture) = Fixture::start() else { return };
    fixture.write("file", 1 << 20);
    let unshare = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", script, "sh"]);
        command
    };
    if !unshare("mount -t tmpfs none /dev/shm").status().is_ok_and(|status| status.success()) {
        skip(Requirement::Mount, "this process may not make a mount namespace and mount in it");
        return;
    }
    for client in client_names() {
        let inner = reader(&fixture, &client);
        let script = "mount -t tmpfs none /dev/shm && exec \"$@\"";
        let output = unshare(script).arg(inner.get_program()).args(inner.get_args()).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains("--ipc=host"), "{error}");
    }
}

#[test]
fn shared_memory_that_is_full_is_an_error_and_not_a_signal() {
    let Some(fixture) = Fixture::start() else { return };
    fixture.write("file", 1 << 20);
    let script = "mount -t tmpfs -o size=1m none /dev/shm && exec \"$@\"";
    let inner = reader(&fixture, &client_names()[0]);
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, "sh"]).arg(inner.get_program()).args(inner.get_args());
    let output = command.output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    if error.contains("unshare") {
        skip(Requirement::Mount, "this process may not make a mount namespace and mount in it");
        return;
    }
    assert!(output.status.code() == Some(1) && error.contains("/dev/shm has no room for"), "{error}");
}

#[test]
fn a_hard_limit_of_open_files_that_the_library_cannot_bear_is_refused() {
    let Some(fixture) = Fixture::start() else { return };
    fixture.write("file", 1 << 20);
    let [native, vendor] = client_names();
    let limited = |client: &OsString| {
        let inner = reader(&fixture, client);
        let mut command = Command::new("prlimit");
        command.arg(format!("--nofile=1024:{}", 1 << 29)).arg(inner.get_program()).args(inner.get_args());
        command.output()
    };
    let output = match limited(&native) {
        Ok(output) => output,
        Err(error) => {
            skip(Requirement::Limits, format!("prlimit: {error}"));
            return;
        }
    };
    let said = String::from_utf8_lossy(&output.stderr);
    if said.contains("prlimit") {
        skip(Requirement::Limits, said.trim());
        return;
    }
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = limited(&vendor).unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("hard limit of open files"), "{error}");
}

#[test]
fn a_forked_child_is_told_to_open_the_mount_anew() {
    let Some(fixture) = Fixture::start() else { return };
    let path = fixture.write("file", 1 << 20);
    for client in clients() {
        let mount = fixture.mount(client);
        let file = mount.open_file(Path::new(&path)).unwrap();
        drop(file);
        // SAFETY: the child only makes system calls and ends; no lock of the parent's threads is needed for that.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let told = matches!(mount.check(), Err(hoistway_usrbio::Error::Forked { .. }));
            // SAFETY: ends the child at once, without the parent's destructors.
            unsafe { libc::_exit(i32::from(!told)) };
        }
        let mut status = 0;
        // SAFETY: `status` is writable.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status}");
        mount.check().unwrap();
    }
}
