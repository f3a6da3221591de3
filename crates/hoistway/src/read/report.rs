//! What a batch did: the route of every byte, and why it was not a better one.
#![forbid(unsafe_code)]

use super::Priority;
use crate::{
    counted,
    report::{Carrier, Refusal, Retries, add_new, shown_rate, write_carriers, write_refused},
    route::Route,
};
use bytesize::ByteSize;
use serde::{Deserialize, Serialize};
use std::fmt;

/// What one batch did so far; the whole truth once all of its reads have ended.
///
/// The bytes of [`BatchReport::carriers`] add up to [`BatchReport::delivered_bytes`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct BatchReport {
    /// Version of hoistway.
    pub version: String,
    /// The route that was asked for.
    pub route: Route,
    /// How urgent it is now.
    pub priority: Priority,
    /// Reads that were asked for.
    pub reads: usize,
    /// Reads that have delivered all of their bytes.
    pub delivered: usize,
    /// Reads that have failed or were cancelled.
    pub failed: usize,
    /// Bytes that were asked for.
    pub bytes: u64,
    /// Bytes of these that reached their place.
    pub delivered_bytes: u64,
    /// Bytes that were read: padding to whole blocks included, and what was read for nothing.
    pub read_bytes: u64,
    /// Bytes that passed through a staging slot rather than being read in place.
    pub staged_bytes: u64,
    /// Which route moved how much.
    pub carriers: Vec<Carrier>,
    /// What proves that a route past the host went past it, if one carried bytes.
    pub proof: Option<String>,
    /// Routes that would have been better, and why they were not used.
    pub refused: Vec<Refusal>,
    /// Whatever else is worth knowing.
    #[serde(default)]
    pub notes: Vec<String>,
    /// Reads that had to be repeated.
    pub retries: Retries,
    /// From the submission to the end of the last read, or to now.
    pub seconds: f64,
}

impl BatchReport {
    /// Adds what another batch did, whose seconds count from the submission of this one.
    pub(crate) fn merge(&mut self, later: Self) {
        self.reads += later.reads;
        self.delivered += later.delivered;
        self.failed += later.failed;
        self.bytes += later.bytes;
        self.delivered_bytes += later.delivered_bytes;
        self.read_bytes += later.read_bytes;
        self.staged_bytes += later.staged_bytes;
        self.seconds = self.seconds.max(later.seconds);
        self.retries.short += later.retries.short;
        self.retries.interrupted += later.retries.interrupted;
        later.carriers.into_iter().for_each(|carrier| carrier.add_to(&mut self.carriers));
        self.proof = self.proof.take().or(later.proof);
        add_new(&mut self.refused, later.refused);
        add_new(&mut self.notes, later.notes);
    }

    /// Bytes delivered per second.
    pub fn bytes_per_second(&self) -> f64 {
        if self.seconds > 0.0 { self.delivered_bytes as f64 / self.seconds } else { 0.0 }
    }
}

impl fmt::Display for BatchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} of {} delivered {} in {:.3} s, {}; {} failed",
            self.delivered,
            counted(self.reads, "read", "reads"),
            ByteSize(self.delivered_bytes),
            self.seconds,
            shown_rate(self.bytes_per_second()),
            self.failed,
        )?;
        let has_device = self.carriers.iter().any(|carrier| carrier.via.is_some());
        write_carriers(f, &self.carriers, self.delivered_bytes, has_device)?;
        write_refused(f, &self.refused)?;
        if let Some(proof) = &self.proof {
            writeln!(f, "  proof     {proof}, and none through the host since")?;
        }
        if self.retries != Retries::default() {
            writeln!(
                f,
                "  retries   {} short, {} interrupted",
                self.retries.short, self.retries.interrupted
            )?;
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "  note: {note}"))
    }
}
