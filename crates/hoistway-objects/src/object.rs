//! One object, pinned when it is opened.

use crate::{
    Checksum, Problem, Result, StoreOptions,
    asking::{Asking, Unsaid, ask_now},
    client::Client,
    digest::{ContentDigest, WholeDigest},
    http::{Answer, Waiting},
    location::{Kind, Location},
    options::Checksums,
    pace::{Again, Fault},
    pin::{Part, Pin, Tag},
    policy::Failure,
    redirect::{self, FilePlace, Followed, Linked},
    region::in_its_region,
    request_size::RequestSize,
    signature::unsigned,
};
use http::{
    HeaderMap, HeaderName,
    header::{IF_MATCH, RANGE},
};
use std::{
    io,
    ops::Range,
    sync::{Arc, OnceLock, RwLock, atomic::AtomicBool},
    time::{Duration, Instant},
};

/// The header by which requests to Google name a generation.
const IF_GENERATION_MATCH: HeaderName = HeaderName::from_static("x-goog-if-generation-match");

/// Bytes that the first request asks for: the header of most checkpoints is among them.
pub const HEAD_BYTES: usize = 1 << 20;

/// An object that was opened. Bytes are read of the version that it had then, or not at all.
#[derive(Debug)]
pub struct Object {
    location: Location,
    client: Arc<Client>,
    /// The region of its bucket that the server said.
    region: Option<String>,
    pin: Pin,
    /// What the hub or a web server said of the file, and where it led to.
    linked: Option<(Linked, RwLock<Arc<FilePlace>>)>,
    changed: OnceLock<String>,
    /// The checksum that the store has of it, or why none can be compared.
    checksum: OnceLock<Result<Checksum, &'static str>>,
    /// The digest that the hub or the first answer said of it.
    digest: OnceLock<WholeDigest>,
    /// What S3 was asked of its checksum.
    asking: Option<Asking>,
}

impl Object {
    /// Opens an object by its URL, and returns it with its first [`HEAD_BYTES`]. Ends soon after `stop` is set.
    ///
    /// # Errors
    /// [`Problem::Invalid`], [`Problem::NotFound`], [`Problem::Denied`], [`Problem::Credentials`], [`Problem::NoETag`],
    /// [`Problem::WrongAnswer`] if the server sends no ranges, and others.
    pub fn open_with_head(url: &str, options: &StoreOptions, stop: &AtomicBool) -> Result<(Self, Vec<u8>)> {
        Self::opened(url, options, false, stop)
    }

    /// Does the same, and asks S3 for the checksum of the object beside the first request. Opening it does not
    /// wait for the answer.
    ///
    /// # Errors
    /// Those of [`Object::open_with_head`].
    pub fn open_asking(url: &str, options: &StoreOptions, stop: &AtomicBool) -> Result<(Self, Vec<u8>)> {
        Self::opened(url, options, true, stop)
    }

