//! What tests need of a machine. A test that lacks something prints a line and ends, or fails if
//! `HOISTWAY_TEST_REQUIRE` lists what is missing: `fuse,direct,io_uring`.

use std::{
    collections::BTreeSet,
    env,
    fmt::{self, Display},
    io::{self, Write},
    panic::Location,
    sync::{Mutex, PoisonError},
    thread,
};

/// The environment variable that lists what must not be missing, separated by commas.
pub const VARIABLE: &str = "HOISTWAY_TEST_REQUIRE";

/// Something that a machine may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Requirement {
    /// Mounting a FUSE file system.
    Fuse,
    /// Direct reads and writes (`O_DIRECT`) below the folder of build outputs.
    Direct,
    /// io_uring.
    IoUring,
    /// A file system in memory at `/dev/shm`.
    Shm,
    /// Mounting a file system, in this mount namespace and in a new one.
    Mount,
    /// Making a control group that limits memory.
    Cgroup,
    /// Raising limits of this process (`prlimit`).
    Limits,
    /// A compiler of C++ (`c++`).
    Cxx,
    /// The rights of root, such as to give files away.
    Root,
    /// Access control lists of files below the folder of build outputs.
    Acl,
    /// A kernel that tells what its page cache holds of a file (`cachestat`, Linux 6.5).
    Cachestat,
}

impl Requirement {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::Fuse,
        Self::Direct,
        Self::IoUring,
        Self::Shm,
        Self::Mount,
        Self::Cgroup,
        Self::Limits,
        Self::Cxx,
        Self::Root,
        Self::Acl,
        Self::Cachestat,
    ];

    /// The name in the environment variable and in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fuse => "fuse",
            Self::Direct => "direct",
            Self::IoUring => "io_uring",
            Self::Shm => "shm",
            Self::Mount => "mount",
            Self::Cgroup => "cgroup",
            Self::Limits => "limits",
            Self::Cxx => "cxx",
            Self::Root => "root",
            Self::Acl => "acl",
            Self::Cachestat => "cachestat",
        }
    }
}

impl Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Prints that the calling test, or a part of it, is skipped: once for each test and requirement, past the capture of
/// test output. The caller then leaves the test.
///
/// # Panics
/// If `HOISTWAY_TEST_REQUIRE` lists the requirement, or a name that is no requirement.
#[allow(clippy::panic, reason = "this is how a test fails")]
#[track_caller]
pub fn skip(requirement: Requirement, why: impl Display) {
    let current = thread::current();
    let test = match current.name() {
        None | Some("main") => Location::caller().to_string(),
        Some(name) => name.to_owned(),
    };
    match line(requirement, &test, &why, &env::var(VARIABLE).unwrap_or_default()) {
        Err(failure) => panic!("{failure}"),
        Ok(line) => print_once(line),
    }
}

/// Prints the lines of a child's output that say what it skipped.
pub fn forward_skips(output: &str) {
    output.lines().filter(|line| line.starts_with(PREFIX)).for_each(|line| print_once(line.to_owned()));
}

const PREFIX: &str = "skipped: ";

/// The line that says what is skipped, or why that is a failure.
fn line(requirement: Requirement, test: &str, why: &dyn Display, required: &str) -> Result<String, String> {
    for name in required.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        if Requirement::ALL.iter().all(|known| known.name() != name) {
            let known = Requirement::ALL.map(Requirement::name).join(", ");
            return Err(format!("{VARIABLE} lists '{name}', which is none of {known}"));
        }
        if name == requirement.name() {
            return Err(format!("{test} lacks {requirement}, which {VARIABLE} requires: {why}"));
        }
    }
    Ok(format!("{PREFIX}{test} lacks {requirement}: {why}"))
}

fn print_once(line: String) {
    static PRINTED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut printed = PRINTED.lock().unwrap_or_else(PoisonError::into_inner);
    if !printed.contains(&line) {
        // Not by `eprintln!`, whose output the test harness keeps from users if the test passes.
        let _ = writeln!(io::stderr(), "{line}");
        printed.insert(line);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn what_is_not_required_is_skipped_by_name() {
        for required in ["", "direct", " direct , io_uring,", "shm,mount,cgroup,limits,cxx"] {
            let said = line(Requirement::Fuse, "reading", &"there is no /dev/fuse", required).unwrap();
            assert_eq!(said, "skipped: reading lacks fuse: there is no /dev/fuse");
        }
    }

    #[test]
    fn what_is_required_fails() {
        for requirement in Requirement::ALL {
            let all = Requirement::ALL.map(Requirement::name).join(",");
            for required in [requirement.name(), &format!("{requirement} "), &all] {
                let failure = line(requirement, "reading", &"broken", required).unwrap_err();
                assert!(failure.contains(&format!("lacks {requirement}")), "{failure}");
            }
        }
    }

    #[test]
    fn a_name_that_is_unknown_fails_whatever_is_missing() {
        let failure = line(Requirement::Direct, "reading", &"tmpfs", "fsue").unwrap_err();
        assert!(failure.contains("'fsue'") && failure.contains("fuse, direct, io_uring"), "{failure}");
    }
}
