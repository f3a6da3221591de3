//! Faults to come: what shall happen at the n-th occurrence of something.

use super::settings::Unacceptable;
use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicBool, Ordering},
};

/// Rules that say what happens instead, counted from when they were set.
pub(crate) struct Faults<T> {
    /// Spares the lock while there are none, which is nearly always.
    armed: AtomicBool,
    rules: Mutex<Vec<Rule<T>>>,
}

pub(crate) struct Rule<T> {
    subject: String,
    when: When,
    seen: u64,
    outcome: T,
}

/// What becomes of one read by cuFile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadFault {
    /// One of cuFile's own errors, positive.
    Cufile(i32),
    Errno(i32),
    /// No more than this many bytes are read.
    Short(u64),
}

/// At which occurrences, which are counted from 1.
#[derive(Clone, Copy)]
enum When {
    Always,
    Nth(u64),
    EveryNth(u64),
}

impl When {
    fn is_at(self, occurrence: u64) -> bool {
        match self {
            When::Always => true,
            When::Nth(nth) => occurrence == nth,
            When::EveryNth(nth) => occurrence.is_multiple_of(nth),
        }
    }
}

impl<T> Default for Faults<T> {
    fn default() -> Faults<T> {
        Faults { armed: AtomicBool::new(false), rules: Mutex::new(Vec::new()) }
    }
}

impl<T: Copy> Faults<T> {
    pub(crate) fn replace(&self, rules: Vec<Rule<T>>) {
        self.armed.store(!rules.is_empty(), Ordering::Relaxed);
        *self.rules.lock().unwrap_or_else(PoisonError::into_inner) = rules;
    }

    /// Counts an occurrence of `subject` and says what shall come of it, if not the usual.
    pub(crate) fn strike(&self, subject: &str) -> Option<T> {
        if !self.armed.load(Ordering::Relaxed) {
            return None;
        }
        let mut rules = self.rules.lock().unwrap_or_else(PoisonError::into_inner);
        let mut outcome = None;
        for rule in rules.iter_mut().filter(|rule| rule.subject == subject) {
            rule.seen += 1;
            if outcome.is_none() && rule.when.is_at(rule.seen) {
                outcome = Some(rule.outcome);
            }
        }
        outcome
    }
}

/// Reads `function:nth=code`, separated by commas.
pub(crate) fn call_faults(text: &str) -> Result<Vec<Rule<i32>>, Unacceptable> {
    each(text, |rule| {
        let (subject, rule) = rule.split_once(':').ok_or(Unacceptable)?;
        let (nth, code) = rule.split_once('=').ok_or(Unacceptable)?;
        let outcome = code.parse().ok().filter(|code| *code != 0).ok_or(Unacceptable)?;
        Ok(Rule { subject: subject.to_owned(), when: occurrence(nth)?, seen: 0, outcome })
    })
}

/// Reads `nth=-code`, `nth=-errno` and `nth=short:bytes`, separated by commas.
pub(crate) fn read_faults(text: &str) -> Result<Vec<Rule<ReadFault>>, Unacceptable> {
    each(text, |rule| {
        let (nth, outcome) = rule.split_once('=').ok_or(Unacceptable)?;
        let outcome = match outcome.strip_prefix("short:") {
            Some(bytes) => ReadFault::Short(bytes.parse().map_err(|_| Unacceptable)?),
            None => match outcome.trim_end_matches("(errno)").parse::<i32>().map_err(|_| Unacceptable)? {
                code if code <= -5000 => ReadFault::Cufile(-code),
                code if code < 0 => ReadFault::Errno(-code),
                _ => return Err(Unacceptable),
            },
        };
        Ok(Rule { subject: READ.to_owned(), when: occurrence(nth)?, seen: 0, outcome })
    })
}

/// The one subject of read faults.
pub(crate) const READ: &str = "read";

fn each<T>(
    text: &str,
    parse: impl Fn(&str) -> Result<Rule<T>, Unacceptable>,
) -> Result<Vec<Rule<T>>, Unacceptable> {
    text.split(',').map(str::trim).filter(|rule| !rule.is_empty()).map(parse).collect()
}

fn occurrence(nth: &str) -> Result<When, Unacceptable> {
    let number = |text: &str| text.parse().ok().filter(|nth| *nth > 0).ok_or(Unacceptable);
    match (nth, nth.strip_prefix('%')) {
        ("*", _) => Ok(When::Always),
        (_, Some(every)) => Ok(When::EveryNth(number(every)?)),
        (nth, None) => Ok(When::Nth(number(nth)?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_nth_occurrence_fails() {
        let faults = Faults::default();
        faults.replace(call_faults("cuMemAlloc_v2:2=2, copy:*=700").unwrap());
        let calls: Vec<_> = (0..3).map(|_| faults.strike("cuMemAlloc_v2")).collect();
        assert_eq!(calls, [None, Some(2), None]);
        assert_eq!((faults.strike("copy"), faults.strike("copy")), (Some(700), Some(700)));
        assert_eq!(faults.strike("kernel"), None);
    }

    #[test]
    fn read_faults_tell_errno_from_cufile_codes() {
        let faults = Faults::default();
        faults.replace(read_faults("1=-5012,2=-5,3=-5(errno),4=short:4096").unwrap());
        let reads: Vec<_> = (0..5).map(|_| faults.strike(READ)).collect();
        let expected = [
            Some(ReadFault::Cufile(5012)),
            Some(ReadFault::Errno(5)),
            Some(ReadFault::Errno(5)),
            Some(ReadFault::Short(4096)),
            None,
        ];
        assert_eq!(reads, expected);
    }

    #[test]
    fn rules_that_make_no_sense_are_refused() {
        for text in ["cuInit", "cuInit:1", "cuInit:0=2", "cuInit:1=0", "cuInit:x=2"] {
            assert!(call_faults(text).is_err(), "{text}");
        }
        for text in ["1", "1=5012", "0=-5", "1=short:x"] {
            assert!(read_faults(text).is_err(), "{text}");
        }
    }
}
