//! A server and its caller: connections that stay open, pace, signatures. All loads of the process share them.

use crate::{
    Problem, StoreOptions,
    asking::{IN_TIME, Questions, REFUSES, Unsaid},
    aws_files::FilesState,
    credentials::Identity,
    digest::{ASKS_RANGE_CRC, MAX_CRC_RANGE_BYTES},
    http::{
        Answer, Connection, Ends, IdlePool, Network, Origin, Pending, Roots, Sent, TooSlow, Waiting,
        have_input, send, send_pieces,
    },
    location::{self, Kind, Location, Target},
    object::variable,
    options::{Checksums, aws_roots},
    pace::{Again, Fault, Pace},
    per_process::PerProcess,
    pin::{header, printable},
    policy::Failure,
    redirect,
    refusals::Refusals,
    region,
};
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request,
    header::{ACCEPT_ENCODING, CONTENT_LENGTH, LOCATION, RANGE, RETRY_AFTER, USER_AGENT},
    request::Parts,
};
use reqsign_core::time::Timestamp;
use std::{
    collections::HashMap,
    io,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime},
};

/// How long a connection is kept that is not used, and then closed.
const IDLE: Duration = Duration::from_secs(60);
/// Connections of a server that are kept.
const MAX_IDLE: usize = 256;
/// Clients that are kept.
const MAX_CLIENTS: usize = 64;
/// The version of Azure's interface that requests have.
const AZURE_VERSION: &str = "2021-08-06";
/// The code by which Azure's emulator refuses a header that it does not know.
pub(crate) const UNSUPPORTED: &str = "FeatureNotSupported";
/// Longest text of an error.
const MAX_ERROR_BYTES: usize = 64 << 10;
/// How long a connection may take to be made, over all addresses of the server.
const CONNECT: Duration = Duration::from_secs(5);
/// The same for the second of two requests for the same bytes: meanwhile the first is not looked at.
const HEDGE_CONNECT: Duration = Duration::from_secs(1);

/// A server, and who asks it.
#[derive(Debug)]
pub(crate) struct Client {
    kind: Kind,
    origin: Origin,
    options: StoreOptions,
    /// Whether it lies outside of this machine's network.
    is_outside: bool,
    roots: Roots,
    own: PerProcess<Own>,
}

/// What each process has of its own.
#[derive(Debug)]
struct Own {
    idle: IdlePool,
    pace: Pace,
    network: Network,
    identity: Mutex<Known>,
    failed_head: Mutex<Option<FailedHead>>,
    questions: Questions,
    /// Whether the server refuses to say the checksum of a range.
    refused_range_checksums: Refusals,
}

/// Who asks, and the files that say so.
#[derive(Debug)]
struct Known {
    identity: Result<Option<Arc<Identity>>, String>,
    files: FilesState,
    /// When it was found anew, since the files were written.
    renewed: Option<Instant>,
}

impl Known {
    fn of(client: &Client, files: FilesState, renewed: Option<Instant>) -> Self {
        let identity = Identity::new(client.kind, &client.origin, &client.options);
        let identity = identity.map(|own| own.map(Arc::new)).map_err(|problem| problem.to_string());
        Self { identity, files, renewed }
    }
}

/// How long requests that keys were refused are asked again after new keys were read: they may have been sent before.
const RENEWED_FOR: Duration = Duration::from_secs(10);
/// The codes of S3's errors about keys that hold no longer, or that were read while their file was written.
const OLD_KEYS: [&str; 4] = ["ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch"];

/// A question for a checksum that failed.
#[derive(Clone, Copy, Debug)]
enum FailedHead {
    Refused,
    /// Without an answer, then.
    Silent(Instant),
}

/// How long no checksums are asked for after a question without an answer.
const SILENT_FOR: Duration = Duration::from_secs(60);

/// Clients, each with the surroundings that it was made in.
type Clients = Mutex<HashMap<(Origin, Kind, StoreOptions, bool), (Surroundings, Arc<Client>)>>;

