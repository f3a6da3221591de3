//! Uploads: an object is written by one request, or in parts, and the store shows it once it is complete.

use crate::{
    Problem, Result, StoreOptions,
    checksum::{Algorithm, Checksum},
    client::{Client, error_code},
    combine::Combiner,
    http::{Answer, Waiting},
    location::{Kind, Location, Target, encoded_value},
    object::variable,
    options::Checksums,
    pace::{Again, Fault},
    pin::header,
    policy::Failure,
    region::in_its_region,
};
use http::{
    HeaderMap, HeaderName, Method,
    header::{CONTENT_LENGTH, CONTENT_TYPE, ETAG},
};
use serde::Deserialize;
use std::{
    collections::BTreeMap,
    fmt::Write,
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// Bytes of a part, unless the object is so long that it would have too many. An object that is not longer is written by one
/// request.
const PART_BYTES: u64 = 8 << 20;
/// Most parts of an object, and the longest object: those of S3 and Google.
const MAX_PARTS: u64 = 10_000;
const MAX_OBJECT_BYTES: u64 = 5 << 40;
/// Lengths of longer parts are multiples of this.
const PART_STEP: u64 = 1 << 20;
/// Longest answer to a request that begins or completes an upload.
const MAX_ANSWER_BYTES: usize = 64 << 10;
/// Longest name that a store gives an upload, and longest ETag of a part.
const MAX_NAME_BYTES: usize = 4 << 10;
/// Most attempts to send a body.
const MAX_ATTEMPTS: u32 = 10;
/// How long the server may take to store what was sent, and to put the parts of an object together.
const STORED_IN: Duration = Duration::from_secs(30);
const COMPLETED_IN: Duration = Duration::from_secs(60);
/// How long an upload that failed is waited for to be aborted.
const ABORTED_IN: Duration = Duration::from_secs(10);

/// An object on its way to a store. The store shows it when it is complete, in place of what had its name. An upload that is
/// dropped before that is aborted.
///
/// ```no_run
/// use std::sync::atomic::AtomicBool;
/// use hoistway_objects::{StoreOptions, Upload};
/// let (bytes, stop) = (vec![7; 20 << 20], AtomicBool::new(false));
/// let url = "s3://models/llama/model.safetensors";
/// let upload = Upload::begin(url, bytes.len() as u64, &StoreOptions::default(), &stop)?;
/// for number in 0..upload.parts() {
///     let part = upload.range(number);
///     upload.send(number, &[&bytes[part.start as usize..part.end as usize]], &stop)?;
/// }
/// upload.complete(&stop)?;
/// # Ok::<(), hoistway_objects::Error>(())
/// ```
#[derive(Debug)]
pub struct Upload {
    given_url: String,
    /// Without secrets.
    url: String,
    options: StoreOptions,
    len: u64,
    part_bytes: u64,
    /// What the store calls the upload, and where; `None` of an object that one request writes.
    open: Option<Open>,
    sent: Mutex<BTreeMap<u64, Part>>,
    /// Attempts that were repeated.
    repeated: AtomicU64,
    is_over: AtomicBool,
}

/// An upload that the store knows.
#[derive(Debug)]
struct Open {
    client: Arc<Client>,
    target: Target,
    id: String,
    /// What parts are compared by. `None` if the store refused checksums, or the caller wants none.
    algorithm: Option<Algorithm>,
    /// Whether the store may have begun another one, whose name did not arrive.
    has_stray: bool,
}

/// A part that the store has.
#[derive(Clone, Debug)]
struct Part {
    etag: String,
    len: u64,
    sum: Option<u64>,
    /// Whether the store said the same checksum.
    was_compared: bool,
}

/// What a complete upload says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Uploaded {
    /// The checksum that the store compared all bytes by, such as `CRC-64/NVME`; or why it compared none.
    pub compared: Result<&'static str, &'static str>,
    /// Attempts that failed and were repeated.
    pub repeated: u64,
    /// Whether the answer to a request that begins an upload was lost: the store may hold that upload, without parts.
    pub has_stray: bool,
}

