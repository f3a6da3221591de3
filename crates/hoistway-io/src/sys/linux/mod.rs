//! Linux: rustix and libc, `/proc` and `/sys`.

pub mod block_device;
pub mod files;
pub mod folders;
pub mod limits;
pub mod machine;
pub mod numa;
pub mod pages;
pub mod permissions;
pub mod pieces;
pub mod threads;
pub mod usage;

use std::{fs, path::Path, str::FromStr};

/// A number that stands alone in a file of `/proc` or `/sys`.
fn read_number<T: FromStr>(path: impl AsRef<Path>) -> Option<T> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}
