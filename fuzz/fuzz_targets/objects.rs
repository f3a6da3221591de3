//! What users write as URLs and servers say: no panic whatever it is, and no secret shown.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| hoistway_objects::fuzzing::parse_everything(bytes));