/// What the store calls an upload.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Created {
    upload_id: String,
}

impl Upload {
    /// Fails for URLs of what is only read, with what can be written. Asks no server.
    ///
    /// # Errors
    /// [`Problem::Invalid`].
    pub fn check(url: &str, options: &StoreOptions) -> Result<()> {
        for_writing(url, options).map(drop).map_err(|problem| problem.of(&crate::shown(url), None))
    }

    /// Begins to write an object of so many bytes. Ends soon after `stop` is set.
    ///
    /// # Errors
    /// [`Problem::Invalid`] if nothing can be written there; [`Problem::Denied`], [`Problem::Credentials`],
    /// [`Problem::Unreliable`] and others.
    pub fn begin(url: &str, len: u64, options: &StoreOptions, stop: &AtomicBool) -> Result<Self> {
        let shown = crate::shown(url);
        let begun = Self::begun(url, &shown, len, options, stop);
        begun.map_err(|problem| problem.of(&shown, None))
    }

    fn begun(
        url: &str,
        shown: &str,
        len: u64,
        options: &StoreOptions,
        stop: &AtomicBool,
    ) -> Result<Self, Problem> {
        let options = for_writing(url, options)?;
        let location = Location::parse(url, &options)?;
        let key = location.bucket.map(|bucket| bucket.key).unwrap_or_default();
        if key.is_empty() || key.ends_with('/') {
            return Err(Problem::Invalid("the URL is that of a folder; give the object a name".into()));
        }
        if len > MAX_OBJECT_BYTES {
            return Err(Problem::Invalid("no object of a store is longer than 5 TiB; save shards".into()));
        }
        let part_bytes = len.div_ceil(MAX_PARTS).next_multiple_of(PART_STEP).max(PART_BYTES);
        let open = match len > part_bytes {
            false => None,
            true => {
                let create = |location: Location, options: &StoreOptions| create(&location, options, stop);
                Some(in_its_region(url, &options, create)?.0)
            }
        };
        Ok(Self {
            given_url: url.to_owned(),
            url: shown.to_owned(),
            options,
            len,
            part_bytes,
            open,
            sent: Mutex::default(),
            repeated: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
        })
    }

    /// Returns the URL without secrets.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns how many parts there are: 1 of an object that one request writes.
    pub fn parts(&self) -> u64 {
        self.len.div_ceil(self.part_bytes).max(1)
    }

    /// Returns the bytes of all parts but the last.
    pub fn part_bytes(&self) -> u64 {
        self.part_bytes
    }

    /// Returns whether one request writes the object: then the store shows it as soon as its only part is sent.
    pub fn is_one_request(&self) -> bool {
        self.open.is_none()
    }

    /// Returns the bytes of a part, by its number from 0 on.
    pub fn range(&self, number: u64) -> Range<u64> {
        let start = number.saturating_mul(self.part_bytes).min(self.len);
        start..start.saturating_add(self.part_bytes).min(self.len)
    }

    /// Sends a part, whose bytes lie in these pieces of memory. Tries again what may succeed. Any number of threads may send
    /// parts, in any order. Ends soon after `stop` is set.
    ///
    /// # Errors
    /// [`Problem::Invalid`] if the pieces have not the length of the part; [`Problem::Refused`], [`Problem::Damaged`] if the
    /// store got other bytes, [`Problem::Unreliable`] and others.
    pub fn send(&self, number: u64, pieces: &[&[u8]], stop: &AtomicBool) -> Result<()> {
        let range = self.range(number);
        let failed = |problem: Problem| problem.of(&self.url, Some(range.clone()));
        let len: u64 = pieces.iter().map(|piece| piece.len() as u64).sum();
        if number >= self.parts() || len != range.end - range.start {
            return Err(failed(Problem::Invalid("the bytes are not those of a part".into())));
        }
        let part = match &self.open {
            Some(open) => {
                let id = encoded_value(&open.id);
                let target = Target(format!("{}?partNumber={}&uploadId={id}", open.target.0, number + 1));
                self.put(&open.client, &target, pieces, open.algorithm, stop)
            }
            None => {
                let put = |location: Location, options: &StoreOptions| {
                    let client = Client::of(&location, options);
                    let algorithm = algorithm_of(location.kind, options);
                    self.put(&client, &location.target, pieces, algorithm, stop)
                };
                in_its_region(&self.given_url, &self.options, put).map(|(part, _)| part)
            }
        };
        lock(&self.sent).insert(number, part.map_err(failed)?);
        Ok(())
    }

