//! Threads and the cores that they run on.
#![forbid(unsafe_code)]

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Keeps this thread on `cpus`. Best effort: a container may forbid it.
pub fn run_on(cpus: &[usize]) {
    let mut set = CpuSet::new();
    for &cpu in cpus.iter().filter(|&&cpu| cpu < CpuSet::MAX_CPU) {
        set.set(cpu);
    }
    let _ = sched_setaffinity(None, &set);
}

/// Returns those of `cpus` that this thread may run on, if the system says.
pub fn usable(cpus: &[usize]) -> Vec<usize> {
    let may_run = |set: &CpuSet, cpu: usize| cpu < CpuSet::MAX_CPU && set.is_set(cpu);
    match sched_getaffinity(None) {
        Ok(set) => cpus.iter().copied().filter(|&cpu| may_run(&set, cpu)).collect(),
        // Machines with more processors than a set has room for.
        Err(_) => cpus.to_vec(),
    }
}
