//! Tests that run in a process of their own, where limits can be set that cannot be taken back.

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use std::{collections::BTreeMap, process::Command};

const CHILD: &str = "WINDLASS_TEST_CHILD";

/// Runs this test again in a child; `true` in the child.
pub fn in_child(test: &str) -> bool {
    if std::env::var_os(CHILD).is_some() {
        return true;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{test} failed in its child ({}):\n{text}", output.status);
    assert!(text.contains("1 passed"), "there is no test {test}:\n{text}");
    requirements::forward_skips(&text);
    false
}

/// From now on these system calls fail with `errno` in this process, as under a container's seccomp profile.
pub fn forbid(calls: &[i64], errno: i32) {
    let rules: BTreeMap<i64, Vec<_>> = calls.iter().map(|&call| (call, Vec::new())).collect();
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::Allow,
        SeccompAction::Errno(errno as u32),
        std::env::consts::ARCH.try_into().unwrap(),
    )
    .unwrap();
    let program: BpfProgram = filter.try_into().unwrap();
    seccompiler::apply_filter_all_threads(&program).unwrap();
}
