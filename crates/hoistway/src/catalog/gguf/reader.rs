//! A window that moves over a source of bytes, and the numbers and strings in it.
#![forbid(unsafe_code)]

use super::{ByteOrder, GgufError, HeaderPart, MAX_HEADER_BYTES, MAX_STRING_BYTES, MAX_TEXT_BYTES};
use crate::ByteRange;
use hoistway_io::{file, memory};
use std::{fs::File, io};

/// Bytes that are read at once. So few where the smallest of files must need several windows.
const WINDOW_BYTES: u64 = if cfg!(any(test, fuzzing)) { 64 } else { 256 << 10 };

/// Something that any range of bytes can be read from.
pub trait ByteSource {
    /// Its length in bytes.
    ///
    /// # Errors
    /// Those of the system.
    fn len_bytes(&self) -> io::Result<u64>;

    /// Fills `buffer` with the bytes from `offset` on.
    ///
    /// # Errors
    /// Those of the system; [`io::ErrorKind::UnexpectedEof`] if there are too few.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
}

impl ByteSource for File {
    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        file::read_exact_at(self, buffer, offset)
    }
}

impl ByteSource for &[u8] {
    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.len() as u64)
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let found = usize::try_from(offset)
            .ok()
            .and_then(|start| self.get(start..start.checked_add(buffer.len())?))
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        buffer.copy_from_slice(found);
        Ok(())
    }
}

/// Reads forward from some byte of a source, and never past `end`.
pub(super) struct Reader<'a> {
    source: &'a dyn ByteSource,
    byte_order: ByteOrder,
    end: u64,
    start: u64,
    position: u64,
    /// Bytes of text that were handed out to be kept.
    text_bytes: u64,
    /// The bytes of the source from `window_start` on.
    window: Vec<u8>,
    window_start: u64,
    /// The part that is being read, for errors.
    part: HeaderPart,
}

impl<'a> Reader<'a> {
    /// Begins at `range`'s first byte; whatever lies past its last is treated as past the end of the file.
    pub(super) fn new(source: &'a dyn ByteSource, range: ByteRange, byte_order: ByteOrder) -> Self {
        let (position, end) = (range.start(), range.end());
        Self {
            source,
            byte_order,
            end,
            start: position,
            position,
            text_bytes: 0,
            window: Vec::new(),
            window_start: position,
            part: HeaderPart::Start,
        }
    }

    pub(super) fn set_byte_order(&mut self, byte_order: ByteOrder) {
        self.byte_order = byte_order;
    }

    pub(super) fn byte_order(&self) -> ByteOrder {
        self.byte_order
    }

    /// Sets the part that later errors are about.
    pub(super) fn enter(&mut self, part: HeaderPart) {
        self.part = part;
    }

    pub(super) fn part(&self) -> HeaderPart {
        self.part.clone()
    }

    /// Offset in the source of the next byte.
    pub(super) fn position(&self) -> u64 {
        self.position
    }

    /// Fails unless `count` things of at least `least_bytes` each can still follow.
    pub(super) fn require(&self, count: u64, least_bytes: u64) -> Result<u64, GgufError> {
        let needed = count.saturating_mul(least_bytes);
        if needed > self.end - self.position {
            let (part, offset) = (self.part(), self.position);
            return Err(GgufError::PastEnd { part, offset, needed, file_len: self.end });
        }
        if self.position - self.start + needed > MAX_HEADER_BYTES {
            return Err(GgufError::LongHeader { part: self.part(), offset: self.position, needed });
        }
        Ok(needed)
    }

