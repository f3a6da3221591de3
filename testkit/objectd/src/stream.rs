//! A connection, plain or encrypted.

use rustls::{
    ServerConfig, ServerConnection,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer},
};
use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpStream},
    sync::Arc,
};

pub(crate) struct Stream {
    socket: TcpStream,
    tls: Option<ServerConnection>,
}

/// The server's certificate and key.
pub(crate) fn config() -> io::Result<Arc<ServerConfig>> {
    let certificate = CertificateDer::from(&include_bytes!("../certificates/server.der")[..]);
    let key = PrivatePkcs8KeyDer::from(&include_bytes!("../certificates/server.key.der")[..]);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_no_client_auth()
        .with_single_cert(vec![certificate], PrivateKeyDer::from(key))
        .map_err(io::Error::other)?;
    Ok(Arc::new(config))
}

impl Stream {
    pub(crate) fn new(socket: TcpStream, tls: Option<&Arc<ServerConfig>>) -> io::Result<Self> {
        let tls =
            tls.map(|config| ServerConnection::new(config.clone())).transpose().map_err(io::Error::other)?;
        Ok(Self { socket, tls })
    }

    pub(crate) fn shutdown(&self) -> io::Result<()> {
        self.socket.shutdown(Shutdown::Both)
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match &mut self.tls {
            None => self.socket.read(buffer),
            Some(tls) => rustls::Stream::new(tls, &mut self.socket).read(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.tls {
            None => self.socket.write(bytes),
            Some(tls) => rustls::Stream::new(tls, &mut self.socket).write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.tls {
            None => self.socket.flush(),
            Some(tls) => rustls::Stream::new(tls, &mut self.socket).flush(),
        }
    }
}
