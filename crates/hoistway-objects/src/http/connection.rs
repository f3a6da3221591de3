//! A connection, plain or encrypted, whose reads can be stopped.

use super::{
    names::{addresses, is_of_this_network},
    proxy::{self, Proxy},
    tls::{self, Roots},
};
use crate::{policy::MeanSpeed, stop::Stop};
use rustls::{ClientConnection, Stream, pki_types::ServerName};
use std::{
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr, TcpStream},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

/// How often a thread that waits looks whether it was stopped.
pub(crate) const TICK: Duration = Duration::from_millis(100);
/// How long a record of TLS, which has up to 16 KiB, or a handshake may take. No body may be slower either.
const RECORD_IN: Duration = Duration::from_secs(20);
/// Longest answer of a proxy to the request for a tunnel.
const MAX_PROXY_HEAD_BYTES: usize = 16 << 10;

/// A server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Origin {
    pub(crate) is_tls: bool,
    pub(crate) host: String,
    pub(crate) port: u16,
}

/// What connections to a server may be.
#[derive(Clone, Debug, Default)]
pub(crate) struct Network {
    pub(crate) roots: Roots,
    /// Whether it lies outside of this machine's network, and an address within is refused: a server there led to it.
    pub(crate) is_outside: bool,
}

/// How long a thread waits, and what ends that.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting<'a> {
    pub(crate) stop: &'a AtomicBool,
    /// Time without a byte.
    pub(crate) patience: Duration,
    /// Whether it needs a new connection.
    pub(crate) is_new: bool,
    /// How fast the bodies of the server come.
    pub(crate) mean_speed: &'a MeanSpeed,
    /// What else ends it.
    pub(crate) end: End<'a>,
}

/// When something that waits ends at the latest.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct End<'a> {
    pub(crate) at: Option<Instant>,
    /// So long after this was set.
    pub(crate) after: Option<(&'a Stop, Duration)>,
}

/// What ends a caller that waits: the wish to stop, or a time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ends<'a> {
    pub(crate) stop: &'a AtomicBool,
    pub(crate) end: End<'a>,
}

impl<'a> From<&'a AtomicBool> for Ends<'a> {
    fn from(stop: &'a AtomicBool) -> Self {
        Self { stop, end: End::default() }
    }
}

impl Ends<'_> {
    /// Whether the caller waits no longer.
    pub(crate) fn are_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed) || self.end.is_over()
    }
}

impl End<'_> {
    fn is_over(&self) -> bool {
        self.at.is_some_and(|at| Instant::now() >= at)
            || self.after.is_some_and(|(stop, time)| stop.was_set_for(time))
    }
}

/// A connection to an origin.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: TcpStream,
    tls: Option<Box<ClientConnection>>,
    /// Whether it has carried an answer.
    pub(crate) is_reused: bool,
}

impl Origin {
    /// Its URL.
    pub(crate) fn url(&self) -> String {
        let Self { is_tls, host, port } = self;
        match (is_tls, port) {
            (true, 443) => format!("https://{host}"),
            (false, 80) => format!("http://{host}"),
            (true, _) => format!("https://{host}:{port}"),
            (false, _) => format!("http://{host}:{port}"),
        }
    }

    /// Whether it is this machine by its name.
    pub(crate) fn is_this_machine(&self) -> bool {
        let host = self.host.trim_start_matches('[').trim_end_matches(']');
        host.eq_ignore_ascii_case("localhost")
            || host.parse::<IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback())
    }
}

