//! What events of devices keep alive.

use hoistway_io::executor::{
    Charge, Customer, Limits, Operation, QueueId, QueueOptions, Reason, Scheduler, Submission, Whose,
};
use std::{
    hash::{Hash, Hasher},
    sync::Arc,
};

/// An event, and what lives as long as it.
#[derive(Clone)]
struct Kept {
    event: u32,
    _owner: Arc<()>,
}

impl PartialEq for Kept {
    fn eq(&self, other: &Self) -> bool {
        self.event == other.event
    }
}

impl Eq for Kept {}

impl Hash for Kept {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.event.hash(state);
    }
}

struct Waiting;

impl Customer for Waiting {
    type Operation = ();
    type Group = ();
    type Event = Kept;
    type Error = Reason;

    fn ended(&self, (): (), _: Result<(), Reason>) {}

    fn is_reached(&self, _: &Kept) -> Result<bool, Reason> {
        Ok(false)
    }
}

#[test]
fn a_group_that_has_ended_keeps_nothing_of_an_event_that_others_wait_for() {
    let scheduler = Scheduler::new(Waiting, Limits::NONE, &[QueueOptions::default()]);
    scheduler.expect_watcher();
    let owners: Vec<Arc<()>> = (0..3).map(|_| Arc::new(())).collect();
    let submit = |owner: &Arc<()>| {
        let operation = Operation { queue: QueueId(0), charge: Charge::default(), order: 0, content: () };
        let event = Some(Kept { event: 7, _owner: owner.clone() });
        let submission = Submission { event, ..Submission::new((), vec![operation]) };
        scheduler.submit(submission).unwrap_or_else(|refused| panic!("{}", refused.reason))
    };
    let groups: Vec<_> = owners.iter().map(submit).collect();
    for (owner, group) in owners.iter().zip(groups) {
        assert!(Arc::strong_count(owner) > 1);
        scheduler.cancel(Whose::Group(group));
        assert_eq!(Arc::strong_count(owner), 1, "the event of others keeps it");
    }
}
