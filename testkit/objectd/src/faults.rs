//! What goes wrong, and when.

use std::time::Duration;

/// What is wrong with an answer to a request for a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Another status, with an error for a body: 403, 429, 500, 501 or 503.
    Status(u16),
    /// A redirect to elsewhere, whose URL holds a secret.
    Redirect,
    /// A redirect to another path of the server, whose query holds a secret.
    RedirectWithin,
    /// The connection ends in the middle of the body.
    Truncate,
    /// The connection ends after so many bytes of a longer body.
    TruncateAfter(usize),
    /// The connection is reset in the middle of the body.
    Reset,
    /// A shorter range than was asked for, and a head that says so: a part that RFC 9110 (15.3.7) allows.
    Short,
    /// The range in chunks, without a length.
    Chunked,
    /// The range without a length: it ends with the connection.
    UntilClose,
    /// Chunks that hold more than the range.
    LongChunks,
    /// A range that begins or ends a byte early, and a head that says so.
    Shift,
    /// A head that gives another range than the body has.
    LyingRange,
    /// The whole object.
    Whole,
    /// A length that is longer than the range.
    LongBody,
    /// A length that is shorter than the range.
    ShortBody,
    /// No ETag.
    NoETag,
    /// A weak ETag.
    WeakETag,
    /// The ETag of another object.
    OtherETag,
    /// A body that is said to be encoded.
    Encoded,
    /// No `Content-Range`.
    NoRange,
    /// No HTTP.
    Garbage,
    /// A head of 200 kB.
    LongHead,
    /// Nothing for this long.
    Stall(Duration),
    /// Nothing for this long in the middle of the body.
    StallInside(Duration),
    /// A byte at a time, with pauses that are shorter than any patience.
    Trickle,
    /// For each of these requests another one of the faults that may pass, or none, as a number generator says that begins with
    /// this seed.
    Random(u64),
    /// From now on another object of the same length under the same name.
    Swap,
    /// One bit of the body is another.
    Flip,
}

impl Fault {
    /// A fault by its name on the command line.
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "truncate" => Self::Truncate,
            "reset" => Self::Reset,
            "short" => Self::Short,
            "shift" => Self::Shift,
            "lying-range" => Self::LyingRange,
            "whole" => Self::Whole,
            "swap" => Self::Swap,
            "flip" => Self::Flip,
            "stall" => Self::Stall(ENDLESS),
            status => Self::Status(status.parse().ok()?),
        })
    }
}

/// When requests for ranges fail, and how.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// What goes wrong.
    pub fault: Option<Fault>,
    /// Each of so many requests fails, the last of them.
    pub every: usize,
    /// The one request that fails, by its number from 1 on, whatever `every` says.
    pub only: Option<usize>,
    /// Each request fails whose range has this byte, whatever `every` and `only` say. So does a repetition of it.
    pub byte: Option<usize>,
    /// Whether requests for the first byte of an object never fail.
    pub spares_first: bool,
    /// Wait before each answer.
    pub latency: Duration,
    /// Bytes that one connection sends in a second, at most.
    pub bytes_per_second: Option<u64>,
    /// Whether `If-Match` is ignored.
    pub ignores_preconditions: bool,
    /// Whether a hub gives another length than the file has that it leads to.
    pub wrong_linked_size: bool,
    /// Whether a hub says that its files are of another commit than was asked for.
    pub wrong_commit: bool,
    /// The status of an answer to a URL that has expired, if it is not 403.
    pub expired_status: Option<u16>,
    /// The status of an answer of Azure to a request for the checksum of a range, if that is refused: 400 or 501.
    pub range_crc_status: Option<u16>,
    /// Whether listings have a next page and do not say where.
    pub endless_listing: bool,
}

impl Faults {
    /// Has each of `every` requests fail that is not for the first byte of an object.
    pub fn every(every: usize, fault: Fault) -> Self {
        Self { fault: Some(fault), every, spares_first: true, ..Self::default() }
    }

    /// Has one request fail, by its number from 1 on.
    pub fn only(number: usize, fault: Fault) -> Self {
        Self { fault: Some(fault), only: Some(number), ..Self::default() }
    }

    /// Has each request fail whose range has this byte of an object.
    pub fn of_byte(byte: usize, fault: Fault) -> Self {
        Self { fault: Some(fault), byte: Some(byte), ..Self::default() }
    }

    /// Has each request fail.
    pub fn always(fault: Fault) -> Self {
        Self { fault: Some(fault), every: 1, ..Self::default() }
    }

    /// Has each request fail that is not for the first byte of an object, by faults that may pass, in an order that the seed
    /// tells.
    pub fn random(seed: u64) -> Self {
        Self { fault: Some(Fault::Random(seed)), every: 1, ..Self::default() }
    }

    /// What goes wrong with the next request, after so many that might have failed.
    pub(crate) fn next(&self, range: Option<(usize, usize)>, seen: &mut usize) -> Option<Fault> {
        let (first, last) = range.filter(|(first, _)| *first > 0 || !self.spares_first)?;
        *seen += 1;
        let fails = match (self.byte, self.only) {
            (Some(byte), _) => (first..=last).contains(&byte),
            (None, Some(only)) => only == *seen,
            (None, None) => seen.is_multiple_of(self.every.max(1)),
        };
        match self.fault.filter(|_| fails) {
            Some(Fault::Random(seed)) => chosen(seed, *seen as u64),
            fault => fault,
        }
    }
}

/// Longer than any client waits.
const ENDLESS: Duration = Duration::from_secs(600);
/// One in so many requests fails at random.
const RANDOM_PART: u64 = 6;

/// The fault of one request among those of a seed.
fn chosen(seed: u64, number: u64) -> Option<Fault> {
    // SplitMix64.
    let mut mixed = seed.wrapping_add(number.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^= mixed >> 31;
    if !mixed.is_multiple_of(RANDOM_PART) {
        return None;
    }
    let faults = [
        Fault::Status(500),
        Fault::Status(503),
        Fault::Status(429),
        Fault::Truncate,
        Fault::Reset,
        Fault::Garbage,
        Fault::Short,
        Fault::Chunked,
        Fault::UntilClose,
        Fault::StallInside(ENDLESS),
        Fault::Stall(ENDLESS),
        Fault::Trickle,
    ];
    let at = (mixed / RANDOM_PART) as usize % faults.len();
    Some(faults[at])
}