impl<'a> Waiting<'a> {
    /// What ends it, whatever it waits for.
    pub(crate) fn ends(&self) -> Ends<'a> {
        Ends { stop: self.stop, end: self.end }
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.ends().are_over()
    }

    /// Repeats what waits a tick at most, until it has a result, the caller stops it, it was patient enough, or bytes came
    /// for as long as `limit` without a result. An attempt sets its argument if bytes came.
    fn repeat<T>(
        &self,
        limit: Duration,
        mut attempt: impl FnMut(&mut bool) -> io::Result<T>,
    ) -> io::Result<T> {
        let (begun, mut waited) = (Instant::now(), Duration::ZERO);
        loop {
            // Each time: of a server that sends a little all the time, no attempt ever waits for a tick.
            if self.is_stopped() {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let mut came = false;
            match attempt(&mut came) {
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    if came && begun.elapsed() >= limit {
                        let reason = format!("no whole TLS record came in {:.1} s", limit.as_secs_f64());
                        return Err(io::Error::new(io::ErrorKind::TimedOut, reason));
                    }
                    waited = if came { Duration::ZERO } else { waited + TICK };
                    if waited >= self.patience {
                        let waited = self.patience.as_secs_f64();
                        return Err(io::Error::new(
                            io::ErrorKind::TimedOut,
                            format!("no byte came in {waited:.1} s"),
                        ));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result,
            }
        }
    }
}

impl Connection {
    /// Connects within `patience`, which the look-up of the name and all addresses of the server share, unless something
    /// ends the caller before.
    pub(crate) fn open<'a>(
        origin: &Origin,
        network: &Network,
        patience: Duration,
        ends: impl Into<Ends<'a>>,
    ) -> io::Result<Self> {
        let ends = ends.into();
        let until = Instant::now() + patience;
        let until = ends.end.at.map_or(until, |at| until.min(at));
        let host = origin.host.trim_start_matches('[').trim_end_matches(']');
        let proxy = proxy::of(origin)?;
        let mut socket = match &proxy {
            None => connect_to(host, origin.port, network.is_outside, until, ends)?,
            Some(proxy) => connect_to(&proxy.host, proxy.port, false, until, ends).map_err(|error| {
                io::Error::new(error.kind(), format!("the proxy {}:{}: {error}", proxy.host, proxy.port))
            })?,
        };
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(TICK))?;
        socket.set_write_timeout(Some(TICK))?;
        if let Some(proxy) = &proxy {
            tunnel(&mut socket, proxy, origin, until, ends)?;
        }
        let tls = match origin.is_tls {
            true => {
                let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
                Some(Box::new(
                    ClientConnection::new(tls::config(&network.roots)?, name).map_err(io::Error::other)?,
                ))
            }
            false => None,
        };
        Ok(Self { socket, tls, is_reused: false })
    }

    /// Whether nothing came since the last answer ended: neither the end of the connection nor bytes of no answer.
    pub(crate) fn is_quiet(&mut self) -> bool {
        if let Some(tls) = &mut self.tls {
            match tls.process_new_packets() {
                Ok(state) if state.plaintext_bytes_to_read() == 0 && !state.peer_has_closed() => {}
                _ => return false,
            }
        }
        let _ = self.socket.set_nonblocking(true);
        let nothing =
            self.socket.peek(&mut [0]).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
        self.socket.set_nonblocking(false).is_ok() && nothing
    }

    /// The address that it leads to.
    pub(crate) fn peer(&self) -> Option<SocketAddr> {
        self.socket.peer_addr().ok()
    }

    /// Reads what has come, or waits for it. Returns 0 at the end.
    pub(crate) fn read(&mut self, target: &mut [u8], waiting: &Waiting<'_>) -> io::Result<usize> {
        waiting.repeat(RECORD_IN, |came| match &mut self.tls {
            None => self.socket.read(target),
            Some(tls) => {
                Stream::new(&mut **tls, &mut ReadOnce { socket: &mut self.socket, came }).read(target)
            }
        })
    }

    /// Reads what has come, or waits a tick for it. Returns `None` if nothing came, and 0 at the end.
    pub(crate) fn read_soon(&mut self, target: &mut [u8]) -> io::Result<Option<usize>> {
        let mut came = false;
        let read = match &mut self.tls {
            None => self.socket.read(target),
            Some(tls) => Stream::new(&mut **tls, &mut ReadOnce { socket: &mut self.socket, came: &mut came })
                .read(target),
        };
        match read {
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
                ) =>
            {
                Ok(None)
            }
            read => read.map(Some),
        }
    }

    pub(crate) fn write_all(&mut self, mut bytes: &[u8], waiting: &Waiting<'_>) -> io::Result<()> {
        while !bytes.is_empty() {
            let count = waiting.repeat(RECORD_IN, |came| match &mut self.tls {
                None => self.socket.write(bytes),
                Some(tls) => {
                    Stream::new(&mut **tls, &mut ReadOnce { socket: &mut self.socket, came }).write(bytes)
                }
            })?;
            if count == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            bytes = &bytes[count..];
        }
        waiting.repeat(RECORD_IN, |came| match &mut self.tls {
            None => Ok(()),
            Some(tls) => Stream::new(&mut **tls, &mut ReadOnce { socket: &mut self.socket, came }).flush(),
        })
    }
}

/// Which of two connections have something to read. Waits a tick for it.
#[cfg(target_os = "linux")]
pub(crate) fn have_input(one: &Connection, other: &Connection) -> [bool; 2] {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let tick = Timespec { tv_sec: 0, tv_nsec: TICK.subsec_nanos().into() };
    let mut sockets = [&one.socket, &other.socket].map(|own| PollFd::new(own, PollFlags::IN));
    // Nothing is ready where it fails, and the caller's patience ends.
    let _ = poll(&mut sockets, Some(&tick));
    sockets.map(|own| !own.revents().is_empty())
}

