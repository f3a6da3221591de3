//! The checksum that S3 has of an object: asked for beside its first request, once, by a few threads of its
//! server's own.

use crate::{
    Checksum, Problem,
    checksum::{MAX_PARTS_ASKED, Parts, is_of_whole},
    client::Client,
    http::{End, Waiting},
    location::Target,
    pace::{Again, Fault},
    pin::{Part, Pin, Tag, header},
    policy::{Failure, MeanSpeed},
};
use http::{
    HeaderMap, HeaderName,
    header::{CONTENT_LENGTH, IF_MATCH},
};
use std::{
    collections::VecDeque,
    panic::{self, AssertUnwindSafe},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// The header by which requests to S3 ask for checksums.
const CHECKSUM_MODE: HeaderName = HeaderName::from_static("x-amz-checksum-mode");
/// How long the store has for all of its answers.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often who waits for the answer looks whether it is there.
const TICK: Duration = Duration::from_millis(1);
/// Questions that one server has at once: as many as objects are opened at once.
const MAX_ASKED: usize = 16;

/// A question on its way. Dropping it ends that.
#[derive(Debug)]
pub(crate) struct Asking(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    found: OnceLock<Result<Found, &'static str>>,
    is_over: AtomicBool,
}

/// What the store says of one version.
#[derive(Debug)]
struct Found {
    pin: Pin,
    checksum: Result<Checksum, &'static str>,
    sha256: Option<[u8; 32]>,
}

impl Drop for Asking {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Relaxed);
    }
}

impl Asking {
    /// Asks, unless an earlier question to the server has failed.
    pub(crate) fn begin(client: &Arc<Client>, target: &Target) -> Self {
        let shared = Arc::new(Shared::default());
        let asking = Self(shared.clone());
        if let Some(why) = client.refuses_heads() {
            shared.found.get_or_init(|| Err(why));
            return asking;
        }
        let mut questions = client.questions().lock();
        questions.waiting.push_back((target.clone(), shared));
        if questions.threads < MAX_ASKED {
            let client = client.clone();
            let asks = move || client.questions().ask_all(&client);
            let started = thread::Builder::new().name("hoistway-checksum".into()).spawn(asks).is_ok();
            questions.threads += usize::from(started);
        }
        // Without a thread of its own it is another's, if there is one.
        if questions.threads == 0 {
            for (_, own) in questions.waiting.drain(..) {
                own.found.get_or_init(|| Err("there was no thread to ask its store for a checksum"));
            }
        }
        drop(questions);
        asking
    }

    /// Waits for the answer, but not beyond `until`, nor long after `stop` is set.
    pub(crate) fn wait(&self, until: Instant, stop: &AtomicBool) {
        while self.0.found.get().is_none() && Instant::now() < until && !stop.load(Ordering::Relaxed) {
            thread::sleep(TICK);
        }
    }

    /// The checksum of a version, or why there is none. `None` while the answer is not there.
    pub(crate) fn checksum(&self, pin: &Pin) -> Option<Result<&Checksum, &'static str>> {
        Some(self.found(pin)?.and_then(|found| found.checksum.as_ref().map_err(|why| *why)))
    }

    /// The SHA-256 of a version, if the store has said it.
    pub(crate) fn sha256(&self, pin: &Pin) -> Option<[u8; 32]> {
        self.found(pin)?.ok()?.sha256
    }

    fn found(&self, pin: &Pin) -> Option<Result<&Found, &'static str>> {
        Some(match self.0.found.get()? {
            Ok(found) if pin.check(&found.pin).is_ok() => Ok(found),
            Ok(_) => Err("the store said the checksum of another version"),
            Err(why) => Err(*why),
        })
    }
}

/// The questions of one server.
#[derive(Debug, Default)]
pub(crate) struct Questions(Mutex<Queue>);

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<(Target, Arc<Shared>)>,
    /// The threads that ask, which end when nothing waits.
    threads: usize,
}

impl Questions {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask_all(&self, client: &Client) {
        while let Some((target, shared)) = self.next() {
            let until = Instant::now() + PATIENCE;
            let question = Question { client, target: &target, until, is_over: &shared.is_over };
            // A panic must not cost the server one of its threads.
            let found = panic::catch_unwind(AssertUnwindSafe(|| question.ask()));
            shared.found.get_or_init(|| found.unwrap_or(Err("the answer of its store cannot be used")));
        }
    }

