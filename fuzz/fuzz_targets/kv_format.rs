//! What the KV store has on its disk: no panic whatever it is, and what is taken is written as it was read.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| hoistway_kv::fuzzing::parse_everything(bytes));