    /// Has the store show the object: all parts were sent. Ends soon after `stop` is set, unless the store has been asked.
    ///
    /// # Errors
    /// Those of [`Upload::send`]. The object that had the name is still there, unless the error says that this is not known.
    pub fn complete(&self, stop: &AtomicBool) -> Result<Uploaded> {
        let failed = |problem: Problem| problem.of(&self.url, None);
        let parts: Vec<Part> = lock(&self.sent).values().cloned().collect();
        if parts.len() as u64 != self.parts() {
            return Err(failed(Problem::Invalid("not all of its parts were sent".into())));
        }
        if self.open.is_some() && stop.load(Ordering::Relaxed) {
            return Err(failed(Problem::Stopped));
        }
        let by_parts = parts.iter().all(|part| part.was_compared);
        let compared = match &self.open {
            None => by_parts,
            Some(open) => self.completed(open, &parts, stop).map_err(failed)? || by_parts,
        };
        self.is_over.store(true, Ordering::Relaxed);
        let kind = Kind::of(&self.given_url).map_err(failed)?;
        let algorithm = match &self.open {
            Some(open) => open.algorithm,
            None => algorithm_of(kind, &self.options),
        };
        let compared = match (algorithm, compared) {
            (Some(algorithm), true) => Ok(algorithm.name()),
            (Some(_), false) => Err("the store did not say that it compared the bytes with their checksums"),
            (None, _) if self.options.checksums == Checksums::Off => Err("the store option checksums is off"),
            (None, _) => Err("the store refuses checksums of uploads"),
        };
        let has_stray = self.open.as_ref().is_some_and(|open| open.has_stray);
        Ok(Uploaded { compared, repeated: self.repeated.load(Ordering::Relaxed), has_stray })
    }

    /// Has the store forget the parts that were sent. No thread may be sending a part. Takes 10 s at most.
    ///
    /// # Errors
    /// [`Problem::LeftOpen`] if the store does not do it.
    pub fn abort(&self) -> Result<()> {
        let Some(open) = self.open.as_ref().filter(|_| !self.is_over.swap(true, Ordering::Relaxed)) else {
            return Ok(());
        };
        let target = Target(format!("{}?uploadId={}", open.target.0, encoded_value(&open.id)));
        let until = Instant::now() + ABORTED_IN;
        let never = AtomicBool::new(false);
        let aborted = open.client.pace().persist(&never, |waiting| {
            let left = until.saturating_duration_since(Instant::now());
            let waiting = Waiting { patience: waiting.patience.min(left), ..*waiting };
            let late = |fault| match fault {
                Fault::Again(Again { why, .. }) if Instant::now() >= until => {
                    Fault::Final(Problem::Unreliable { attempts: 1, last: why })
                }
                fault => fault,
            };
            let answer = open.client.send((Method::DELETE, &target), &[], &[], &mut 0, &waiting);
            let answer = answer.map_err(late)?;
            open.client.body(answer, MAX_ANSWER_BYTES, &waiting).map_err(late)
        });
        match aborted {
            Ok(_) | Err(Problem::NotFound { .. }) => Ok(()),
            Err(problem) => Err(Problem::LeftOpen(problem.to_string()).of(&self.url, None)),
        }
    }

