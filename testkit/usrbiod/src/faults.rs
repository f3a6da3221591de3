//! How the daemon misbehaves.

use std::{fmt, str::FromStr, time::Duration};

/// The number of a fault that never happens.
const NEVER: u64 = 0;

/// How the daemon misbehaves. The default is not at all.
///
/// As text it is words like `delay_us=500 error_every=7 stall=1`; what is not named is not at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Each transfer takes this long, however many are under way.
    pub delay: Duration,
    /// Bytes of all transfers together that pass in a second, as over a network; 0 is no limit.
    pub bytes_per_second: u64,
    /// Each so-manieth transfer takes ten times as long; 0 is none.
    pub slow_every: u64,
    /// Each so-manieth transfer fails; 0 is none.
    pub error_every: u64,
    /// With this number; 0 is EREMOTEIO.
    pub errno: i32,
    /// Each so-manieth read comes short by half; 0 is none.
    pub short_every: u64,
    /// Reads end before the hole that they end in, as on a 3FS.
    pub holes: bool,
    /// No transfer begins.
    pub stall: bool,
    /// Questions about files and their closing get no answer, until this is over.
    pub mute: bool,
    /// What came last is carried out first.
    pub reorder: bool,
    /// Transfers of a batch are carried out one by one.
    pub serial: bool,
    /// Each read has one wrong byte.
    pub corrupt: bool,
    /// The version of the protocol is this much too high.
    pub version_ahead: u32,
}

impl Faults {
    /// Whether the transfer with this number, counted from 1, is one of each so many.
    pub(crate) fn hits(number: u64, every: u64) -> bool {
        every != NEVER && number.is_multiple_of(every)
    }
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "delay_us={} bytes_per_second={} slow_every={} error_every={} errno={} short_every={} holes={} stall={} mute={} \
             reorder={} serial={} \
             corrupt={} version_ahead={}",
            self.delay.as_micros(),
            self.bytes_per_second,
            self.slow_every,
            self.error_every,
            self.errno,
            self.short_every,
            u8::from(self.holes),
            u8::from(self.stall),
            u8::from(self.mute),
            u8::from(self.reorder),
            u8::from(self.serial),
            u8::from(self.corrupt),
            self.version_ahead,
        )
    }
}

impl FromStr for Faults {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut faults = Self::default();
        for word in text.split_whitespace() {
            let (name, value) = word.split_once('=').ok_or_else(|| format!("{word} is not name=value"))?;
            let number: u64 = value.parse().map_err(|_| format!("{word}: not a number"))?;
            match name {
                "delay_us" => faults.delay = Duration::from_micros(number),
                "bytes_per_second" => faults.bytes_per_second = number,
                "slow_every" => faults.slow_every = number,
                "error_every" => faults.error_every = number,
                "errno" => faults.errno = i32::try_from(number).map_err(|_| format!("{word}: too large"))?,
                "short_every" => faults.short_every = number,
                "holes" => faults.holes = number != 0,
                "stall" => faults.stall = number != 0,
                "mute" => faults.mute = number != 0,
                "reorder" => faults.reorder = number != 0,
                "serial" => faults.serial = number != 0,
                "corrupt" => faults.corrupt = number != 0,
                "version_ahead" => {
                    faults.version_ahead = u32::try_from(number).map_err(|_| format!("{word}: too large"))?;
                }
                _ => return Err(format!("{name} is no fault")),
            }
        }
        Ok(faults)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_survive_the_way_to_another_process() {
        let faults = Faults {
            delay: Duration::from_millis(3),
            bytes_per_second: 1 << 30,
            error_every: 7,
            mute: true,
            ..Faults::default()
        };
        assert_eq!(faults.to_string().parse(), Ok(faults));
        assert!("stal=1".parse::<Faults>().is_err());
    }
}
