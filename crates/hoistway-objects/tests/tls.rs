//! Encrypted connections: only to servers whose certificate this machine trusts.
#![allow(missing_docs, clippy::unwrap_used)]

use hoistway_objects::{Object, Problem, StoreOptions, Upload};
use objectd::{Fault, Faults, Server};
use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

/// What the variables name is of a process: each case has its own.
const CASE: &str = "HOISTWAY_TEST_CASE";

#[test]
fn a_server_is_trusted_if_its_root_is() {
    let Ok(case) = std::env::var(CASE) else {
        let proxy = Proxy::start();
        for case in ["trusted", "unknown", "bundle", "bundle of another", "proxy"] {
            let mut child = Command::new(std::env::current_exe().unwrap());
            child.args(["--exact", "a_server_is_trusted_if_its_root_is"]).env(CASE, case);
            for name in ["https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"] {
                child.env_remove(name);
            }
            match case {
                "trusted" => drop(child.env("SSL_CERT_FILE", Server::ROOT)),
                "bundle" => drop(child.env("AWS_CA_BUNDLE", Server::ROOT)),
                // It counts for AWS alone.
                "bundle of another" => drop(child.env("AWS_CA_BUNDLE", Server::ROOT)),
                "proxy" => {
                    let url = format!("http://me:canary@{}", proxy.address);
                    child.env("SSL_CERT_FILE", Server::ROOT).env("HTTPS_PROXY", url);
                }
                _ => {}
            }
            let output = child.output().unwrap();
            assert!(output.status.success(), "{case}: {}", String::from_utf8_lossy(&output.stdout));
        }
        assert!(proxy.tunnels.load(Ordering::Relaxed) > 0, "no connection went through the proxy");
        return;
    };
    let server = Server::start_tls().unwrap();
    let bytes: Vec<u8> = (0..3_000_001).map(|at| (at % 251) as u8).collect();
    server.put("models/a", &bytes);
    let mut options = StoreOptions::default();
    let url = if case == "bundle" { "s3://models/a".into() } else { format!("{}/models/a", server.url()) };
    if case == "bundle" {
        options.set("endpoint", &server.url()).unwrap();
        options.set("anonymous", "true").unwrap();
    }
    let opened = Object::open(&url, &options);
    if matches!(&*case, "unknown" | "bundle of another") {
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
    if case == "bundle" {
        let (bytes, stop) = (bytes.repeat(4), hoistway_objects::Stop::default());
        let upload = Upload::begin("s3://models/b", bytes.len() as u64, &options, &stop).unwrap();
        for number in 0..upload.parts() {
            let part = upload.range(number);
            upload.send(number, &[&bytes[part.start as usize..part.end as usize]], &stop).unwrap();
        }
        upload.complete(&stop).unwrap();
        assert!(server.object("models/b").unwrap() == bytes);
    }
}

/// An opening trusts the certificates that the file holds at that time, also if the file was written again under its name.
#[test]
fn roots_are_read_again_once_their_file_was_written() {
    let name = "roots_are_read_again_once_their_file_was_written";
    let Some(path) = std::env::var_os(CASE) else {
        for variable in ["SSL_CERT_FILE", "AWS_CA_BUNDLE"] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("roots.pem");
            let mut child = Command::new(std::env::current_exe().unwrap());
            for name in
                ["https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "SSL_CERT_DIR", "AWS_CA_BUNDLE"]
            {
                child.env_remove(name);
            }
            child.args(["--exact", name]).env(CASE, &path).env(variable, &path);
            let output = child.output().unwrap();
            assert!(output.status.success(), "{variable}: {}", String::from_utf8_lossy(&output.stdout));
        }
        return;
    };
    let server = Server::start_tls().unwrap();
    server.put("models/a", b"bytes");
    let mut options = StoreOptions::default();
    for (name, value) in [("endpoint", &*server.url()), ("anonymous", "true")] {
        options.set(name, value).unwrap();
    }
    let root = std::fs::read_to_string(Server::ROOT).unwrap();
    for is_trusted in [true, false, true] {
        std::fs::write(&path, if is_trusted { &root } else { "no certificate" }).unwrap();
        let opened = Object::open("s3://models/a", &options);
        assert_eq!(opened.is_ok(), is_trusted, "{opened:?}");
        if let Err(error) = opened {
            assert!(matches!(error.problem, Problem::Tls(_)), "{error:?}");
        }
    }
}

/// A proxy that makes tunnels for one user.
struct Proxy {
    address: SocketAddr,
    tunnels: Arc<AtomicUsize>,
}

impl Proxy {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, tunnels) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
        let count = tunnels.clone();
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let count = count.clone();
                thread::spawn(move || tunnel(client, &count));
            }
        });
        Self { address, tunnels }
    }
}

fn tunnel(mut client: TcpStream, count: &AtomicUsize) -> Option<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        client.read_exact(&mut byte).ok()?;
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).ok()?;
    let target = head.strip_prefix("CONNECT ")?.split(' ').next()?;
    if !head.contains("Proxy-Authorization: Basic bWU6Y2FuYXJ5\r\n") {
        return client.write_all(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n").ok();
    }
    let mut server = TcpStream::connect(target).ok()?;
    client.write_all(b"HTTP/1.1 200 Connected\r\n\r\n").ok()?;
    count.fetch_add(1, Ordering::Relaxed);
    let (mut from, mut to) = (client.try_clone().ok()?, server.try_clone().ok()?);
    thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(std::net::Shutdown::Both);
    });
    let _ = std::io::copy(&mut server, &mut client);
    client.shutdown(std::net::Shutdown::Both).ok()
}