    fn opened(url: &str, options: &StoreOptions, asks: bool, stop: &AtomicBool) -> Result<(Self, Vec<u8>)> {
        let failed = |problem: Problem| problem.of(&crate::shown(url), None);
        let kind = Kind::of(url).map_err(failed)?;
        let options = options.resolved(kind, variable).map_err(failed)?;
        let begin = |location: Location, options: &StoreOptions| {
            let client = Client::of(&location, options);
            let asks = asks && location.kind == Kind::S3 && options.checksums == Checksums::Auto;
            let asked = asks.then(|| Asking::begin(&client, &location.target));
            let first = client.pace().persist(stop, |waiting| first(&client, &location, waiting))?;
            Ok((location, client, first, asked))
        };
        let ((location, client, first, asked), region) =
            in_its_region(url, &options, begin).map_err(failed)?;
        let First { pin, mut head, linked, headers, digest: of_answer } = first;
        let linked = linked.map(|(linked, place)| (linked, RwLock::new(Arc::new(place))));
        let checksum = OnceLock::new();
        let has_hashes = headers.contains_key("x-goog-hash");
        match location.kind {
            _ if options.checksums == Checksums::Off => {
                let _ = checksum.set(Err("the store option checksums is off"));
            }
            Kind::S3 => {}
            Kind::Azure | Kind::Hub | Kind::Web if !has_hashes => {
                let why = "the server says no checksum of the whole object that can be computed from ranges; what \
                           answers say of their own bytes is compared";
                let _ = checksum.set(Err(why));
            }
            _ => {
                let _ = checksum.set(Checksum::of_google(&headers));
            }
        }
        let digest = OnceLock::new();
        let said = linked.as_ref().and_then(|(linked, _)| linked.sha256()).map(WholeDigest::sha256);
        if let Some(sum) = said.or(of_answer).filter(|_| options.checksums == Checksums::Auto) {
            digest.get_or_init(|| sum);
        }
        let (changed, asking) = (OnceLock::new(), asked);
        let object = Self { location, client, region, pin, linked, changed, checksum, digest, asking };
        if let (Tag::Date(date), false) = (&object.pin.tag, object.is_pinned() || options.unpinned) {
            let said = date.as_ref().map_or("and no date", |_| "but a date");
            return Err(failed(Problem::NoETag { said: said.into() }));
        }
        // The server may have sent less than was asked for.
        let (came, expected) = (head.len(), object.len().min(HEAD_BYTES as u64) as usize);
        head.resize(expected, 0);
        object.read(came as u64, &mut head[came..], stop)?;
        Ok((object, head))
    }

    /// Opens an object by its URL.
    ///
    /// # Errors
    /// Those of [`Object::open_with_head`].
    pub fn open(url: &str, options: &StoreOptions) -> Result<Self> {
        Self::open_with_head(url, options, &AtomicBool::new(false)).map(|(object, _)| object)
    }

    /// Returns the URL without its query.
    pub fn url(&self) -> &str {
        &self.location.shown
    }

    /// Returns the length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "an empty object is no special case")]
    pub fn len(&self) -> u64 {
        self.pin.len
    }

    /// Returns the server that is asked, such as `https://storage.example:9000`.
    pub fn server(&self) -> String {
        self.client.origin().url()
    }

    /// Returns the region of its bucket, if no region was named and the server said another one than the default.
    pub fn region(&self) -> Option<&str> {
        self.region.as_deref()
    }

    /// Returns how long its server takes for the first byte of an answer, of late.
    pub fn first_byte(&self) -> Option<Duration> {
        self.data_client().pace().first_byte()
    }

    /// The client of the server that has the bytes.
    pub(crate) fn data_client(&self) -> Arc<Client> {
        // A child of `fork` waits for no thread of its parent that may hold it.
        let place = self.linked.as_ref().and_then(|(_, place)| Some(place.try_read().ok()?.client.clone()));
        place.unwrap_or_else(|| self.client.clone())
    }

    /// Returns whether an ETag, a generation or a commit tells its version, rather than length and date.
    pub fn is_pinned(&self) -> bool {
        matches!(self.pin.tag, Tag::Strong(_))
            || self.pin.generation().is_some()
            || self.location.commit.is_some()
    }

    /// Returns the commit, the generation or the ETag of this version, or the date of its last change if it has none of these.
    pub fn version(&self) -> Option<&str> {
        match (&self.location.commit, self.pin.generation(), &self.pin.tag) {
            (Some(commit), ..) => Some(commit),
            (None, Some(generation), _) => Some(generation),
            (None, None, Tag::Strong(etag)) => Some(etag),
            (None, None, Tag::Date(date)) => date.as_deref(),
        }
    }

    /// Returns what names this version of the object and no other: its server, its path and query there, and its ETag,
    /// generation or commit. Parameters are left out only where they are a complete signature of a known scheme. `None` if
    /// only length and date tell the version.
    pub fn identity(&self) -> Option<String> {
        let version = self.version().filter(|_| self.is_pinned())?;
        let path = unsigned(&self.location.origin.host, &self.location.target.0);
        let (server, len) = (self.server(), self.len());
        Some(format!("{server}\n{path}\n{version}\n{len}"))
    }

    /// Returns what is different, once an answer has shown that the object changed.
    pub fn change(&self) -> Option<&str> {
        self.changed.get().map(String::as_str)
    }

