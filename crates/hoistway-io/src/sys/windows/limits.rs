//! How much more memory this process may use: what is free, what the system may still promise, and what a job object allows.
#![allow(unsafe_code)]

pub use crate::sys::common::MemoryLimit;
use std::{
    ffi::c_void,
    os::windows::io::{AsRawHandle, FromRawHandle, OwnedHandle},
    path::PathBuf,
    process, ptr,
};
use windows_sys::Win32::{
    Foundation::HANDLE,
    System::{
        JobObjects::{
            JOB_OBJECT_LIMIT_JOB_MEMORY, JOB_OBJECT_LIMIT_PROCESS_MEMORY,
            JOBOBJECT_EXTENDED_LIMIT_INFORMATION, JOBOBJECTINFOCLASS, JobObjectBasicProcessIdList,
            JobObjectExtendedLimitInformation, QueryInformationJobObject,
        },
        ProcessStatus::{K32GetProcessMemoryInfo, PROCESS_MEMORY_COUNTERS},
        SystemInformation::{GlobalMemoryStatusEx, MEMORYSTATUSEX},
        Threading::{GetCurrentProcess, OpenProcess, PROCESS_QUERY_LIMITED_INFORMATION},
    },
};

/// Processes of a job whose memory is counted.
const MOST_PROCESSES: usize = 1024;

/// A place that tells a limit and what it leaves.
#[derive(Clone, Debug)]
pub struct LimitSource(Kind);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The machine's memory.
    Machine,
    /// Memory and page files together.
    Commit,
    /// The memory limit of a job object for each of its processes.
    ProcessOfJob,
    /// The memory limit of a job object for all of its processes together.
    Job,
}

/// Returns every limit that may apply to this process. Of jobs that are one in another, the innermost is asked: Windows does
/// not show the others. What limits leave always changes.
pub fn sources() -> Vec<LimitSource> {
    [Kind::Machine, Kind::Commit, Kind::ProcessOfJob, Kind::Job].map(LimitSource).into()
}

impl LimitSource {
    /// Reads the limit and what it leaves; `None` if it sets none or cannot be read.
    pub fn read(&self) -> Option<MemoryLimit> {
        self.0.limit(&System)
    }

    /// Returns whether memory counts as soon as it is allocated, touched or not. An allocation beyond the limit fails.
    pub fn counts_allocated(&self) -> bool {
        self.0 != Kind::Machine
    }

    /// Returns the file that stands for the limit. Processes under the same limit have the same file.
    pub fn file(&self) -> PathBuf {
        std::env::temp_dir().join(match self.0 {
            Kind::Machine => "hoistway-memory",
            Kind::Commit => "hoistway-commit",
            Kind::ProcessOfJob | Kind::Job => "hoistway-job",
        })
    }
}

impl Kind {
    /// The limit by what the system answers.
    fn limit(self, system: &impl Answers) -> Option<MemoryLimit> {
        match self {
            Self::Machine => {
                let status = system.memory()?;
                Some(limit("the machine's free memory".into(), status.ullAvailPhys, status.ullTotalPhys))
            }
            Self::Commit => {
                let status = system.memory()?;
                let (available, total) = (status.ullAvailPageFile, status.ullTotalPageFile);
                Some(limit("the system's commit limit".into(), available, total))
            }
            Self::ProcessOfJob => {
                let most = limits_of(&system.job()?).0?;
                // Names are equal for processes under the same limit. This limit is of this process alone.
                let name = format!("what its job object allows process {}", process::id());
                Some(limit(name, most.saturating_sub(system.committed_bytes()?), most))
            }
            Self::Job => {
                let most = limits_of(&system.job()?).1?;
                let name = "what the job object allows its processes";
                Some(limit(name.into(), most.saturating_sub(system.committed_by_job()?), most))
            }
        }
    }
}

fn limit(name: String, available_bytes: u64, total_bytes: u64) -> MemoryLimit {
    MemoryLimit { name, available_bytes, total_bytes }
}

