//! Proxies that the environment names: `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY`, as curl reads them. They carry encrypted
//! connections, through a tunnel; `http://` servers are asked directly.

use super::Origin;
use base64::{Engine, prelude::BASE64_STANDARD as STANDARD};
use percent_encoding::percent_decode_str;
use std::{io, net::IpAddr};

/// A proxy that tunnels connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Proxy {
    pub(super) host: String,
    pub(super) port: u16,
    /// User and password, as the head of a request has them.
    credentials: Option<String>,
}

/// The proxy for a server, as the environment says.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] if the variable names none that can be used.
pub(super) fn of(origin: &Origin) -> io::Result<Option<Proxy>> {
    within(origin, |name| std::env::var(name).ok())
}

/// The host and port of the proxy for a server, if connections to it go through one.
pub(crate) fn address_of(origin: &Origin) -> io::Result<Option<String>> {
    Ok(of(origin)?.map(|proxy| format!("{}:{}", proxy.host, proxy.port)))
}

fn within(origin: &Origin, variable: impl Fn(&str) -> Option<String>) -> io::Result<Option<Proxy>> {
    let set = |names: &[&'static str]| {
        let mut set = names.iter().filter_map(|name| Some((*name, variable(name)?)));
        set.find(|(_, value)| !value.trim().is_empty())
    };
    if !origin.is_tls {
        return Ok(None);
    }
    let Some((name, url)) = set(&["https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"]) else {
        return Ok(None);
    };
    let left_out = set(&["no_proxy", "NO_PROXY"]).map(|(_, list)| list).unwrap_or_default();
    if left_out.split([',', ' ']).any(|pattern| covers(pattern.trim(), origin)) {
        return Ok(None);
    }
    Proxy::parse(url.trim()).map(Some).map_err(|reason| {
        let reason = format!("{name} cannot be used: {reason}");
        io::Error::new(io::ErrorKind::InvalidInput, reason)
    })
}

/// Whether an entry of `NO_PROXY` stands for a server: `*`, a name and those below it, an address, or a range of addresses.
fn covers(pattern: &str, origin: &Origin) -> bool {
    let host = bare(&origin.host).to_ascii_lowercase();
    let pattern = pattern.to_ascii_lowercase();
    let (pattern, port) = match pattern.rsplit_once(':') {
        Some((name, port)) if !name.contains(':') || name.ends_with(']') => match port.parse::<u16>() {
            Ok(port) => (name.to_owned(), Some(port)),
            Err(_) => (pattern, None),
        },
        _ => (pattern, None),
    };
    if pattern.is_empty() || port.is_some_and(|port| port != origin.port) {
        return false;
    }
    if pattern == "*" {
        return true;
    }
    if let Ok(address) = host.parse::<IpAddr>() {
        let (base, bits) =
            pattern.split_once('/').map_or((&*pattern, None), |(base, bits)| (base, Some(bits)));
        let Ok(base) = bare(base).parse::<IpAddr>() else { return false };
        let bits = bits.map(str::parse::<u32>).unwrap_or(Ok(if base.is_ipv4() { 32 } else { 128 }));
        return bits.is_ok_and(|bits| is_within(address, base, bits));
    }
    let name = pattern.trim_start_matches("*.").trim_start_matches('.');
    let host = host.trim_end_matches('.');
    host == name || host.strip_suffix(name).is_some_and(|front| front.ends_with('.'))
}

fn is_within(address: IpAddr, base: IpAddr, bits: u32) -> bool {
    match (address, base) {
        (IpAddr::V4(address), IpAddr::V4(base)) if bits <= 32 => {
            (address.to_bits() ^ base.to_bits()).checked_shr(32 - bits).unwrap_or(0) == 0
        }
        (IpAddr::V6(address), IpAddr::V6(base)) if bits <= 128 => {
            (address.to_bits() ^ base.to_bits()).checked_shr(128 - bits).unwrap_or(0) == 0
        }
        _ => false,
    }
}

fn bare(host: &str) -> &str {
    host.trim_start_matches('[').trim_end_matches(']')
}

