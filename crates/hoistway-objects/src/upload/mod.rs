//! Uploads: an object is written by one request, or in parts, and the store shows it once it is complete.

mod answers;
mod blocks;
mod multipart;
mod sums;

use crate::{
    Problem, Result, StoreOptions,
    checksum::Algorithm,
    client::Client,
    http::{Answer, End, Sent, Waiting},
    location::{Kind, Location, Target, encoded_value},
    object::variable,
    options::Checksums,
    pace::{Again, Fault, sleep},
    pin::header,
    refusals::Refusals,
    region::in_its_region,
    stop::{ANSWERED_BY, COMPARED_BY, ENDED_BY, Stop},
};
use answers::{OtherSum, in_doubt, is_unanswered, leaves_doubt, of_a_save, refused_bytes, wrong_sum};
use base64::{Engine, engine::general_purpose::STANDARD};
use http::{
    HeaderName, Method,
    header::{CONTENT_LENGTH, CONTENT_TYPE, ETAG},
};
use md5::{Digest, Md5};
use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};
use sums::{CHECKSUM_TYPE, algorithm_of, checksum_header, said_sum, whole_sum};

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
/// How long the server may take to store what was sent.
const STORED_IN: Duration = Duration::from_secs(30);
/// How long the server may be silent while it puts the parts of an object together, and how long it has for that in all. Meanwhile
/// S3 sends a blank now and then.
const SILENT_FOR: Duration = Duration::from_secs(60);
const COMPLETED_IN: Duration = Duration::from_secs(300);
/// Pause before a request is sent again whose answer did not come: the server may still be doing what it asked for.
const ASKED_AGAIN_AFTER: Duration = Duration::from_secs(1);
/// A part that was on its way may be stored after its upload was aborted, which has to be repeated then. S3 may answer so to any
/// number of requests.
const MOST_ABORTS: u32 = 5;
const ABORTED_AGAIN_AFTER: Duration = Duration::from_millis(200);

/// An object on its way to a store. The store shows it when it is complete, in place of what had its name. An upload that is
/// dropped before that is aborted.
///
/// ```no_run
/// use hoistway_objects::{Stop, StoreOptions, Upload};
/// let (bytes, stop) = (vec![7; 20 << 20], Stop::default());
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
    /// Whether the store refuses the checksums of bytes that are sent.
    refused_checksums: Refusals,
    /// Whether the store has a part, or may have one.
    may_have_parts: AtomicBool,
    /// Whether a part may still be on its way.
    is_part_astray: AtomicBool,
    is_over: AtomicBool,
}

/// An upload that the store knows.
#[derive(Debug)]
struct Open {
    client: Arc<Client>,
    target: Target,
    /// In Azure, what the names of its blocks begin with.
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

impl Upload {
    /// Fails for URLs of what is only read, with what can be written. Asks no server.
    ///
    /// # Errors
    /// [`Problem::Invalid`].
    pub fn check(url: &str, options: &StoreOptions) -> Result<()> {
        for_writing(url, options).map(drop).map_err(|problem| problem.of(&crate::shown(url), None))
    }

    /// Begins to write an object of so many bytes. Ends soon after `stop` is set, within 5 s if the store was asked.
    ///
    /// # Errors
    /// [`Problem::Invalid`] if nothing can be written there; [`Problem::Denied`], [`Problem::Credentials`],
    /// [`Problem::Unreliable`], [`Problem::MayBeOpen`] and others.
    pub fn begin(url: &str, len: u64, options: &StoreOptions, stop: &Stop) -> Result<Self> {
        let shown = crate::shown(url);
        let begun = Self::begun(url, &shown, len, options, stop);
        begun.map_err(|problem| problem.of(&shown, None))
    }

