//! Serves the files of a directory as objects: `objectd DIRECTORY [PREFIX] [LATENCY_MS]`. Their names begin with the
//! prefix, `bucket/folder/` for instance. Prints its URL, and ends with its input.
#![allow(clippy::print_stdout)]

use objectd::{Faults, Server};
use std::{env, fs, io, path::Path, time::Duration};

fn main() -> io::Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let root = arguments.first().map_or(".", String::as_str);
    let prefix = arguments.get(1).map_or("", String::as_str);
    let latency =
        arguments.get(2).and_then(|text| text.parse().ok()).map_or(Duration::ZERO, Duration::from_millis);
    let server = Server::start()?;
    server.fail(Faults { latency, ..Faults::default() });
    put_all(&server, Path::new(root), prefix)?;
    println!("{}", server.url());
    io::copy(&mut io::stdin(), &mut io::sink()).map(drop)
}

fn put_all(server: &Server, directory: &Path, prefix: &str) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            put_all(server, &path, &format!("{prefix}{name}/"))?;
        } else {
            server.put(&format!("{prefix}{name}"), &fs::read(&path)?);
        }
    }
    Ok(())
}