    /// Moves the request for the checksum to the front of the queue, if it was to be sent: a load waits for it.
    pub fn hurry_checksum(&self) {
        if let (None, Some(asking)) = (self.checksum.get(), &self.asking) {
            asking.hurry(&self.client);
        }
    }

    /// Asks S3 again for the checksum of the object and its digest, and waits for the answer until `until`. Ends soon after
    /// `stop` is set. `None` if S3 was not asked before.
    pub fn ask_again(
        &self,
        until: Instant,
        stop: &AtomicBool,
    ) -> Option<(Result<Checksum, Unsaid>, Option<WholeDigest>)> {
        self.asking.as_ref()?;
        let (checksum, sha256) = ask_now(&self.client, &self.location.target, &self.pin, until, stop);
        Some((checksum, sha256.map(WholeDigest::sha256)))
    }

    /// Waits until S3 has said the checksum of the object, if it was asked, but not beyond `until`. Ends soon after `stop` is set.
    pub fn wait_for_checksum(&self, until: Instant, stop: &AtomicBool) {
        if let (None, Some(asking)) = (self.checksum.get(), &self.asking) {
            asking.wait(until, stop);
        }
    }

    /// Returns the checksum that the store has of the object, or why there is none that can be compared. `None` while S3 was not
    /// asked, or has not answered.
    pub fn known_checksum(&self) -> Option<Result<&Checksum, Unsaid>> {
        match self.checksum.get() {
            Some(known) => Some(known.as_ref().map_err(|why| Unsaid::Never(why))),
            None => self.asking.as_ref()?.checksum(&self.pin),
        }
    }

    /// Returns the digest that the store or the hub has said of the object: no checksums of parts combine to it.
    pub fn known_digest(&self) -> Option<WholeDigest> {
        let of_s3 = || self.asking.as_ref()?.sha256(&self.pin).map(WholeDigest::sha256);
        self.digest.get().cloned().or_else(of_s3)
    }

    /// Fills `target` with the bytes from `offset` on, and returns how many there were: fewer at the end of the object. Waits,
    /// and tries again what may succeed. Ends soon after `stop` is set. Of a read that fails, `target` may have any part.
    ///
    /// # Errors
    /// [`Problem::Changed`], [`Problem::WrongAnswer`], [`Problem::Unreliable`] and others.
    pub fn read(&self, offset: u64, target: &mut [u8], stop: &AtomicBool) -> Result<usize> {
        self.read_with(offset, target, stop, |_| ())
    }

    /// Does what [`Object::read`] does, and calls `came` with the bytes as they come, in their order.
    ///
    /// # Errors
    /// Those of [`Object::read`].
    pub fn read_with(
        &self,
        offset: u64,
        target: &mut [u8],
        stop: &AtomicBool,
        mut came: impl FnMut(&[u8]),
    ) -> Result<usize> {
        let left = usize::try_from(self.len().saturating_sub(offset)).unwrap_or(usize::MAX);
        let len = left.min(target.len());
        let target = &mut target[..len];
        let mut filled = 0;
        if target.is_empty() {
            return Ok(0);
        }
        let (client, mut size) = (self.data_client(), RequestSize::new());
        let read = client.pace().persist(stop, |waiting| {
            let before = filled;
            let range = size.first_of(&(offset + before as u64..offset + target.len() as u64));
            let asked = &mut target[before..before + (range.end - range.start) as usize];
            self.attempt(range, asked, (&mut filled, &mut came), &mut size, waiting)?;
            if filled == target.len() {
                return Ok(());
            }
            let bytes = filled - before;
            Err(Fault::Again(Again { bytes, ..Again::of(Failure::Part, String::new()) }))
        });
        read.map_err(|problem| {
            if let Problem::Changed(change) = &problem {
                let _ = self.changed.set(change.clone());
            }
            problem.of(self.url(), Some(offset + filled as u64..offset + len as u64))
        })?;
        Ok(len)
    }

