//! Refuses a load that would be killed: checks the user's budget, the control groups' limits and the machine's memory
//! before the load allocates, and the latter two again while it touches its memory, as others take memory too.
#![forbid(unsafe_code)]

use super::promised::{self, Promise, RESERVE_BYTES};
use crate::{
    Error, Result,
    sys::limits::{LimitSource, MemoryLimit, sources},
};
use hoistway_io::memory::release_idle_staging;

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
    let left = |mut found: Limit| {
        found.limit.available_bytes = found.left(promised);
        found.limit
    };
    sources().iter().filter_map(Limit::read).map(left).collect()
}

/// A limit, and whether memory counts against it before it is touched.
struct Limit {
    limit: MemoryLimit,
    counts_allocated: bool,
}

impl Limit {
    fn read(source: &LimitSource) -> Option<Self> {
        Some(Self { limit: source.read()?, counts_allocated: source.counts_allocated() })
    }

    /// Bytes that it leaves beside loads that were promised so many and have not touched them.
    fn left(&self, promised: u64) -> u64 {
        // Loads allocate at once what they are promised.
        let untouched = if self.counts_allocated { 0 } else { promised };
        self.limit.available_bytes.saturating_sub(untouched)
    }
}

/// The limit that leaves the least beside what was promised, and the bytes that it leaves.
fn tightest(limits: &[Limit], promised: u64) -> Option<(&Limit, u64)> {
    limits.iter().map(|limit| (limit, limit.left(promised))).min_by_key(|limit| limit.1)
}

/// Bytes that a load has for each of its reads besides their memory: the plan, and what its threads know of them. Its heap grew by
/// 1000 for each of 200,000 reads, and by 1250 where each has a tensor of its own. The rest is for what the allocator adds.
const READ_BYTES: u64 = 1408;
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
    let look = || {
        let sources = sources();
        let limits: Vec<Limit> = sources.iter().filter_map(Limit::read).collect();
        within(&limits, sources, fresh, needed)
    };
    match look() {
        // What earlier loads to devices have left takes memory too, and so does what later reads would use.
        Err(_) if release_idle_staging() | super::clear_spare() => look(),
        found => found,
    }
}

/// Sets `fresh` bytes apart if `limits`, which were read from `sources`, allow `needed` bytes and what comes with them.
fn within(limits: &[Limit], mut sources: Vec<LimitSource>, fresh: u64, needed: u64) -> Result<Promise> {
    let needed = needed.saturating_add(needed >> OVERHEAD_SHIFT).saturating_add(RESERVE_BYTES);
    // Where the allocation counts, it is refused if it is too much. What is left afterwards is beside it.
    sources.retain(|source| !source.counts_allocated());
    let may = |promised| tightest(limits, promised).is_none_or(|(_, left)| needed <= left);
    Promise::new(fresh, sources, may).map_err(|promised| {
        let found = tightest(limits, promised).map(|(least, available)| match least.limit.available_bytes {
            all if all == available => (least.limit.name.clone(), available),
            _ => (
                format!("{}, less what other loads of this process were promised,", least.limit.name),
                available,
            ),
        });
        let (limit_name, available) = found.unwrap_or_default();
        let fix = "free memory, raise that limit, select fewer tensors, or use route 'mapped'".into();
        Error::MemoryBudget { needed, available, limit_name, fix }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(available_bytes: u64, counts_allocated: bool) -> Limit {
        let mut limit = limits().swap_remove(0);
        limit.available_bytes = available_bytes;
        Limit { limit, counts_allocated }
    }

    #[test]
    fn a_load_that_a_limit_does_not_leave_room_for_is_refused_by_its_name() {
        const NEEDED: u64 = 64 << 20;
        let allowed = NEEDED + (NEEDED >> OVERHEAD_SHIFT) + RESERVE_BYTES;
        // Room in the machine's memory, and none under a limit on what is allocated, such as that of a job object.
        let refused = |available_bytes| {
            let mut limits = [limit(u64::MAX, false), limit(available_bytes, true), limit(u64::MAX, true)];
            limits[1].limit.name = "the limit of the job".into();
            match within(&limits, Vec::new(), NEEDED, NEEDED) {
                Ok(_) => None,
                Err(Error::MemoryBudget { needed, available, limit_name, .. }) => {
                    assert_eq!((needed, available), (allowed, available_bytes));
                    Some(limit_name)
                }
                Err(other) => panic!("{other:?}"),
            }
        };
        for available_bytes in [0, NEEDED, allowed - 1] {
            assert_eq!(refused(available_bytes).as_deref(), Some("the limit of the job"));
        }
        assert_eq!(refused(allowed), None);
    }

    #[test]
    fn what_is_allocated_is_not_counted_twice() {
        let limits = [limit(100, false), limit(70, true)];
        let left = |promised| tightest(&limits, promised).map(|(limit, left)| (limit.counts_allocated, left));
        // 70 bytes were left after 60 that were promised had been allocated.
        assert_eq!(left(0), Some((true, 70)));
        assert_eq!(left(20), Some((true, 70)));
        assert_eq!(left(60), Some((false, 40)));
        assert_eq!(tightest(&[], 60).map(|limit| limit.1), None);
    }

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
