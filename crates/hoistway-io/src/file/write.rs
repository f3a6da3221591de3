//! Writes that go on until all is written, or that fail and say where.
#![forbid(unsafe_code)]

use super::is_transient;
use crate::{
    Alignment,
    sys::files::{self, MAX_SLICES},
};
use std::{
    fs::File,
    io::{self, IoSlice},
};

/// Writes in a row without progress before an error is final.
const MAX_STALLS: u32 = 100;

/// Writes all slices to a file from `offset` on, which is where it ends or failed. Goes on after short writes, at a
/// multiple of `block`, and repeats those that were interrupted.
///
/// # Errors
/// The system's; [`WriteZero`](io::ErrorKind::WriteZero) if the file takes no more.
pub fn write_all_at(
    file: &File,
    slices: &mut [IoSlice<'_>],
    offset: &mut u64,
    block: Alignment,
) -> io::Result<()> {
    write_all(|slices, at| files::write_vectored_at(file, slices, at), slices, offset, block)
}

fn write_all(
    mut write: impl FnMut(&[IoSlice<'_>], u64) -> io::Result<usize>,
    mut slices: &mut [IoSlice<'_>],
    offset: &mut u64,
    block: Alignment,
) -> io::Result<()> {
    let mut stalls = 0;
    // Without the slices at the beginning that have no byte: writing these makes no progress.
    IoSlice::advance_slices(&mut slices, 0);
    while !slices.is_empty() {
        let written = match write(&slices[..slices.len().min(MAX_SLICES)], *offset) {
            Ok(count) => block.down(count as u64),
            Err(error) if is_transient(&error) && stalls < MAX_STALLS => 0,
            Err(error) => return Err(error),
        };
        if written == 0 {
            stalls += 1;
            if stalls > MAX_STALLS {
                return Err(io::Error::new(io::ErrorKind::WriteZero, "the file system takes no more bytes"));
            }
            continue;
        }
        stalls = 0;
        *offset += written;
        IoSlice::advance_slices(&mut slices, written as usize);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    /// Carries writes of `data` out on a vector as `script` says: so many bytes, or that error. What is not in the script
    /// goes well.
    fn scripted(
        data: &[&[u8]],
        script: &[Result<usize, io::ErrorKind>],
        block: Alignment,
    ) -> (io::Result<()>, u64, Vec<u8>) {
        let mut script: VecDeque<_> = script.iter().copied().collect();
        let mut file = Vec::new();
        let mut offset = 0;
        let mut slices: Vec<_> = data.iter().map(|data| IoSlice::new(data)).collect();
        let write = |slices: &[IoSlice<'_>], offset: u64| {
            let all: Vec<u8> = slices.iter().flat_map(|slice| slice.iter().copied()).collect();
            let count = match script.pop_front() {
                Some(Err(kind)) => return Err(kind.into()),
                Some(Ok(count)) => count.min(all.len()),
                None => all.len(),
            };
            file.truncate(offset as usize);
            file.extend_from_slice(&all[..count]);
            Ok(count)
        };
        let result = write_all(write, &mut slices, &mut offset, block);
        (result, offset, file)
    }

    #[test]
    fn short_and_interrupted_writes_are_continued() {
        let data: [&[u8]; 3] = [b"abc", b"defgh", b"i"];
        let script =
            [Ok(1), Err(io::ErrorKind::Interrupted), Ok(0), Ok(4), Err(io::ErrorKind::WouldBlock), Ok(3)];
        let (result, offset, file) = scripted(&data, &script, Alignment::BYTE);
        result.unwrap();
        assert_eq!((offset, file.as_slice()), (9, b"abcdefghi".as_slice()));
    }

    #[test]
    fn slices_without_bytes_are_written() {
        for data in [vec![], vec![&b""[..]], vec![&b""[..]; 3000]] {
            let (result, offset, _) = scripted(&data, &[], Alignment::BYTE);
            assert_eq!((result.ok(), offset), (Some(()), 0), "{} slices", data.len());
        }
        let (result, offset, file) = scripted(&[b"", b"ab", b"", b"c", b""], &[], Alignment::BYTE);
        assert_eq!((result.ok(), offset, &file[..]), (Some(()), 3, &b"abc"[..]));
    }

    #[test]
    fn short_direct_writes_go_on_at_a_whole_block() {
        let data: Vec<u8> = (0..5 * 4096u32).map(|i| (i / 7) as u8).collect();
        let (result, offset, file) = scripted(&[&data], &[Ok(5000), Ok(100), Ok(4096)], Alignment::BLOCK);
        result.unwrap();
        assert_eq!(offset, 5 * 4096);
        assert!(file == data);
    }

    #[test]
    fn errors_say_where_and_writes_without_progress_end() {
        let (result, offset, _) =
            scripted(&[b"abcdef"], &[Ok(2), Err(io::ErrorKind::StorageFull)], Alignment::BYTE);
        assert_eq!((result.unwrap_err().kind(), offset), (io::ErrorKind::StorageFull, 2));
        let (result, offset, _) = scripted(&[b"abcdef"], &[Ok(0); 200], Alignment::BYTE);
        assert_eq!((result.unwrap_err().kind(), offset), (io::ErrorKind::WriteZero, 0));
        let (result, ..) = scripted(&[b"abcdef"], &[Err(io::ErrorKind::Interrupted); 200], Alignment::BYTE);
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::Interrupted);
    }

    #[test]
    fn more_slices_than_the_kernel_takes_are_written_in_turn() {
        let data = vec![b"ab".as_slice(); 3000];
        let mut largest = 0;
        let mut slices: Vec<_> = data.iter().map(|data| IoSlice::new(data)).collect();
        let mut offset = 0;
        let write = |slices: &[IoSlice<'_>], _| {
            largest = largest.max(slices.len());
            Ok(slices.iter().map(|slice| slice.len()).sum())
        };
        write_all(write, &mut slices, &mut offset, Alignment::BYTE).unwrap();
        assert_eq!((offset, largest), (6000, MAX_SLICES));
    }
}