/// What clients have of this machine, and clients of S3 of its shared files. Where that changes, objects that are opened from then
/// on have a client of their own.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Surroundings {
    roots: Roots,
    files: FilesState,
}

impl Surroundings {
    fn of(kind: Kind) -> Self {
        match kind {
            Kind::S3 => Self { roots: aws_roots(), files: FilesState::now(variable) },
            _ => Self { roots: Roots::of_machine(), files: FilesState::default() },
        }
    }
}

impl Client {
    /// The client for a location. `options` are resolved.
    pub(crate) fn of(location: &Location, options: &StoreOptions) -> Arc<Self> {
        let account = location.account.clone().or_else(|| options.account.clone());
        Self::at(location.origin.clone(), location.kind, StoreOptions { account, ..options.clone() }, false)
    }

    /// The client for a web server that another one redirects to. It has no credentials. One that `is_outside` is refused if
    /// its name leads into this machine's network.
    pub(crate) fn of_redirect(origin: Origin, is_outside: bool) -> Arc<Self> {
        Self::at(origin, Kind::Web, StoreOptions::default(), is_outside)
    }

    fn at(origin: Origin, kind: Kind, options: StoreOptions, is_outside: bool) -> Arc<Self> {
        static CLIENTS: PerProcess<Clients> = PerProcess::new();
        let key = (origin, kind, options, is_outside);
        // Not while others wait: the files may lie on a slow file system.
        let surroundings = Surroundings::of(kind);
        let mut clients = lock(CLIENTS.get(Mutex::default));
        if let Some((made_in, client)) = clients.get(&key)
            && *made_in == surroundings
        {
            return client.clone();
        }
        if clients.len() >= MAX_CLIENTS {
            clients.clear();
        }
        let (origin, kind, options, is_outside) = key.clone();
        let (roots, own) = (surroundings.roots.clone(), PerProcess::new());
        let client = Arc::new(Self { kind, origin, options, is_outside, roots, own });
        clients.insert(key, (surroundings, client.clone()));
        client
    }

    /// Whether a server outside of this machine's network led to it.
    pub(crate) fn is_outside(&self) -> bool {
        self.is_outside
    }

    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    /// Whether bytes are compared with what the server says of them.
    pub(crate) fn compares(&self) -> bool {
        self.options.checksums == Checksums::Auto
    }

    pub(crate) fn origin(&self) -> &Origin {
        &self.origin
    }

    fn own(&self) -> &Own {
        self.own.get(|| Own {
            idle: IdlePool::new(MAX_IDLE, IDLE),
            pace: Pace::new(),
            network: Network { roots: self.roots.clone(), is_outside: self.is_outside },
            identity: Mutex::new(Known::of(self, Surroundings::of(self.kind).files, None)),
            failed_head: Mutex::default(),
            questions: Questions::default(),
            refused_range_checksums: Refusals::default(),
        })
    }

    pub(crate) fn pace(&self) -> &Pace {
        &self.own().pace
    }

    /// The questions for checksums.
    pub(crate) fn questions(&self) -> &Questions {
        &self.own().questions
    }

    /// Why checksums are not asked for, once a question has failed.
    pub(crate) fn refuses_heads(&self) -> Option<Unsaid> {
        match *lock(&self.own().failed_head) {
            Some(FailedHead::Refused) => Some(REFUSES),
            Some(FailedHead::Silent(then)) if then.elapsed() < SILENT_FOR => Some(IN_TIME),
            _ => None,
        }
    }

    /// Notes that a question for a checksum failed.
    pub(crate) fn note_failed_head(&self, was_refused: bool) {
        let failed = if was_refused { FailedHead::Refused } else { FailedHead::Silent(Instant::now()) };
        *lock(&self.own().failed_head) = Some(failed);
    }

