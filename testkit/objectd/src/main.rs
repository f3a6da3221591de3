//! Serves the files of a directory as objects: `objectd DIRECTORY [PREFIX] [LATENCY_MS] [DIALECT] [MB_PER_SECOND] [FAULT]
//! [REQUEST] [CHECKSUMS] [WRITES] [tls]`; the rate is that of each connection, and the request that fails is the one with this number, or each of those that are
//! not for the first byte of an object; it has no checksums if those are `none`; of writes some steps fail, such as `part:503,abort:403`, unless that is `none`; with `tls` it encrypts, by a certificate in `certificates`. Their names begin with the prefix, `bucket/folder/` for instance. The dialect is `s3`, `google`,
//! `azure`, or `hub`: then they are the files of the model `org/model`, and safetensors lie on a second server. Prints its URL,
//! and ends with its input.
#![allow(clippy::print_stdout)]

use objectd::{Checksums, Dialect, Fault, Faults, Server, Step};
use std::{env, fs, io, path::Path, time::Duration};

/// The model of a hub, and its commit.
const MODEL: &str = "org/model";
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn main() -> io::Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let root = arguments.first().map_or(".", String::as_str);
    let prefix = arguments.get(1).map_or("", String::as_str);
    let latency =
        arguments.get(2).and_then(|text| text.parse().ok()).map_or(Duration::ZERO, Duration::from_millis);
    let server = if arguments.get(9).is_some_and(|text| text == "tls") {
        Server::start_tls()?
    } else {
        Server::start()?
    };
    let megabytes: Option<u64> = arguments.get(4).and_then(|text| text.parse().ok());
    let bytes_per_second = megabytes.map(|rate| rate.saturating_mul(1_000_000));
    let fault = match arguments.get(5).filter(|name| *name != "none") {
        None => None,
        Some(name) => Some(Fault::named(name).ok_or_else(|| io::Error::other("there is no such fault"))?),
    };
    let only = arguments.get(6).and_then(|text| text.parse().ok());
    server.fail(Faults {
        fault,
        every: 1,
        only,
        spares_first: true,
        latency,
        bytes_per_second,
        ..Faults::default()
    });
    if arguments.get(7).is_some_and(|text| text == "none") {
        server.say_checksums(Checksums::None);
    }
    if let Some(name) = arguments.get(8).filter(|name| *name != "none") {
        for name in name.split(',') {
            let (step, fault) =
                Step::named(name).ok_or_else(|| io::Error::other("there is no such fault"))?;
            server.then_fail_writes(step, usize::MAX, fault);
        }
    }
    let elsewhere = Server::start()?;
    let is_hub = match arguments.get(3).map(String::as_str) {
        Some("google") => {
            server.speak(Dialect::Google);
            false
        }
        Some("azure") => {
            server.speak(Dialect::Azure);
            false
        }
        dialect => dialect == Some("hub"),
    };
    if is_hub {
        server.lead_to(&elsewhere);
        server.put_model(MODEL, COMMIT);
    }
    put_all(&server, Path::new(root), prefix, is_hub)?;
    println!("{}", server.url());
    io::copy(&mut io::stdin(), &mut io::sink()).map(drop)
}

fn put_all(server: &Server, directory: &Path, prefix: &str, is_hub: bool) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            put_all(server, &path, &format!("{prefix}{name}/"), is_hub)?;
        } else if is_hub {
            let linked = name.ends_with(".safetensors");
            server.put_file(MODEL, &format!("{prefix}{name}"), &fs::read(&path)?, linked);
        } else {
            server.put(&format!("{prefix}{name}"), &fs::read(&path)?);
        }
    }
    Ok(())
}