    /// Writes a part, or a whole object.
    fn put(
        &self,
        client: &Arc<Client>,
        target: &Target,
        pieces: &[&[u8]],
        algorithm: Option<Algorithm>,
        stop: &AtomicBool,
    ) -> Result<Part, Problem> {
        let len = pieces.iter().map(|piece| piece.len() as u64).sum();
        let sum = algorithm.map(|algorithm| {
            let mut digest = crc_fast::Digest::new(algorithm.crc());
            pieces.iter().for_each(|piece| digest.update(piece));
            (algorithm, digest.finalize())
        });
        let headers: Vec<_> = sum.iter().map(|(algorithm, sum)| checksum_header(*algorithm, *sum)).collect();
        let mut attempts = 0;
        let part = client.pace().persist_sending(stop, |waiting| {
            attempts += 1;
            let begun = Instant::now();
            let waiting = Waiting { patience: STORED_IN, ..*waiting };
            let mut sent = 0;
            let answer = client.send((Method::PUT, target), &headers, pieces, &mut sent, &waiting);
            let sent_for = if sent > 0 { begun.elapsed() } else { Duration::ZERO };
            let part = answer.and_then(|answer| part_of(client, answer, len, sum, &waiting));
            let part = part.map_err(refused_bytes).map_err(|fault| match fault {
                Fault::Again(Again { why, .. }) if attempts >= MAX_ATTEMPTS => {
                    Fault::Final(Problem::Unreliable { attempts, last: why })
                }
                fault => fault,
            });
            (part, sent_for)
        });
        self.repeated.fetch_add(u64::from(attempts.saturating_sub(1)), Ordering::Relaxed);
        part.map_err(of_a_save)
    }

    /// Completes the upload. Returns whether the store compared the whole object with its checksum.
    fn completed(&self, open: &Open, parts: &[Part], stop: &AtomicBool) -> Result<bool, Problem> {
        let id = encoded_value(&open.id);
        let target = Target(format!("{}?uploadId={id}", open.target.0));
        let sum = whole_sum(open.algorithm, parts);
        let of_s3 = sum.filter(|(algorithm, _)| *algorithm == Algorithm::Crc64Nvme);
        let text = parts_text(open.algorithm, parts);
        let mut headers = vec![(CONTENT_TYPE, "application/xml".to_owned())];
        if let Some((algorithm, sum)) = of_s3 {
            headers.push(checksum_header(algorithm, sum));
            headers.push((CHECKSUM_TYPE, "FULL_OBJECT".to_owned()));
        }
        // Once it was asked, the store may have done it: the answer is waited for.
        let never = AtomicBool::new(false);
        let (mut attempts, mut is_in_doubt) = (0, false);
        let done = open.client.pace().persist(stop, |waiting| {
            attempts += 1;
            let connecting = waiting;
            let waiting = Waiting { patience: COMPLETED_IN, stop: &never, ..*waiting };
            let (what, waits) = ((Method::POST, &target), (connecting, &waiting));
            let answer = open.client.send_whole(what, &headers, &[text.as_bytes()], &mut 0, waits);
            let done = answer.and_then(|answer| {
                let headers = answer.headers.clone();
                let body = open.client.body(answer, MAX_ANSWER_BYTES, &waiting)?;
                completion(&headers, &body, sum)
            });
            // A store that says an error may have done it all the same.
            done.inspect_err(|fault| {
                is_in_doubt |= is_unanswered(fault)
                    || matches!(fault, Fault::Again(Again { failure: Failure::Refused, .. }));
            })
        });
        self.repeated.fetch_add(attempts.max(1) - 1, Ordering::Relaxed);
        match done {
            // An attempt whose answer was lost may have completed it: then the store does not know the upload any more.
            Err(problem @ (Problem::NotFound { .. } | Problem::Unreliable { .. } | Problem::Stopped))
                if is_in_doubt =>
            {
                match self.is_there(open, sum) {
                    true => Ok(true),
                    false => Err(Problem::Doubtful(of_a_save(problem).to_string())),
                }
            }
            done => done.map_err(of_a_save),
        }
    }

