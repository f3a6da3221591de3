//! A daemon that dies, comes back, forgets or hangs is an error of that name, in time.

use crate::fixture::{Fixture, PATIENCE, Session, clients, eventually, fails_within};
use hoistway_usrbio::{Client, Error, IovOptions, Mount, RingOptions};
use std::{
    fs::File,
    path::Path,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};
use usrbiod::Faults;

const STALL: Faults = Faults {
    stall: true,
    delay: Duration::ZERO,
    bytes_per_second: 0,
    slow_every: 0,
    error_every: 0,
    errno: 0,
    short_every: 0,
    holes: false,
    mute: false,
    reorder: false,
    serial: false,
    corrupt: false,
    version_ahead: 0,
};

/// Far longer than it takes to find out, and no longer than reads may take by default.
const SOON: Duration = PATIENCE;

/// One read is under way, and does not end.
fn reading(fixture: &Fixture, client: Client, options: &RingOptions) -> Session {
    let path = fixture.write("file", 100_000);
    let mut session = Session::with(fixture.mount(client), 1, 4096, options);
    let file = session.mount.open_file(&path).unwrap();
    fixture.daemon.behave(STALL).unwrap();
    session.push(&file, 0, 4096).unwrap();
    session.ring.submit().unwrap();
    session
}

#[test]
fn a_daemon_that_is_killed_is_dead_soon() {
    for client in clients() {
        let Some(mut fixture) = Fixture::start() else { return };
        let mut session = reading(&fixture, client, &RingOptions::default());
        fixture.daemon.kill().unwrap();
        let error = fails_within(SOON, || session.drain());
        assert!(matches!(error, Error::DaemonDead { .. }), "{error}");
        // So says everything from now on, and nothing hangs.
        let again = fails_within(SOON, || session.ring.submit());
        assert!(matches!(again, Error::DaemonDead { .. }), "{again}");
        assert!(matches!(session.mount.check(), Err(Error::DaemonDead { .. })));
        let options = IovOptions::default().len(4096);
        let error = fails_within(SOON, || session.mount.create_iov(&options));
        assert!(matches!(error, Error::DaemonDead { .. }), "{error}");
        let error = fails_within(SOON, || session.mount.open_file(&fixture.path("other")));
        assert!(matches!(error, Error::DaemonDead { .. }), "{error}");
        let error = fails_within(SOON, || Mount::open(&fixture.path("file"), Client::Native));
        assert!(matches!(error, Error::DaemonDead { .. }), "{error}");
    }
}

#[test]
fn a_mount_that_is_opened_anew_after_a_death_works() {
    for client in clients() {
        let Some(mut fixture) = Fixture::start() else { return };
        let mut session = reading(&fixture, client.clone(), &RingOptions::default());
        fixture.daemon.kill().unwrap();
        assert!(session.drain().is_err());
        fixture.start_again();
        let error = session.mount.check().unwrap_err();
        assert!(matches!(error, Error::DaemonRestarted { .. }), "{error}");
        let mut fresh = Session::new(fixture.mount(client), 2, 4096);
        fresh.compare(&fixture.path("file"), &fixture.behind("file"), (0..20).map(|n| (n * 4001, 4000)));
    }
}

#[test]
fn a_daemon_that_was_restarted_no_longer_knows_the_ring() {
    let Some(fixture) = Fixture::start() else { return };
    for client in clients() {
        let mut session = reading(&fixture, client.clone(), &RingOptions::default());
        fixture.daemon.restart().unwrap();
        let error = fails_within(SOON, || session.drain());
        assert!(matches!(error, Error::DaemonRestarted { .. }), "{error}");
        let error = session.mount.create_ring(&RingOptions::default()).unwrap_err();
        assert!(matches!(error, Error::DaemonRestarted { .. }), "{error}");
        fixture.daemon.behave(Faults::default()).unwrap();
        let mut fresh = Session::new(fixture.mount(client), 2, 4096);
        fresh.compare(&fixture.path("file"), &fixture.behind("file"), (0..20).map(|n| (n * 4001, 4000)));
    }
}

#[test]
fn a_daemon_that_hangs_altogether_is_given_up_in_time() {
    let Some(fixture) = Fixture::start() else { return };
    for client in clients() {
        let limit = Duration::from_millis(500);
        let options = RingOptions::default().stall_limit(limit);
        let mut session = reading(&fixture, client, &options);
        fixture.daemon.pause().unwrap();
        let error = fails_within(SOON, || session.drain());
        fixture.daemon.resume().unwrap();
        assert!(matches!(error, Error::Timeout { limit: named, .. } if named == limit), "{error}");
    }
}

/// Whether this process has a file open.
fn is_open(path: &Path) -> bool {
    let handles = std::fs::read_dir("/proc/self/fd").unwrap();
    handles.flatten().any(|handle| std::fs::read_link(handle.path()).is_ok_and(|target| target == path))
}