    /// One request for `range`. Adds the bytes that came to `filled`, and calls `came` with them. Tells `size` how the answer
    /// ended.
    fn attempt(
        &self,
        range: Range<u64>,
        target: &mut [u8],
        (filled, came): Taker<'_>,
        size: &mut RequestSize,
        waiting: &Waiting<'_>,
    ) -> Result<(), Fault> {
        let mut headers = vec![(RANGE, format!("bytes={}-{}", range.start, range.end - 1))];
        if let Tag::Strong(etag) = &self.pin.tag {
            headers.push((IF_MATCH, etag.clone()));
        }
        if let Some(generation) = self.pin.generation() {
            headers.push((IF_GENERATION_MATCH, generation.to_owned()));
        }
        let (client, answer) = match &self.linked {
            None => {
                let answer = self
                    .client
                    .get_range(&self.location.target, &headers, &range, waiting)
                    .map_err(as_change)?;
                (self.client.clone(), answer)
            }
            Some((linked, place)) => self.linked_answer(linked, place, &headers, waiting)?,
        };
        let digest = self.content_digest(&answer);
        // To ask for less is of use only where the answer has what was asked for, and is discarded unless it is whole.
        if digest.is_none() || answer.status == 200 {
            *size = RequestSize::new();
        }
        if answer.status == 200 {
            let headers = answer.headers.clone();
            let whole = whole(&client, answer, waiting)?;
            digest.map_or(Ok(()), |digest| digest.check(&whole))?;
            self.pin.check(&Part::whole(&headers, whole.len() as u64)?.pin)?;
            // The range lies in the object, whose length was compared.
            target.copy_from_slice(&whole[range.start as usize..range.end as usize]);
            *filled += target.len();
            came(target);
            return Ok(());
        }
        let part = part_of(&answer)?;
        self.pin.check(&part.pin)?;
        part.begins(&range)?;
        let len = (part.range.end - range.start) as usize;
        match digest {
            None => body(&client, answer, &mut target[..len], (filled, came), waiting)?,
            // Bytes count once they were compared.
            Some(digest) => {
                let mut discarded = 0;
                let read = body(&client, answer, &mut target[..len], (&mut discarded, &mut |_| ()), waiting);
                read.map_err(|fault| without_progress(fault, size, len))?;
                size.came_whole();
                digest.check(&target[..len])?;
                *filled += len;
                came(&target[..len]);
            }
        }
        if part.range.end == range.end {
            return Ok(());
        }
        let why = format!("the server sent bytes up to {} of those up to {}", part.range.end, range.end);
        Err(Fault::Again(Again { bytes: len, ..Again::of(Failure::Part, why) }))
    }

    /// What an answer says of its own bytes, if they are compared.
    fn content_digest(&self, answer: &Answer) -> Option<ContentDigest> {
        let compares = self.client.compares();
        compares.then(|| ContentDigest::of(self.location.kind, &answer.headers)).flatten()
    }

    /// The answer from where the hub or a web server led to. If that is not valid any more, it is asked again, for the same
    /// version.
    fn linked_answer(
        &self,
        linked: &Linked,
        place: &RwLock<Arc<FilePlace>>,
        headers: &[(HeaderName, String)],
        waiting: &Waiting<'_>,
    ) -> Result<(Arc<Client>, Answer), Fault> {
        // A child of `fork` waits for no thread of its parent that may hold it.
        let known = place.try_read().ok().map(|own| own.clone());
        if let Some(own) = &known {
            match own.client.get(&own.target, headers, waiting) {
                Ok(answer) => return Ok((own.client.clone(), answer)),
                Err(Fault::Final(problem))
                    if is_expired(&problem)
                        && (own.was_redirected || own.target.0 != self.location.target.0) => {}
                Err(fault) => return Err(as_change(fault)),
            }
        }
        // The hub's own ETag is another.
        let plain: Vec<_> = headers.iter().filter(|(name, _)| *name != IF_MATCH).cloned().collect();
        let followed = redirect::follow(&self.client, &self.location.target, &plain, waiting);
        let Followed { answer, place: found, linked: now } = followed.map_err(as_change)?;
        linked.check(&now)?;
        let client = found.client.clone();
        if let Ok(mut own) = place.try_write() {
            *own = Arc::new(found);
        }
        Ok((client, answer))
    }
}

