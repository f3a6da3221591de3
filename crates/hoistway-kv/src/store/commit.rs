//! Blocks that are whole become visible, in groups that share their syncs.
#![forbid(unsafe_code)]

use super::{
    Assembly, Core,
    core::Message,
    placement::{Coming, status_of},
    requests::StoreUnderWay,
};
use crate::{
    Durability, EventKind, Status,
    layout::Written,
    metrics::NamespaceCounters,
    ticket::{Settled, TicketState},
};
use crossbeam_channel::Receiver;
use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

/// How long a group waits for more blocks, where the durability does not ask for each block to be synced at once.
const LONGEST_GATHERING: Duration = Duration::from_millis(5);
/// Bytes after which a group waits no longer.
const LARGEST_GROUP: u64 = 64 << 20;

/// A block that was written, with its header.
pub(crate) struct CommitTask {
    pub(crate) written: Written,
    pub(crate) assembly: Arc<Assembly>,
    pub(crate) counters: Arc<NamespaceCounters>,
    pub(crate) waiter: Waiter,
    pub(crate) under_way: Arc<StoreUnderWay>,
    pub(crate) coming: Coming,
}

/// The items that end with the block.
pub(crate) struct Waiter {
    pub(crate) ticket: Arc<TicketState>,
    pub(crate) settled: Vec<Settled>,
    pub(crate) started: Option<Instant>,
}

/// Commits blocks until it is told to stop.
pub(crate) fn run(core: &Arc<Core>, tasks: &Receiver<Message<CommitTask>>) {
    let gathering = match core.options.durability {
        Durability::Batched => LONGEST_GATHERING,
        // What comes during a commit makes the next group.
        Durability::None | Durability::Sync => Duration::ZERO,
    };
    while let Ok(Message::Task(first)) = tasks.recv() {
        let end = Instant::now() + gathering;
        let mut bytes = len_bytes(&first);
        let mut group = vec![first];
        let mut stops = false;
        while bytes < LARGEST_GROUP && !stops {
            // Where no other block is under way, none will come that could share the sync.
            let is_alone = core.coming.load(Ordering::Relaxed) <= group.len();
            let end = if is_alone { Instant::now() } else { end };
            let next = match end.saturating_duration_since(Instant::now()) {
                Duration::ZERO => tasks.try_recv().ok(),
                left => tasks.recv_timeout(left).ok(),
            };
            match next {
                Some(Message::Task(task)) => {
                    bytes = bytes.saturating_add(len_bytes(&task));
                    group.push(task);
                }
                Some(Message::Stop) => stops = true,
                None => break,
            }
        }
        commit(core, group);
        if stops {
            return;
        }
    }
}

fn len_bytes(task: &CommitTask) -> u64 {
    task.written.table.0.iter().fold(0, |sum, shard| sum.saturating_add(shard.len))
}

fn commit(core: &Arc<Core>, group: Vec<CommitTask>) {
    let (blocks, rest): (Vec<_>, Vec<_>) = group
        .into_iter()
        .map(|CommitTask { written, assembly, counters, waiter, under_way, coming }| {
            (written, (assembly, counters, waiter, under_way, coming))
        })
        .unzip();
    let mut results = core.layout.commit(blocks).into_iter();
    core.metrics.commits.inc();
    for (assembly, counters, waiter, under_way, coming) in rest {
        // It is found now, or its place is free.
        core.assemblies.remove(&assembly);
        let Waiter { ticket, mut settled, started } = waiter;
        match results.next() {
            Some(Ok(())) => {
                counters.stored_blocks.inc();
            }
            Some(Err(error)) => {
                fail(&mut settled, status_of(&error));
                core.note_block(EventKind::StoreFailed, assembly.namespace, &assembly.key, error.to_string());
            }
            None => fail(&mut settled, Status::Io(libc::EIO)),
        }
        drop(coming);
        ticket.settle(settled, started);
        drop(under_way);
    }
}

fn fail(settled: &mut [Settled], status: Status) {
    for settled in settled {
        settled.status = status;
        settled.bytes = 0;
    }
}
