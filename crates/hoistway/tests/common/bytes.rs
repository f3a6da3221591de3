//! Bytes for tests.

/// Bytes that depend on a seed and their place. The hash is compiled with optimisations: a loop over megabytes is not.
pub fn noise(seed: &[u8], len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    blake3::Hasher::new().update(seed).finalize_xof().fill(&mut bytes);
    bytes
}
