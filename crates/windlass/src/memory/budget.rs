//! Refuses a load that would be killed: checks the user's budget, the cgroup's limit and the machine's memory.
#![forbid(unsafe_code)]

use crate::{Error, Result, host};

/// Page tables, thread stacks and the like, as a part of what is allocated: one 64th.
const OVERHEAD_SHIFT: u32 = 6;
/// Too little to be worth the dozen files that say what the system has left.
const SMALL_BYTES: u64 = 8 << 20;

/// Whether `fresh` bytes for tensors and `staging` bytes may be allocated now, under `budget` and under what the
/// system has left.
///
/// # Errors
/// [`Error::MemoryBudget`] names the limit that is in the way.
pub(crate) fn check(fresh: u64, staging: u64, budget: Option<u64>) -> Result<()> {
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
        return Ok(());
    }
    let needed = needed.saturating_add(needed >> OVERHEAD_SHIFT);
    let tightest = host::memory::limits().into_iter().min_by_key(|limit| limit.available_bytes);
    match tightest {
        Some(limit) if needed > limit.available_bytes => Err(Error::MemoryBudget {
            needed,
            available: limit.available_bytes,
            limit_name: limit.name,
            fix: "free memory, raise that limit, select fewer tensors, or use route 'mapped'".into(),
        }),
        _ => Ok(()),
    }
}
