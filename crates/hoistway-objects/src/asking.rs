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
    process,
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

pub(crate) const IN_TIME: Unsaid = Unsaid::Late("the store did not say its checksum in time");
const OTHER_VERSION: Unsaid = Unsaid::Late("the store said the checksum of another version");
const ENDED: Unsaid = Unsaid::Late("the store was not asked for a checksum to the end");
pub(crate) const REFUSES: Unsaid = Unsaid::Never("the store refuses to say its checksum");
const UNUSABLE: Unsaid = Unsaid::Never("the answer of its store cannot be used");

/// Why the checksum of an object is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsaid {
    /// The store has not said it, and may have one.
    Late(&'static str),
    /// There is none that can be compared.
    Never(&'static str),
}

impl Unsaid {
    /// Returns the reason in words.
    pub const fn reason(self) -> &'static str {
        match self {
            Self::Late(reason) | Self::Never(reason) => reason,
        }
    }
}

/// A question on its way. Dropping it ends that.
#[derive(Debug)]
pub(crate) struct Asking {
    shared: Arc<Shared>,
    /// A child of `fork` has no thread that asks.
    process: u32,
}

#[derive(Debug, Default)]
struct Shared {
    found: OnceLock<Result<Found, Unsaid>>,
    is_over: AtomicBool,
}

/// What the store says of one version.
#[derive(Debug)]
struct Found {
    pin: Pin,
    checksum: Result<Checksum, Unsaid>,
    sha256: Option<[u8; 32]>,
}

impl Drop for Asking {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
    }
}

impl Asking {
    /// Asks, unless an earlier question to the server has failed.
    pub(crate) fn begin(client: &Arc<Client>, target: &Target) -> Self {
        let shared = Arc::new(Shared::default());
        let asking = Self { shared: shared.clone(), process: process::id() };
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
                own.found
                    .get_or_init(|| Err(Unsaid::Late("there was no thread to ask its store for a checksum")));
            }
        }
        drop(questions);
        asking
    }

    /// Moves the question to the front of the queue, before those that no load waits for.
    pub(crate) fn hurry(&self, client: &Client) {
        if self.process == process::id() && self.shared.found.get().is_none() {
            client.questions().hurry(&self.shared);
        }
    }

    /// Waits for the answer, but not beyond `until`, nor long after `stop` is set. To a child of `fork` none comes.
    pub(crate) fn wait(&self, until: Instant, stop: &AtomicBool) {
        while self.process == process::id()
            && self.shared.found.get().is_none()
            && Instant::now() < until
            && !stop.load(Ordering::Relaxed)
        {
            thread::sleep(TICK);
        }
    }

    /// The checksum of a version, or why there is none. `None` while the answer is not there.
    pub(crate) fn checksum(&self, pin: &Pin) -> Option<Result<&Checksum, Unsaid>> {
        Some(self.found(pin)?.and_then(|found| found.checksum.as_ref().map_err(|why| *why)))
    }

    /// The SHA-256 of a version, if the store has said it.
    pub(crate) fn sha256(&self, pin: &Pin) -> Option<[u8; 32]> {
        self.found(pin)?.ok()?.sha256
    }

    fn found(&self, pin: &Pin) -> Option<Result<&Found, Unsaid>> {
        Some(match self.shared.found.get()? {
            Ok(found) if pin.check(&found.pin).is_ok() => Ok(found),
            Ok(_) => Err(OTHER_VERSION),
            Err(why) => Err(*why),
        })
    }
}

/// Asks on this thread for the checksum of a version, and its SHA-256, also if an earlier question had no answer.
pub(crate) fn ask_now(
    client: &Client,
    target: &Target,
    pin: &Pin,
    until: Instant,
    stop: &AtomicBool,
) -> (Result<Checksum, Unsaid>, Option<[u8; 32]>) {
    if let Some(why @ Unsaid::Never(_)) = client.refuses_heads() {
        return (Err(why), None);
    }
    match (Question { client, target, until, is_over: stop, is_new: true }).ask() {
        Ok(found) if pin.check(&found.pin).is_ok() => (found.checksum, found.sha256),
        Ok(_) => (Err(OTHER_VERSION), None),
        Err(why) => (Err(why), None),
    }
}

/// The questions of one server.
#[derive(Debug, Default)]
pub(crate) struct Questions(Mutex<Queue>);

#[derive(Debug, Default)]
struct Queue {
    /// Those that are waited for.
    hurried: VecDeque<(Target, Arc<Shared>)>,
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
            let (until, is_over) = (Instant::now() + PATIENCE, &shared.is_over);
            let question = Question { client, target: &target, until, is_over, is_new: false };
            // Another question may have failed while this one waited. A panic must not cost the server one of its threads.
            let ask = || client.refuses_heads().map_or_else(|| question.ask(), Err);
            let found = panic::catch_unwind(AssertUnwindSafe(ask));
            shared.found.get_or_init(|| found.unwrap_or(Err(UNUSABLE)));
        }
    }

    fn next(&self) -> Option<(Target, Arc<Shared>)> {
        let mut queue = self.lock();
        loop {
            match queue.hurried.pop_front().or_else(|| queue.waiting.pop_front()) {
                // The object was dropped: no load uses the answer.
                Some((_, shared)) if shared.is_over.load(Ordering::Relaxed) => {
                    shared.found.get_or_init(|| Err(ENDED));
                }
                next => {
                    queue.threads -= usize::from(next.is_none());
                    return next;
                }
            }
        }
    }

    fn hurry(&self, own: &Arc<Shared>) {
        let mut queue = self.lock();
        if let Some(at) = queue.waiting.iter().position(|(_, shared)| Arc::ptr_eq(shared, own)) {
            let question = queue.waiting.remove(at);
            queue.hurried.extend(question);
        }
    }
}

