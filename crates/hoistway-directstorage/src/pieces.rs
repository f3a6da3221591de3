//! How a read becomes requests.
#![forbid(unsafe_code)]

use std::iter;

/// Cuts a read of `len` bytes at `offset` into requests: of `most` bytes each but the last, none of them empty. Each is its offset in
/// the file, its position in the memory, and its length.
pub fn pieces(offset: u64, len: usize, most: u32) -> impl Iterator<Item = (u64, usize, u32)> {
    let mut position = 0;
    iter::from_fn(move || {
        let rest = len.checked_sub(position).filter(|&rest| rest > 0)?;
        let bytes = u32::try_from(rest).map_or(most, |rest| rest.min(most));
        let piece = (offset.checked_add(position as u64)?, position, bytes);
        position += usize::try_from(bytes).ok().filter(|&bytes| bytes > 0)?;
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_a_read_and_none_is_empty() {
        for (offset, len, most, count) in
            [(0, 0, 4, 0), (7, 1, 4, 1), (7, 4, 4, 1), (7, 5, 4, 2), (1 << 40, 4097, 512, 9)]
        {
            let pieces: Vec<_> = pieces(offset, len, most).collect();
            assert_eq!(pieces.len(), count);
            let mut covered = 0;
            for (at, position, bytes) in pieces {
                assert_eq!((at, position), (offset + covered as u64, covered));
                assert!(bytes > 0 && bytes <= most);
                covered += bytes as usize;
            }
            assert_eq!(covered, len);
        }
    }

    #[test]
    fn a_read_past_all_offsets_has_no_piece_there() {
        assert_eq!(pieces(u64::MAX, 5, 2).count(), 1);
        assert_eq!(pieces(0, 5, 0).count(), 0);
    }
}
