//! Tests that run in a process of their own, where limits can be set that cannot be taken back.
#![allow(dead_code, unreachable_pub)]

use std::process::Command;

const CHILD: &str = "HOISTWAY_TEST_CHILD";

/// Runs this test again in a child; `true` in the child.
pub fn in_child(test: &str) -> bool {
    let is_child = std::env::var_os(CHILD).is_some();
    if !is_child {
        run_again(test, "1");
    }
    is_child
}

/// What the process that runs this test tells it; `None` if it is no child.
pub fn case() -> Option<String> {
    std::env::var(CHILD).ok()
}

/// Runs the test in a child, which learns that it is one, and of which case.
pub fn run_again(test: &str, case: &str) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, case)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{test} ({case}) failed in its child ({}):\n{text}", output.status);
    assert!(text.contains("1 passed"), "there is no test {test}:\n{text}");
    requirements::forward_skips(&text);
}

/// Runs this test again in a child for one of its cases; `true` in the child of that case.
pub fn is_case(test: &str, case: &str) -> bool {
    match std::env::var(CHILD) {
        Ok(named) => named == case,
        Err(_) => {
            run_again(test, case);
            false
        }
    }
}

/// From now on these system calls fail with `errno` in this process, as under a container's seccomp profile.
#[cfg(target_os = "linux")]
pub fn forbid(calls: &[i64], errno: i32) {
    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
    let rules: std::collections::BTreeMap<i64, Vec<_>> =
        calls.iter().map(|&call| (call, Vec::new())).collect();
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
