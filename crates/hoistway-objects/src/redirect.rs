//! Where the hub or a web server leads to for the bytes of a file, and what it says of them.

use crate::{
    Problem,
    client::Client,
    http::{Answer, Origin, Waiting, addresses, is_of_this_network},
    location::{Target, web},
    pace::Fault,
    pin::{header, printable},
};
use http::{HeaderMap, HeaderName, header::LOCATION};
use std::{
    net::IpAddr,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

/// Redirects that are followed.
const MOST: usize = 5;
/// Longest body of a redirect that is read, so that its connection can serve again.
const MAX_REDIRECT_BYTES: usize = 64 << 10;

/// Where the bytes of a file are.
#[derive(Clone, Debug)]
pub(crate) struct FilePlace {
    pub(crate) client: Arc<Client>,
    pub(crate) target: Target,
    /// Whether another server than the hub has them, by a URL that is signed and expires.
    pub(crate) was_redirected: bool,
}

/// What the hub says of a file that it leads on from. Headers: `X-Repo-Commit`, `X-Linked-ETag`, `X-Linked-Size`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Linked {
    commit: Option<String>,
    etag: Option<String>,
    len: Option<u64>,
}

/// The answer at the end of redirects.
pub(crate) struct Followed {
    pub(crate) answer: Answer,
    pub(crate) place: FilePlace,
    pub(crate) linked: Linked,
}

impl Linked {
    fn of(headers: &HeaderMap) -> Self {
        let text = |name| header(headers, name).map(str::to_owned);
        let len = text("x-linked-size").and_then(|len| len.parse().ok());
        Self { commit: text("x-repo-commit"), etag: text("x-linked-etag"), len }
    }

    /// The SHA-256 of the file: that is the hash of large files.
    pub(crate) fn sha256(&self) -> Option<[u8; 32]> {
        let digits = self.etag.as_ref()?.strip_prefix('"')?.strip_suffix('"')?;
        if digits.len() != 64 || !digits.bytes().all(|own| own.is_ascii_hexdigit()) {
            return None;
        }
        let mut sum = [0; 32];
        for (byte, at) in sum.iter_mut().zip((0..64).step_by(2)) {
            *byte = u8::from_str_radix(&digits[at..at + 2], 16).ok()?;
        }
        Some(sum)
    }

    /// Takes what a later answer of the hub says beyond this.
    fn or(self, later: Self) -> Self {
        Self {
            commit: self.commit.or(later.commit),
            etag: self.etag.or(later.etag),
            len: self.len.or(later.len),
        }
    }

    /// Fails if the hub's answer is of another commit than the URL.
    pub(crate) fn check_commit(&self, commit: Option<&str>) -> Result<(), Problem> {
        match (&self.commit, commit) {
            (Some(own), Some(commit)) if own != commit => Err(Problem::WrongAnswer(format!(
                "the hub answers with commit {} where {commit} was asked for",
                printable(own)
            ))),
            _ => Ok(()),
        }
    }

    /// Fails if the hub leads to a file of another length than it says.
    pub(crate) fn check_len(&self, len: u64) -> Result<(), Problem> {
        match self.len {
            Some(own) if own != len => Err(Problem::WrongAnswer(format!(
                "the hub says that the file has {own} bytes, and leads to one of {len}"
            ))),
            _ => Ok(()),
        }
    }

    /// Fails if the hub now says something else.
    pub(crate) fn check(&self, now: &Self) -> Result<(), Problem> {
        let changes = [
            ("commit", self.commit != now.commit),
            ("hash of the file", self.etag != now.etag),
            ("length", self.len != now.len),
        ];
        let changed = |(what, _): &(&str, bool)| Problem::Changed(format!("the hub gives another {what}"));
        changes.iter().find(|(_, is_other)| *is_other).map_or(Ok(()), |change| Err(changed(change)))
    }
}

/// Sends a GET to the hub or a web server, and to where it leads. The hub's token is sent to no other server.
pub(crate) fn follow(
    hub: &Arc<Client>,
    target: &Target,
    headers: &[(HeaderName, String)],
    waiting: &Waiting<'_>,
) -> Result<Followed, Fault> {
    let mut place = FilePlace { client: hub.clone(), target: target.clone(), was_redirected: false };
    let mut linked = Linked::default();
    for _ in 0..=MOST {
        let answer = place.client.ask(&place.target, headers, waiting)?;
        if !place.was_redirected {
            linked = linked.or(Linked::of(&answer.headers));
        }
        match answer.status {
            200..=299 => return Ok(Followed { answer, place, linked }),
            301 | 302 | 303 | 307 | 308 => {}
            _ => return Err(place.client.refusal(answer, waiting)),
        }
        let Some(location) = header(&answer.headers, LOCATION.as_str()) else {
            return Err(place.client.refusal(answer, waiting));
        };
        let asked = place.client.clone();
        place = next(place, location, waiting.stop)?;
        // What the body says is of no interest, and its connection serves the next request.
        let _ = asked.body(answer, MAX_REDIRECT_BYTES, waiting);
    }
    Err(Problem::WrongAnswer(format!("the server redirects more than {MOST} times")).into())
}