/// What counts the bytes of a body, and what is called with them as they come.
type Taker<'a> = (&'a mut usize, &'a mut dyn FnMut(&[u8]));

/// What the first request for an object brings.
struct First {
    pin: Pin,
    head: Vec<u8>,
    linked: Option<(Linked, FilePlace)>,
    headers: HeaderMap,
    digest: Option<WholeDigest>,
}

/// The version of an object, and its first bytes.
fn first(client: &Arc<Client>, location: &Location, waiting: &Waiting<'_>) -> Result<First, Fault> {
    let (range, compares) = (0..HEAD_BYTES as u64, client.compares());
    let headers = [(RANGE, format!("bytes=0-{}", HEAD_BYTES - 1))];
    let empty = |fault| match fault {
        Fault::Final(Problem::Refused { status: 416, .. }) => Problem::Empty.into(),
        fault => fault,
    };
    let (client, answer, linked) = match location.kind {
        Kind::Hub | Kind::Web => {
            let followed = redirect::follow(client, &location.target, &headers, waiting).map_err(empty)?;
            let Followed { answer, place, linked } = followed;
            let is_there = Arc::ptr_eq(&place.client, client) && place.target.0 == location.target.0;
            let linked = (location.kind == Kind::Hub || !is_there).then(|| (linked, place.clone()));
            (place.client, answer, linked)
        }
        _ => {
            let answer = client.get_range(&location.target, &headers, &range, waiting).map_err(empty)?;
            (client.clone(), answer, None)
        }
    };
    let checked = |len: u64| match &linked {
        Some((linked, _)) => {
            linked.check_commit(location.commit.as_deref()).and_then(|()| linked.check_len(len))
        }
        None => Ok(()),
    };
    let headers = answer.headers.clone();
    let digest = WholeDigest::of_object(location.kind, answer.status, &headers);
    let of_content = ContentDigest::of(location.kind, &headers).filter(|_| compares);
    if answer.status == 200 {
        let head = whole(&client, answer, waiting)?;
        of_content.map_or(Ok(()), |digest| digest.check(&head))?;
        let part = Part::whole(&headers, head.len() as u64)?;
        checked(part.pin.len)?;
        return Ok(First { pin: part.pin, head, linked, headers, digest });
    }
    let part = part_of(&answer)?;
    checked(part.pin.len)?;
    part.begins(&(0..part.pin.len.min(HEAD_BYTES as u64)))?;
    let (mut head, mut came) = (vec![0; part.range.end as usize], 0);
    let read = body(&client, answer, &mut head, (&mut came, &mut |_| ()), waiting);
    match read {
        // The rest is asked for by what is known of the object now; all of it if what came cannot be compared.
        Err(Fault::Again(_)) if came > 0 => head.truncate(if of_content.is_none() { came } else { 0 }),
        read => {
            read?;
            of_content.map_or(Ok(()), |digest| digest.check(&head))?;
        }
    }
    Ok(First { pin: part.pin, head, linked, headers, digest })
}

/// A file that an answer has whole, though a range of it was asked for: as small ones come of some servers.
fn whole(client: &Client, answer: Answer, waiting: &Waiting<'_>) -> Result<Vec<u8>, Fault> {
    let too_long =
        || Problem::WrongAnswer("status 200 for a range: the server sends whole objects alone".into());
    if answer.len().is_some_and(|len| len > HEAD_BYTES as u64) {
        return Err(too_long().into());
    }
    // Where the connection ends, so may have the body too early.
    if answer.len().is_none() && answer.ends_with_connection() {
        return Err(Problem::WrongAnswer("status 200 for a range, and no length".into()).into());
    }
    let bytes = client.body(answer, HEAD_BYTES, waiting).map_err(|fault| match fault {
        Fault::Again(Again { why, .. }) if why.ends_with("the body is too long") => too_long().into(),
        fault => fault,
    })?;
    match bytes.is_empty() {
        true => Err(Problem::Empty.into()),
        false => Ok(bytes),
    }
}

