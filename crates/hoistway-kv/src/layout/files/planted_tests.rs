//! Names that another user has planted below the root: FIFOs and links.
#![forbid(unsafe_code)]

use super::{
    Files, names,
    tests::{HASTY, bench},
    writer,
};
use crate::{
    NamespaceOptions, StoreOptions,
    format::lease::{Account, Lease},
    layout::{
        Administration,
        conformance::{Loaded, Stored, block, bytes, load, open_namespace, store},
    },
};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use std::{fs, os::unix::fs::symlink, path::Path, sync::mpsc, thread, time::Duration};

fn fifo(path: &Path) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
}

/// What a thread returns, which must not hang.
fn soon<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, receive) = mpsc::channel();
    thread::spawn(move || send.send(run()));
    receive.recv_timeout(Duration::from_secs(60)).expect("it hangs")
}

/// Opens a store, stores and loads a block, and looks after it.
fn works(options: StoreOptions) -> Vec<String> {
    soon(move || {
        let layout = Files::open_timed(&options, HASTY).unwrap();
        let namespace = open_namespace(&layout, "model", NamespaceOptions::default());
        let shards = [bytes("new", 5000)];
        assert_eq!(store(&layout, &block(namespace, "new", &shards), &shards), Stored::Committed);
        assert_eq!(load(&layout, namespace, "new"), Loaded::Shards(shards.to_vec()));
        for _ in 0..3 {
            layout.maintain().unwrap();
        }
        assert_eq!(
            layout.delete(namespace, &[(b"new", crate::Fingerprint::of(namespace, b"new"))]).unwrap(),
            1
        );
        layout.observed().take_notices().into_iter().map(|notice| notice.reason).collect()
    })
}

#[test]
fn fifos_do_not_hang_writers() {
    let bench = bench();
    let writer = |name: &str| bench.options.root.join("w-00000000-0000-4000-8000-000000000001").join(name);
    fifo(&writer(names::LEASE));
    fifo(&writer("1.tmp"));
    assert_eq!(works(bench.options.clone()), Vec::<String>::new());

    let description =
        format!("{}/00112233445566778899aabbccddeeff/{}", names::NAMESPACES, names::DESCRIPTION);
    fifo(&bench.options.root.join(description));
    let noticed = works(bench.options.clone());
    assert!(matches!(&*noticed, [one] if one.contains("it is a FIFO")), "{noticed:?}");
}

#[test]
fn a_fifo_is_no_store() {
    let bench = bench();
    let superblock = bench.options.root.join(names::SUPERBLOCK);
    fs::remove_file(&superblock).unwrap();
    fifo(&superblock);
    let options = bench.options.clone();
    let refused = soon(move || Files::open(&options).map(drop).unwrap_err().to_string());
    assert!(refused.contains("STORE: it is a FIFO, not a regular file"), "{refused}");
    assert!(crate::layout::open(&StoreOptions { layout: None, ..bench.options.clone() }).is_err());
}

#[test]
fn a_lease_that_is_a_link_is_not_followed() {
    let bench = bench();
    let target = bench.root.path().join("target");
    // That of a dead writer, whose announcement would be taken back.
    let lease = Lease {
        writer: uuid::Uuid::from_u128(1),
        epoch: 1,
        process: 1,
        heartbeat: 1,
        wanted_bytes: 0,
        capacity: 1,
        durability: None,
        account: Account { taken: 5000, ..Account::default() },
        lock_domain: writer::lock_domain(&bench.options.root),
    };
    fs::write(&target, lease.to_bytes()).unwrap();
    let directory = bench.options.root.join("w-00000000-0000-4000-8000-000000000001");
    fs::create_dir(&directory).unwrap();
    for name in [names::LEASE, "1.tmp"] {
        symlink(&target, directory.join(name)).unwrap();
    }
    works(bench.options.clone());
    assert_eq!(fs::read(&target).unwrap(), lease.to_bytes());
    assert!(!directory.exists());
}

#[test]
fn blocks_are_not_written_through_links() {
    let bench = bench();
    let shards = [bytes("a", 5000)];
    let fingerprint = format!("{:?}", crate::Fingerprint::of(bench.namespace, b"a"));
    let elsewhere = bench.root.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    let tree = bench.options.root.join(names::NAMESPACES).join(bench.namespace.to_string());
    symlink(&elsewhere, tree.join(&fingerprint[..2])).unwrap();
    let crate::layout::Reservation::Claimed(claim) =
        bench.layout().reserve(block(bench.namespace, "a", &shards)).unwrap()
    else {
        panic!("it is not there")
    };
    let written = crate::layout::conformance::write(claim, &shards);
    let refused = bench.layout().commit(vec![written]).pop().unwrap().unwrap_err().to_string();
    assert!(refused.contains("it is a symbolic link, not a directory"), "{refused}");
    assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 0);
}