    /// Whether the store has an object of this length and checksum under the name.
    fn is_there(&self, open: &Open, sum: Option<(Algorithm, u64)>) -> bool {
        let Some((algorithm, sum)) = sum else { return false };
        let until = Instant::now() + ABORTED_IN;
        let never = AtomicBool::new(false);
        let asks = [(HeaderName::from_static("x-amz-checksum-mode"), "ENABLED".to_owned())];
        let asks = if algorithm == Algorithm::Crc64Nvme { &asks[..] } else { &[] };
        let headers = open.client.pace().persist(&never, |waiting| {
            let left = until.saturating_duration_since(Instant::now());
            let waiting = Waiting { patience: waiting.patience.min(left), ..*waiting };
            open.client.ask_head(&open.target, asks, &waiting).map_err(|fault| match fault {
                Fault::Again(Again { why, .. }) if Instant::now() >= until => {
                    Fault::Final(Problem::Unreliable { attempts: 1, last: why })
                }
                fault => fault,
            })
        });
        let Ok(headers) = headers else { return false };
        let len = header(&headers, CONTENT_LENGTH.as_str()).and_then(|len| len.parse().ok());
        len == Some(self.len) && said_sum(algorithm, &headers) == Some(sum)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if let Err(error) = self.abort() {
            tracing::warn!("{error}");
        }
    }
}

/// Removes an object, if it is there. Ends soon after `stop` is set.
///
/// # Errors
/// Those of [`Upload::begin`].
pub fn remove(url: &str, options: &StoreOptions, stop: &AtomicBool) -> Result<()> {
    let failed = |problem: Problem| problem.of(&crate::shown(url), None);
    let options = for_writing(url, options).map_err(failed)?;
    let removed = in_its_region(url, &options, |location, options| {
        let client = Client::of(&location, options);
        client.pace().persist(stop, |waiting| {
            let target = (Method::DELETE, &location.target);
            let answer = client.send(target, &[], &[], &mut 0, waiting)?;
            client.body(answer, MAX_ANSWER_BYTES, waiting)
        })
    });
    match removed {
        Ok(_) | Err(Problem::NotFound { .. }) => Ok(()),
        Err(problem) => Err(failed(of_a_save(problem))),
    }
}

/// The header that says what a checksum of S3 is of.
const CHECKSUM_TYPE: HeaderName = HeaderName::from_static("x-amz-checksum-type");
/// The header with the checksums of Google.
const GOOGLE_HASH: HeaderName = HeaderName::from_static("x-goog-hash");

/// The options for a URL that is written.
fn for_writing(url: &str, options: &StoreOptions) -> Result<StoreOptions, Problem> {
    let other = "give a path of this machine, or an s3:// or gs:// URL";
    let kind = match Kind::of(url) {
        Ok(kind @ (Kind::S3 | Kind::Google)) => kind,
        Ok(Kind::Azure) => {
            return Err(Problem::Invalid(format!("saving to Azure is not there yet; {other}")));
        }
        Ok(Kind::Hub) => {
            let upload = "to upload a model to the hub, save it to a folder and run `hf upload`";
            return Err(Problem::Invalid(format!("the hub is only read; {other}; {upload}")));
        }
        Ok(Kind::Web) => return Err(Problem::Invalid(format!("web servers are only read; {other}"))),
        Err(_) => return Err(Problem::Invalid(format!("there is no such scheme; {other}"))),
    };
    options.resolved(kind, variable).map(|resolved| StoreOptions { writes: true, ..resolved })
}

/// What the bytes for a store are compared by.
fn algorithm_of(kind: Kind, options: &StoreOptions) -> Option<Algorithm> {
    match kind {
        _ if options.checksums == Checksums::Off => None,
        Kind::S3 => Some(Algorithm::Crc64Nvme),
        Kind::Google => Some(Algorithm::Crc32c),
        Kind::Azure | Kind::Hub | Kind::Web => None,
    }
}

/// The header by which a request says the checksum of its body.
fn checksum_header(algorithm: Algorithm, sum: u64) -> (HeaderName, String) {
    match algorithm {
        Algorithm::Crc32c => (GOOGLE_HASH, format!("crc32c={}", algorithm.text(sum))),
        _ => (HeaderName::from_static(algorithm.header()), algorithm.text(sum)),
    }
}

