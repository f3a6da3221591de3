//! GGUF headers: no panic, no reading of what is not there, and tensors that are apart and inside the file.
#![no_main]

use hoistway::{
    Catalog, Dtype,
    catalog::{
        OpenOptions,
        gguf::{Array, ArrayValues, ByteSource, Gguf, Value},
    },
    plan::{Plan, PlanError, PlanOptions, TensorRequest},
};
use libfuzzer_sys::fuzz_target;
use std::{cell::Cell, io, path::Path};

/// A source that counts what is read of it.
struct Counted<'a> {
    bytes: &'a [u8],
    read: Cell<usize>,
}

impl ByteSource for Counted<'_> {
    fn len_bytes(&self) -> io::Result<u64> {
        self.bytes.len_bytes()
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.read.set(self.read.get() + buffer.len());
        self.bytes.read_exact_at(buffer, offset)
    }
}

fuzz_target!(|input: (bool, u8, &[u8])| {
    let (lenient, offset, file) = input;
    let options = OpenOptions::default().lenient(lenient).offset(offset.into());
    let source = Counted { bytes: file, read: Cell::new(0) };
    let parsed = Gguf::parse(&source, &options);
    // Here the window is of 64 bytes, so that it moves. It reads bytes again where a field lies across its end, and long
    // strings by themselves: two moves get on by more than one window.
    assert!(source.read.get() <= 2 * file.len() + 2 * 64, "{} of {} bytes", source.read.get(), file.len());
    let Ok(gguf) = parsed else { return };
    if !lenient {
        let also = Gguf::parse(&file, &options.lenient(true)).expect("lenient takes no less");
        assert_eq!(also.tensors, gguf.tensors);
        assert_eq!(also.header.data_start, gguf.header.data_start);
    }

    let len = file.len() as u64;
    let mut end = gguf.header.data_start;
    for tensor in gguf.tensors.iter().filter(|tensor| !tensor.bytes.is_empty()) {
        assert!(tensor.bytes.start() >= end, "'{}' overlaps what lies before it", tensor.name);
        end = tensor.bytes.end();
        assert!(end <= len, "'{}' leaves the file", tensor.name);
        match tensor.dtype {
            Dtype::UnknownGgml(_) => {}
            dtype => assert_eq!(dtype.size_of(&tensor.shape), Ok(tensor.bytes.len())),
        }
    }
    for (key, value) in gguf.header.metadata.iter() {
        assert!(
            std::ptr::eq(gguf.header.metadata.get(key).expect("it is there"), value),
            "'{key}' comes twice"
        );
        if let Value::Array(array) = value {
            read(array, file);
        }
    }

    let catalog = Catalog::from_header(Path::new("f"), len, gguf).expect("the catalog is valid");
    let plans = catalog.ids().map(|id| {
        let request = TensorRequest::whole(id);
        match Plan::new(&catalog, std::slice::from_ref(&request), &PlanOptions::default()) {
            Ok(_) => Some(request),
            Err(PlanError::UnknownType { .. } | PlanError::ByteOrder { .. }) => None,
            Err(other) => panic!("{other}"),
        }
    });
    let requests: Vec<_> = plans.flatten().collect();
    let plan =
        Plan::new(&catalog, &requests, &PlanOptions::default()).expect("each can be planned by itself");
    let wanted: u64 = requests.iter().map(|request| catalog.tensor(request.tensor).bytes.len()).sum();
    assert_eq!(plan.tensor_bytes(), wanted);
});

/// Reads an array that was found: it is still there, so only text can be wrong.
fn read(array: &Array, file: &[u8]) {
    assert!(array.bytes().end() <= file.len() as u64);
    let values = match array.read(&file) {
        Ok(values) => values,
        Err(problem) => {
            assert!(problem.to_string().contains("not UTF-8"), "{problem}");
            return;
        }
    };
    let len = match values {
        ArrayValues::U8(values) => values.len(),
        ArrayValues::I8(values) => values.len(),
        ArrayValues::U16(values) => values.len(),
        ArrayValues::I16(values) => values.len(),
        ArrayValues::U32(values) => values.len(),
        ArrayValues::I32(values) => values.len(),
        ArrayValues::F32(values) => values.len(),
        ArrayValues::Bool(values) => values.len(),
        ArrayValues::String(values) => values.len(),
        ArrayValues::U64(values) => values.len(),
        ArrayValues::I64(values) => values.len(),
        ArrayValues::F64(values) => values.len(),
        ArrayValues::Array(arrays) => {
            arrays.iter().for_each(|inner| read(inner, file));
            arrays.len()
        }
    };
    assert_eq!(len as u64, array.len());
}
