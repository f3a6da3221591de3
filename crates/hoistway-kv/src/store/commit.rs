//! Blocks that are whole become visible, in groups that share their syncs.
#![forbid(unsafe_code)]

use super::{Assembly, Core, core::Message, placement::status_of, requests::StoreUnderWay};
use crate::{
    EventKind, Result, Status,
    layout::Written,
    metrics::NamespaceCounters,
    ticket::{Settled, TicketState},
};
use crossbeam_channel::{Receiver, Sender};
use std::{sync::Arc, time::Instant};

/// Bytes after which a group has no more blocks.
const LARGEST_GROUP: u64 = 64 << 20;

/// A block that was written, with its header.
pub(crate) struct CommitTask {
    pub(crate) written: Written,
    pub(crate) assembly: Arc<Assembly>,
    pub(crate) counters: Arc<NamespaceCounters>,
    pub(crate) waiter: Waiter,
    pub(crate) under_way: Arc<StoreUnderWay>,
}

/// The items that end with the block.
pub(crate) struct Waiter {
    pub(crate) ticket: Arc<TicketState>,
    pub(crate) settled: Vec<Settled>,
    pub(crate) started: Option<Instant>,
}

/// Brings the bytes of blocks to the disk until it is told to stop, and hands groups on to be committed. What comes during
/// a sync makes the next group, whose bytes are synced while the one before it is written to the log.
pub(crate) fn prepare(core: &Arc<Core>, tasks: &Receiver<Message<CommitTask>>, prepared: &Sender<Group>) {
    while let Ok(Message::Task(first)) = tasks.recv() {
        let mut bytes = len_bytes(&first);
        let mut group = vec![first];
        let mut stops = false;
        while bytes < LARGEST_GROUP && !stops {
            match tasks.try_recv() {
                Ok(Message::Task(task)) => {
                    bytes = bytes.saturating_add(len_bytes(&task));
                    group.push(task);
                }
                Ok(Message::Stop) => stops = true,
                Err(_) => break,
            }
        }
        let group = sync(core, group);
        // If the thread that commits has ended, the store is closed, and has ended the requests.
        let _ = prepared.send(group);
        if stops {
            return;
        }
    }
}

/// Commits groups until there are no more.
pub(crate) fn run(core: &Arc<Core>, groups: &Receiver<Group>) {
    groups.iter().for_each(|group| commit(core, group));
}

/// Blocks whose bytes are on the disk where that is promised, and the end of the others.
pub(crate) struct Group {
    blocks: Vec<Written>,
    rest: Vec<Committing>,
}

/// What is known of a block that is being committed.
struct Committing {
    assembly: Arc<Assembly>,
    counters: Arc<NamespaceCounters>,
    waiter: Waiter,
    under_way: Arc<StoreUnderWay>,
}

fn sync(core: &Core, tasks: Vec<CommitTask>) -> Group {
    let (mut blocks, mut rest) = (Vec::with_capacity(tasks.len()), Vec::with_capacity(tasks.len()));
    for CommitTask { written, assembly, counters, waiter, under_way } in tasks {
        blocks.push(written);
        rest.push(Committing { assembly, counters, waiter, under_way });
    }
    let results = core.layout.prepare(&mut blocks);
    let mut group = Group { blocks: Vec::with_capacity(blocks.len()), rest: Vec::with_capacity(rest.len()) };
    for ((written, committing), result) in blocks.into_iter().zip(rest).zip(results) {
        match result {
            Ok(()) => {
                group.blocks.push(written);
                group.rest.push(committing);
            }
            Err(error) => {
                drop(written);
                committing.end(core, Err(error));
            }
        }
    }
    group
}

fn len_bytes(task: &CommitTask) -> u64 {
    task.written.table.0.iter().fold(0, |sum, shard| sum.saturating_add(shard.len))
}

fn commit(core: &Core, Group { blocks, rest }: Group) {
    if blocks.is_empty() {
        return;
    }
    let results = core.layout.commit(blocks);
    core.metrics.commits.inc();
    for (committing, result) in rest.into_iter().zip(results) {
        committing.end(core, result);
    }
}

impl Committing {
    fn end(self, core: &Core, result: Result<()>) {
        let Self { assembly, counters, waiter, under_way } = self;
        // It is found now, or its place is free.
        core.assemblies.remove(&assembly);
        let Waiter { ticket, mut settled, started } = waiter;
        match result {
            Ok(()) => {
                core.unreadable.stored(&assembly.fingerprint);
                counters.stored_blocks.inc();
            }
            Err(error) => {
                fail(&mut settled, status_of(&error));
                core.note_block(EventKind::StoreFailed, assembly.namespace, &assembly.key, error.to_string());
            }
        }
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