/// What a system says of its memory; each is `None` where it does not say.
trait Answers {
    /// The memory of the machine, and its page files.
    fn memory(&self) -> Option<MEMORYSTATUSEX>;
    /// The limits of the job object that this process is in.
    fn job(&self) -> Option<JOBOBJECT_EXTENDED_LIMIT_INFORMATION>;
    /// Bytes that this process has allocated.
    fn committed_bytes(&self) -> Option<u64>;
    /// Bytes that the processes of its job have allocated.
    fn committed_by_job(&self) -> Option<u64>;
}

/// The system that runs this process.
struct System;

impl Answers for System {
    fn memory(&self) -> Option<MEMORYSTATUSEX> {
        let mut status =
            MEMORYSTATUSEX { dwLength: size_of::<MEMORYSTATUSEX>() as u32, ..Default::default() };
        // SAFETY: the structure says its size and outlives the call.
        (unsafe { GlobalMemoryStatusEx(&raw mut status) } != 0).then_some(status)
    }

    fn job(&self) -> Option<JOBOBJECT_EXTENDED_LIMIT_INFORMATION> {
        let mut limits = JOBOBJECT_EXTENDED_LIMIT_INFORMATION::default();
        let bytes = size_of_val(&limits);
        // SAFETY: a structure of this kind and of as many bytes as the call is told.
        unsafe { ask_job(JobObjectExtendedLimitInformation, (&raw mut limits).cast(), bytes) }
            .then_some(limits)
    }

    fn committed_bytes(&self) -> Option<u64> {
        // SAFETY: the handle of this process needs no closing.
        committed_bytes(unsafe { GetCurrentProcess() })
    }

    fn committed_by_job(&self) -> Option<u64> {
        committed_by_job()
    }
}

/// The limits of a job for each process, and for all of them together.
fn limits_of(limits: &JOBOBJECT_EXTENDED_LIMIT_INFORMATION) -> (Option<u64>, Option<u64>) {
    let flags = limits.BasicLimitInformation.LimitFlags;
    let if_set = |flag: u32, bytes: usize| (flags & flag != 0).then_some(bytes as u64);
    (
        if_set(JOB_OBJECT_LIMIT_PROCESS_MEMORY, limits.ProcessMemoryLimit),
        if_set(JOB_OBJECT_LIMIT_JOB_MEMORY, limits.JobMemoryLimit),
    )
}

/// Bytes that the processes of this process's job have allocated, as far as they can be asked.
fn committed_by_job() -> Option<u64> {
    // How many there are and how many are listed, 32 bits each; then their numbers.
    let mut list = vec![0usize; 1 + MOST_PROCESSES];
    let bytes = size_of_val(&*list);
    // What has no room is left out, which the call answers as an error.
    // SAFETY: memory of as many bytes as the call is told, aligned as the structure is.
    unsafe { ask_job(JobObjectBasicProcessIdList, list.as_mut_ptr().cast(), bytes) };
    let listed = list[0] >> u32::BITS;
    let processes = list.get(1..=listed).filter(|ids| !ids.is_empty())?;
    let committed = processes.iter().filter_map(|&id| {
        // SAFETY: takes numbers.
        let process = unsafe { OpenProcess(PROCESS_QUERY_LIMITED_INFORMATION, 0, u32::try_from(id).ok()?) };
        // SAFETY: a new handle, which has no other owner.
        let process = (!process.is_null()).then(|| unsafe { OwnedHandle::from_raw_handle(process) })?;
        committed_bytes(process.as_raw_handle())
    });
    Some(committed.sum())
}

/// Asks the job of this process, and returns whether it answered.
///
/// # Safety
/// `information` is memory of as many `bytes`, for what the class says.
unsafe fn ask_job(class: JOBOBJECTINFOCLASS, information: *mut c_void, bytes: usize) -> bool {
    // SAFETY: no handle stands for the job of this process. The rest is as the caller says.
    unsafe {
        QueryInformationJobObject(ptr::null_mut(), class, information, bytes as u32, ptr::null_mut()) != 0
    }
}

