//! Connections that wait for their next request, and the thread that closes those that wait too long.

use super::Connection;
use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    thread,
    time::{Duration, Instant},
};

/// Stack of the thread that closes connections.
const STACK_BYTES: usize = 128 << 10;

/// Connections of one server. They close after a time without use, also if no request follows.
#[derive(Debug)]
pub(crate) struct IdlePool(Arc<Pool>);

#[derive(Debug)]
struct Pool {
    keep_for: Duration,
    most: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    connections: Vec<(Connection, Instant)>,
    /// Whether a thread closes them in time.
    is_watched: bool,
}

impl IdlePool {
    /// A pool that keeps up to `most` connections, each for as long as `keep_for`.
    pub(crate) fn new(most: usize, keep_for: Duration) -> Self {
        Self(Arc::new(Pool { keep_for, most, state: Mutex::default() }))
    }

    /// Takes the connection that was used last. One that the server closed, or on which bytes came that belong to no
    /// answer, is closed instead.
    pub(crate) fn take(&self) -> Option<Connection> {
        loop {
            let (mut connection, since) = self.0.lock().connections.pop()?;
            if since.elapsed() < self.0.keep_for && connection.is_quiet() {
                return Some(connection);
            }
        }
    }

    /// Closes the connections that were kept before a time: one of them was dead.
    pub(crate) fn forget(&self, before: Instant) {
        self.0.lock().connections.retain(|(_, since)| *since >= before);
    }

    /// Keeps a connection for the next request. Closes it if no thread can be had that would close it in time.
    pub(crate) fn keep(&self, connection: Connection) {
        let mut state = self.0.lock();
        if state.connections.len() >= self.0.most {
            return;
        }
        if !state.is_watched {
            let pool = Arc::downgrade(&self.0);
            let thread = thread::Builder::new().name("hoistway-idle".into()).stack_size(STACK_BYTES);
            state.is_watched = thread.spawn(move || watch(&pool)).is_ok();
        }
        if state.is_watched {
            state.connections.push((connection, Instant::now()));
        }
    }
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Closes connections in time, until none is kept for as long as one may be. A connection that carries a request comes back:
/// a thread that ended as soon as it found none would have to be started again for each request.
fn watch(pool: &Weak<Pool>) {
    let mut was_empty = false;
    while let Some(own) = pool.upgrade() {
        let mut state = own.lock();
        state.connections.retain(|(_, since)| since.elapsed() < own.keep_for);
        let oldest = state.connections.iter().map(|(_, since)| *since).min();
        if was_empty && oldest.is_none() {
            state.is_watched = false;
            return;
        }
        was_empty = oldest.is_none();
        let until = oldest.unwrap_or_else(Instant::now) + own.keep_for;
        drop(state);
        drop(own);
        thread::sleep(until.saturating_duration_since(Instant::now()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::{Network, Origin};
    use std::{
        io::{Read, Write},
        net::{TcpListener, TcpStream},
        sync::atomic::AtomicBool,
    };

    fn connected() -> (Connection, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let origin =
            Origin { is_tls: false, host: "127.0.0.1".into(), port: listener.local_addr().unwrap().port() };
        let connection =
            Connection::open(&origin, &Network::default(), LONG, &AtomicBool::new(false)).unwrap();
        (connection, listener.accept().unwrap().0)
    }

    /// Longer than anything here takes.
    const LONG: Duration = Duration::from_secs(60);

    fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
        let until = Instant::now() + LONG;
        while !is_so() {
            assert!(Instant::now() < until, "{what}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn connections_close_in_time_without_another_request() {
        let keep_for = Duration::from_millis(200);
        let pool = IdlePool::new(2, keep_for);
        for _ in 0..2 {
            let (connection, mut server) = connected();
            let kept = Instant::now();
            pool.keep(connection);
            server.set_read_timeout(Some(LONG)).unwrap();
            assert_eq!(server.read(&mut [0]).unwrap(), 0, "the connection is still open");
            assert!(kept.elapsed() >= keep_for, "no thread would have closed it in time");
        }
    }

    /// Where the system gives no more threads, a connection that comes back is kept all the same.
    #[test]
    fn the_thread_stays_while_connections_carry_requests() {
        let pool = IdlePool::new(2, Duration::from_secs(60));
        let (connection, _server) = connected();
        pool.keep(connection);
        let _carries_a_request = pool.take().unwrap();
        thread::sleep(Duration::from_millis(50));
        assert!(pool.0.lock().is_watched);
    }

    #[test]
    fn the_thread_ends_when_no_connection_comes_back() {
        let pool = IdlePool::new(2, Duration::from_millis(100));
        let (connection, _server) = connected();
        pool.keep(connection);
        wait_until("the thread stays", || !pool.0.lock().is_watched);
    }

    #[test]
    fn only_quiet_connections_are_used_again() {
        let pool = IdlePool::new(2, Duration::from_secs(60));
        let (quiet, _server) = connected();
        let (mut closed, server) = connected();
        drop(server);
        wait_until("the end does not arrive", || !closed.is_quiet());
        pool.keep(quiet);
        pool.keep(closed);
        pool.keep(connected().0);
        assert_eq!(pool.0.lock().connections.len(), 2, "no more than the pool may have");
        let (mut talked_to, mut server) = connected();
        assert!(pool.take().is_some() && pool.take().is_none());
        server.write_all(b"HTTP/1.1 200 OK\r\n\r\n").unwrap();
        wait_until("the answer does not arrive", || !talked_to.is_quiet());
        pool.keep(talked_to);
        assert!(pool.take().is_none(), "an answer to no request would be the answer to the next");
    }
}
