//! Rings that write.

use crate::fixture::{Fixture, Session, clients, pattern};
use hoistway_usrbio::{Direction, Error, Refused, RingOptions};

#[test]
fn what_is_written_is_in_the_file() {
    let Some(fixture) = Fixture::start() else { return };
    for client in clients() {
        let path = fixture.write("file", 100);
        let options = RingOptions::default().depth(4).direction(Direction::Write);
        let mut session = Session::with(fixture.mount(client), 4, 10_000, &options);
        let file = session.mount.open_file_for_writing(&path).unwrap();
        for n in 0..4 {
            let slot = session.slots.last_mut().unwrap();
            slot.copy_from(0, &pattern(n * 9_999, 9_999)).unwrap();
            session.push(&file, n * 9_999, 9_999).unwrap();
        }
        for completion in session.drain().unwrap() {
            assert_eq!(completion.result.unwrap(), 9_999);
        }
        assert!(std::fs::read(fixture.behind("file")).unwrap() == pattern(0, 4 * 9_999));
    }
}

#[test]
fn a_file_that_is_open_for_reading_is_not_written() {
    let Some(fixture) = Fixture::start() else { return };
    let path = fixture.write("file", 100);
    for client in clients() {
        let options = RingOptions::default().depth(1).direction(Direction::Write);
        let mut session = Session::with(fixture.mount(client), 1, 100, &options);
        let file = session.mount.open_file(&path).unwrap();
        let Err(Refused::Failed(_, Error::Invalid(reason))) = session.push(&file, 0, 100) else {
            panic!("it was taken");
        };
        assert!(reason.contains("not opened for writing"), "{reason}");
    }
}