    /// Fails if a number that was just read, `width` bytes wide, is above `limit`.
    pub(super) fn check_limit(
        &self,
        what: &'static str,
        count: u64,
        limit: u64,
        width: u64,
    ) -> Result<(), GgufError> {
        if count > limit {
            let offset = self.position.saturating_sub(width);
            return Err(GgufError::TooMany { part: self.part(), what, count, limit, offset });
        }
        Ok(())
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], GgufError> {
        self.require(1, N as u64)?;
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.buffered(N)?);
        self.position += N as u64;
        Ok(bytes)
    }

    /// A number's bytes, lowest first.
    pub(super) fn number<const N: usize>(&mut self) -> Result<[u8; N], GgufError> {
        let mut bytes = self.array()?;
        if self.byte_order == ByteOrder::Big {
            bytes.reverse();
        }
        Ok(bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, GgufError> {
        self.number().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, GgufError> {
        self.number().map(u64::from_le_bytes)
    }

    /// A string of at most `limit` bytes that will be kept: all of them together have a limit too.
    pub(super) fn kept_string(&mut self, limit: u64) -> Result<String, GgufError> {
        let offset = self.position;
        let len = self.string_len(limit)?;
        self.text_bytes += len;
        if self.text_bytes > MAX_TEXT_BYTES {
            return Err(GgufError::TooMuchText { part: self.part(), offset });
        }
        self.text(len)
    }

    /// A string of an array.
    pub(super) fn string(&mut self) -> Result<String, GgufError> {
        let len = self.string_len(MAX_STRING_BYTES)?;
        self.text(len)
    }

    /// A string of an array, whether or not it is text.
    pub(super) fn byte_string(&mut self) -> Result<Vec<u8>, GgufError> {
        let len = self.string_len(MAX_STRING_BYTES)?;
        self.bytes(len)
    }

    fn text(&mut self, len: u64) -> Result<String, GgufError> {
        let offset = self.position;
        String::from_utf8(self.bytes(len)?).map_err(|error| GgufError::NotUtf8 {
            part: self.part(),
            offset: offset + error.utf8_error().valid_up_to() as u64,
        })
    }

    /// The next `len` bytes, which must be there.
    fn bytes(&mut self, len: u64) -> Result<Vec<u8>, GgufError> {
        let bytes = if len <= WINDOW_BYTES {
            self.buffered(usize::try_from(len).unwrap_or(usize::MAX))?.to_vec()
        } else {
            let range = ByteRange::at(self.position, len).unwrap_or_default();
            let mut bytes = zeroed(len, range)?;
            read(self.source, &mut bytes, self.position)?;
            bytes
        };
        self.position += len;
        Ok(bytes)
    }

    pub(super) fn skip_string(&mut self) -> Result<(), GgufError> {
        let len = self.string_len(MAX_STRING_BYTES)?;
        self.skip(len)
    }

    pub(super) fn skip(&mut self, len: u64) -> Result<(), GgufError> {
        self.position += self.require(1, len)?;
        Ok(())
    }

    fn string_len(&mut self, limit: u64) -> Result<u64, GgufError> {
        let len = self.u64()?;
        self.check_limit("bytes", len, limit, 8)?;
        self.require(1, len)
    }

    /// The next `len` bytes, which must be there and fit the window.
    fn buffered(&mut self, len: usize) -> Result<&[u8], GgufError> {
        let buffered_end = self.window_start + self.window.len() as u64;
        if self.position + len as u64 > buffered_end {
            let window_len = WINDOW_BYTES.min(self.end - self.position);
            self.window.resize(usize::try_from(window_len).unwrap_or(usize::MAX), 0);
            self.window_start = self.position;
            if let Err(error) = read(self.source, &mut self.window, self.position) {
                self.window.clear();
                return Err(error);
            }
        }
        let start = usize::try_from(self.position - self.window_start).unwrap_or(usize::MAX);
        let bytes = self.window.get(start..start.saturating_add(len));
        bytes.ok_or_else(|| GgufError::PastEnd {
            part: self.part.clone(),
            offset: self.position,
            needed: len as u64,
            file_len: self.end,
        })
    }
}

/// Memory for `len` elements that the bytes `range` hold.
pub(super) fn zeroed<T: Clone + Default>(len: u64, range: ByteRange) -> Result<Vec<T>, GgufError> {
    memory::zeroed(len).map_err(|source| GgufError::Allocation { range, source })
}

/// Fills `buffer` from a source.
pub(super) fn read(source: &dyn ByteSource, buffer: &mut [u8], offset: u64) -> Result<(), GgufError> {
    let range = ByteRange::at(offset, buffer.len() as u64).unwrap_or_default();
    source.read_exact_at(buffer, offset).map_err(|source| GgufError::Io { range, source })
}