#[test]
fn closing_a_file_does_not_wait_for_a_daemon_that_hangs() {
    let Some(fixture) = Fixture::start() else { return };
    let path = fixture.write("file", 100_000);
    for client in clients() {
        let mount = fixture.mount(client);
        let file = mount.open_file(&path).unwrap();
        fixture.daemon.pause().unwrap();
        let (dropped, hears) = mpsc::channel();
        thread::spawn(move || {
            drop(file);
            dropped.send(())
        });
        let outcome = hears.recv_timeout(PATIENCE);
        fixture.daemon.resume().unwrap();
        outcome.expect("dropping a file waits for the daemon");
        mount.settle().unwrap();
        assert!(!is_open(&path));
    }
}

#[test]
fn a_question_that_gets_no_answer_is_given_up() {
    let Some(fixture) = Fixture::start() else { return };
    let path = fixture.write("file", 100_000);
    let mount = fixture.mount(Client::Native);
    let file = Arc::new(File::open(&path).unwrap());
    let ask = || {
        let asked = file.clone();
        mount.ask("asking about it", move || asked.metadata().map(drop))
    };
    ask().unwrap().unwrap();
    fixture.daemon.behave(Faults { mute: true, ..Faults::default() }).unwrap();
    // The kernel answers by itself at first, having asked just now.
    let error = fails_within::<()>(PATIENCE, || {
        loop {
            let _ = ask()?;
        }
    });
    fixture.daemon.behave(Faults::default()).unwrap();
    assert!(matches!(&error, Error::Timeout { what, .. } if what == "asking about it"), "{error}");
}

#[test]
fn a_wait_ends_when_its_caller_says_so() {
    let Some(fixture) = Fixture::start() else { return };
    for client in clients() {
        let mut session = reading(&fixture, client, &RingOptions::default());
        let mut completions = Vec::new();
        assert_eq!(session.ring.wait(Duration::ZERO, &mut completions).unwrap(), 0);
        assert_eq!(session.ring.wait(Duration::from_millis(400), &mut completions).unwrap(), 0);
        assert_eq!(session.ring.in_flight(), 1);
        fixture.daemon.behave(Faults::default()).unwrap();
        assert_eq!(session.ring.wait(PATIENCE, &mut completions).unwrap(), 1);
    }
}

#[test]
fn registrations_can_be_listed_from_another_thread() {
    let Some(fixture) = Fixture::start() else { return };
    let path = fixture.write("file", 100_000);
    for client in clients() {
        let mut session = Session::new(fixture.mount(client), 4, 4096);
        let names = std::fs::read_dir(fixture.path("3fs-virt/iovs")).unwrap().count();
        assert!(names > 3, "{names}");
        session.compare(&path, &fixture.behind("file"), (0..20).map(|n| (n * 4001, 4000)));
        assert!(session.mount.check().is_ok());
    }
}

#[test]
fn a_buffer_that_was_removed_is_missed() {
    let Some(fixture) = Fixture::start() else { return };
    for client in clients() {
        let mut session = reading(&fixture, client, &RingOptions::default());
        for key in fixture.daemon.registrations().unwrap() {
            std::fs::remove_file(fixture.path("3fs-virt/iovs").join(key)).unwrap();
        }
        let error = fails_within(SOON, || session.drain());
        assert!(matches!(error, Error::IovRemoved { .. }), "{error}");
        fixture.daemon.behave(Faults::default()).unwrap();
    }
}

#[test]
fn what_is_dropped_is_deregistered() {
    let Some(fixture) = Fixture::start() else { return };
    let path = fixture.write("file", 100_000);
    for client in clients() {
        let mut session = Session::new(fixture.mount(client), 4, 4096);
        session.compare(&path, &fixture.behind("file"), (0..20).map(|n| (n * 4001, 4000)));
        assert_eq!(fixture.daemon.registrations().unwrap().len(), 2);
        let Session { mount, ring, slots } = session;
        drop(ring);
        drop(slots);
        mount.settle().unwrap();
        assert_eq!(fixture.daemon.registrations().unwrap(), Vec::<String>::new());
    }
}

#[test]
fn a_ring_that_is_dropped_with_reads_in_flight_waits_for_them_but_not_for_ever() {
    let Some(fixture) = Fixture::start() else { return };
    for client in clients() {
        let options = RingOptions::default().farewell(Duration::from_millis(100));
        let session = reading(&fixture, client, &options);
        let mount = session.mount.clone();
        drop(session);
        fixture.daemon.behave(Faults::default()).unwrap();
        // The read carries on in memory that nothing else has, and the daemon loses it afterwards.
        eventually("the deregistration", || {
            mount.settle().unwrap();
            fixture.daemon.registrations().unwrap().is_empty()
        });
    }
}
