//! A connection, plain or encrypted, whose reads can be stopped.

use rustls::{ClientConfig, ClientConnection, RootCertStore, Stream, pki_types::ServerName};
use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream, ToSocketAddrs},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// How often a thread that waits looks whether it was stopped.
pub(crate) const TICK: Duration = Duration::from_millis(100);
/// How long a record of TLS, which has up to 16 KiB, or a handshake may take. No body may be slower either.
const RECORD_IN: Duration = Duration::from_secs(20);

/// A server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Origin {
    pub(crate) is_tls: bool,
    pub(crate) host: String,
    pub(crate) port: u16,
}

/// How long a thread waits, and what ends that.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting<'a> {
    pub(crate) stop: &'a AtomicBool,
    /// Time without a byte.
    pub(crate) patience: Duration,
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
}

impl Waiting<'_> {
    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
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
    /// Connects within `patience`, which all addresses of the server share, unless the caller stops it. Names are looked up
    /// by the system, which has its own patience.
    pub(crate) fn open(origin: &Origin, patience: Duration, stop: &AtomicBool) -> io::Result<Self> {
        let host = origin.host.trim_start_matches('[').trim_end_matches(']');
        let mut addresses: Vec<SocketAddr> = (host, origin.port).to_socket_addrs()?.collect();
        // Connections spread over the addresses of a server.
        fastrand::shuffle(&mut addresses);
        let mut last = io::Error::new(io::ErrorKind::NotFound, "its name has no address");
        let until = Instant::now() + patience;
        let socket = addresses.iter().enumerate().find_map(|(at, address)| {
            let left = u32::try_from(addresses.len() - at).unwrap_or(u32::MAX);
            let share = until.saturating_duration_since(Instant::now()) / left;
            connect(address, share, stop).map_err(|error| last = error).ok()
        });
        let socket = socket.ok_or(last)?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(TICK))?;
        socket.set_write_timeout(Some(TICK))?;
        let tls = match origin.is_tls {
            true => {
                let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
                Some(Box::new(ClientConnection::new(tls_config()?, name).map_err(io::Error::other)?))
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

    /// Reads what has come, or waits for it. Returns 0 at the end.
    pub(crate) fn read(&mut self, target: &mut [u8], waiting: &Waiting<'_>) -> io::Result<usize> {
        waiting.repeat(RECORD_IN, |came| match &mut self.tls {
            None => self.socket.read(target),
            Some(tls) => {
                Stream::new(&mut **tls, &mut ReadOnce { socket: &mut self.socket, came }).read(target)
            }
        })
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

/// Connects to an address within `patience`, unless the caller stops it.
#[cfg(target_os = "linux")]
fn connect(address: &SocketAddr, patience: Duration, stop: &AtomicBool) -> io::Result<TcpStream> {
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
            if stop.load(Ordering::Relaxed) {
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
fn connect(address: &SocketAddr, patience: Duration, _: &AtomicBool) -> io::Result<TcpStream> {
    TcpStream::connect_timeout(address, patience.max(Duration::from_millis(1)))
}

/// The trusted roots of this machine: those of `SSL_CERT_FILE`, if that is set.
fn tls_config() -> io::Result<Arc<ClientConfig>> {
    static CONFIG: OnceLock<Arc<ClientConfig>> = OnceLock::new();
    if let Some(config) = CONFIG.get() {
        return Ok(config.clone());
    }
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if roots.is_empty() {
        let reason =
            "this machine has no trusted root certificates; install ca-certificates, or set SSL_CERT_FILE";
        return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(CONFIG.get_or_init(|| Arc::new(config)).clone())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketType, bind, getsockname, listen, socket};
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
        let error = Connection::open(&origin, short, &stop).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        thread::scope(|scope| {
            let opening = scope.spawn(|| Connection::open(&origin, Duration::from_secs(600), &stop));
            thread::sleep(short);
            stop.store(true, Ordering::Relaxed);
            let begun = Instant::now();
            let error = opening.join().unwrap().unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::Interrupted, "{error}");
            assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
        });
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
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let waiting = Waiting { stop: &stop, patience: Duration::from_secs(30) };
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
        let waiting = Waiting { stop: &stop, patience: Duration::from_secs(30) };
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