/// Where a redirect leads.
fn next(place: FilePlace, location: &str, stop: &AtomicBool) -> Result<FilePlace, Problem> {
    let refused = |why: &str| {
        let to = printable(&redirect_target(location));
        Err(Problem::Redirected { said: format!("to {to}, {why}") })
    };
    if !location.starts_with("//") && !has_scheme(location) {
        let target = beside(&place.target.0, location);
        return Ok(FilePlace { target: Target(target), ..place });
    }
    let scheme = if place.client.origin().is_tls { "https:" } else { "http:" };
    let url = if location.starts_with("//") { format!("{scheme}{location}") } else { location.to_owned() };
    let Ok((origin, target)) = web(&url) else { return refused("which is not the URL of a web server") };
    let target = Target(target);
    let from = place.client.origin();
    if *from == origin {
        return Ok(FilePlace { target, ..place });
    }
    if from.is_tls && !origin.is_tls {
        return refused("without encryption");
    }
    // A chain of redirects that has left this network stays outside, whatever a later look-up of the name answers.
    let is_outside = place.client.is_outside() || is_elsewhere(from, stop);
    if is_outside && is_named_of_this_network(&origin) {
        return refused("a machine of this network");
    }
    Ok(FilePlace { client: Client::of_redirect(origin, is_outside), target, was_redirected: true })
}

/// Whether a reference is a URL rather than a path.
fn has_scheme(reference: &str) -> bool {
    let end = reference.find(['/', '?', '#']).unwrap_or(reference.len());
    reference[..end].contains(':')
}