    /// Sends a GET, and hands over its answer if it is a success.
    pub(crate) fn get(
        &self,
        target: &Target,
        headers: &[(HeaderName, String)],
        waiting: &Waiting<'_>,
    ) -> Result<Answer, Fault> {
        let answer = self.ask(target, headers, waiting)?;
        match answer.status {
            200..=299 => Ok(answer),
            _ => Err(self.refusal(answer, waiting)),
        }
    }

    /// Sends a GET for a range, and asks Azure for the checksum of a short one, unless the server has refused that.
    pub(crate) fn get_range(
        &self,
        target: &Target,
        headers: &[(HeaderName, String)],
        range: &Range<u64>,
        waiting: &Waiting<'_>,
    ) -> Result<Answer, Fault> {
        let refused = &self.own().refused_range_checksums;
        let is_short = range.end - range.start <= MAX_CRC_RANGE_BYTES;
        if self.kind == Kind::Azure && self.compares() && is_short && !refused.are_meant() {
            let asking = [headers, &[(ASKS_RANGE_CRC, "true".to_owned())]].concat();
            let problem = match self.get(target, &asking, waiting) {
                Err(Fault::Final(problem)) if may_refuse_range_checksums(&problem) => problem,
                Err(fault) => return Err(fault),
                Ok(answer) => {
                    refused.forget();
                    return Ok(answer);
                }
            };
            // Whether that was the reason shows without it.
            let answer = self.get(target, headers, waiting)?;
            refused.note(&problem);
            return Ok(answer);
        }
        self.get(target, headers, waiting)
    }

    /// Sends a GET, and hands over its answer. One that is slow to come at the end of a load is asked for on a second
    /// connection too, and the first answer is taken.
    pub(crate) fn ask(
        &self,
        target: &Target,
        headers: &[(HeaderName, String)],
        waiting: &Waiting<'_>,
    ) -> Result<Answer, Fault> {
        let request = self.request(Method::GET, target, headers, 0, waiting)?;
        let begun = Instant::now();
        let connection = self.connection(waiting)?;
        let was_reused = connection.is_reused;
        let answer = Pending::send(connection, &request, &[], waiting)
            .and_then(|pending| self.first_of(pending, &request, waiting));
        match answer {
            Ok((answer, sent)) => {
                self.pace().note_first_byte(sent.elapsed());
                if was_reused && !answer.was_reused() {
                    // The second request was faster: the connection of the first may be dead, and those kept as long.
                    self.own().idle.forget(begun);
                }
                Ok(answer)
            }
            Err(error) => {
                if was_reused && error.kind() == io::ErrorKind::TimedOut {
                    // The network has forgotten it, and those that were kept as long.
                    self.own().idle.forget(begun);
                }
                Err(self.fault(error, was_reused, 0, waiting))
            }
        }
    }

    /// Sends a HEAD, and hands over its answer if it is a success.
    pub(crate) fn ask_head(
        &self,
        target: &Target,
        headers: &[(HeaderName, String)],
        waiting: &Waiting<'_>,
    ) -> Result<HeaderMap, Fault> {
        let request = self.request(Method::HEAD, target, headers, 0, waiting)?;
        let connection = self.connection(waiting)?;
        let was_reused = connection.is_reused;
        let answer = send(connection, &request, &[], waiting)
            .map_err(|error| self.fault(error, was_reused, 0, waiting))?;
        match answer.status {
            200..=299 => {
                let headers = answer.headers.clone();
                self.body(answer, 0, waiting)?;
                Ok(headers)
            }
            _ => Err(self.refusal(answer, waiting)),
        }
    }