/// Which of two connections have something to read. Each of them waits a tick for it.
#[cfg(not(target_os = "linux"))]
pub(crate) fn have_input(_: &Connection, _: &Connection) -> [bool; 2] {
    [true; 2]
}

/// A socket that a TLS session reads once. A session reads on as long as bytes come that end no record and no handshake, and
/// the caller could neither stop it nor lose patience.
struct ReadOnce<'a> {
    socket: &'a mut TcpStream,
    came: &'a mut bool,
}

impl Read for ReadOnce<'_> {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        if *self.came {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let count = self.socket.read(target)?;
        *self.came = count > 0;
        Ok(count)
    }
}

impl Write for ReadOnce<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.socket.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.socket.flush()
    }
}

/// Connects to one of the addresses of a name until a time, unless the caller stops it.
fn connect_to(
    host: &str,
    port: u16,
    is_outside: bool,
    until: Instant,
    ends: Ends<'_>,
) -> io::Result<TcpStream> {
    let left = || until.saturating_duration_since(Instant::now());
    let mut addresses = addresses(host, port, left(), ends)?;
    if is_outside && addresses.iter().any(|own| is_of_this_network(own.ip())) {
        let reason = format!("a redirect leads to {host}, a machine of this network");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
    }
    // Connections spread over the addresses of a server.
    fastrand::shuffle(&mut addresses);
    let mut last = io::Error::new(io::ErrorKind::NotFound, "its name has no address");
    let socket = addresses.iter().enumerate().find_map(|(at, address)| {
        let share = left() / u32::try_from(addresses.len() - at).unwrap_or(u32::MAX);
        connect(address, share, ends).map_err(|error| last = error).ok()
    });
    socket.ok_or(last)
}

/// Has a proxy connect to a server.
fn tunnel(
    socket: &mut TcpStream,
    proxy: &Proxy,
    origin: &Origin,
    until: Instant,
    ends: Ends<'_>,
) -> io::Result<()> {
    let name = format!("the proxy {}:{}", proxy.host, proxy.port);
    socket.write_all(proxy.request(origin).as_bytes())?;
    let mut head = Vec::new();
    // A byte at a time: what follows the head is of the server's.
    while !head.ends_with(b"\r\n\r\n") {
        if ends.are_over() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        if Instant::now() >= until || head.len() >= MAX_PROXY_HEAD_BYTES {
            return Err(io::Error::new(io::ErrorKind::TimedOut, format!("{name} did not answer in time")));
        }
        let mut byte = [0];
        match socket.read(&mut byte) {
            Ok(0) => return Err(io::Error::other(format!("{name} closed the connection"))),
            Ok(_) => head.push(byte[0]),
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
                ) => {}
            Err(error) => return Err(error),
        }
    }
    let line = head.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    let status = line.split(' ').nth(1).and_then(|status| status.parse::<u16>().ok());
    match status {
        Some(200..=299) => Ok(()),
        Some(status) => {
            let reason = format!("{name} refused to connect to {}: status {status}", origin.host);
            // Another attempt helps where the proxy could not reach the server.
            let kind = if status >= 500 { io::ErrorKind::Other } else { io::ErrorKind::InvalidInput };
            Err(io::Error::new(kind, reason))
        }
        None => Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{name} speaks no HTTP"))),
    }
}

/// Connects to an address within `patience`, unless something ends the caller before.
#[cfg(target_os = "linux")]
fn connect(address: &SocketAddr, patience: Duration, ends: Ends<'_>) -> io::Result<TcpStream> {
    use rustix::{
        event::{PollFd, PollFlags, Timespec, poll},
        io::Errno,
        net::{AddressFamily, SocketFlags, SocketType, connect, socket_with, sockopt::socket_error},
    };
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    let until = Instant::now() + patience;
    match connect(&socket, address) {
        Ok(()) => {}
        Err(Errno::INPROGRESS | Errno::INTR) => loop {
            if ends.are_over() {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let reason = format!("{address} did not answer within {:.1} s", patience.as_secs_f64());
                return Err(io::Error::new(io::ErrorKind::TimedOut, reason));
            }
            let tick = Timespec { tv_sec: 0, tv_nsec: left.min(TICK).subsec_nanos().into() };
            match poll(&mut [PollFd::new(&socket, PollFlags::OUT)], Some(&tick)) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => {
                    socket_error(&socket)??;
                    break;
                }
                Err(error) => return Err(error.into()),
            }
        },
        Err(error) => return Err(error.into()),
    }
    let socket = TcpStream::from(socket);
    socket.set_nonblocking(false)?;
    Ok(socket)
}