/// The path that a reference means which begins with a slash, or is of a file beside that of `base` (RFC 3986, 5.2).
fn beside(base: &str, reference: &str) -> String {
    let reference = &reference[..reference.find('#').unwrap_or(reference.len())];
    if reference.is_empty() {
        return base.to_owned();
    }
    let base = &base[..base.find('?').unwrap_or(base.len())];
    let (path, query) = reference.split_at(reference.find('?').unwrap_or(reference.len()));
    let folder = match path {
        "" => return format!("{base}{query}"),
        path if path.starts_with('/') => "",
        _ => &base[..=base.rfind('/').unwrap_or(0)],
    };
    let whole = format!("{folder}{path}");
    let mut parts = Vec::new();
    for part in whole.split('/').skip(1) {
        match part {
            "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    // What ends with dots is a folder.
    if whole.ends_with("/.") || whole.ends_with("/..") {
        parts.push("");
    }
    format!("/{}{query}", parts.join("/"))
}

/// Where a redirect leads, without what may be secret: it is a URL, or the path of one on the same server.
pub(crate) fn redirect_target(location: &str) -> String {
    let end = location.find(['?', '#']).unwrap_or(location.len());
    match location[..end].strip_prefix("//") {
        Some(rest) => crate::shown(&format!("https://{rest}")),
        None => crate::shown(&location[..end]),
    }
}

/// How long the look-up of a name may take that was asked a moment ago.
const LOOK_UP: Duration = Duration::from_secs(5);

/// Whether a server lies outside of this machine's network, by its name and by its addresses.
fn is_elsewhere(origin: &Origin, stop: &AtomicBool) -> bool {
    let host = origin.host.trim_start_matches('[').trim_end_matches(']');
    // A proxy may know a name that this machine does not.
    let addresses = || addresses(host, origin.port, LOOK_UP, stop).unwrap_or_default();
    !is_named_of_this_network(origin) && !addresses().iter().any(|own| is_of_this_network(own.ip()))
}

/// Whether the name of a server is an address of this network, or this machine's.
fn is_named_of_this_network(origin: &Origin) -> bool {
    let host = origin.host.trim_start_matches('[').trim_end_matches(']').trim_end_matches('.');
    let host = host.to_ascii_lowercase();
    host.parse::<IpAddr>().map(is_of_this_network).unwrap_or_else(|_| {
        // The system takes short and hexadecimal numbers for addresses too: no name ends with a number.
        let last = host.rsplit('.').next().unwrap_or_default();
        last == "localhost" || last.starts_with("0x") || last.bytes().all(|own| own.is_ascii_digit())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(url: &str) -> FilePlace {
        let (origin, target) = web(url).unwrap();
        FilePlace {
            client: Client::of_redirect(origin, false),
            target: Target(target),
            was_redirected: false,
        }
    }

    #[test]
    fn redirects_lead_to_safe_places_only() {
        let hub = "https://hub.example/a";
        for (location, expected, was_redirected) in [
            ("/api/b?c=d", "https://hub.example /api/b?c=d", false),
            ("https://hub.example/b", "https://hub.example /b", false),
            ("b?c=d", "https://hub.example /b?c=d", false),
            ("../b/./c#d", "https://hub.example /b/c", false),
            ("?c=d/../e", "https://hub.example /a?c=d/../e", false),
            ("/b/c/../d/..", "https://hub.example /b/", false),
            ("//hub.example/b", "https://hub.example /b", false),
            ("//cdn.example/b?sig=canary", "https://cdn.example /b?sig=canary", true),
            ("https://cdn.example/b?sig=canary", "https://cdn.example /b?sig=canary", true),
        ] {
            let place = next(from(hub), location, &AtomicBool::new(true)).unwrap();
            let found = format!("{} {}", place.client.origin().url(), place.target.0);
            assert_eq!((found.as_str(), place.was_redirected), (expected, was_redirected));
        }
        for location in [
            "http://cdn.example/b?sig=canary",
            "https://127.0.0.1/b?sig=canary",
            "https://localhost/b",
            "https://169.254.169.254/latest?sig=canary",
            "https://[::1]/b",
            "https://[::ffff:127.0.0.1]/b",
            "https://127.1/b",
            "https://2130706433/b",
            "https://0x7f000001/b",
            "https://localhost./b",
            "https://127.0.0.1./b",
            "https://10.0.0.1/b",
            "https://100.64.0.1/b",
            "https://[64:ff9b::10.0.0.1]/b",
            "https://me:canary@cdn.example/b",
            "//127.0.0.1/b?sig=canary",
            "//me:canary@cdn.example/b",
            "ftp://cdn.example/b?sig=canary",
        ] {
            let problem = next(from(hub), location, &AtomicBool::new(true)).unwrap_err();
            assert!(
                matches!(&problem, Problem::Redirected { said } if !said.contains("canary")),
                "{problem:?}"
            );
        }
        for itself in ["", "#b"] {
            let place =
                next(from("https://hub.example/a?sig=canary"), itself, &AtomicBool::new(true)).unwrap();
            assert_eq!(place.target.0, "/a?sig=canary");
        }
        assert!(next(from("http://127.0.0.1:80/a"), "http://127.0.0.1:81/b", &AtomicBool::new(true)).is_ok());
    }

    #[test]
    fn another_commit_hash_or_length_is_a_change() {
        let linked = Linked { commit: Some("a".into()), etag: Some("\"b\"".into()), len: Some(5) };
        linked.check(&linked.clone()).unwrap();
        for other in [
            Linked { commit: Some("c".into()), ..linked.clone() },
            Linked { etag: None, ..linked.clone() },
            Linked { len: Some(6), ..linked.clone() },
        ] {
            assert!(matches!(linked.check(&other), Err(Problem::Changed(_))), "{other:?}");
        }
        assert_eq!(linked.sha256(), None);
        let of_sum = |text: &str| Linked { etag: Some(text.into()), ..linked.clone() }.sha256();
        assert_eq!(of_sum(&format!("\"{}\"", "0a".repeat(32))), Some([10; 32]));
        assert_eq!(of_sum(&format!("\"{}\"", "0g".repeat(32))), None);
        assert_eq!(of_sum(&format!("W/\"{}\"", "0a".repeat(32))), None);
        linked.check_commit(None).unwrap();
        linked.check_commit(Some("a")).unwrap();
        Linked::default().check_commit(Some("a")).unwrap();
        assert!(linked.check_commit(Some("c")).is_err());
        linked.check_len(5).unwrap();
        assert!(linked.check_len(6).is_err());
    }

    #[test]
    fn a_redirect_shows_no_secret_however_it_is_written() {
        for (location, shown) in [
            ("https://me:canary@host/a?s=canary", "https://host/a"),
            ("//me:canary@host/a?s=canary", "https://host/a"),
            ("/a?s=canary#canary", "/a"),
            ("s3://bucket/a?s=canary", "s3://bucket/a"),
        ] {
            assert_eq!(redirect_target(location), shown);
        }
    }
}
