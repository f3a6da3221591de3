//! Encrypted connections: only to servers whose certificate this machine trusts.
#![allow(missing_docs, clippy::unwrap_used)]

use hoistway_objects::{Object, Problem, StoreOptions};
use objectd::{Fault, Faults, Server};
use std::{process::Command, sync::atomic::AtomicBool, time::Duration};

/// Roots are read once in a process: each case has its own.
const CASE: &str = "HOISTWAY_TEST_CASE";

#[test]
fn a_server_is_trusted_if_its_root_is() {
    let Ok(case) = std::env::var(CASE) else {
        for case in ["trusted", "unknown"] {
            let mut child = Command::new(std::env::current_exe().unwrap());
            child.args(["--exact", "a_server_is_trusted_if_its_root_is"]).env(CASE, case);
            if case == "trusted" {
                child.env("SSL_CERT_FILE", Server::ROOT);
            }
            let output = child.output().unwrap();
            assert!(output.status.success(), "{case}: {}", String::from_utf8_lossy(&output.stdout));
        }
        return;
    };
    let server = Server::start_tls().unwrap();
    let bytes: Vec<u8> = (0..3_000_001).map(|at| (at % 251) as u8).collect();
    server.put("models/a", &bytes);
    let opened = Object::open(&format!("{}/models/a", server.url()), &StoreOptions::default());
    if case == "unknown" {
        assert!(
            matches!(opened, Err(hoistway_objects::Error { problem: Problem::Tls(_), .. })),
            "{opened:?}"
        );
        return;
    }
    let object = opened.unwrap();
    for fault in [None, Some(Fault::Truncate), Some(Fault::StallInside(Duration::from_secs(600)))] {
        server.fail(Faults { fault, every: 2, ..Faults::default() });
        for offset in [0, 5, 2_000_000] {
            let mut found = vec![0; bytes.len() - offset];
            object.read(offset as u64, &mut found, &AtomicBool::new(false)).unwrap();
            assert!(found == bytes[offset..], "{fault:?}");
        }
    }
}
