//! Addresses of servers. The system's look-up has a patience of its own, which no flag ends: so another thread waits for it.

use super::TICK;
use crate::per_process::PerProcess;
use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr, ToSocketAddrs},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{RecvTimeoutError, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

/// How long addresses are kept: the connections that a load begins with ask once.
const KEPT_FOR: Duration = Duration::from_secs(5);
/// Servers whose addresses are kept.
const MOST: usize = 64;

type Known = Mutex<HashMap<(String, u16), (Instant, Vec<SocketAddr>)>>;

/// The addresses of a server. Ends soon after `stop` is set, and after `patience`.
pub(crate) fn addresses(
    host: &str,
    port: u16,
    patience: Duration,
    stop: &AtomicBool,
) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    static KNOWN: PerProcess<Known> = PerProcess::new();
    let known = KNOWN.get(Mutex::default);
    let key = (host.to_owned(), port);
    let kept = {
        let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, (since, _)| since.elapsed() < KEPT_FOR);
        known.get(&key).map(|(_, addresses)| addresses.clone())
    };
    if let Some(addresses) = kept {
        return Ok(addresses);
    }
    let found = within(patience, stop, {
        let key = key.clone();
        move || (&*key.0, key.1).to_socket_addrs().map(Vec::from_iter)
    })?;
    let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
    if known.len() < MOST {
        known.insert(key, (Instant::now(), found.clone()));
    }
    Ok(found)
}

/// Whether an address is that of this machine or of one beside it, which no server elsewhere has a reason to lead to.
pub(crate) fn is_of_this_network(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(own) => {
            let [first, second, ..] = own.octets();
            // 100.64.0.0/10 is shared within networks of providers and clouds.
            let is_shared = first == 100 && (64..128).contains(&second);
            own.is_loopback() || own.is_private() || own.is_link_local() || first == 0 || is_shared
        }
        IpAddr::V6(own) => match own.segments() {
            // NAT64: the last two have an address of version 4.
            [0x64, 0xff9b, 0, 0, 0, 0, high, low] => {
                let bits = u32::from(high) << 16 | u32::from(low);
                is_of_this_network(IpAddr::V4(bits.into()))
            }
            _ => {
                own.is_loopback()
                    || own.is_unique_local()
                    || own.is_unicast_link_local()
                    || own.is_unspecified()
            }
        },
    }
}

/// What `look_up` returns, which a thread of its own waits for. The thread ends when it has returned.
fn within<T: Send + 'static>(
    patience: Duration,
    stop: &AtomicBool,
    look_up: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let (answer, answered) = sync_channel(1);
    let thread = thread::Builder::new().name("hoistway-names".into());
    // The caller may have gone.
    thread.spawn(move || drop(answer.send(look_up())))?;
    let until = Instant::now() + patience;
    loop {
        match answered.recv_timeout(TICK) {
            Ok(found) => return found,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(io::Error::other("the look-up of its name ended without an answer"));
            }
            Err(RecvTimeoutError::Timeout) if stop.load(Ordering::Relaxed) => {
                return Err(io::ErrorKind::Interrupted.into());
            }
            Err(RecvTimeoutError::Timeout) if Instant::now() >= until => {
                let reason = format!("its name was not found within {:.1} s", patience.as_secs_f64());
                return Err(io::Error::new(io::ErrorKind::TimedOut, reason));
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn a_look_up_that_hangs_holds_up_no_caller_that_stops_or_has_waited_enough() {
        let (release, released) = channel::<()>();
        let hang = move || released.recv().map_err(io::Error::other);
        let stop = AtomicBool::new(false);
        let short = Duration::from_millis(1);
        assert_eq!(within(short, &stop, hang).unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(release);
        let (_release, released) = channel::<()>();
        let hang = move || released.recv().map_err(io::Error::other);
        stop.store(true, Ordering::Relaxed);
        let error = within(Duration::from_secs(3600), &stop, hang).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Interrupted);
    }

    #[test]
    fn names_and_addresses_are_found() {
        let stop = AtomicBool::new(false);
        let find = |host| addresses(host, 5, Duration::from_secs(60), &stop).unwrap();
        assert_eq!(find("127.0.0.1"), ["127.0.0.1:5".parse().unwrap()]);
        assert_eq!(find("::1"), ["[::1]:5".parse().unwrap()]);
        assert!(!find("localhost").is_empty());
        assert_eq!(find("localhost"), find("localhost"));
    }
}
