//! What lies between this machine and a store: the way to it, its clock, and who asks. For `hoistway doctor`.

use crate::{
    Problem, Result, StoreOptions,
    client::Client,
    http::{addresses, proxy_of},
    hub,
    location::{Kind, Location, Target},
    object::variable,
    pace::{Again, Fault},
    pin::header,
    policy::Failure,
    shown,
};
use http::{HeaderMap, header::DATE};
use reqsign_core::time::Timestamp;
use std::{
    net::IpAddr,
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant},
};

/// How long the look-up of a name may take.
const LOOK_UP: Duration = Duration::from_secs(5);

/// Examines the store of a URL.
///
/// ```no_run
/// use std::sync::atomic::AtomicBool;
/// use hoistway_objects::{StoreOptions, StoreProbe};
/// let probe = StoreProbe::new("s3://models/llama/", &StoreOptions::default())?;
/// let (stop, server) = (AtomicBool::new(false), probe.server());
/// println!("{server}: {:?}, asked by {}", probe.reach(&stop)?, probe.credentials(&stop)?);
/// # Ok::<(), hoistway_objects::Error>(())
/// ```
#[derive(Debug)]
pub struct StoreProbe {
    url: String,
    /// As the caller gave them.
    options: StoreOptions,
    client: Arc<Client>,
    target: Target,
    is_dated: bool,
    is_offline: bool,
}

/// How a server was reached.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reached {
    /// The address that answered. `None` behind a proxy, which looks it up.
    pub address: Option<IpAddr>,
    /// The status of the answer.
    pub status: u16,
    /// Host and port of the proxy that connections to it go through.
    pub proxy: Option<String>,
    /// How long it took to connect to it, encryption included, and to be answered. The look-up of its name is left out.
    pub answered_in: Duration,
    /// Seconds by which the clock of this machine is at least ahead of the server's; negative if it is behind, and 0 if they
    /// may agree. `None` if the answer has no date.
    pub clock_ahead_seconds: Option<i64>,
}

impl StoreProbe {
    /// Finds the server of a URL, without asking it.
    ///
    /// # Errors
    /// [`Problem::Invalid`] if options or the environment contradict each other, or it is no URL of a store.
    pub fn new(url: &str, options: &StoreOptions) -> Result<Self> {
        let failed = |problem: Problem| problem.of(&shown(url), None);
        let kind = Kind::of(url).map_err(failed)?;
        let resolved = options.resolved(kind, variable).map_err(failed)?;
        let location = Location::parse(url, &resolved).map_err(failed)?;
        let is_dated = !resolved.anonymous
            && match kind {
                Kind::S3 => true,
                Kind::Azure => resolved.account_key.is_some(),
                // Tokens are exchanged for a signature of a service account's.
                Kind::Google => resolved.credentials_file.is_some(),
                Kind::Web | Kind::Hub => false,
            };
        let client = Client::of(&location, &resolved);
        let is_offline = kind == Kind::Hub && hub::is_offline(variable);
        let options = options.clone();
        Ok(Self { url: url.to_owned(), options, client, target: location.target, is_dated, is_offline })
    }

    /// Returns the server, such as `https://storage.example:9000`.
    pub fn server(&self) -> String {
        self.client.origin().url()
    }

    /// Returns whether signatures have the time of this machine's clock, so that servers refuse those of a wrong one.
    pub fn is_dated(&self) -> bool {
        self.is_dated
    }

    /// Returns whether the server may not be asked: the hub, while `HF_HUB_OFFLINE` is set.
    pub fn is_offline(&self) -> bool {
        self.is_offline
    }