/// Connects to an address within `patience`. The caller cannot stop it before.
#[cfg(not(target_os = "linux"))]
fn connect(address: &SocketAddr, patience: Duration, _: Ends<'_>) -> io::Result<TcpStream> {
    TcpStream::connect_timeout(address, patience.max(Duration::from_millis(1)))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketType, bind, getsockname, listen, socket};
    use rustls::{ClientConfig, RootCertStore};
    use std::sync::Arc;
    use std::{
        net::{Ipv4Addr, TcpListener},
        thread,
    };

    #[test]
    fn a_server_that_takes_no_connection_is_waited_for_as_long_as_the_caller_says() {
        let listener = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        bind(&listener, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        listen(&listener, 1).unwrap();
        let address = SocketAddr::try_from(getsockname(&listener).unwrap()).unwrap();
        // The system accepts what the server's queue has room for, and then leaves connections without an answer.
        let short = Duration::from_millis(200);
        let fill = || TcpStream::connect_timeout(&address, Duration::from_secs(2)).ok();
        let taken: Vec<_> = (0..16).map_while(|_| fill()).collect();
        assert!(taken.len() < 16, "the queue has no end");
        let origin = Origin { is_tls: false, host: "127.0.0.1".into(), port: address.port() };
        let stop = AtomicBool::new(false);
        let error = Connection::open(&origin, &Network::default(), short, &stop).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        thread::scope(|scope| {
            let opening = scope
                .spawn(|| Connection::open(&origin, &Network::default(), Duration::from_secs(600), &stop));
            thread::sleep(short);
            stop.store(true, Ordering::Relaxed);
            let begun = Instant::now();
            let error = opening.join().unwrap().unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::Interrupted, "{error}");
            assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
        });
        // What cannot be stopped has its own end.
        let (never, stop, begun) = (AtomicBool::new(false), Stop::default(), Instant::now());
        stop.set();
        for end in
            [End { at: Some(begun + short), after: None }, End { at: None, after: Some((&stop, short)) }]
        {
            let ends = Ends { stop: &never, end };
            Connection::open(&origin, &Network::default(), Duration::from_secs(600), ends).unwrap_err();
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    }

    #[test]
    fn a_name_that_leads_into_this_network_is_refused_where_it_must_lie_outside() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let origin = Origin { is_tls: false, host: "localhost".into(), port };
        let network = Network { is_outside: true, ..Network::default() };
        let long = Duration::from_secs(60);
        let error = Connection::open(&origin, &network, long, &AtomicBool::new(false)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
    }

    #[test]
    fn a_record_that_trickles_ends_when_the_caller_stops_it() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = thread::spawn(move || {
            let mut socket = listener.accept().unwrap().0;
            // The head of a long record of a handshake, and then a byte at a time.
            let _ = socket.write_all(&[22, 3, 3, 0x3f, 0xff, 2, 0, 0x3f, 0xfb]);
            while socket.write_all(&[0]).is_ok() {
                thread::sleep(Duration::from_millis(10));
            }
        });
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.unwrap().with_root_certificates(RootCertStore::empty()).with_no_client_auth();
        let tls =
            ClientConnection::new(Arc::new(config), ServerName::try_from("localhost").unwrap()).unwrap();
        let socket = TcpStream::connect(address).unwrap();
        socket.set_read_timeout(Some(TICK)).unwrap();
        let mut connection = Connection { socket, tls: Some(Box::new(tls)), is_reused: false };
        let (stop, mean_speed) = (AtomicBool::new(false), MeanSpeed::default());
        thread::scope(|scope| {
            let waiting = Waiting {
                stop: &stop,
                patience: Duration::from_secs(30),
                is_new: false,
                mean_speed: &mean_speed,
                end: End::default(),
            };
            let sending = scope.spawn(move || {
                // What is written waits for the end of the handshake.
                let written = connection.write_all(b"GET", &waiting);
                let result = written.and_then(|()| connection.read(&mut [0], &waiting));
                drop(connection);
                result
            });
            thread::sleep(Duration::from_millis(300));
            stop.store(true, Ordering::Relaxed);
            let begun = Instant::now();
            let error = sending.join().unwrap().unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::Interrupted, "{error}");
            assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
        });
        server.join().unwrap();
    }

    #[test]
    fn bytes_that_come_without_a_result_have_a_limit() {
        let (stop, begun) = (AtomicBool::new(false), Instant::now());
        let mean_speed = MeanSpeed::default();
        let waiting = Waiting {
            stop: &stop,
            patience: Duration::from_secs(30),
            is_new: false,
            mean_speed: &mean_speed,
            end: End::default(),
        };
        let trickle = |came: &mut bool| {
            thread::sleep(Duration::from_millis(10));
            *came = true;
            Err(io::ErrorKind::WouldBlock.into())
        };
        let error = waiting.repeat::<()>(Duration::from_millis(200), trickle).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        assert!(begun.elapsed() < Duration::from_secs(60));
    }
}