struct Question<'a> {
    client: &'a Client,
    target: &'a Target,
    until: Instant,
    is_over: &'a AtomicBool,
    /// Whether it takes no connection that was kept, which may have died.
    is_new: bool,
}

impl Question<'_> {
    fn ask(&self) -> Result<Found, Unsaid> {
        let headers = self.head(self.target, None)?;
        let len = header(&headers, CONTENT_LENGTH.as_str()).and_then(|len| len.parse().ok());
        let unusable = Unsaid::Never("the store's answer to HEAD cannot be used");
        let pin = Part::whole(&headers, len.ok_or(unusable)?).map_err(|_| unusable)?.pin;
        let etag = pin.etag();
        let sha256 = Checksum::sha256_of_s3(&headers).filter(|_| is_of_whole(&headers, etag));
        let checksum = Checksum::of_s3(&headers, etag).map_err(Unsaid::Never);
        let checksum = checksum.and_then(|checksum| match checksum.parts {
            Some(parts) => Ok(Checksum { parts: Some(self.lengths(parts, &pin)?), ..checksum }),
            None => Ok(checksum),
        });
        Ok(Found { pin, checksum, sha256 })
    }

    /// The length of the parts of an object, which all but the last one have.
    fn lengths(&self, parts: Parts, pin: &Pin) -> Result<Parts, Unsaid> {
        if parts.count == 1 {
            return Ok(Parts { bytes: pin.len, ..parts });
        }
        if parts.count > MAX_PARTS_ASKED {
            return Err(Unsaid::Never("it has too many parts to ask for the lengths of all"));
        }
        let other = Unsaid::Never("its parts differ in their lengths");
        let mut bytes = 0;
        // What is left is the last one.
        for number in 1..parts.count {
            let separator = if self.target.0.contains('?') { '&' } else { '?' };
            let target = Target(format!("{}{separator}partNumber={number}", self.target.0));
            let headers = self.head(&target, pin.etag())?;
            let part =
                Part::of(&headers).map_err(|_| Unsaid::Never("the store says not where its parts are"))?;
            if pin.check(&part.pin).is_err() {
                return Err(OTHER_VERSION);
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

    /// One attempt, and another one if its keys were old. Their failures slow down no other request.
    fn head(&self, target: &Target, etag: Option<&str>) -> Result<HeaderMap, Unsaid> {
        let mut headers = vec![(CHECKSUM_MODE, "ENABLED".to_owned())];
        headers.extend(etag.map(|etag| (IF_MATCH, etag.to_owned())));
        let mean_speed = MeanSpeed::default();
        let (stop, mean_speed) = (self.is_over, &mean_speed);
        let ask = || {
            let patience = self.until.saturating_duration_since(Instant::now());
            if patience.is_zero() {
                return Err(None);
            }
            let waiting = Waiting { stop, patience, is_new: self.is_new, mean_speed, end: End::default() };
            self.client.ask_head(target, &headers, &waiting).map_err(Some)
        };
        let keys_of = self.client.renewed();
        let answer = match ask() {
            Err(Some(Fault::Again(_))) if self.client.renewed() != keys_of => ask(),
            answer => answer,
        };
        answer.map_err(|fault| match fault {
            None => IN_TIME,
            Some(Fault::Final(Problem::NotFound { .. } | Problem::Refused { status: 412, .. })) => {
                OTHER_VERSION
            }
            Some(Fault::Final(Problem::Stopped)) => ENDED,
            // A connection that was kept may have died meanwhile.
            Some(Fault::Again(Again { failure: Failure::Broken, was_reused: true, .. })) => {
                Unsaid::Late("the connection ended as the store was asked for a checksum")
            }
            Some(Fault::Again(_)) => {
                self.client.note_failed_head(false);
                IN_TIME
            }
            // The files of its keys are being written.
            Some(Fault::Final(_)) if self.client.has_other_files() => IN_TIME,
            Some(Fault::Final(_)) => {
                self.client.note_failed_head(true);
                REFUSES
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_waited_for_is_asked_first_and_what_nobody_wants_not_at_all() {
        let questions = Questions::default();
        let shared: Vec<_> = (0..5).map(|_| Arc::new(Shared::default())).collect();
        let targets = (0..).map(|number| Target(format!("/{number}")));
        questions.lock().waiting.extend(targets.zip(shared.iter().cloned()));
        questions.lock().threads = 1;
        shared[1].is_over.store(true, Ordering::Relaxed);
        [4, 3, 4].iter().for_each(|number| questions.hurry(&shared[*number]));
        let asked: Vec<_> = std::iter::from_fn(|| Some(questions.next()?.0.0)).collect();
        assert_eq!(asked, ["/4", "/3", "/0", "/2"]);
        assert!(matches!(shared[1].found.get(), Some(Err(ENDED))));
        assert_eq!(questions.lock().threads, 0);
    }

    #[test]
    fn another_process_waits_for_no_answer() {
        let asking = Asking { shared: Arc::default(), process: process::id().wrapping_add(1) };
        // A wait would not end.
        asking.wait(Instant::now() + Duration::from_secs(3600), &AtomicBool::new(false));
    }
}
