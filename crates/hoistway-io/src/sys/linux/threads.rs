//! Threads and the cores that they run on.
#![forbid(unsafe_code)]

use rustix::thread::{CpuSet, sched_setaffinity};

/// Keeps this thread on `cpus`. Best effort: a container may forbid it.
pub fn run_on(cpus: &[usize]) {
    let mut set = CpuSet::new();
    for &cpu in cpus.iter().filter(|&&cpu| cpu < CpuSet::MAX_CPU) {
        set.set(cpu);
    }
    let _ = sched_setaffinity(None, &set);
}
