//! Threads and the cores that they run on.
#![forbid(unsafe_code)]

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::io;

/// Keeps this thread on `cpus`.
///
/// # Errors
/// The system's: a container may forbid it.
pub fn run_on(cpus: &[usize]) -> io::Result<()> {
    let mut set = CpuSet::new();
    for &cpu in cpus.iter().filter(|&&cpu| cpu < CpuSet::MAX_CPU) {
        set.set(cpu);
    }
    Ok(sched_setaffinity(None, &set)?)
}

/// Returns those of `cpus` that this thread may run on. `None` if the system does not say, as on machines with more processors than a
/// set has room for.
pub fn usable(cpus: &[usize]) -> Option<Vec<usize>> {
    let set = sched_getaffinity(None).ok()?;
    let may_run = |cpu: usize| cpu < CpuSet::MAX_CPU && set.is_set(cpu);
    Some(cpus.iter().copied().filter(|&cpu| may_run(cpu)).collect())
}
