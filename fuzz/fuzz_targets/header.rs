//! Headers: no panic, and the same answer as the reference crate but for names that come twice.
#![no_main]

use hoistway::catalog::safetensors::{Header, HeaderError, header_len};
use libfuzzer_sys::fuzz_target;
use safetensors::SafeTensors;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use std::fmt;

fuzz_target!(|input: (u16, &[u8])| {
    let (data_len, text) = input;
    let mut file = (text.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(text);
    file.resize(file.len() + data_len as usize, 0);

    assert_eq!(header_len(file[..8].try_into().unwrap(), file.len() as u64).unwrap(), text.len() as u64);
    let ours = Header::parse(text, file.len() as u64);
    let reference = SafeTensors::read_metadata(&file);
    match (ours, reference) {
        (Ok(ours), Ok((_, reference))) => {
            assert_eq!(ours.tensors.len(), reference.tensors().len());
            for tensor in &ours.tensors {
                let info = reference.info(&tensor.name).expect("the reference has every tensor");
                assert_eq!(tensor.dtype.to_string(), info.dtype.to_string());
                assert!(tensor.shape.iter().copied().eq(info.shape.iter().map(|&dim| dim as u64)));
                assert_eq!(tensor.data.start(), info.data_offsets.0 as u64);
                assert_eq!(tensor.data.end(), info.data_offsets.1 as u64);
            }
            let metadata = reference.metadata().as_ref().map(|map| map.clone().into_iter().collect());
            assert_eq!(ours.metadata, metadata);
        }
        (Err(HeaderError::DuplicateTensor { tensor }), _) => {
            let Names(names) = serde_json::from_slice(text).expect("it is JSON");
            assert!(names.iter().filter(|name| **name == tensor).count() > 1, "{tensor} comes once");
        }
        (Err(_), Err(_)) => {}
        (ours, reference) => panic!("ours: {ours:?}, reference: {reference:?}"),
    }
});

/// The names of a JSON object, also those that come twice.
struct Names(Vec<String>);

impl<'de> Deserialize<'de> for Names {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Self(Vec::new()))
    }
}

impl<'de> Visitor<'de> for Names {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self, A::Error> {
        while let Some((name, IgnoredAny)) = map.next_entry()? {
            self.0.push(name);
        }
        Ok(self)
    }
}