    fn next(&self) -> Option<(Target, Arc<Shared>)> {
        let mut queue = self.lock();
        let next = queue.waiting.pop_front();
        queue.threads -= usize::from(next.is_none());
        next
    }
}

struct Question<'a> {
    client: &'a Client,
    target: &'a Target,
    until: Instant,
    is_over: &'a AtomicBool,
}

impl Question<'_> {
    fn ask(&self) -> Result<Found, &'static str> {
        // Another question may have failed while this one waited.
        if let Some(why) = self.client.refuses_heads() {
            return Err(why);
        }
        let headers = self.head(self.target, None)?;
        let len = header(&headers, CONTENT_LENGTH.as_str()).and_then(|len| len.parse().ok());
        let unusable = "the store's answer to HEAD cannot be used";
        let pin = Part::whole(&headers, len.ok_or(unusable)?).map_err(|_| unusable)?.pin;
        let etag = pin.etag();
        let sha256 = Checksum::sha256_of_s3(&headers).filter(|_| is_of_whole(&headers, etag));
        let checksum = Checksum::of_s3(&headers, etag).and_then(|checksum| match checksum.parts {
            Some(parts) => Ok(Checksum { parts: Some(self.lengths(parts, &pin)?), ..checksum }),
            None => Ok(checksum),
        });
        Ok(Found { pin, checksum, sha256 })
    }

    /// The length of the parts of an object, which all but the last one have.
    fn lengths(&self, parts: Parts, pin: &Pin) -> Result<Parts, &'static str> {
        if parts.count == 1 {
            return Ok(Parts { bytes: pin.len, ..parts });
        }
        if parts.count > MAX_PARTS_ASKED {
            return Err("it has too many parts to ask for the lengths of all");
        }
        let other = "its parts differ in their lengths";
        let mut bytes = 0;
        // What is left is the last one.
        for number in 1..parts.count {
            let separator = if self.target.0.contains('?') { '&' } else { '?' };
            let target = Target(format!("{}{separator}partNumber={number}", self.target.0));
            let headers = self.head(&target, pin.etag())?;
            let part = Part::of(&headers).map_err(|_| "the store says not where its parts are")?;
            if pin.check(&part.pin).is_err() {
                return Err("the store said the checksum of another version");
            }
            if number == 1 {
                bytes = part.range.end;
            }
            if part.range != ((number - 1).saturating_mul(bytes)..number.saturating_mul(bytes)) {
                return Err(other);
            }
        }
        parts.of_length(bytes, pin.len).ok_or(other)
    }

    /// One attempt. Its failures slow down no other request.
    fn head(&self, target: &Target, etag: Option<&str>) -> Result<HeaderMap, &'static str> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err("the store did not say its checksum in time");
        }
        let mut headers = vec![(CHECKSUM_MODE, "ENABLED".to_owned())];
        headers.extend(etag.map(|etag| (IF_MATCH, etag.to_owned())));
        let mean_speed = MeanSpeed::default();
        let (stop, mean_speed) = (self.is_over, &mean_speed);
        let waiting = Waiting { stop, patience: left, is_new: false, mean_speed, end: End::default() };
        self.client.ask_head(target, &headers, &waiting).map_err(|fault| match fault {
            Fault::Final(Problem::NotFound { .. } | Problem::Refused { status: 412, .. }) => {
                "the store said the checksum of another version"
            }
            Fault::Final(Problem::Stopped) => "the store was not asked for a checksum to the end",
            // A connection that was kept may have died meanwhile.
            Fault::Again(Again { failure: Failure::Broken, was_reused: true, .. }) => {
                "the connection ended as the store was asked for a checksum"
            }
            Fault::Again(_) => {
                self.client.note_failed_head(false);
                "the store did not say its checksum in time"
            }
            Fault::Final(_) => {
                self.client.note_failed_head(true);
                "the store refuses to say its checksum"
            }
        })
    }
}

impl Pin {
    fn etag(&self) -> Option<&str> {
        match &self.tag {
            Tag::Strong(etag) => Some(etag),
            Tag::Date(_) => None,
        }
    }
}
