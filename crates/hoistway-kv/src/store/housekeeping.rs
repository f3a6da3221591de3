//! Periodic work: the layout's upkeep, and blocks that never got all their shards.
#![forbid(unsafe_code)]

use super::Core;
use crate::EventKind;
use hoistway_io::parallel::lock;
use std::{
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Time between rounds: what others wrote is found after so long.
const ROUND: Duration = Duration::from_millis(100);
/// Time between looks at blocks that lack shards, and at namespaces that are not open any more.
const PARTIAL_ROUND: Duration = Duration::from_millis(500);

/// Ends the rounds.
#[derive(Default)]
pub(crate) struct Bell {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    pub(crate) fn ring(&self) {
        *lock(&self.rung) = true;
        self.changed.notify_all();
    }

    /// Whether it was rung within this time.
    pub(crate) fn wait(&self, time: Duration) -> bool {
        let rung = lock(&self.rung);
        let (rung, _) = self
            .changed
            .wait_timeout_while(rung, time, |rung| !*rung)
            .unwrap_or_else(PoisonError::into_inner);
        *rung
    }
}

/// Does its rounds until the bell is rung.
pub(crate) fn run(core: &Arc<Core>, bell: &Bell) {
    let mut partial = Instant::now();
    let mut failing = false;
    while !bell.wait(ROUND) {
        let is_round = partial.elapsed() >= PARTIAL_ROUND;
        let closed = if is_round { core.close_namespaces() } else { Ok(()) };
        match core.layout.maintain().and(closed) {
            Ok(()) => failing = false,
            // Once for each time that it begins to fail.
            Err(error) if !failing => {
                failing = true;
                core.events.note(EventKind::MaintenanceFailed, None, error.to_string());
            }
            Err(_) => {}
        }
        core.note_notices();
        if is_round {
            partial = Instant::now();
            abandon(core);
        }
    }
}

/// Gives up blocks that did not get all their shards in time.
fn abandon(core: &Core) {
    let limit = core.options.partial_timeout;
    for assembly in core.assemblies.abandon_older_than(limit, &*core.layout) {
        core.metrics.abandoned.inc();
        core.note_block(
            EventKind::Abandoned,
            assembly.namespace,
            &assembly.key,
            format!("no shard was added for {} s, and some are missing", limit.as_secs()),
        );
    }
}
