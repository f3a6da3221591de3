//! `usrbio-read FILE EXPECTED CLIENT [again]`: reads a file of a 3FS through USRBIO in a process of its own, and compares
//! each byte with another file's. `CLIENT` is `native`, or the path of the vendor's library. With `again` it says `reading`
//! once it does, and does not end.

use hoistway_usrbio::{
    Client, IovOptions, Library, LibrarySearch, Mount, Refused, Result, Ring, RingOptions, Transfer,
};
use std::{
    env,
    ffi::OsString,
    fs::File,
    io::{self, Write},
    os::unix::fs::FileExt,
    path::Path,
    process::ExitCode,
    time::Duration,
};

const SLOT_BYTES: usize = (1 << 20) + 1;
const DEPTH: usize = 4;

fn main() -> ExitCode {
    let arguments: Vec<OsString> = env::args_os().skip(1).collect();
    let [file, expected, client, rest @ ..] = arguments.as_slice() else {
        let _ = writeln!(io::stderr(), "usage: usrbio-read FILE EXPECTED native|LIBRARY [again]");
        return ExitCode::FAILURE;
    };
    let again = rest.first().is_some_and(|word| word == "again");
    match read(Path::new(file), Path::new(expected), client, again) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(wrong) => {
            let _ = writeln!(io::stderr(), "{wrong} reads brought other bytes");
            ExitCode::FAILURE
        }
        Err(error) => {
            let _ = writeln!(io::stderr(), "{error}");
            ExitCode::FAILURE
        }
    }
}

/// How many reads brought other bytes.
fn read(path: &Path, expected: &Path, client: &OsString, again: bool) -> Result<usize> {
    let client = match client.to_str() {
        Some("native") => Client::Native,
        _ => {
            let search = LibrarySearch::default().library(client.into());
            Client::Vendor(Library::find(&search)?)
        }
    };
    let mount = Mount::open(path, client)?;
    let iov = mount.create_iov(&IovOptions::default().len(DEPTH * SLOT_BYTES))?;
    let mut ring = mount.create_ring(&RingOptions::default().depth(DEPTH))?;
    let mut slots = iov.slots(SLOT_BYTES);
    let file = mount.open_file(path)?;
    let expected = File::open(expected).ok();
    let mut wrong = 0;
    loop {
        let len = file.len_now()?;
        let (mut offset, mut completions) = (0, Vec::new());
        while offset < len || ring.in_flight() > 0 {
            while offset < len
                && let Some(slot) = slots.pop()
            {
                let wanted = SLOT_BYTES.min((len - offset) as usize);
                let transfer = Transfer::new(file.clone(), offset, wanted, slot);
                if let Some(slot) = pushed(&mut ring, transfer)? {
                    slots.push(slot);
                    break;
                }
                offset += wanted as u64;
            }
            ring.wait(Duration::from_secs(1), &mut completions)?;
            for completion in completions.drain(..) {
                let transfer = completion.transfer;
                let got = completion.result?;
                let (mut bytes, mut right) = (vec![0; got], vec![0; transfer.len]);
                transfer.slot.copy_to(0, &mut bytes)?;
                let read = expected.as_ref().map(|file| file.read_exact_at(&mut right, transfer.offset));
                wrong += usize::from(!matches!(read, Some(Ok(()))) || bytes != right);
                slots.push(transfer.slot);
            }
        }
        if !again {
            return Ok(wrong);
        }
        let _ = writeln!(io::stdout(), "reading").and_then(|()| io::stdout().flush());
    }
}

/// The slot, if there is no room for the transfer.
fn pushed(ring: &mut Ring, transfer: Transfer) -> Result<Option<hoistway_usrbio::IovSlot>> {
    match ring.push(transfer) {
        Ok(()) => Ok(None),
        Err(Refused::Full(transfer)) => Ok(Some(transfer.slot)),
        Err(Refused::Failed(_, error)) => Err(error),
    }
}