/// The checksum that an answer says.
fn said_sum(algorithm: Algorithm, headers: &HeaderMap) -> Option<u64> {
    match algorithm {
        Algorithm::Crc32c => Checksum::of_google(headers).ok().map(|own| own.value),
        _ => algorithm.parse(header(headers, algorithm.header())?),
    }
}

/// Opens an upload.
fn create(location: &Location, options: &StoreOptions, stop: &AtomicBool) -> Result<Open, Problem> {
    let client = Client::of(location, options);
    let algorithm = algorithm_of(location.kind, options);
    let created = match created(&client, &location.target, algorithm, stop) {
        // Some stores know no such checksums. If the request itself is wrong, this one is refused as well.
        Err(Problem::Refused { status: 400 | 501, .. }) if algorithm == Some(Algorithm::Crc64Nvme) => {
            created(&client, &location.target, None, stop).map(|created| (created, None))
        }
        created => created.map(|created| (created, algorithm)),
    };
    let ((id, has_stray), algorithm) = created.map_err(of_a_save)?;
    Ok(Open { client, target: location.target.clone(), id, algorithm, has_stray })
}

/// The name of a new upload, and whether an answer with another one may have been lost.
fn created(
    client: &Arc<Client>,
    target: &Target,
    algorithm: Option<Algorithm>,
    stop: &AtomicBool,
) -> Result<(String, bool), Problem> {
    let headers = match algorithm {
        Some(Algorithm::Crc64Nvme) => vec![
            (HeaderName::from_static("x-amz-checksum-algorithm"), "CRC64NVME".to_owned()),
            (CHECKSUM_TYPE, "FULL_OBJECT".to_owned()),
        ],
        _ => Vec::new(),
    };
    let target = Target(format!("{}?uploads=", target.0));
    // An upload whose answer is not waited for would stay open.
    let never = AtomicBool::new(false);
    let mut has_stray = false;
    let created = client.pace().persist(stop, |waiting| {
        let connecting = waiting;
        let waiting = Waiting { stop: &never, ..*waiting };
        let waits = (connecting, &waiting);
        let answer = client.send_whole((Method::POST, &target), &headers, &[], &mut 0, waits);
        let body = answer.and_then(|answer| client.body(answer, MAX_ANSWER_BYTES, &waiting));
        let body = body.inspect_err(|fault| has_stray |= is_unanswered(fault))?;
        let wrong = || Problem::WrongAnswer("it does not name the upload that was asked for".into());
        let text = std::str::from_utf8(&body).map_err(|_| wrong())?;
        let created: Created = quick_xml::de::from_str(text).map_err(|_| wrong())?;
        let is_name = (1..=MAX_NAME_BYTES).contains(&created.upload_id.len());
        Ok(is_name.then_some(created.upload_id).ok_or_else(wrong)?)
    });
    match created {
        Err(Problem::Unreliable { attempts, last }) if has_stray => {
            Err(Problem::Unreliable { attempts, last: format!("{last}; an upload may have been left open") })
        }
        created => created.map(|id| (id, has_stray)),
    }
}

/// Whether a request was sent, and went without an answer: what it asked for may have been done.
fn is_unanswered(fault: &Fault) -> bool {
    let failure = match fault {
        Fault::Again(Again { failure, .. }) => *failure,
        Fault::Final(_) => return false,
    };
    matches!(failure, Failure::Broken | Failure::Silent | Failure::Slow)
}

/// What the answer to a part says.
fn part_of(
    client: &Arc<Client>,
    answer: Answer,
    len: u64,
    sum: Option<(Algorithm, u64)>,
    waiting: &Waiting<'_>,
) -> Result<Part, Fault> {
    let headers = answer.headers.clone();
    client.body(answer, MAX_ANSWER_BYTES, waiting)?;
    let etag = header(&headers, ETAG.as_str()).filter(|etag| (1..=MAX_NAME_BYTES).contains(&etag.len()));
    let etag = etag.ok_or_else(|| Problem::WrongAnswer("it has no ETag of the part".into()))?.to_owned();
    let said = sum.and_then(|(algorithm, _)| said_sum(algorithm, &headers));
    if let (Some(said), Some((algorithm, sum))) = (said, sum)
        && said != sum
    {
        return Err(Checksum { algorithm, value: said, parts: None }.mismatch(sum).into());
    }
    Ok(Part { etag, len, sum: sum.map(|(_, sum)| sum), was_compared: said.is_some() })
}