    fn begun(url: &str, shown: &str, len: u64, options: &StoreOptions, stop: &Stop) -> Result<Self, Problem> {
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
                let create = |location: Location, options: &StoreOptions| Open::new(&location, options, stop);
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
            refused_checksums: Refusals::default(),
            may_have_parts: AtomicBool::new(false),
            is_part_astray: AtomicBool::new(false),
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
    /// parts, in any order. Ends soon after `stop` is set. The answer to the request that writes a whole object is waited for up
    /// to 5 s longer, and then the store is asked what it has.
    ///
    /// # Errors
    /// [`Problem::Invalid`] if the pieces have not the length of the part; [`Problem::Refused`], also if the store got other
    /// bytes, [`Problem::Unreliable`] and others. If one request writes the object, the one that had the name is still there,
    /// unless the error is [`Problem::Doubtful`] or [`Problem::StoredDamaged`].
    pub fn send(&self, number: u64, pieces: &[&[u8]], stop: &Stop) -> Result<()> {
        let range = self.range(number);
        let failed = |problem: Problem| problem.of(&self.url, Some(range.clone()));
        let len: u64 = pieces.iter().map(|piece| piece.len() as u64).sum();
        if number >= self.parts() || len != range.end - range.start {
            return Err(failed(Problem::Invalid("the bytes are not those of a part".into())));
        }
        let part = match &self.open {
            Some(open) => {
                let target = open.part_target(number);
                self.put(&open.client, &target, pieces, (open.algorithm, true), stop)
            }
            None => {
                let put = |location: Location, options: &StoreOptions| {
                    let client = Client::of(&location, options);
                    let algorithm = algorithm_of(location.kind, options);
                    self.put(&client, &location.target, pieces, (algorithm, true), stop)
                };
                in_its_region(&self.given_url, &self.options, put).map(|(part, _)| part)
            }
        };
        lock(&self.sent).insert(number, part.map_err(failed)?);
        Ok(())
    }

    /// Has the store show the object: all parts were sent. Ends soon after `stop` is set. If the store was asked before, its answer
    /// is waited for up to 5 s longer, and then it is asked what it has.
    ///
    /// # Errors
    /// Those of [`Upload::send`]. The object that had the name is still there, unless the error is [`Problem::Doubtful`] or
    /// [`Problem::StoredDamaged`].
    pub fn complete(&self, stop: &Stop) -> Result<Uploaded> {
        let failed = |problem: Problem| problem.of(&self.url, None);
        let parts: Vec<Part> = lock(&self.sent).values().cloned().collect();
        if parts.len() as u64 != self.parts() {
            return Err(failed(Problem::Invalid("not all of its parts were sent".into())));
        }
        if self.open.is_some() && stop.is_set() {
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
            _ if self.refused_checksums.are_meant() => None,
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

    /// Has the store forget the parts that were sent. No thread may be sending a part. Sets `stop`, and ends within 10 s of when
    /// that was set first.
    ///
    /// # Errors
    /// [`Problem::LeftOpen`] if the store does not do it; [`Problem::MayBeOpen`] if it may hold another upload of this object;
    /// [`Problem::BlocksLeft`] if the store cannot do it, as Azure.
    pub fn abort(&self, stop: &Stop) -> Result<()> {
        let Some(open) = self.open.as_ref().filter(|_| !self.is_over.swap(true, Ordering::Relaxed)) else {
            return Ok(());
        };
        let until = stop.end();
        if open.client.kind() == Kind::Azure {
            return match self.may_have_parts.load(Ordering::Relaxed) {
                true => Err(Problem::BlocksLeft.of(&self.url, None)),
                false => Ok(()),
            };
        }
        let mut done = 0;
        let aborted = loop {
            match ask_abort(open, until) {
                Err(Problem::NotFound { .. }) => break Ok(()),
                Err(problem) => break Err(problem.to_string()),
                Ok(()) => done += 1,
            }
            // A part that is on its way may come after it.
            if !self.is_part_astray.load(Ordering::Relaxed) || done >= MOST_ABORTS {
                break Ok(());
            }
            let pause = ABORTED_AGAIN_AFTER * done;
            if Instant::now() + pause >= until {
                break Err("there was no time to see whether a part came later".into());
            }
            thread::sleep(pause);
        };
        let problem = match aborted {
            Err(why) => Problem::LeftOpen(why),
            Ok(()) if open.has_stray => {
                Problem::MayBeOpen("an answer to the request that begins the upload was lost".into())
            }
            Ok(()) => return Ok(()),
        };
        Err(problem.of(&self.url, None))
    }

    /// Writes a part, or a whole object. Whether the store gets the checksum with it is `says_sum`.
    fn put(
        &self,
        client: &Arc<Client>,
        target: &Target,
        pieces: &[&[u8]],
        (algorithm, says_sum): (Option<Algorithm>, bool),
        stop: &Stop,
    ) -> Result<Part, Problem> {
        // The store shows the object with its answer.
        let is_whole = self.open.is_none();
        let len = pieces.iter().map(|piece| piece.len() as u64).sum();
        let sum = algorithm.map(|algorithm| {
            let mut digest = crc_fast::Digest::new(algorithm.crc());
            pieces.iter().for_each(|piece| digest.update(piece));
            (algorithm, digest.finalize())
        });
        let kind = client.kind();
        let says_sum = says_sum && !self.refused_checksums.are_meant();
        let said = sum.iter().filter(|_| says_sum);
        let mut headers: Vec<_> =
            said.map(|(algorithm, sum)| checksum_header(kind, *algorithm, *sum)).collect();
        if is_whole && kind == Kind::Azure {
            headers.push((HeaderName::from_static("x-ms-blob-type"), "BlockBlob".to_owned()));
        }
        let never = AtomicBool::new(false);
        let (mut attempts, mut is_in_doubt) = (0, false);
        let part = client.pace().persist_sending(stop.flag(), None, |waiting| {
            attempts += 1;
            let begun = Instant::now();
            let sending = Waiting { patience: STORED_IN, ..*waiting };
            let waiting = if is_whole { until_answered(&sending, stop, &never) } else { sending };
            let mut sent = Sent::default();
            let what = (Method::PUT, target);
            let answer = client.send(what, &headers, pieces, &mut sent, (&sending, &waiting));
            let sent_for = if sent.bytes > 0 { begun.elapsed() } else { Duration::ZERO };
            let part = answer.and_then(|answer| part_of(client, answer, len, sum, &waiting));
            let part = part.and_then(|part| part.map_err(|other| wrong_sum(other, is_whole)));
            let may_be_stored =
                part.as_ref().map_or_else(|fault| sent.may_be_whole && leaves_doubt(fault), |_| true);
            self.may_have_parts.fetch_or(may_be_stored, Ordering::Relaxed);
            let part = part.inspect_err(|fault| {
                is_in_doubt |= is_whole && sent.may_be_whole && leaves_doubt(fault);
                if !is_whole && leaves_doubt(fault) {
                    self.is_part_astray.store(true, Ordering::Relaxed);
                }
            });
            let part = part.map_err(refused_bytes).map_err(|fault| match fault {
                Fault::Again(Again { why, .. }) if attempts >= MAX_ATTEMPTS => {
                    Fault::Final(Problem::Unreliable { attempts, last: why })
                }
                fault => fault,
            });
            (part, sent_for)
        });
        self.repeated.fetch_add(u64::from(attempts.max(1) - 1), Ordering::Relaxed);
        let mut problem = match part {
            Ok(part) => {
                if says_sum {
                    self.refused_checksums.forget();
                }
                return Ok(part);
            }
            Err(problem) => problem,
        };
        // As for uploads of parts.
        if (is_whole || kind == Kind::Azure) && says_sum && multipart::refuses_checksums(&problem, algorithm)
        {
            // Whether that was the reason shows without it.
            match self.put(client, target, pieces, (algorithm, false), stop) {
                Ok(part) => {
                    self.refused_checksums.note(&problem);
                    return Ok(part);
                }
                Err(later) if is_in_doubt => problem = later,
                Err(later) => return Err(later),
            }
        }
        match is_in_doubt {
            true => match self.is_there(client, target, &Proof::of_bytes(kind, sum, pieces), stop) {
                Some(was_compared) => {
                    Ok(Part { etag: String::new(), len, sum: sum.map(|(_, sum)| sum), was_compared })
                }
                None => Err(in_doubt(problem)),
            },
            false => Err(of_a_save(problem)),
        }
    }

    /// Completes the upload. Returns whether the store compared the whole object with its checksum.
    fn completed(&self, open: &Open, parts: &[Part], stop: &Stop) -> Result<bool, Problem> {
        let (kind, sum) = (open.client.kind(), whole_sum(open.algorithm, parts));
        // A store that has compared no part may refuse the checksum of their list.
        let says_sum = parts.iter().any(|part| part.was_compared);
        let Completing { method, target, headers, text } = open.completing(parts, sum, says_sum);
        let never = AtomicBool::new(false);
        let (mut attempts, mut is_in_doubt, mut was_silent) = (0, false, false);
        let until = Instant::now() + COMPLETED_IN;
        let done = open.client.pace().persist_sending(stop.flag(), Some(until), |waiting| {
            let begun = Instant::now();
            if was_silent && let Err(problem) = sleep(ASKED_AGAIN_AFTER, stop.flag()) {
                return (Err(problem.into()), Duration::ZERO);
            }
            attempts += 1;
            let patience = SILENT_FOR.min(until.saturating_duration_since(Instant::now()));
            let sending = Waiting { patience, ..*waiting };
            let waiting = until_answered(&sending, stop, &never);
            let mut sent = Sent::default();
            let (what, waits) = ((method.clone(), &target), (&sending, &waiting));
            let answer = open.client.send(what, &headers, &[text.as_bytes()], &mut sent, waits);
            let done = answer.and_then(|answer| {
                let headers = answer.headers.clone();
                let body = open.client.body(answer.at_any_speed(), MAX_ANSWER_BYTES, &waiting)?;
                match kind {
                    // The store has compared each of its blocks.
                    Kind::Azure => Ok(false),
                    _ => multipart::completion(&headers, &body, sum),
                }
            });
            let done = done.map_err(|fault| {
                is_in_doubt |= sent.may_be_whole && leaves_doubt(&fault);
                was_silent = sent.may_be_whole && is_unanswered(&fault);
                match refused_bytes(fault) {
                    Fault::Again(Again { why, .. }) if attempts >= MAX_ATTEMPTS => {
                        Fault::Final(Problem::Unreliable { attempts, last: why })
                    }
                    fault => fault,
                }
            });
            // The time for an answer has its own limit.
            (done, begun.elapsed())
        });
        self.repeated.fetch_add(u64::from(attempts.max(1) - 1), Ordering::Relaxed);
        match done {
            // An attempt whose answer was lost may have completed it. The store does not know the upload any more then, or refuses
            // the request for another reason.
            Err(problem) if is_in_doubt => {
                let proof = if kind == Kind::Azure {
                    Proof::Blocks(&open.id, self.parts())
                } else {
                    Proof::of_sum(sum)
                };
                let found = self.is_there(&open.client, &open.target, &proof, stop);
                found.ok_or_else(|| in_doubt(problem))
            }
            done => done.map_err(of_a_save),
        }
    }

    /// Whether the store has the new object under its name. Hands out whether its checksum tells.
    fn is_there(&self, client: &Client, target: &Target, proof: &Proof<'_>, stop: &Stop) -> Option<bool> {
        let never = AtomicBool::new(false);
        let until = Instant::now() + ENDED_BY;
        let asked = client.pace().persist_sending(&never, Some(until), |waiting| {
            let end = End { after: Some((stop, COMPARED_BY)), ..waiting.end };
            (self.is_shown(client, target, proof, &Waiting { end, ..*waiting }), Duration::ZERO)
        });
        let is_sum = matches!(proof, Proof::Checksum(..));
        asked.is_ok_and(|is_shown| is_shown).then_some(is_sum)
    }

    fn is_shown(
        &self,
        client: &Client,
        target: &Target,
        proof: &Proof<'_>,
        waiting: &Waiting<'_>,
    ) -> Result<bool, Fault> {
        let asks_sum = (HeaderName::from_static("x-amz-checksum-mode"), "ENABLED".to_owned());
        let asks: &[_] = match proof {
            Proof::None => return Ok(false),
            Proof::Blocks(id, count) => {
                let answer = client.get(&blocks::committed_target(target), &[], waiting)?;
                let list = client.body(answer, blocks::MAX_LIST_BYTES, waiting)?;
                return Ok(blocks::are_listed(&list, id, *count));
            }
            Proof::Checksum(Algorithm::Crc64Nvme, _) => &[asks_sum],
            Proof::Checksum(..) | Proof::Md5(_) => &[],
        };
        let headers = client.ask_head(target, asks, waiting)?;
        let len = header(&headers, CONTENT_LENGTH.as_str()).and_then(|len| len.parse().ok());
        let is_same = match proof {
            Proof::Checksum(algorithm, sum) => said_sum(client.kind(), *algorithm, &headers) == Some(*sum),
            Proof::Md5(sum) => header(&headers, "content-md5") == Some(&**sum),
            Proof::Blocks(..) | Proof::None => false,
        };
        Ok(len == Some(self.len) && is_same)
    }
}

/// What tells a new object from the one that had its name.
enum Proof<'a> {
    Checksum(Algorithm, u64),
    /// The MD5 that Azure computes of a blob that one request writes, in base64.
    Md5(String),
    /// The names of so many blocks.
    Blocks(&'a str, u64),
    None,
}

impl Proof<'_> {
    fn of_sum(sum: Option<(Algorithm, u64)>) -> Self {
        sum.map_or(Self::None, |(algorithm, sum)| Self::Checksum(algorithm, sum))
    }

    fn of_bytes(kind: Kind, sum: Option<(Algorithm, u64)>, pieces: &[&[u8]]) -> Self {
        if kind != Kind::Azure {
            return Self::of_sum(sum);
        }
        let mut digest = Md5::new();
        pieces.iter().for_each(|piece| digest.update(piece));
        Self::Md5(STANDARD.encode(digest.finalize()))
    }
}

/// The request that completes an upload.
struct Completing {
    method: Method,
    target: Target,
    headers: Vec<(HeaderName, String)>,
    text: String,
}

impl Open {
    /// Opens an upload.
    fn new(location: &Location, options: &StoreOptions, stop: &Stop) -> Result<Self, Problem> {
        if location.kind != Kind::Azure {
            return multipart::create(location, options, stop);
        }
        Ok(Self {
            client: Client::of(location, options),
            target: location.target.clone(),
            id: blocks::new_id(),
            algorithm: algorithm_of(location.kind, options),
            has_stray: false,
        })
    }

    /// Where a part is sent.
    fn part_target(&self, number: u64) -> Target {
        if self.client.kind() == Kind::Azure {
            return blocks::block_target(&self.target, &self.id, number);
        }
        let id = encoded_value(&self.id);
        Target(format!("{}?partNumber={}&uploadId={id}", self.target.0, number + 1))
    }

    fn completing(&self, parts: &[Part], sum: Option<(Algorithm, u64)>, says_sum: bool) -> Completing {
        let mut headers = vec![(CONTENT_TYPE, "application/xml".to_owned())];
        let kind = self.client.kind();
        if kind == Kind::Azure {
            let text = blocks::list_text(&self.id, parts.len() as u64);
            // The checksum is that of the list.
            let sum = |algorithm: Algorithm| crc_fast::checksum(algorithm.crc(), text.as_bytes());
            let algorithm = self.algorithm.filter(|_| says_sum);
            headers.extend(algorithm.map(|own| checksum_header(kind, own, sum(own))));
            let target = blocks::list_target(&self.target);
            return Completing { method: Method::PUT, target, headers, text };
        }
        if let Some((algorithm @ Algorithm::Crc64Nvme, sum)) = sum {
            headers.push(checksum_header(kind, algorithm, sum));
            headers.push((CHECKSUM_TYPE, "FULL_OBJECT".to_owned()));
        }
        let target = Target(format!("{}?uploadId={}", self.target.0, encoded_value(&self.id)));
        let text = multipart::parts_text(self.algorithm, parts);
        Completing { method: Method::POST, target, headers, text }
    }
}

/// Waits for an answer that says whether an object was replaced, a bounded time after a stop too.
fn until_answered<'a>(waiting: &Waiting<'a>, stop: &'a Stop, never: &'a AtomicBool) -> Waiting<'a> {
    Waiting { stop: never, end: End { after: Some((stop, ANSWERED_BY)), ..waiting.end }, ..*waiting }
}

/// Asks the store to abort an upload.
fn ask_abort(open: &Open, until: Instant) -> Result<(), Problem> {
    let target = Target(format!("{}?uploadId={}", open.target.0, encoded_value(&open.id)));
    let never = AtomicBool::new(false);
    open.client.pace().persist_sending(&never, Some(until), |waiting| {
        (ask_delete(&open.client, &target, waiting), Duration::ZERO)
    })
}

fn ask_delete(client: &Client, target: &Target, waiting: &Waiting<'_>) -> Result<(), Fault> {
    let waits = (waiting, waiting);
    let answer = client.send((Method::DELETE, target), &[], &[], &mut Sent::default(), waits)?;
    client.body(answer, MAX_ANSWER_BYTES, waiting).map(drop)
}

impl Drop for Upload {
    fn drop(&mut self) {
        if let Err(error) = self.abort(&Stop::default()) {
            tracing::warn!("{error}");
        }
    }
}

/// Removes an object, if it is there. Sets `stop`, and ends within 10 s of when that was set first.
///
/// # Errors
/// Those of [`Upload::begin`].
pub fn remove(url: &str, options: &StoreOptions, stop: &Stop) -> Result<()> {
    let failed = |problem: Problem| problem.of(&crate::shown(url), None);
    let options = for_writing(url, options).map_err(failed)?;
    let until = stop.end();
    let never = AtomicBool::new(false);
    let removed = in_its_region(url, &options, |location, options| {
        let client = Client::of(&location, options);
        client.pace().persist_sending(&never, Some(until), |waiting| {
            (ask_delete(&client, &location.target, waiting), Duration::ZERO)
        })
    });
    match removed {
        Ok(_) | Err(Problem::NotFound { .. }) => Ok(()),
        Err(problem) => Err(failed(of_a_save(problem))),
    }
}

/// The options for a URL that is written.
fn for_writing(url: &str, options: &StoreOptions) -> Result<StoreOptions, Problem> {
    let other = "give a path of this machine, or an s3://, gs:// or az:// URL";
    let kind = match Kind::of(url) {
        Ok(kind @ (Kind::S3 | Kind::Google | Kind::Azure)) => kind,
        Ok(Kind::Hub) => {
            let upload = "to upload a model to the hub, save it to a folder and run `hf upload`";
            return Err(Problem::Invalid(format!("the hub is only read; {other}; {upload}")));
        }
        Ok(Kind::Web) => return Err(Problem::Invalid(format!("web servers are only read; {other}"))),
        Err(_) => return Err(Problem::Invalid(format!("there is no such scheme; {other}"))),
    };
    options.resolved(kind, variable).map(|resolved| StoreOptions { writes: true, ..resolved })
}

/// What the answer to a part says.
fn part_of(
    client: &Arc<Client>,
    answer: Answer,
    len: u64,
    sum: Option<(Algorithm, u64)>,
    waiting: &Waiting<'_>,
) -> Result<Result<Part, OtherSum>, Fault> {
    let headers = answer.headers.clone();
    client.body(answer, MAX_ANSWER_BYTES, waiting)?;
    let kind = client.kind();
    let etag = header(&headers, ETAG.as_str()).filter(|etag| (1..=MAX_NAME_BYTES).contains(&etag.len()));
    let etag = match etag {
        Some(etag) => etag.to_owned(),
        // The names of blocks are the sender's.
        None if kind == Kind::Azure => String::new(),
        None => return Err(Problem::WrongAnswer("it has no ETag of the part".into()).into()),
    };
    let said = sum.and_then(|(algorithm, _)| said_sum(kind, algorithm, &headers));
    if let (Some(said), Some((algorithm, sum))) = (said, sum)
        && said != sum
    {
        return Ok(Err(OtherSum { algorithm, said, sent: sum }));
    }
    Ok(Ok(Part { etag, len, sum: sum.map(|(_, sum)| sum), was_compared: said.is_some() }))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