/// Bytes that count against commit limits for a process, whose handle is open.
fn committed_bytes(process: HANDLE) -> Option<u64> {
    let bytes = size_of::<PROCESS_MEMORY_COUNTERS>() as u32;
    let mut counters = PROCESS_MEMORY_COUNTERS { cb: bytes, ..Default::default() };
    // SAFETY: the handle is open, and the structure has as many bytes as the call is told.
    let is_told = unsafe { K32GetProcessMemoryInfo(process, &raw mut counters, bytes) } != 0;
    is_told.then_some(counters.PagefileUsage as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_limits_each_process_and_all_of_them() {
        let mut limits = JOBOBJECT_EXTENDED_LIMIT_INFORMATION {
            ProcessMemoryLimit: 3 << 30,
            JobMemoryLimit: 8 << 30,
            ..Default::default()
        };
        assert_eq!(limits_of(&limits), (None, None), "numbers that no flag speaks of");
        limits.BasicLimitInformation.LimitFlags = JOB_OBJECT_LIMIT_PROCESS_MEMORY;
        assert_eq!(limits_of(&limits), (Some(3 << 30), None));
        limits.BasicLimitInformation.LimitFlags |= JOB_OBJECT_LIMIT_JOB_MEMORY;
        assert_eq!(limits_of(&limits), (Some(3 << 30), Some(8 << 30)));
    }

    /// A system with 16 GiB, of which little can still be allocated, whose job allows each process 3 GiB and all of them 8 GiB.
    #[derive(Clone, Copy, Default)]
    struct Played {
        committed_bytes: u64,
        committed_by_job: u64,
        has_no_job: bool,
    }

    impl Answers for Played {
        fn memory(&self) -> Option<MEMORYSTATUSEX> {
            Some(MEMORYSTATUSEX {
                ullTotalPhys: 16 << 30,
                ullAvailPhys: 9 << 30,
                ullTotalPageFile: 20 << 30,
                ullAvailPageFile: 5 << 20,
                ..Default::default()
            })
        }

        fn job(&self) -> Option<JOBOBJECT_EXTENDED_LIMIT_INFORMATION> {
            let mut limits = JOBOBJECT_EXTENDED_LIMIT_INFORMATION {
                ProcessMemoryLimit: 3 << 30,
                JobMemoryLimit: 8 << 30,
                ..Default::default()
            };
            limits.BasicLimitInformation.LimitFlags =
                JOB_OBJECT_LIMIT_PROCESS_MEMORY | JOB_OBJECT_LIMIT_JOB_MEMORY;
            (!self.has_no_job).then_some(limits)
        }

        fn committed_bytes(&self) -> Option<u64> {
            Some(self.committed_bytes)
        }

        fn committed_by_job(&self) -> Option<u64> {
            Some(self.committed_by_job)
        }
    }

    #[test]
    fn what_a_limit_leaves_is_told_until_nothing_is_left() {
        let left = |played: Played| {
            let kinds = [Kind::Machine, Kind::Commit, Kind::ProcessOfJob, Kind::Job];
            kinds.map(|kind| kind.limit(&played).map(|limit| (limit.available_bytes, limit.total_bytes)))
        };
        let machine = [Some((9 << 30, 16 << 30)), Some((5 << 20, 20 << 30))];
        let played = Played { committed_bytes: 1 << 30, committed_by_job: 7 << 30, has_no_job: false };
        let expected = [machine[0], machine[1], Some((2 << 30, 3 << 30)), Some((1 << 30, 8 << 30))];
        assert_eq!(left(played), expected);
        // At the limit, and beyond it, as a limit may be lowered.
        for committed in [0, 1 << 20] {
            let (committed_bytes, committed_by_job) = ((3 << 30) + committed, (8 << 30) + committed);
            let played = Played { committed_bytes, committed_by_job, has_no_job: false };
            assert_eq!(left(played)[2..], [Some((0, 3 << 30)), Some((0, 8 << 30))]);
        }
        assert_eq!(
            left(Played { has_no_job: true, ..Played::default() }),
            [machine[0], machine[1], None, None]
        );
    }

    #[test]
    fn memory_that_is_allocated_counts_before_it_is_touched() {
        assert!(System.committed_bytes().is_some_and(|bytes| bytes > 0));
        let counting: Vec<_> = sources().iter().map(LimitSource::counts_allocated).collect();
        assert_eq!(counting, [false, true, true, true]);
    }
}