/// Has bytes sent again that the server refuses because they changed on the way.
fn refused_bytes(fault: Fault) -> Fault {
    match fault {
        Fault::Final(Problem::Refused { said, .. })
            if ["BadDigest", "XAmzContentChecksumMismatch", "InvalidDigest"]
                .iter()
                .any(|code| said.ends_with(code)) =>
        {
            let why = format!("the server said {said}: the bytes that it got have another checksum");
            Fault::Again(Again { failure: Failure::Refused, why, was_reused: false, bytes: 0 })
        }
        fault => fault,
    }
}

/// What an answer of status 200 to the request for completion says: S3 sends the head before it begins, so that the body may be
/// an error. Returns whether the store compared the whole object with its checksum.
fn completion(headers: &HeaderMap, body: &[u8], sum: Option<(Algorithm, u64)>) -> Result<bool, Fault> {
    let text = std::str::from_utf8(body).unwrap_or_default();
    if text.contains("<CompleteMultipartUploadResult") {
        let Some((algorithm, sum)) = sum else { return Ok(false) };
        let in_body = || {
            let (_, rest) = text.split_once("<ChecksumCRC64NVME>")?;
            algorithm.parse(rest.split_once("</ChecksumCRC64NVME>")?.0)
        };
        return match said_sum(algorithm, headers).or_else(in_body) {
            Some(said) if said != sum => {
                Err(Checksum { algorithm, value: said, parts: None }.mismatch(sum).into())
            }
            said => Ok(said.is_some()),
        };
    }
    let Some(code) = error_code(body) else {
        return Err(Problem::WrongAnswer("it does not say whether the object is complete".into()).into());
    };
    let said = format!("status 200, {code}");
    let passing = ["InternalError", "ServiceUnavailable", "SlowDown", "RequestTimeout", "OperationAborted"];
    if passing.contains(&code.as_str()) {
        let failure = if code == "SlowDown" { Failure::Busy(None) } else { Failure::Refused };
        let why = format!("the server said {said}");
        return Err(Fault::Again(Again { failure, why, was_reused: false, bytes: 0 }));
    }
    Err(Problem::Refused { status: 200, said }.into())
}

/// The checksum of the whole object, from those of its parts.
fn whole_sum(algorithm: Option<Algorithm>, parts: &[Part]) -> Option<(Algorithm, u64)> {
    let algorithm = algorithm?;
    let mut combiner = Combiner::new(algorithm);
    let mut sums = parts.iter().map(|part| Some((part.sum?, part.len)));
    let (first, _) = sums.next()??;
    let whole = sums.try_fold(first, |sum, part| {
        let (next, len) = part?;
        Some(combiner.combine(sum, next, len))
    });
    Some((algorithm, whole?))
}

/// The list of parts by which an object is completed.
fn parts_text(algorithm: Option<Algorithm>, parts: &[Part]) -> String {
    let mut text = "<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">".to_owned();
    for (number, part) in (1..).zip(parts) {
        let etag = quick_xml::escape::escape(&part.etag);
        let _ = write!(text, "<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag>");
        if let (Some(algorithm @ Algorithm::Crc64Nvme), Some(sum)) = (algorithm, part.sum) {
            let _ = write!(text, "<ChecksumCRC64NVME>{}</ChecksumCRC64NVME>", algorithm.text(sum));
        }
        text += "</Part>";
    }
    text + "</CompleteMultipartUpload>"
}

/// A problem in the words of a save.
fn of_a_save(problem: Problem) -> Problem {
    match problem {
        Problem::NotFound { said } => Problem::Refused { status: 404, said },
        problem => problem,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