/// What an answer to a request for a range says of its body.
fn part_of(answer: &Answer) -> Result<Part, Problem> {
    if answer.status != 206 {
        return Err(Problem::WrongAnswer(format!("status {} for a range", answer.status)));
    }
    let part = Part::of(&answer.headers)?;
    let expected = part.range.end - part.range.start;
    // Without a length the body is chunked, or ends with the connection. How long it is shows when it was read.
    match answer.len() {
        Some(len) if len != expected => {
            Err(Problem::WrongAnswer(format!("206 of {expected} bytes with a body of {len}")))
        }
        _ => Ok(part),
    }
}

/// Reads a body to its place.
fn body(
    client: &Client,
    answer: Answer,
    target: &mut [u8],
    (filled, take): Taker<'_>,
    waiting: &Waiting<'_>,
) -> Result<(), Fault> {
    let (mut came, len, was_reused) = (0, target.len(), answer.was_reused());
    let is_chunked = answer.len().is_none() && !answer.ends_with_connection();
    match answer.read_into(target, &mut came, take, waiting) {
        // What TLS cannot decrypt is of the connection, not of the chunks.
        Err(error)
            if is_chunked
                && error.kind() == io::ErrorKind::InvalidData
                && !error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>()) =>
        {
            Err(Problem::WrongAnswer(error.to_string()).into())
        }
        // Only the end of the chunks is missing: to ask for the rest would be to ask for nothing.
        Err(_) if came == len && !waiting.is_stopped() => {
            *filled += came;
            Ok(())
        }
        result => {
            *filled += came;
            client.keep(result.map_err(|error| client.fault(error, was_reused, came, waiting))?);
            Ok(())
        }
    }
}

/// An attempt whose bytes cannot be compared, as not all of them came: they are asked for again, and are no progress.
fn without_progress(fault: Fault, size: &mut RequestSize, asked: usize) -> Fault {
    match fault {
        Fault::Again(Again { failure, why, bytes: discarded @ 1.., .. }) => {
            let failure = size.ended_early(failure, asked as u64, discarded as u64);
            Fault::Again(Again { discarded, ..Again::of(failure, why) })
        }
        fault => fault,
    }
}

/// Whether a refusal may mean that a signed URL has expired: servers have different statuses for that.
fn is_expired(problem: &Problem) -> bool {
    matches!(problem, Problem::Denied { .. } | Problem::Refused { status: 400 | 410, .. })
}

/// What a refusal means for an object that was there.
fn as_change(fault: Fault) -> Fault {
    match fault {
        Fault::Final(Problem::NotFound { said }) => Problem::Changed(format!("it is gone ({said})")).into(),
        Fault::Final(Problem::Refused { status: 412, said }) => {
            Problem::Changed(format!("the server holds another version ({said})")).into()
        }
        Fault::Final(Problem::Refused { status: 416, said }) => {
            Problem::Changed(format!("it has become shorter ({said})")).into()
        }
        fault => fault,
    }
}

/// A variable of the environment. Services may have no `HOME`: the system knows it.
pub(crate) fn variable(name: &str) -> Option<String> {
    let of_system = || std::env::home_dir()?.into_os_string().into_string().ok();
    of_environment(name, |name| std::env::var(name).ok(), of_system)
}

fn of_environment(
    name: &str,
    get: impl Fn(&str) -> Option<String>,
    home: impl Fn() -> Option<String>,
) -> Option<String> {
    match get(name).filter(|text| name != "HOME" || !text.is_empty()) {
        None if name == "HOME" => home(),
        found => found,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_home_that_the_environment_lacks_is_the_systems() {
        let home = || Some("/home/of/passwd".to_owned());
        let of = |name: &str, value: Option<&str>| of_environment(name, |_| value.map(str::to_owned), home);
        assert_eq!(of("HOME", Some("/mine")).as_deref(), Some("/mine"));
        for unset in [None, Some("")] {
            assert_eq!(of("HOME", unset).as_deref(), Some("/home/of/passwd"));
        }
        assert_eq!((of("AWS_PROFILE", None), of("AWS_PROFILE", Some(""))), (None, Some(String::new())));
    }
}
