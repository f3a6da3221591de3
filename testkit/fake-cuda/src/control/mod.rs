//! How tests steer the stand-in: settings, faults, counters and the trace.

pub(crate) mod costs;
pub(crate) mod counters;
mod exports;
pub(crate) mod faults;
pub(crate) mod settings;
pub(crate) mod trace;

use faults::{Faults, ReadFault};
use settings::{Settings, Unacceptable};
use std::{
    io::Write,
    sync::{Condvar, LazyLock, Mutex, PoisonError, RwLock},
    time::Duration,
};
use trace::Trace;

const PREFIX: &str = "FAKE_CUDA_";

/// Everything that is set, by the environment at first and by the test later.
pub(crate) struct Control {
    environment: Vec<(String, String)>,
    environment_is_sound: bool,
    settings: RwLock<Settings>,
    /// How often everything was reset.
    resets: Mutex<u64>,
    was_reset: Condvar,
    pub(crate) faults: Faults<i32>,
    pub(crate) read_faults: Faults<ReadFault>,
    pub(crate) trace: Trace,
}

/// The one control of this process.
pub(crate) fn control() -> &'static Control {
    static CONTROL: LazyLock<Control> = LazyLock::new(Control::from_environment);
    &CONTROL
}

/// The settings at this moment.
pub(crate) fn settings() -> Settings {
    *control().settings.read().unwrap_or_else(PoisonError::into_inner)
}

impl Control {
    fn from_environment() -> Control {
        let environment = std::env::vars_os()
            .filter_map(|(key, value)| Some((key.into_string().ok()?, value.into_string().ok()?)))
            .filter_map(|(key, value)| Some((key.strip_prefix(PREFIX)?.to_owned(), value)))
            .collect();
        let mut control = Control {
            environment,
            environment_is_sound: true,
            settings: RwLock::default(),
            resets: Mutex::default(),
            was_reset: Condvar::new(),
            faults: Faults::default(),
            read_faults: Faults::default(),
            trace: Trace::default(),
        };
        control.environment_is_sound = control.apply_environment();
        control
    }

    /// False if a variable was unacceptable: a misspelt fault must not look like a passed test.
    pub(crate) fn environment_is_sound(&self) -> bool {
        self.environment_is_sound
    }

    /// Changes one thing.
    pub(crate) fn set(&self, key: &str, value: &str) -> Result<(), Unacceptable> {
        match key {
            "FAULTS" => self.faults.replace(faults::call_faults(value)?),
            "CUFILE_READ_FAULTS" => self.read_faults.replace(faults::read_faults(value)?),
            "TRACE" => self.trace.redirect(value)?,
            _ => self.settings.write().unwrap_or_else(PoisonError::into_inner).set(key, value)?,
        }
        Ok(())
    }

    /// Undoes every change that a test made.
    pub(crate) fn reset(&self) {
        self.faults.replace(Vec::new());
        self.read_faults.replace(Vec::new());
        // Writing nowhere can't fail.
        let _ = self.trace.redirect("");
        *self.settings.write().unwrap_or_else(PoisonError::into_inner) = Settings::default();
        self.apply_environment();
        *self.resets.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.was_reset.notify_all();
    }

    /// Waits as long as the settings say that it takes to move so many bytes. A reset ends the wait, and so does `is_over` once it is
    /// asked [again](Self::wake).
    pub(crate) fn wait_for_transfer(&self, bytes: u64, is_over: impl Fn() -> bool) {
        // The settings are read under the lock, so that the wait sees the reset that changes them.
        let resets = self.resets.lock().unwrap_or_else(PoisonError::into_inner);
        let (before, time) = (*resets, settings().transfer_time(bytes));
        if time > Duration::ZERO {
            let waits = |resets: &mut u64| *resets == before && !is_over();
            drop(self.was_reset.wait_timeout_while(resets, time, waits));
        }
    }

    /// Has transfers ask whether they are over.
    pub(crate) fn wake(&self) {
        drop(self.resets.lock().unwrap_or_else(PoisonError::into_inner));
        self.was_reset.notify_all();
    }

    fn apply_environment(&self) -> bool {
        let mut sound = true;
        for (key, value) in &self.environment {
            if self.set(key, value).is_err() {
                sound = false;
                let _ = writeln!(std::io::stderr(), "fake-cuda: can't make sense of {PREFIX}{key}={value}");
            }
        }
        sound
    }
}