impl Proxy {
    /// Reads `http://user:password@host:port`, without what may be left out.
    fn parse(url: &str) -> Result<Self, String> {
        let (scheme, rest) = url.split_once("://").unwrap_or(("http", url));
        if !scheme.eq_ignore_ascii_case("http") {
            return Err(format!("a proxy of {scheme}:// is not supported, one of http:// is"));
        }
        let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
        let (user, host) =
            authority.rsplit_once('@').map_or((None, authority), |(user, host)| (Some(user), host));
        let (host, port) = match host.rsplit_once(':') {
            Some((host, port)) if !host.contains(':') || host.ends_with(']') => {
                (host, port.parse().map_err(|_| "its port is none".to_owned())?)
            }
            _ => (host, 80),
        };
        if host.is_empty() {
            return Err("it names no host".into());
        }
        // A user without a password has an empty one.
        let user = user.map(|user| if user.contains(':') { user.to_owned() } else { format!("{user}:") });
        let credentials = user.map(|user| STANDARD.encode(percent_decode_str(&user).collect::<Vec<u8>>()));
        Ok(Self { host: bare(host).to_owned(), port, credentials })
    }

    /// The request for a tunnel to a server.
    pub(super) fn request(&self, origin: &Origin) -> String {
        let Origin { host, port, .. } = origin;
        let credentials = self.credentials.as_ref();
        let credentials =
            credentials.map_or(String::new(), |own| format!("Proxy-Authorization: Basic {own}\r\n"));
        format!("CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n{credentials}\r\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(is_tls: bool, host: &str, port: u16) -> Origin {
        Origin { is_tls, host: host.into(), port }
    }

    fn with(pairs: &'static [(&'static str, &'static str)]) -> impl Fn(&str) -> Option<String> {
        move |name| pairs.iter().find(|(own, _)| *own == name).map(|(_, value)| (*value).to_owned())
    }

    #[test]
    fn encrypted_connections_go_through_the_proxy_that_is_named() {
        let hub = origin(true, "huggingface.co", 443);
        let variables = with(&[("HTTPS_PROXY", "http://me:p%40ss@proxy:3128/")]);
        let proxy = within(&hub, variables).unwrap().unwrap();
        assert_eq!((proxy.host.as_str(), proxy.port), ("proxy", 3128));
        assert_eq!(
            proxy.request(&hub),
            "CONNECT huggingface.co:443 HTTP/1.1\r\nHost: huggingface.co:443\r\n\
             Proxy-Authorization: Basic bWU6cEBzcw==\r\n\r\n"
        );
        let short = within(&hub, with(&[("ALL_PROXY", "proxy:8080")])).unwrap().unwrap();
        assert_eq!((short.host.as_str(), short.port, short.credentials), ("proxy", 8080, None));
        let user = Proxy::parse("http://me@proxy").unwrap();
        assert_eq!(user.credentials, Proxy::parse("http://me:@proxy").unwrap().credentials);
        assert_eq!(within(&hub, with(&[("HTTPS_PROXY", " ")])).unwrap(), None);
        assert_eq!(within(&origin(false, "store", 80), with(&[("ALL_PROXY", "proxy")])).unwrap(), None);
        for wrong in ["socks5://proxy", "https://proxy", "http://", "http://proxy:x"] {
            let error = Proxy::parse(wrong).unwrap_err();
            assert!(!error.is_empty(), "{wrong}");
        }
    }

    #[test]
    fn servers_that_are_left_out_are_asked_directly() {
        for (pattern, host, port, expected) in [
            ("*", "a.example", 443, true),
            ("example", "a.example", 443, true),
            (".example", "a.example", 443, true),
            ("*.example", "a.example", 443, true),
            ("a.example", "a.example", 443, true),
            ("A.Example", "a.eXample", 443, true),
            ("a.example:443", "a.example", 443, true),
            ("a.example:444", "a.example", 443, false),
            ("ample", "a.example", 443, false),
            ("b.example", "a.example", 443, false),
            ("10.0.0.0/8", "10.1.2.3", 443, true),
            ("10.0.0.0/8", "11.1.2.3", 443, false),
            ("0.0.0.0/0", "11.1.2.3", 443, true),
            ("127.0.0.1", "127.0.0.1", 443, true),
            ("::1", "[::1]", 443, true),
            ("fd00::/8", "[fd12::1]", 443, true),
            ("fd00::/8", "[fe12::1]", 443, false),
            ("10.0.0.0/99", "10.0.0.0", 443, false),
            ("", "a.example", 443, false),
        ] {
            assert_eq!(covers(pattern, &origin(true, host, port)), expected, "{pattern} {host}:{port}");
        }
        let variables = with(&[("HTTPS_PROXY", "http://proxy"), ("no_proxy", "localhost, .corp")]);
        assert_eq!(within(&origin(true, "store.corp", 443), variables).unwrap(), None);
    }
}