    /// Asks the server without credentials. Any answer will do. Ends soon after `stop` is set.
    ///
    /// # Errors
    /// [`Problem::Unreliable`] if it is not reached, and [`Problem::Tls`].
    pub fn reach(&self, stop: &AtomicBool) -> Result<Reached> {
        let origin = self.client.origin();
        let failed = |problem: Problem| problem.of(&shown(&self.url), None);
        let proxy = proxy_of(origin).map_err(|error| failed(Problem::Invalid(error.to_string())))?;
        let host = origin.host.trim_start_matches('[').trim_end_matches(']');
        let reached = self.client.pace().persist(stop, |waiting| {
            if proxy.is_none() {
                // Kept for a moment, so that the connection finds it.
                addresses(host, origin.port, LOOK_UP, stop).map_err(|error| {
                    let why = format!("{} cannot be reached: {error}", origin.url());
                    Fault::Again(Again::of(Failure::Unreached, why))
                })?;
            }
            let (begun, sent) = (Instant::now(), Timestamp::now());
            let answer = self.client.ask_anonymously(&self.target, waiting)?;
            Ok(Reached {
                address: answer.peer().filter(|_| proxy.is_none()).map(|address| address.ip()),
                status: answer.status,
                proxy: proxy.clone(),
                answered_in: begun.elapsed(),
                clock_ahead_seconds: ahead_of(&answer.headers, sent, Timestamp::now()),
            })
        });
        reached.map_err(failed)
    }

    /// Asks for credentials, as a load does, and returns what gave them: nothing of what they are. Ends soon after `stop` is
    /// set.
    ///
    /// # Errors
    /// [`Problem::Credentials`] says what is missing.
    pub fn credentials(&self, stop: &AtomicBool) -> Result<String> {
        let failed = |problem: Problem| problem.of(&shown(&self.url), None);
        let giver = match self.client.identity().map_err(failed)? {
            Some(identity) => identity.giver(stop).map_err(failed)?,
            None => None,
        };
        giver.map_or_else(|| self.options.caller(&self.url), Ok)
    }
}

/// Seconds by which a clock is at least ahead of the one that an answer is dated by, or behind it: it said `sent` before the
/// request and `received` after the answer. 0 if the two may agree.
fn ahead_of(headers: &HeaderMap, sent: Timestamp, received: Timestamp) -> Option<i64> {
    let date = Timestamp::parse_rfc2822(header(headers, DATE.as_str())?).ok()?;
    // How long a cache on the way has kept the answer.
    let age: i64 = header(headers, "age").and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    let ahead = |of: Timestamp| of.as_second().checked_sub(date.as_second())?.checked_sub(age);
    // The date is a whole second, in which the server may have been at any point.
    let (least, most) = (ahead(sent)?.checked_sub(1)?, ahead(received)?);
    Some(if least > 0 { least } else { most.min(0) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    #[test]
    fn a_clock_is_compared_with_the_date_of_an_answer() {
        let headers = |date: &'static str, age: Option<&'static str>| {
            let mut headers = HeaderMap::new();
            headers.insert(DATE, HeaderValue::from_static(date));
            if let Some(age) = age {
                headers.insert("age", HeaderValue::from_static(age));
            }
            headers
        };
        let at = |text: &str| Timestamp::parse_rfc2822(text).unwrap();
        let sent = at("Sun, 22 Nov 2026 00:16:40 GMT");
        let received = at("Sun, 22 Nov 2026 00:16:43 GMT");
        for (headers, expected) in [
            (headers("Sun, 22 Nov 2026 00:00:00 GMT", None), Some(999)),
            (headers("Sun, 22 Nov 2026 00:00:00 GMT", Some("990")), Some(9)),
            (headers("Sun, 22 Nov 2026 00:16:39 GMT", None), Some(0)),
            (headers("Sun, 22 Nov 2026 00:16:40 GMT", None), Some(0)),
            (headers("Sun, 22 Nov 2026 00:16:43 GMT", Some("x")), Some(0)),
            (headers("Sun, 22 Nov 2026 00:16:44 GMT", None), Some(-1)),
            (headers("yesterday", None), None),
            (HeaderMap::new(), None),
        ] {
            assert_eq!(ahead_of(&headers, sent, received), expected);
        }
    }
}
