//! A connection, plain or encrypted, whose reads can be stopped.

use rustls::{ClientConfig, ClientConnection, RootCertStore, Stream, pki_types::ServerName};
use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream, ToSocketAddrs},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

/// How often a thread that waits looks whether it was stopped.
pub(crate) const TICK: Duration = Duration::from_millis(100);
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

    /// Repeats what waits a tick at most, until it has a result, the caller stops it, or it was patient enough.
    fn repeat<T>(&self, mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
        let mut waited = Duration::ZERO;
        loop {
            match attempt() {
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    waited += TICK;
                    if self.is_stopped() {
                        return Err(io::ErrorKind::Interrupted.into());
                    }
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
    /// Connects, to each address within so long.
    pub(crate) fn open(origin: &Origin, patience: Duration) -> io::Result<Self> {
        let host = origin.host.trim_start_matches('[').trim_end_matches(']');
        let mut addresses: Vec<SocketAddr> = (host, origin.port).to_socket_addrs()?.collect();
        // Connections spread over the addresses of a server.
        fastrand::shuffle(&mut addresses);
        let mut last = io::Error::new(io::ErrorKind::NotFound, "its name has no address");
        let socket = addresses.iter().find_map(|address| {
            TcpStream::connect_timeout(address, patience).map_err(|error| last = error).ok()
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

    /// Reads what has come, or waits for it. Returns 0 at the end.
    pub(crate) fn read(&mut self, target: &mut [u8], waiting: &Waiting<'_>) -> io::Result<usize> {
        waiting.repeat(|| match &mut self.tls {
            None => self.socket.read(target),
            Some(tls) => Stream::new(&mut **tls, &mut self.socket).read(target),
        })
    }

    pub(crate) fn write_all(&mut self, mut bytes: &[u8], waiting: &Waiting<'_>) -> io::Result<()> {
        while !bytes.is_empty() {
            let count = waiting.repeat(|| match &mut self.tls {
                None => self.socket.write(bytes),
                Some(tls) => Stream::new(&mut **tls, &mut self.socket).write(bytes),
            })?;
            if count == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            bytes = &bytes[count..];
        }
        waiting.repeat(|| match &mut self.tls {
            None => Ok(()),
            Some(tls) => Stream::new(&mut **tls, &mut self.socket).flush(),
        })
    }
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