    /// Sends a request with a body, and hands over its answer if it is a success. Waits in one way until the server may have the
    /// whole request, and in another one from then on.
    pub(crate) fn send(
        &self,
        (method, target): (Method, &Target),
        headers: &[(HeaderName, String)],
        body: &[&[u8]],
        sent: &mut Sent,
        (connecting, waiting): (&Waiting<'_>, &Waiting<'_>),
    ) -> Result<Answer, Fault> {
        let len = body.iter().map(|piece| piece.len() as u64).sum();
        let request = self.request(method, target, headers, len, connecting)?;
        let connection = self.connection(connecting)?;
        let was_reused = connection.is_reused;
        let answer =
            send_pieces(connection, &request, body, sent, (connecting, waiting)).map_err(|error| {
                self.fault(error, was_reused, 0, if sent.may_be_whole { waiting } else { connecting })
            })?;
        match answer.status {
            200..=299 => Ok(answer),
            _ => Err(self.refusal(answer, waiting)),
        }
    }

    /// The answer to a request, and when that was sent: of the request itself, or of a second one.
    fn first_of(
        &self,
        mut first: Pending,
        request: &Parts,
        waiting: &Waiting<'_>,
    ) -> io::Result<(Answer, Instant)> {
        let hedge_after = self.pace().hedge_after().filter(|after| *after < waiting.patience);
        let (mut permit, mut second) = (None, None::<Pending>);
        loop {
            if permit.is_none() && hedge_after.is_some_and(|after| first.sent().elapsed() >= after) {
                permit = self.pace().hedge();
                second = permit.as_ref().and_then(|_| self.second(request, waiting));
            }
            let Some(other) = second.take() else {
                let sent = first.sent();
                match first.advance(waiting)? {
                    Ok(answer) => return Ok((answer, sent)),
                    Err(pending) => first = pending,
                }
                continue;
            };
            if waiting.is_stopped() {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let [has_first, has_second] = have_input(first.connection(), other.connection());
            if has_second || other.has_begun() {
                let sent = other.sent();
                match other.advance(waiting) {
                    Ok(Ok(answer)) => return Ok((answer, sent)),
                    Ok(Err(pending)) => second = Some(pending),
                    // The first one may still come.
                    Err(_) => {}
                }
            } else {
                second = Some(other);
            }
            if has_first || first.has_begun() || first.sent().elapsed() >= waiting.patience {
                let sent = first.sent();
                match (first.advance(waiting), second.take()) {
                    (Ok(Ok(answer)), _) => return Ok((answer, sent)),
                    (Ok(Err(pending)), other) => (first, second) = (pending, other),
                    // The second one takes its place.
                    (Err(_), Some(other)) => first = other,
                    (Err(error), None) => return Err(error),
                }
            }
        }
    }

    /// A second request on a connection of its own, if that can be had soon.
    fn second(&self, request: &Parts, waiting: &Waiting<'_>) -> Option<Pending> {
        let connection =
            Connection::open(&self.origin, &self.own().network, HEDGE_CONNECT, waiting.ends()).ok()?;
        // A handshake too: meanwhile the first one is not looked at.
        Pending::send(connection, request, &[], &Waiting { patience: HEDGE_CONNECT, ..*waiting }).ok()
    }

    /// The whole body of an answer.
    pub(crate) fn body(&self, answer: Answer, most: usize, waiting: &Waiting<'_>) -> Result<Vec<u8>, Fault> {
        let was_reused = answer.was_reused();
        let (body, connection) =
            answer.into_body(most, waiting).map_err(|error| self.fault(error, was_reused, 0, waiting))?;
        self.keep(connection);
        Ok(body)
    }

    /// Keeps a connection for the next request.
    pub(crate) fn keep(&self, connection: Option<Connection>) {
        if let Some(connection) = connection {
            self.own().idle.keep(connection);
        }
    }

    /// What an error of a connection means, after so many bytes of a body.
    pub(crate) fn fault(
        &self,
        error: io::Error,
        was_reused: bool,
        bytes: usize,
        waiting: &Waiting<'_>,
    ) -> Fault {
        if waiting.is_stopped() {
            return Fault::Final(Problem::Stopped);
        }
        let inner = error.get_ref();
        let tls = inner.and_then(|inner| inner.downcast_ref::<rustls::Error>());
        if let Some(tls @ (rustls::Error::InvalidCertificate(_) | rustls::Error::AlertReceived(_))) = tls {
            return Fault::Final(Problem::Tls(format!(
                "{tls}; a certificate of your own is given by SSL_CERT_FILE"
            )));
        }
        let failure = match error.kind() {
            io::ErrorKind::TimedOut if inner.is_some_and(|inner| inner.is::<TooSlow>()) => Failure::Slow,
            io::ErrorKind::TimedOut => Failure::Silent,
            // A server that has never spoken HTTP may be another one than was meant.
            io::ErrorKind::InvalidData if !self.pace().is_known() => Failure::NoHttp,
            _ => Failure::Broken,
        };
        let again = Again::of(failure, format!("{}: {error}", self.origin.url()));
        Fault::Again(Again { was_reused, bytes, ..again })
    }

    /// Who signs requests, if they are signed.
    pub(crate) fn identity(&self) -> Result<Option<Arc<Identity>>, Problem> {
        lock(&self.own().identity).identity.clone().map_err(Problem::Invalid)
    }

    /// Reads the keys of the shared AWS files again, if these were written since. Returns whether a request whose keys were refused
    /// may have others now. Files that are only half written may name no keys, or lead to another caller: nothing of them is taken.
    fn renews_keys(&self, ends: Ends<'_>) -> bool {
        if !self.has_keys_of_files() {
            return false;
        }
        let files = FilesState::now(variable);
        let (refused, looked_at) = {
            let known = lock(&self.own().identity);
            if known.files == files {
                return known.renewed.is_some_and(|renewed| renewed.elapsed() < RENEWED_FOR);
            }
            (known.identity.clone(), known.files.clone())
        };
        // Not while others wait: a service may be asked.
        let new = Known::of(self, files, Some(Instant::now()));
        let (Ok(Some(asked)), Ok(Some(refused))) = (&new.identity, &refused) else { return false };
        let is_same = asked.giver(ends).is_ok_and(|giver| giver == refused.last_giver());
        let mut known = lock(&self.own().identity);
        if known.files != looked_at {
            // Another request has taken later ones meanwhile.
            return true;
        }
        if is_same {
            *known = new;
            // Those were asked with the keys of before.
            *lock(&self.own().failed_head) = None;
        }
        is_same
    }

    fn has_keys_of_files(&self) -> bool {
        self.kind == Kind::S3 && !self.options.anonymous && self.options.access_key.is_none()
    }

    /// Whether the shared AWS files were written since its keys were read, so that a refusal may be one of old keys.
    pub(crate) fn has_other_files(&self) -> bool {
        self.has_keys_of_files() && lock(&self.own().identity).files != FilesState::now(variable)
    }

    /// When its keys were read again.
    pub(crate) fn renewed(&self) -> Option<Instant> {
        lock(&self.own().identity).renewed
    }

    /// Sends a request without credentials on a new connection, and hands over the answer, which may be a refusal.
    pub(crate) fn ask_anonymously(&self, target: &Target, waiting: &Waiting<'_>) -> Result<Answer, Fault> {
        let uri = format!("{}{}", self.origin.url(), target.0);
        let agent = concat!("hoistway/", env!("CARGO_PKG_VERSION"));
        let request = Request::get(uri).header(RANGE, "bytes=0-0").header(USER_AGENT, agent).body(());
        let invalid = |_| Problem::Invalid("the URL has a character that no request may have".into());
        let parts = request.map_err(invalid)?.into_parts().0;
        let connection = self.connection(&Waiting { is_new: true, ..*waiting })?;
        send(connection, &parts, &[], waiting).map_err(|error| self.fault(error, false, 0, waiting))
    }

    fn request(
        &self,
        method: Method,
        target: &Target,
        headers: &[(HeaderName, String)],
        body_len: u64,
        waiting: &Waiting<'_>,
    ) -> Result<Parts, Problem> {
        let invalid = |_| {
            Problem::Invalid(
                "the URL, or the ETag of an earlier answer, has a character that no request may have".into(),
            )
        };
        let uri = format!("{}{}", self.origin.url(), target.0);
        let request = Request::builder().method(method).uri(uri).body(()).map_err(invalid)?;
        let mut parts = request.into_parts().0;
        for (name, value) in headers {
            let value = HeaderValue::from_str(value).map_err(|error| invalid(error.into()))?;
            parts.headers.insert(name, value);
        }
        if self.kind == Kind::Azure {
            parts.headers.insert("x-ms-version", HeaderValue::from_static(AZURE_VERSION));
            // It is signed.
            if body_len > 0 {
                parts.headers.insert(CONTENT_LENGTH, body_len.into());
            }
        }
        if self.options.requester_pays {
            parts.headers.insert("x-amz-request-payer", HeaderValue::from_static("requester"));
        }
        if let Some(identity) = self.identity()? {
            identity.sign(&mut parts, waiting.ends())?;
        }
        // They need no signature.
        parts.headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        let agent = concat!("hoistway/", env!("CARGO_PKG_VERSION"));
        parts.headers.insert(USER_AGENT, HeaderValue::from_static(agent));
        Ok(parts)
    }

    fn connection(&self, waiting: &Waiting<'_>) -> Result<Connection, Fault> {
        if !waiting.is_new
            && let Some(connection) = self.own().idle.take()
        {
            return Ok(connection);
        }
        let patience = CONNECT.min(waiting.patience);
        Connection::open(&self.origin, &self.own().network, patience, waiting.ends()).map_err(|error| {
            match error.kind() {
                _ if waiting.is_stopped() => Fault::Final(Problem::Stopped),
                io::ErrorKind::InvalidData => Fault::Final(Problem::Tls(error.to_string())),
                io::ErrorKind::InvalidInput => Fault::Final(Problem::Invalid(error.to_string())),
                _ => {
                    let why = format!("{} cannot be reached: {error}", self.origin.url());
                    Fault::Again(Again::of(Failure::Unreached, why))
                }
            }
        })
    }

    /// What an answer means that is no success.
    pub(crate) fn refusal(&self, answer: Answer, waiting: &Waiting<'_>) -> Fault {
        let (status, headers) = (answer.status, answer.headers.clone());
        let body = match answer.into_body(MAX_ERROR_BYTES, waiting) {
            Ok((body, connection)) => {
                self.keep(connection);
                body
            }
            Err(_) => Vec::new(),
        };
        let code = error_code(&body);
        let other_region = region::said_by(header(&headers, "x-amz-bucket-region"), code.as_deref(), &body)
            .filter(|said| self.kind == Kind::S3 && said != location::region(&self.options));
        let mut said = format!("status {status}");
        // The hub has its codes there.
        let code = code.or_else(|| header(&headers, "x-error-code").map(printable));
        if let Some(code) = &code {
            said = format!("{said}, {code}");
        }
        if let Some(to) = header(&headers, LOCATION.as_str()).filter(|_| matches!(status, 300..=399)) {
            said = format!("{said}, to {}", printable(&redirect::redirect_target(to)));
        }
        let is_passing = code.as_deref() == Some("RequestTimeout");
        if let (Some(region), 300..=400, false) = (&other_region, status, is_passing) {
            return Fault::Final(Problem::OtherRegion { region: region.clone(), said });
        }
        if let Some(region) = other_region.filter(|_| status != 404) {
            said = format!("{said}; the bucket is in region {region}");
        }
        let may_be_of_old_keys = match &code {
            Some(code) => OLD_KEYS.contains(&&**code),
            // The answer to a HEAD has none.
            None => matches!(status, 400 | 401 | 403),
        };
        if may_be_of_old_keys && self.renews_keys(waiting.ends()) {
            return Fault::Again(Again::of(Failure::Refused, format!("the server said {said}")));
        }
        // A program or a service may have been waited for.
        if may_be_of_old_keys && waiting.is_stopped() {
            return Fault::Final(Problem::Stopped);
        }
        let is_busy = status == 429 || code.as_deref() == Some("SlowDown");
        match status {
            // That of Azure's emulator, whose status is 500.
            _ if code.as_deref() == Some(UNSUPPORTED) => Fault::Final(Problem::Refused { status, said }),
            // What a server does not implement it does not implement later either.
            _ if is_busy || is_passing || matches!(status, 408 | 500 | 502..) => {
                let failure = match status {
                    _ if is_busy => Failure::Busy(retry_after(&headers)),
                    503 => Failure::Unavailable(retry_after(&headers)),
                    _ => Failure::Refused,
                };
                let why = format!("the server said {said}");
                Fault::Again(Again::of(failure, why))
            }
            300..=399 => Fault::Final(Problem::Redirected { said }),
            401 | 403 => Fault::Final(Problem::Denied { said }),
            404 => Fault::Final(Problem::NotFound { said }),
            _ => Fault::Final(Problem::Refused { status, said }),
        }
    }
}

/// Whether a server may have refused a request for the checksum of a range: servers have different answers for that.
fn may_refuse_range_checksums(problem: &Problem) -> bool {
    match problem {
        Problem::Refused { status: 501, .. } => true,
        Problem::Refused { status: 400, said } => !said.contains("Range"),
        Problem::Refused { said, .. } => said.ends_with(UNSUPPORTED),
        _ => false,
    }
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = header(headers, RETRY_AFTER.as_str())?.trim();
    match text.parse() {
        Ok(seconds) => Some(Duration::from_secs(seconds)),
        Err(_) => {
            let date = Timestamp::parse_rfc2822(text).ok()?.as_system_time();
            Some(date.duration_since(SystemTime::now()).unwrap_or_default())
        }
    }
}

/// The code of an error of S3, Google and Azure. Its message may hold what was signed.
pub(crate) fn error_code(body: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(body).ok()?;
    let (_, rest) = text.split_once("<Code>")?;
    let (code, _) = rest.split_once("</Code>")?;
    let is_code = (1..=64).contains(&code.len()) && code.bytes().all(|byte| byte.is_ascii_alphanumeric());
    is_code.then(|| code.to_owned())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::header::HeaderValue;

    #[test]
    fn a_server_that_never_spoke_http_may_be_a_wrong_one() {
        let origin = Origin { is_tls: false, host: "no.http.example".into(), port: 80 };
        let client = Client::of_redirect(origin, false);
        let (stop, mean_speed) =
            (std::sync::atomic::AtomicBool::new(false), crate::policy::MeanSpeed::default());
        let patience = Duration::from_secs(1);
        let waiting = Waiting {
            stop: &stop,
            patience,
            is_new: false,
            mean_speed: &mean_speed,
            end: crate::http::End::default(),
        };
        let failure = || match client.fault(io::ErrorKind::InvalidData.into(), false, 0, &waiting) {
            Fault::Again(again) => again.failure,
            fault => panic!("{fault:?}"),
        };
        assert_eq!(failure(), Failure::NoHttp);
        client.pace().note_first_byte(Duration::ZERO);
        assert_eq!(failure(), Failure::Broken);
    }

    #[test]
    fn a_time_to_wait_is_in_seconds_or_a_date() {
        let of = |text: &str| {
            retry_after(&[(RETRY_AFTER, HeaderValue::from_str(text).unwrap())].into_iter().collect())
        };
        assert_eq!(of(" 7 "), Some(Duration::from_secs(7)));
        assert_eq!(of("Sun, 06 Nov 1994 08:49:37 GMT"), Some(Duration::ZERO));
        assert!(of("Tue, 31 Dec 2999 23:59:59 GMT").is_some_and(|own| own > Duration::from_secs(1 << 30)));
        assert_eq!(of("soon"), None);
    }
}
