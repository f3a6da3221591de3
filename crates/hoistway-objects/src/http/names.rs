//! Addresses of servers. The system's look-up has a patience of its own, which no flag ends: so another thread waits for it,
//! one for all connections that a load begins with.

use super::{Ends, TICK};
use crate::per_process::PerProcess;
use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr, ToSocketAddrs},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// How long addresses are kept once they were found.
const KEPT_FOR: Duration = Duration::from_secs(5);
/// Servers whose addresses are kept.
const MOST: usize = 64;

/// A server, by its name and port.
type Server = (String, u16);

/// The addresses of a server. Ends soon after the caller does, and after `patience`.
pub(crate) fn addresses<'a>(
    host: &str,
    port: u16,
    patience: Duration,
    ends: impl Into<Ends<'a>>,
) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    static NAMES: PerProcess<Names> = PerProcess::new();
    let look_up = |(host, port): &Server| (&**host, *port).to_socket_addrs().map(Vec::from_iter);
    NAMES.get(Names::default).find((host.to_owned(), port), patience, ends, look_up)
}

/// The look-ups of a process that are under way, or ended well a moment ago.
#[derive(Debug, Default)]
struct Names(Mutex<HashMap<Server, Arc<LookUp>>>);

/// A look-up, which a thread of its own waits for.
#[derive(Debug)]
struct LookUp {
    found: Mutex<Option<Found>>,
    ended: Condvar,
}

/// The addresses and when they were found, or the error's kind and text.
type Found = Result<(Vec<SocketAddr>, Instant), (io::ErrorKind, String)>;

impl Names {
    /// What `look_up` finds, for all callers that ask for the server at about the same time.
    fn find<'a>(
        &self,
        server: Server,
        patience: Duration,
        ends: impl Into<Ends<'a>>,
        look_up: impl FnOnce(&Server) -> io::Result<Vec<SocketAddr>> + Send + 'static,
    ) -> io::Result<Vec<SocketAddr>> {
        let mut known = lock(&self.0);
        known.retain(|_, own| own.is_usable());
        let own = match known.get(&server) {
            Some(own) => own.clone(),
            None => {
                let own = LookUp::start(server.clone(), look_up)?;
                if known.len() < MOST {
                    known.insert(server, own.clone());
                }
                own
            }
        };
        drop(known);
        own.wait(patience, ends.into())
    }
}

impl LookUp {
    fn start(
        server: Server,
        look_up: impl FnOnce(&Server) -> io::Result<Vec<SocketAddr>> + Send + 'static,
    ) -> io::Result<Arc<Self>> {
        let own = Arc::new(Self { found: Mutex::default(), ended: Condvar::new() });
        let told = own.clone();
        // The callers may have gone when it ends.
        thread::Builder::new().name("hoistway-names".into()).spawn(move || {
            let found = look_up(&server).map_err(|error| (error.kind(), error.to_string()));
            *lock(&told.found) = Some(found.map(|addresses| (addresses, Instant::now())));
            told.ended.notify_all();
        })?;
        Ok(own)
    }

    /// Whether it is under way, or has found addresses a moment ago. One that failed is made anew.
    fn is_usable(&self) -> bool {
        match &*lock(&self.found) {
            None => true,
            Some(Ok((_, at))) => at.elapsed() < KEPT_FOR,
            Some(Err(_)) => false,
        }
    }

    fn wait(&self, patience: Duration, ends: Ends<'_>) -> io::Result<Vec<SocketAddr>> {
        let until = Instant::now() + patience;
        let mut found = lock(&self.found);
        loop {
            match &*found {
                Some(Ok((addresses, _))) => return Ok(addresses.clone()),
                Some(Err((kind, error))) => return Err(io::Error::new(*kind, error.clone())),
                None if ends.are_over() => return Err(io::ErrorKind::Interrupted.into()),
                None if Instant::now() >= until => {
                    let reason = format!("its name was not found within {:.1} s", patience.as_secs_f64());
                    return Err(io::Error::new(io::ErrorKind::TimedOut, reason));
                }
                None => {
                    found = self.ended.wait_timeout(found, TICK).unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{
        atomic::{AtomicBool, Ordering},
        mpsc::{Sender, channel},
    };

    fn server() -> Server {
        ("store.test".to_owned(), 5)
    }

    /// A look-up that ends as the result is dropped.
    fn hanging() -> (Sender<()>, impl FnOnce(&Server) -> io::Result<Vec<SocketAddr>> + Send + 'static) {
        let (release, released) = channel();
        (release, move |_: &Server| released.recv().map(|()| Vec::new()).map_err(io::Error::other))
    }

    fn not_asked(_: &Server) -> io::Result<Vec<SocketAddr>> {
        panic!("another look-up is under way");
    }

    #[test]
    fn a_look_up_that_hangs_holds_up_no_caller_that_stops_or_has_waited_enough() {
        let (names, stop, (_release, hang)) = (Names::default(), AtomicBool::new(false), hanging());
        let error = names.find(server(), Duration::from_millis(1), &stop, hang).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        stop.store(true, Ordering::Relaxed);
        let (names, (_release, hang)) = (Names::default(), hanging());
        let error = names.find(server(), Duration::from_secs(3600), &stop, hang).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Interrupted);
    }

    #[test]
    fn callers_share_a_look_up_that_is_under_way_and_not_its_failure() {
        let (names, stop) = (Names::default(), AtomicBool::new(false));
        let own = Arc::new(LookUp { found: Mutex::default(), ended: Condvar::new() });
        lock(&names.0).insert(server(), own.clone());
        let find = || names.find(server(), Duration::from_secs(60), &stop, not_asked);
        let errors = thread::scope(|scope| {
            let callers: Vec<_> = (0..8).map(|_| scope.spawn(find)).collect();
            // This test and the map have it too.
            while Arc::strong_count(&own) < 2 + 8 {
                thread::yield_now();
            }
            *lock(&own.found) = Some(Err((io::ErrorKind::Other, "no such name".into())));
            own.ended.notify_all();
            callers.into_iter().map(|caller| caller.join().unwrap().is_err()).collect::<Vec<_>>()
        });
        assert_eq!(errors, [true; 8]);
        let found = names.find(server(), Duration::from_secs(60), &stop, |_| Ok(Vec::new()));
        assert_eq!(found.unwrap(), []);
    }

    #[test]
    fn addresses_are_kept_for_a_while_from_when_they_were_found() {
        let (names, stop) = (Names::default(), AtomicBool::new(false));
        let address: SocketAddr = "127.0.0.1:5".parse().unwrap();
        let found_before = |age: Duration| {
            let at = Instant::now().checked_sub(age)?;
            let own = LookUp { found: Mutex::new(Some(Ok((vec![address], at)))), ended: Condvar::new() };
            lock(&names.0).insert(server(), Arc::new(own));
            Some(names.find(server(), Duration::from_secs(60), &stop, |_| Ok(Vec::new())).unwrap())
        };
        // The clock of a machine may not reach back that far.
        assert!(found_before(2 * KEPT_FOR).is_none_or(|found| found.is_empty()));
        let at = Instant::now() + Duration::from_secs(3600);
        let own = LookUp { found: Mutex::new(Some(Ok((vec![address], at)))), ended: Condvar::new() };
        lock(&names.0).insert(server(), Arc::new(own));
        assert_eq!(names.find(server(), Duration::from_secs(60), &stop, not_asked).unwrap(), [address]);
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
