//! Copies of many bytes past the processor's cache, which the memory that the daemon writes to needs for itself.
#![allow(unsafe_code)]

/// Fewer bytes may be in use at once, and are copied into the cache.
#[cfg(any(test, target_arch = "x86_64"))]
const MIN_PAST_CACHE_BYTES: usize = 128 << 10;

/// Copies `len` bytes.
///
/// Ordinary stores fetch each line of the target from memory before they overwrite it, and push out of the cache what
/// the next reads are to land in: where the target is larger than the cache, that takes up to twice as long.
///
/// # Safety
/// As [`core::ptr::copy_nonoverlapping`].
pub(crate) unsafe fn copy(source: *const u8, target: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len >= MIN_PAST_CACHE_BYTES {
        // SAFETY: the caller's promise.
        unsafe { copy_past_cache(source, target, len) };
        return;
    }
    // SAFETY: the caller's promise.
    unsafe { source.copy_to_nonoverlapping(target, len) };
}

#[cfg(target_arch = "x86_64")]
unsafe fn copy_past_cache(source: *const u8, target: *mut u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    /// What a line of the cache is long, and what memory is written by.
    const LINE: usize = 64;
    let head = target.align_offset(LINE).min(len);
    let lines = (len - head) / LINE;
    let tail = head + lines * LINE;
    // SAFETY: all of it lies in the `len` bytes at both, which the caller promises are valid and apart; lines of the
    // target begin at multiples of their length, as the stores demand. The fence comes before any other use of what
    // they wrote.
    unsafe {
        source.copy_to_nonoverlapping(target, head);
        for line in 0..lines {
            let from = source.add(head + line * LINE).cast::<__m128i>();
            let to = target.add(head + line * LINE).cast::<__m128i>();
            // By hand, as tests of debug builds copy gigabytes by it.
            let (first, second) = (_mm_loadu_si128(from), _mm_loadu_si128(from.add(1)));
            let (third, fourth) = (_mm_loadu_si128(from.add(2)), _mm_loadu_si128(from.add(3)));
            _mm_stream_si128(to, first);
            _mm_stream_si128(to.add(1), second);
            _mm_stream_si128(to.add(2), third);
            _mm_stream_si128(to.add(3), fourth);
        }
        _mm_sfence();
        source.add(tail).copy_to_nonoverlapping(target.add(tail), len - tail);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn all_bytes_are_copied_and_no_other_is_touched(
            from in 0..130usize,
            to in 0..130usize,
            len in prop_oneof![0..200usize, MIN_PAST_CACHE_BYTES - 1..MIN_PAST_CACHE_BYTES + 200],
        ) {
            let source: Vec<u8> = (0..from + len).map(|position| (position % 251) as u8).collect();
            let mut target = vec![255; to + len + 130];
            // SAFETY: both have `len` bytes there.
            unsafe { copy(source[from..].as_ptr(), target[to..].as_mut_ptr(), len) };
            prop_assert!(target[to..to + len] == source[from..]);
            prop_assert!(target[..to].iter().chain(&target[to + len..]).all(|&byte| byte == 255));
        }
    }
}
