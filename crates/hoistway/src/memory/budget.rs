//! Refuses a load that would be killed: checks the user's budget, the control groups' limits and the machine's memory
//! before the load allocates, and the latter two again while it touches its memory, as others take memory too.
#![forbid(unsafe_code)]

use super::promised::{self, Promise};
use crate::{
    Error, Result,
    sys::limits::{MemoryLimit, sources},
};

/// Page tables, thread stacks and the like, as a part of what is allocated: one 64th.
const OVERHEAD_SHIFT: u32 = 6;
/// Too little to be worth the dozen files that say what the system has left.
const SMALL_BYTES: u64 = 8 << 20;

/// Returns every limit on the memory of this process that can be read. A load is refused that one of them would kill.
///
/// ```
/// for limit in hoistway::memory::limits() {
///     println!("{} leaves {} bytes", limit.name, limit.available_bytes);
/// }
/// ```
pub fn limits() -> Vec<MemoryLimit> {
    let promised = promised::bytes();
    let left = |mut limit: MemoryLimit| {
        limit.available_bytes = limit.available_bytes.saturating_sub(promised);
        limit
    };
    sources().iter().filter_map(|source| source.read()).map(left).collect()
}

/// Bytes that a load has for each of its reads besides their memory: the plan, and what its threads know of them.
const READ_BYTES: u64 = 1024;
/// Less for all reads is not worth counting.
const LEAST_COUNTED_BYTES: u64 = 1 << 20;

/// Returns the bytes that a load has for so many reads besides their memory.
pub(crate) fn bookkeeping_bytes(reads: u64) -> u64 {
    Some(reads.saturating_mul(READ_BYTES)).filter(|&bytes| bytes >= LEAST_COUNTED_BYTES).unwrap_or(0)
}

/// Whether `fresh` bytes for tensors and `staging` bytes may be allocated now, under `budget` and under what the
/// system has left.
///
/// # Errors
/// [`Error::MemoryBudget`] names the limit that is in the way.
pub(crate) fn check(fresh: u64, staging: u64, budget: Option<u64>) -> Result<()> {
    promise(fresh, staging, budget).map(drop)
}

/// Checks as [`check`] does, and sets `fresh` bytes apart from what later loads of this process may have.
///
/// # Errors
/// [`Error::MemoryBudget`] names the limit that is in the way.
pub(crate) fn promise(fresh: u64, staging: u64, budget: Option<u64>) -> Result<Promise> {
    let needed = fresh.saturating_add(staging);
    if let Some(available) = budget
        && needed > available
    {
        return Err(Error::MemoryBudget {
            needed,
            available,
            limit_name: "the memory budget".into(),
            fix: "raise it, or select fewer tensors".into(),
        });
    }
    if needed < SMALL_BYTES {
        return Ok(Promise::none());
    }
    let needed = needed.saturating_add(needed >> OVERHEAD_SHIFT);
    let sources = sources();
    let tightest =
        sources.iter().filter_map(|source| source.read()).min_by_key(|limit| limit.available_bytes);
    let available = tightest.as_ref().map_or(u64::MAX, |limit| limit.available_bytes);
    Promise::new(fresh, sources, |promised| needed <= available.saturating_sub(promised)).map_err(
        |promised| {
            let limit_name = tightest.map(|limit| limit.name).unwrap_or_default();
            Error::MemoryBudget {
                needed,
                available: available.saturating_sub(promised),
                limit_name: if promised == 0 {
                    limit_name
                } else {
                    format!("{limit_name}, less what other loads of this process were promised,")
                },
                fix: "free memory, raise that limit, select fewer tensors, or use route 'mapped'".into(),
            }
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_of_one_process_are_not_promised_the_same_memory() {
        let available = || limits().iter().map(|limit| limit.available_bytes).min().unwrap();
        let (before, most) = (available(), available() / 10 * 6);
        let first = promise(most, 0, None).unwrap();
        assert!(available() < before - most / 2, "what is promised is not available");
        match promise(most, 0, None).unwrap_err() {
            Error::MemoryBudget { available, limit_name, .. } => {
                assert!(
                    available < most && limit_name.contains("other loads of this process"),
                    "{limit_name}"
                );
            }
            other => panic!("{other:?}"),
        }
        drop(first);
        promise(most, 0, None).unwrap();
    }
}
