//! Threads and the cores that they run on.
#![allow(unsafe_code)]

use super::CORES_A_GROUP;
use std::{io, ptr};
use windows_sys::Win32::System::{
    SystemInformation::GROUP_AFFINITY,
    Threading::{GetCurrentThread, SetThreadGroupAffinity},
};

/// Keeps this thread on those of `cpus` that are in the first one's processor group: a thread is in one group.
///
/// # Errors
/// The system's.
pub fn run_on(cpus: &[usize]) -> io::Result<()> {
    let Some(group) = cpus.first().map(|cpu| cpu / CORES_A_GROUP) else { return Ok(()) };
    let number = u16::try_from(group).map_err(io::Error::other)?;
    let of_group = cpus.iter().filter(|&&cpu| cpu / CORES_A_GROUP == group);
    let mask = of_group.fold(0, |mask, cpu| mask | 1usize << (cpu % CORES_A_GROUP));
    let affinity = GROUP_AFFINITY { Mask: mask, Group: number, ..Default::default() };
    // SAFETY: the structure outlives the call; the previous affinity is not asked for.
    let is_set = unsafe { SetThreadGroupAffinity(GetCurrentThread(), &raw const affinity, ptr::null_mut()) };
    if is_set == 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Returns `cpus`: Windows itself keeps a thread off those that its process may not use.
pub fn usable(cpus: &[usize]) -> Option<Vec<usize>> {
    Some(cpus.to_vec())
}
