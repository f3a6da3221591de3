//! Headers that are right, headers that lie, and how little a lie costs.

use super::*;
use crate::GgmlType;
use proptest::prelude::*;
use std::{cell::Cell, io};

#[path = "../../../tests/common/gguf.rs"]
mod writer;
use writer::{Item, Writer};

const STRICT: OpenOptions = OpenOptions {
    lenient: false,
    offset: 0,
    #[cfg(feature = "objects")]
    store: None,
    #[cfg(feature = "objects")]
    cache: None,
    cancel: None,
};
const LENIENT: OpenOptions = OpenOptions { lenient: true, ..STRICT };
const F32: u32 = 0;
const Q4_0: u32 = 2;
const I8: u32 = 24;
const UNKNOWN: u32 = 97;

fn parse(file: &[u8]) -> Result<Gguf, GgufError> {
    Gguf::parse(&file, &STRICT)
}

fn error(writer: &Writer) -> GgufError {
    parse(&writer.finish()).unwrap_err()
}

/// Fails unless the file is refused by default and taken leniently.
fn lenient_only(writer: &Writer) -> (GgufError, Gguf) {
    let file = writer.finish();
    (parse(&file).unwrap_err(), Gguf::parse(&file.as_slice(), &LENIENT).unwrap())
}

/// Counts what is read of a source that goes on with zeros after its bytes.
struct Sparse<'a> {
    bytes: &'a [u8],
    len: u64,
    read: Cell<u64>,
}

impl ByteSource for Sparse<'_> {
    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.len)
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.read.set(self.read.get() + buffer.len() as u64);
        buffer.fill(0);
        let start = (offset as usize).min(self.bytes.len());
        let found = &self.bytes[start..self.bytes.len().min(start + buffer.len())];
        buffer[..found.len()].copy_from_slice(found);
        Ok(())
    }
}

/// A file with every type of value.
fn every_value() -> Writer {
    Writer::default()
        .key("u8", Item::U8(200))
        .key("i8", Item::I8(-100))
        .key("u16", Item::U16(60_000))
        .key("i16", Item::I16(-30_000))
        .key("u32", Item::U32(4_000_000_000))
        .key("i32", Item::I32(-2_000_000_000))
        .key("f32", Item::F32(1.5))
        .key("bool", Item::Bool(1))
        .key("string", "größer")
        .key("u64", Item::U64(1 << 60))
        .key("i64", Item::I64(-(1 << 60)))
        .key("f64", Item::F64(-0.25))
        .key("strings", Item::strings(["a", "", "ö"]))
        .key("floats", Item::Array(6, vec![Item::F32(0.5), Item::F32(-2.0)]))
        .key("longs", Item::Array(10, vec![Item::U64(3), Item::U64(1 << 50)]))
        .key("bools", Item::Array(7, vec![Item::Bool(0), Item::Bool(1)]))
        .key("nothing", Item::Array(5, vec![]))
}

fn assert_every_value(gguf: &Gguf, file: &[u8]) {
    let metadata = &gguf.header.metadata;
    let get = |key: &str| metadata.get(key).unwrap().clone();
    assert_eq!(get("u8"), Value::U8(200));
    assert_eq!(get("i8"), Value::I8(-100));
    assert_eq!(get("u16"), Value::U16(60_000));
    assert_eq!(get("i16"), Value::I16(-30_000));
    assert_eq!(get("u32"), Value::U32(4_000_000_000));
    assert_eq!(get("i32"), Value::I32(-2_000_000_000));
    assert_eq!(get("f32"), Value::F32(1.5));
    assert_eq!(get("bool"), Value::Bool(true));
    assert_eq!(get("string").as_str(), Some("größer"));
    assert_eq!(get("u64"), Value::U64(1 << 60));
    assert_eq!(get("i64"), Value::I64(-(1 << 60)));
    assert_eq!(get("f64"), Value::F64(-0.25));
    let read = |key: &str| get(key).as_array().unwrap().read(&file).unwrap();
    assert_eq!(read("strings"), ArrayValues::String(vec!["a".into(), "".into(), "ö".into()]));
    assert_eq!(read("floats"), ArrayValues::F32(vec![0.5, -2.0]));
    assert_eq!(read("longs"), ArrayValues::U64(vec![3, 1 << 50]));
    assert_eq!(read("bools"), ArrayValues::Bool(vec![false, true]));
    assert_eq!(read("nothing"), ArrayValues::I32(vec![]));
    assert_eq!(metadata.iter().nth(1).map(|(key, _)| key), Some("i8"));
}

#[test]
fn values_are_what_was_written_in_both_versions() {
    for version in [2, 3] {
        let file = Writer { version, ..every_value() }.finish();
        let gguf = parse(&file).unwrap();
        assert_eq!((gguf.header.version, gguf.header.byte_order), (version, ByteOrder::Little));
        assert_every_value(&gguf, &file);
    }
}

#[test]
fn values_of_the_other_byte_order_are_read() {
    let file = Writer { big_endian: true, ..every_value() }.tensor("t", &[3], I8, vec![1; 3]).finish();
    let gguf = parse(&file).unwrap();
    assert_eq!((gguf.header.version, gguf.header.byte_order), (3, ByteOrder::Big));
    assert_every_value(&gguf, &file);
    assert_eq!(gguf.tensors[0].shape, [3]);
}

#[test]
fn tensors_come_in_the_order_of_their_bytes_with_gaps_between_them() {
    let writer = Writer::default()
        .tensor_at("late", &[64, 3], Q4_0, 256)
        .tensor_at("early", &[5, 2, 3], F32, 0)
        .tensor_at("scalar", &[], F32, 128)
        .tensor_at("empty", &[4, 0], F32, 1 << 40);
    let mut file = writer.finish();
    let data_start = (file.len() as u64).next_multiple_of(32);
    file.resize((data_start + 256 + 6 * 18) as usize, 0);
    let gguf = parse(&file).unwrap();
    assert_eq!(gguf.header.data_start, data_start);
    let found: Vec<_> = gguf
        .tensors
        .iter()
        .map(|tensor| (&*tensor.name, &*tensor.shape, tensor.bytes.start() - data_start, tensor.bytes.len()))
        .collect();
    assert_eq!(
        found,
        [
            ("early", [3, 2, 5].as_slice(), 0, 120),
            ("scalar", &[], 128, 4),
            ("late", &[3, 64], 256, 108),
            ("empty", &[0, 4], 1 << 40, 0),
        ]
    );
}

#[test]
fn a_gguf_inside_another_file_counts_from_its_own_start() {
    let inner = every_value().tensor("t", &[40], I8, (0..40).collect()).finish();
    let offset = 1000;
    let file = [vec![7; offset], inner, vec![9; 77]].concat();
    let options = OpenOptions { offset: offset as u64, ..STRICT };
    let gguf = Gguf::parse(&file.as_slice(), &options).unwrap();
    assert_every_value(&gguf, &file);
    let bytes = gguf.tensors[0].bytes;
    assert_eq!((bytes.start() - offset as u64) % 32, 0);
    assert!(file[bytes.start() as usize..bytes.end() as usize].iter().copied().eq(0..40));
    assert!(matches!(parse(&file), Err(GgufError::NoMagic { offset: 0, .. })));
    let past = Gguf::parse(&file.as_slice(), &OpenOptions { offset: 1 << 40, ..STRICT });
    assert!(
        matches!(past, Err(GgufError::NoMagic { offset, found }) if offset == 1 << 40 && found.is_empty())
    );
}

#[test]
fn a_header_cut_anywhere_is_refused() {
    let writer = every_value().tensor("t", &[2], F32, vec![0; 8]);
    let (file, header_len) = (writer.finish(), writer.header().len());
    for len in 0..file.len() {
        match parse(&file[..len]) {
            Err(GgufError::NoMagic { .. }) => assert!(len < 4),
            Err(GgufError::PastEnd { file_len, .. }) => {
                assert!(len >= 4 && len < header_len);
                assert_eq!(file_len, len as u64);
            }
            Err(GgufError::Truncated { tensor, file_len, .. }) => {
                assert!(len >= header_len);
                assert_eq!((tensor.as_str(), file_len), ("t", len as u64));
            }
            other => panic!("{len}: {other:?}"),
        }
    }
    // Vocabularies are files without tensors, and end where their header does.
    assert!(parse(&every_value().finish()).is_ok());
}

#[test]
fn a_lying_number_costs_nothing_even_where_a_file_seems_to_hold_it() {
    let array = |element: u32, len: u64| {
        let payload = [element.to_le_bytes().as_slice(), &len.to_le_bytes()].concat();
        Writer::default().key("lie", Item::Raw(9, payload))
    };
    let lies = [
        Writer { claimed_keys: Some(1 << 60), ..Writer::default() },
        Writer { claimed_tensors: Some(1 << 60), ..Writer::default() },
        Writer { claimed_tensors: Some(u64::MAX), ..Writer::default() },
        array(8, 1 << 60),
        array(0, 1 << 60),
        array(12, u64::MAX),
        array(9, 1 << 60),
        array(7, 1 << 60),
        Writer::default().key("lie", Item::Raw(8, (1u64 << 60).to_le_bytes().into())),
        Writer::default().key("lie", Item::Raw(8, (64u64 << 20).to_le_bytes().into())),
    ];
    for writer in lies {
        let bytes = writer.header();
        for len in [bytes.len() as u64, 1 << 30, u64::MAX] {
            let source = Sparse { bytes: &bytes, len, read: Cell::new(0) };
            let found = Gguf::parse(&source, &STRICT);
            assert!(
                matches!(
                    found,
                    Err(GgufError::TooMany { .. } | GgufError::PastEnd { .. } | GgufError::Nested { .. })
                ),
                "{found:?}"
            );
            assert!(source.read.get() <= 256 << 10, "{} bytes were read", source.read.get());
        }
    }
}

#[test]
fn arrays_are_walked_over_not_read() {
    let len = 1u64 << 20;
    let payload = [10u32.to_le_bytes().as_slice(), &len.to_le_bytes()].concat();
    let bytes = Writer::default().key("zeros", Item::Raw(9, payload)).header();
    let source = Sparse { bytes: &bytes, len: 1 << 30, read: Cell::new(0) };
    let gguf = Gguf::parse(&source, &STRICT).unwrap();
    assert!(source.read.get() <= 512 << 10);
    let array = gguf.header.metadata.get("zeros").unwrap().as_array().unwrap();
    assert_eq!((array.element(), array.len(), array.bytes().len()), (ValueType::U64, len, len * 8));
}

/// Counts what is read of a header of one array of strings, as long as the longest string may be and all of zeros, that
/// takes no place anywhere.
struct EndlessStrings {
    head: Vec<u8>,
    read: Cell<u64>,
}

impl ByteSource for EndlessStrings {
    fn len_bytes(&self) -> io::Result<u64> {
        Ok(1 << 60)
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.read.set(self.read.get() + buffer.len() as u64);
        let head_len = self.head.len() as u64;
        let length = MAX_STRING_BYTES.to_le_bytes();
        for (byte, offset) in buffer.iter_mut().zip(offset..) {
            let in_string = offset.saturating_sub(head_len) % (MAX_STRING_BYTES + 8);
            let of_head = self.head.get(offset as usize).copied();
            *byte = of_head.or_else(|| length.get(in_string as usize).copied()).unwrap_or(0);
        }
        Ok(())
    }
}

#[test]
fn a_header_ends_somewhere_also_in_a_file_of_holes() {
    let payload = [8u32.to_le_bytes().as_slice(), &MAX_ARRAY_LEN.to_le_bytes()].concat();
    let head = Writer::default().key("tokens", Item::Raw(9, payload)).header();
    let source = EndlessStrings { head, read: Cell::new(0) };
    let found = Gguf::parse(&source, &STRICT);
    assert!(
        matches!(&found, Err(GgufError::LongHeader { offset, .. }) if *offset < MAX_HEADER_BYTES),
        "{found:?}"
    );
    assert!(source.read.get() < 1 << 20);
}

#[test]
fn the_text_of_a_header_has_a_limit_but_not_that_of_its_arrays() {
    let text = vec![b'x'; MAX_STRING_BYTES as usize];
    let strings = MAX_TEXT_BYTES / MAX_STRING_BYTES;
    let texts = |count: u64| (0..count).map(|i| (format!("{i}").into_bytes(), Item::Str(text.clone())));
    // The keys take a few bytes too, so that the last string is too much.
    let mut writer = Writer { keys: texts(strings).collect(), ..Writer::default() };
    let found = error(&writer);
    let last = format!("{}", strings - 1);
    assert!(
        matches!(&found, GgufError::TooMuchText { part: HeaderPart::Value(key), .. } if **key == *last),
        "{found:?}"
    );
    writer.keys.pop();
    let in_array = Item::Array(8, vec![Item::Str(text), Item::Str(b"y".into())]);
    assert!(parse(&writer.key("array", in_array).finish()).is_ok());
}

#[test]
fn a_header_is_read_once_but_for_fields_across_the_ends_of_windows() {
    let tokens: Vec<String> = (0..500).map(|i| "t".repeat(i % 130)).collect();
    let mut writer = every_value().key("tokens", Item::strings(tokens.iter().map(String::as_str)));
    for (i, token) in tokens.iter().enumerate() {
        writer = writer.key(&format!("{token}{i}"), &**token);
    }
    let bytes = writer.header();
    let source = Sparse { bytes: &bytes, len: bytes.len() as u64, read: Cell::new(0) };
    let gguf = Gguf::parse(&source, &STRICT).unwrap();
    assert!(source.read.get() <= 2 * bytes.len() as u64 + 128, "{} of {}", source.read.get(), bytes.len());
    let array = gguf.header.metadata.get("tokens").unwrap().as_array().unwrap();
    assert_eq!(array.read(&source).unwrap(), ArrayValues::String(tokens));
}

#[test]
fn other_versions_and_files_are_refused() {
    for version in [0, 1, 4, 0x0001_0000] {
        let found = error(&Writer { version, ..Writer::default() });
        assert!(matches!(found, GgufError::Version { .. }), "{found:?}");
    }
    let found = error(&Writer { version: 1, big_endian: true, ..Writer::default() });
    assert!(matches!(found, GgufError::Version { version: 1 }), "{found:?}");
    let found = error(&Writer { magic: *b"FUGG", ..Writer::default() });
    assert!(matches!(&found, GgufError::NoMagic { offset: 0, .. }), "{found:?}");
    assert!(found.to_string().contains("'FUGG\\x03"), "{found}");
    let message = |version: u32| error(&Writer { version, ..Writer::default() }).to_string();
    assert!(message(4).contains("newer hoistway") && !message(1).contains("newer hoistway"));
    for (beginning, shown) in [
        ("version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
        ("<!DOCTYPE html><html>", "web page"),
        ("<html lang=en>", "web page"),
        ("", "ends before"),
        ("GG", "'GG'"),
    ] {
        let found = parse(beginning.as_bytes()).unwrap_err().to_string();
        assert!(found.contains("no GGUF magic") && found.contains(shown), "{found}");
    }
}

#[test]
fn keys_must_be_text_and_unique() {
    let found = error(&every_value().key("i8", Item::U8(1)));
    assert!(matches!(found, GgufError::DuplicateKey { key } if key == "i8"));
    let mut writer = Writer::default();
    writer.keys.push((b"a\xFFb".into(), Item::U8(1)));
    let found = error(&writer);
    // Magic, version, two counts, and the key's length come before it.
    assert!(matches!(found, GgufError::NotUtf8 { part: HeaderPart::Key(0), offset: 33 }), "{found:?}");
    let found = error(&Writer::default().key(&"k".repeat(65_536), Item::U8(1)));
    assert!(matches!(found, GgufError::TooMany { limit: MAX_KEY_BYTES, .. }), "{found:?}");
    assert!(parse(&Writer::default().key(&"k".repeat(65_535), Item::U8(1)).finish()).is_ok());
    let found = error(&Writer::default().key("a", Item::Raw(13, vec![0; 8])));
    assert!(matches!(found, GgufError::ValueType { id: 13, .. }), "{found:?}");
    let found = error(&Writer::default().key("a", Item::Str(b"\xFF".into())));
    assert!(matches!(found, GgufError::NotUtf8 { part: HeaderPart::Value(key), .. } if &*key == "a"));
}

#[test]
fn strings_of_arrays_are_checked_when_they_are_read() {
    let strings = Item::Array(8, vec!["fine".into(), Item::Str(b"ab\xFF".into()), "later".into()]);
    let file = Writer::default().key("tokens", strings).finish();
    let gguf = parse(&file).unwrap();
    let array = gguf.header.metadata.get("tokens").unwrap().as_array().unwrap();
    let source = file.as_slice();
    let mut found = array.strings(&source).unwrap();
    assert_eq!(found.next().unwrap().unwrap(), "fine");
    let wrong = array.bytes().start() + 8 + 4 + 8 + 2;
    match found.next().unwrap() {
        Err(GgufError::NotUtf8 { part: HeaderPart::Value(key), offset }) => {
            assert_eq!((&*key, offset), ("tokens", wrong));
        }
        other => panic!("{other:?}"),
    }
    assert!(found.next().is_none());
    let bytes: Vec<_> = array.byte_strings(&source).unwrap().collect::<Result<_, _>>().unwrap();
    assert_eq!(bytes, [b"fine".as_slice(), b"ab\xFF", b"later"]);
    assert_eq!(array.first(1).read(&source).unwrap(), ArrayValues::String(vec!["fine".into()]));
}

#[test]
fn the_first_elements_are_read_without_the_others() {
    let len = 1u64 << 20;
    let payload = [10u32.to_le_bytes().as_slice(), &len.to_le_bytes()].concat();
    let bytes = Writer::default().key("zeros", Item::Raw(9, payload)).header();
    let source = Sparse { bytes: &bytes, len: 1 << 30, read: Cell::new(0) };
    let gguf = Gguf::parse(&source, &STRICT).unwrap();
    let array = gguf.header.metadata.get("zeros").unwrap().as_array().unwrap();
    let before = source.read.get();
    assert_eq!(array.first(3).read(&source).unwrap(), ArrayValues::U64(vec![0; 3]));
    assert_eq!(source.read.get() - before, 24);
    assert_eq!(array.first(u64::MAX), *array);

    let inner = |from: u32| Item::Array(4, vec![Item::U32(from), Item::U32(from + 1)]);
    let file = Writer::default().key("a", Item::Array(9, vec![inner(1), inner(5), inner(9)])).finish();
    let gguf = Gguf::parse(&file.as_slice(), &LENIENT).unwrap();
    let array = gguf.header.metadata.get("a").unwrap().as_array().unwrap();
    let arrays = array.first(2).arrays(&file.as_slice()).unwrap();
    assert_eq!(arrays.len(), 2);
    assert_eq!(arrays[1].first(1).read(&file.as_slice()).unwrap(), ArrayValues::U32(vec![5]));
}

#[test]
fn arrays_are_read_as_what_they_hold_and_into_enough_memory() {
    let file = every_value().finish();
    let gguf = parse(&file).unwrap();
    let (source, array) = (file.as_slice(), |key| gguf.header.metadata.get(key).unwrap().as_array().unwrap());
    let is_wrong = |found: Option<GgufError>, wanted: &str| {
        assert!(
            matches!(&found, Some(GgufError::ElementType { wanted: of, .. }) if *of == wanted),
            "{found:?}"
        );
    };
    is_wrong(array("strings").read_bytes(&source).err(), "numbers");
    is_wrong(array("strings").arrays(&source).err(), "arrays");
    is_wrong(array("floats").strings(&source).err(), "strings");
    is_wrong(array("floats").byte_strings(&source).err(), "strings");
    let mut buffer = [1; 16];
    array("longs").read_into(&source, &mut buffer).unwrap();
    assert_eq!(buffer, [3u64.to_le_bytes(), (1u64 << 50).to_le_bytes()].concat()[..]);
    let short = array("longs").read_into(&source, &mut buffer[1..]);
    assert!(matches!(short, Err(GgufError::BufferLen { needed: 16, len: 15, .. })), "{short:?}");
}

#[test]
fn long_strings_are_read_whole() {
    let long = "x".repeat(1 << 20);
    let file = Writer::default().key("long", &*long).key("many", Item::strings([&*long, "y"])).finish();
    let gguf = parse(&file).unwrap();
    assert_eq!(gguf.header.metadata.get("long").unwrap().as_str(), Some(&*long));
    let many = gguf.header.metadata.get("many").unwrap().as_array().unwrap().read(&file.as_slice()).unwrap();
    assert_eq!(many, ArrayValues::String(vec![long, "y".into()]));
}

#[test]
fn alignment_is_a_u32_a_power_of_two_and_a_multiple_of_8() {
    for alignment in [8, 16, 64, 4096] {
        let writer = Writer { alignment: alignment.into(), ..Writer::default() };
        let writer = writer.key("general.alignment", Item::U32(alignment)).tensor("a", &[1], F32, vec![0; 4]);
        let gguf = parse(&writer.tensor("b", &[1], F32, vec![0; 4]).finish()).unwrap();
        assert_eq!(gguf.header.data_start % u64::from(alignment), 0);
        assert_eq!(
            gguf.tensors[1].bytes.start() - gguf.tensors[0].bytes.start(),
            u64::from(alignment).max(8)
        );
    }
    for alignment in [0, 3, 24] {
        let writer = Writer::default().key("general.alignment", Item::U32(alignment)).finish();
        for options in [STRICT, LENIENT] {
            let found = Gguf::parse(&writer.as_slice(), &options);
            assert!(matches!(found, Err(GgufError::Alignment { alignment: of }) if of == alignment));
        }
    }
    let found = error(&Writer::default().key("general.alignment", Item::I32(32)));
    assert!(matches!(found, GgufError::AlignmentType { found: ValueType::I32 }));
    let writer = Writer { alignment: 4, ..Writer::default() };
    let writer = writer.key("general.alignment", Item::U32(4)).tensor("a", &[1], F32, vec![0; 4]);
    let (found, gguf) = lenient_only(&writer.tensor("b", &[1], F32, vec![0; 4]));
    assert!(matches!(found, GgufError::Alignment { alignment: 4 }));
    assert_eq!(gguf.tensors[1].bytes.start() - gguf.tensors[0].bytes.start(), 4);
}

#[test]
fn leniently_what_others_take_is_taken() {
    let (found, gguf) = lenient_only(&Writer::default().key("a", Item::Bool(2)));
    assert!(matches!(found, GgufError::Boolean { value: 2, .. }));
    assert_eq!(gguf.header.metadata.get("a"), Some(&Value::Bool(true)));

    let (found, _) = lenient_only(&Writer::default().key("a", Item::Array(7, vec![Item::Bool(255)])));
    assert!(matches!(found, GgufError::Boolean { value: 255, .. }));

    let name = "n".repeat(256);
    let (found, gguf) = lenient_only(&Writer::default().tensor(&name, &[1], F32, vec![0; 4]));
    assert!(matches!(found, GgufError::LongName { len: 256, .. }));
    assert_eq!(gguf.tensors[0].name, name);
    assert!(parse(&Writer::default().tensor(&name[1..], &[1], F32, vec![0; 4]).finish()).is_ok());

    let (found, gguf) =
        lenient_only(&Writer::default().tensor("t", &[1, 2, 1, 1, 1, 1, 1, 2], F32, vec![0; 16]));
    assert!(matches!(found, GgufError::Dimensions { count: 8, .. }));
    assert_eq!(gguf.tensors[0].shape, [2, 1, 1, 1, 1, 1, 2, 1]);
    let nine = Writer::default().tensor("t", &[1; 9], F32, vec![0; 4]).finish();
    assert!(matches!(Gguf::parse(&nine.as_slice(), &LENIENT), Err(GgufError::Dimensions { count: 9, .. })));

    let mut writer = Writer::default().tensor_at("t", &[1], F32, 5);
    writer = writer.tensor("padding", &[16], I8, vec![0; 16]);
    writer.tensors[1].offset = None;
    let file = [writer.finish(), vec![0; 64]].concat();
    assert!(matches!(parse(&file), Err(GgufError::Misaligned { offset: 5, .. })));

    let inner = Item::Array(4, vec![Item::U32(1), Item::U32(2)]);
    let nested = |depth: u32| (1..depth).fold(inner.clone(), |item, _| Item::Array(9, vec![item]));
    let (found, gguf) = lenient_only(&Writer::default().key("a", nested(4)));
    assert!(matches!(found, GgufError::Nested { depth: 2, .. }));
    let file = Writer::default().key("a", nested(4)).finish();
    let mut array = gguf.header.metadata.get("a").unwrap().as_array().unwrap().clone();
    for _ in 1..4 {
        let ArrayValues::Array(arrays) = array.read(&file.as_slice()).unwrap() else { panic!("no arrays") };
        array = arrays[0].clone();
    }
    assert_eq!(array.read(&file.as_slice()).unwrap(), ArrayValues::U32(vec![1, 2]));
    let many = |outer: usize, inner: usize| {
        let empty = Item::Array(9, vec![Item::Array(0, vec![]); inner]);
        let file = Writer::default().key("a", Item::Array(9, vec![empty; outer])).finish();
        Gguf::parse(&file.as_slice(), &LENIENT)
    };
    assert!(many(2, 32_767).is_ok());
    for (outer, inner) in [(2, 32_768), (256, 256), (65_537, 0)] {
        let found = many(outer, inner);
        assert!(matches!(found, Err(GgufError::TooMany { limit: MAX_NESTED_ARRAYS, .. })), "{found:?}");
    }
    let deeper = Writer::default().key("a", nested(5)).finish();
    assert!(matches!(Gguf::parse(&deeper.as_slice(), &LENIENT), Err(GgufError::Nested { depth: 5, .. })));
}

#[test]
fn what_makes_bytes_ambiguous_is_refused_even_leniently() {
    let two = |first: (u64, u64), second: (u64, u64)| {
        Writer::default().tensor_at("a", &[first.1], I8, first.0).tensor_at("b", &[second.1], I8, second.0)
    };
    for writer in [two((0, 33), (32, 1)), two((32, 1), (0, 33)), two((0, 1), (0, 1)), two((0, 96), (32, 1))] {
        let file = [writer.finish(), vec![0; 200]].concat();
        for options in [STRICT, LENIENT] {
            let found = Gguf::parse(&file.as_slice(), &options);
            assert!(matches!(found, Err(GgufError::Overlap { .. })), "{found:?}");
        }
    }
    let short = Writer::default().tensor("a", &[8], F32, vec![0; 31]).finish();
    let twice = Writer::default().tensor("a", &[1], I8, vec![0]).tensor("a", &[1], I8, vec![0]).finish();
    for options in [STRICT, LENIENT] {
        let found = Gguf::parse(&short.as_slice(), &options);
        assert!(matches!(found, Err(GgufError::Truncated { tensor, .. }) if tensor == "a"));
        let found = Gguf::parse(&twice.as_slice(), &options);
        assert!(matches!(found, Err(GgufError::DuplicateTensor { tensor }) if tensor == "a"));
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    for dimensions in [vec![1 << 62, 1 << 62], vec![1 << 63], vec![1 << 62], vec![u64::MAX, 0]] {
        let found = error(&Writer::default().tensor_at("t", &dimensions, F32, 0));
        assert!(matches!(found, GgufError::Overflow { .. }), "{dimensions:?}: {found:?}");
    }
    let found = error(&Writer::default().tensor_at("t", &[1], F32, u64::MAX - 31));
    assert!(matches!(found, GgufError::Overflow { .. }), "{found:?}");
    let found = error(&Writer::default().tensor("t", &[33, 32], Q4_0, vec![0; 33 * 18]));
    assert!(matches!(found, GgufError::PartialBlock { .. }), "{found:?}");
    let found = error(&Writer::default().tensor_at("t", &[], Q4_0, 0));
    assert!(matches!(found, GgufError::PartialBlock { .. }), "{found:?}");
    for id in [4, 5, 31, 32, 33, 36, 37, 38] {
        let found = error(&Writer::default().tensor_at("t", &[256], id, 0));
        assert!(matches!(found, GgufError::RemovedType { id: of, .. } if of == id), "{found:?}");
    }
}

#[test]
fn tensors_of_unknown_types_reach_up_to_the_next() {
    let writer = Writer::default()
        .tensor("a", &[9], UNKNOWN, vec![0; 40])
        .tensor("b", &[4], I8, vec![0; 4])
        .tensor("c", &[9], UNKNOWN, vec![0; 50]);
    let gguf = parse(&writer.finish()).unwrap();
    let lengths: Vec<_> = gguf.tensors.iter().map(|tensor| (tensor.dtype, tensor.bytes.len())).collect();
    let unknown = Dtype::UnknownGgml(UNKNOWN);
    assert_eq!(lengths, [(unknown, 64), (Dtype::I8, 4), (unknown, 50)]);

    // What has no bytes ends nothing, wherever it claims to be.
    let with_empty = Writer::default().tensor("a", &[9], UNKNOWN, vec![0; 100]);
    let with_empty = with_empty.tensor("b", &[4], I8, vec![0; 4]).tensor_at("empty", &[0], F32, 32);
    let gguf = parse(&with_empty.finish()).unwrap();
    let lengths: Vec<_> = gguf.tensors.iter().map(|tensor| (&*tensor.name, tensor.bytes.len())).collect();
    assert_eq!(lengths, [("a", 128), ("empty", 0), ("b", 4)]);

    let together = Writer::default().tensor("a", &[9], UNKNOWN, vec![0; 40]).tensor_at("b", &[9], UNKNOWN, 0);
    assert!(matches!(error(&together), GgufError::Overlap { .. }));
    let nothing = error(&Writer::default().tensor_at("a", &[9], UNKNOWN, 0));
    assert!(matches!(nothing, GgufError::Truncated { .. }), "{nothing:?}");
    let mut empty = Writer::default().tensor_at("a", &[9, 0], UNKNOWN, 0);
    empty = empty.tensor("b", &[1], I8, vec![0]);
    assert_eq!(parse(&empty.finish()).unwrap().tensors[0].bytes.len(), 0);
}

#[test]
fn errors_name_the_key_the_tensor_and_the_byte() {
    let payload = [8u32.to_le_bytes().as_slice(), &1u64.to_le_bytes(), &100u64.to_le_bytes()].concat();
    let file = Writer::default().key("tokens", Item::Raw(9, payload)).finish();
    let found = parse(&file).unwrap_err();
    assert_eq!(found.offset(), Some(file.len() as u64));
    assert!(found.to_string().contains("'tokens'"), "{found}");
    let found = error(&Writer::default().tensor("blk.0.x", &[8], F32, vec![0; 31]));
    assert_eq!(found.tensor(), Some("blk.0.x"));
}

fn scalar() -> impl Strategy<Value = Item> {
    prop_oneof![
        any::<u8>().prop_map(Item::U8),
        any::<i8>().prop_map(Item::I8),
        any::<u16>().prop_map(Item::U16),
        any::<i16>().prop_map(Item::I16),
        any::<u32>().prop_map(Item::U32),
        any::<i32>().prop_map(Item::I32),
        any::<i16>().prop_map(|number| Item::F32(number.into())),
        (0..2u8).prop_map(Item::Bool),
        "\\PC{0,20}".prop_map(|text: String| Item::Str(text.into())),
        any::<u64>().prop_map(Item::U64),
        any::<i64>().prop_map(Item::I64),
        any::<i32>().prop_map(|number| Item::F64(number.into())),
    ]
}

fn value() -> impl Strategy<Value = Item> {
    let array =
        (scalar(), 0..20usize).prop_map(|(first, len)| Item::Array(first.type_id(), vec![first; len]));
    prop_oneof![3 => scalar(), 1 => array]
}

fn random_file() -> impl Strategy<Value = Writer> {
    let tensor = (0..GgmlType::ALL.len(), 0..4u64, prop::collection::vec(0..4u64, 0..4));
    let tensors = prop::collection::vec(tensor, 0..8);
    (prop::collection::vec(value(), 0..12), tensors, 2..4u32, any::<bool>(), 3..8u32).prop_map(
        |(values, tensors, version, big_endian, shift)| {
            let alignment = 1u32 << shift;
            let mut writer = Writer { version, big_endian, alignment: alignment.into(), ..Writer::default() };
            writer = writer.key("general.alignment", Item::U32(alignment));
            for (i, value) in values.into_iter().enumerate() {
                writer = writer.key(&format!("key.{i}"), value);
            }
            for (i, (block, rows, outer)) in tensors.into_iter().enumerate() {
                let block = GgmlType::ALL[block];
                let dimensions = [vec![rows * block.block_len()], outer].concat();
                let elements: u64 = dimensions.iter().product();
                let bytes = (elements / block.block_len() * block.block_bytes()) as usize;
                writer = writer.tensor(&format!("t.{i}"), &dimensions, block.id(), vec![i as u8; bytes]);
            }
            writer
        },
    )
}

fn values_of(array: &Array, source: &[u8]) -> Vec<Item> {
    match array.read(&source).unwrap() {
        ArrayValues::U8(values) => values.into_iter().map(Item::U8).collect(),
        ArrayValues::I8(values) => values.into_iter().map(Item::I8).collect(),
        ArrayValues::U16(values) => values.into_iter().map(Item::U16).collect(),
        ArrayValues::I16(values) => values.into_iter().map(Item::I16).collect(),
        ArrayValues::U32(values) => values.into_iter().map(Item::U32).collect(),
        ArrayValues::I32(values) => values.into_iter().map(Item::I32).collect(),
        ArrayValues::F32(values) => values.into_iter().map(Item::F32).collect(),
        ArrayValues::Bool(values) => values.into_iter().map(|truth| Item::Bool(truth.into())).collect(),
        ArrayValues::String(values) => values.into_iter().map(|text| Item::Str(text.into())).collect(),
        ArrayValues::U64(values) => values.into_iter().map(Item::U64).collect(),
        ArrayValues::I64(values) => values.into_iter().map(Item::I64).collect(),
        ArrayValues::F64(values) => values.into_iter().map(Item::F64).collect(),
        ArrayValues::Array(_) => panic!("no such array was written"),
    }
}

fn item_of(value: &Value, source: &[u8]) -> Item {
    match value {
        Value::U8(number) => Item::U8(*number),
        Value::I8(number) => Item::I8(*number),
        Value::U16(number) => Item::U16(*number),
        Value::I16(number) => Item::I16(*number),
        Value::U32(number) => Item::U32(*number),
        Value::I32(number) => Item::I32(*number),
        Value::F32(number) => Item::F32(*number),
        Value::Bool(truth) => Item::Bool((*truth).into()),
        Value::String(text) => Item::Str(text.as_bytes().into()),
        Value::U64(number) => Item::U64(*number),
        Value::I64(number) => Item::I64(*number),
        Value::F64(number) => Item::F64(*number),
        Value::Array(array) => {
            let items = values_of(array, source);
            assert_eq!(items.len() as u64, array.len());
            let id = (0..13).find(|&id| ValueType::from_id(id) == Some(array.element()));
            Item::Array(id.unwrap(), items)
        }
    }
}

proptest! {
    #[test]
    fn files_parse_to_what_was_written(writer in random_file()) {
        let file = writer.finish();
        let gguf = parse(&file).unwrap();
        let found: Vec<(Vec<u8>, Item)> = gguf
            .header
            .metadata
            .iter()
            .map(|(key, value)| (key.into(), item_of(value, &file)))
            .collect();
        prop_assert_eq!(&found, &writer.keys);
        prop_assert_eq!(gguf.tensors.len(), writer.tensors.len());
        let mut end = 0;
        for tensor in &gguf.tensors {
            let written = writer.tensors.iter().find(|written| written.name == tensor.name.as_bytes()).unwrap();
            let shape: Vec<u64> = written.dimensions.iter().rev().copied().collect();
            prop_assert_eq!(&tensor.shape, &shape);
            prop_assert_eq!(tensor.dtype, Dtype::from_ggml(written.type_id).unwrap());
            if !tensor.bytes.is_empty() {
                prop_assert!(tensor.bytes.start() >= end);
                end = tensor.bytes.end();
                let bytes = &file[tensor.bytes.start() as usize..tensor.bytes.end() as usize];
                prop_assert_eq!(bytes, &*written.bytes);
            }
        }
    }

    #[test]
    fn mutated_files_are_refused_or_hold_what_they_say(
        writer in random_file(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<Option<prop::sample::Index>>(),
        lenient in any::<bool>(),
    ) {
        let mut file = writer.finish();
        for (index, byte) in changes {
            let position = index.index(file.len());
            file[position] = byte;
        }
        if let Some(cut) = cut {
            file.truncate(cut.index(file.len()) + 1);
        }
        if let Ok(gguf) = Gguf::parse(&file.as_slice(), &OpenOptions { lenient, ..STRICT }) {
            let mut end = gguf.header.data_start;
            for tensor in gguf.tensors.iter().filter(|tensor| !tensor.bytes.is_empty()) {
                prop_assert!(tensor.bytes.start() >= end);
                end = tensor.bytes.end();
                prop_assert!(end <= file.len() as u64);
            }
            for (_, value) in gguf.header.metadata.iter() {
                if let Some(array) = value.as_array() {
                    let _ = array.read(&file.as_slice());
                }
            }
        }
    }
}

#[test]
fn a_source_that_fails_is_an_error_with_the_bytes() {
    struct Broken;
    impl ByteSource for Broken {
        fn len_bytes(&self) -> io::Result<u64> {
            Ok(1000)
        }
        fn read_exact_at(&self, _: &mut [u8], _: u64) -> io::Result<()> {
            Err(io::Error::other("unplugged"))
        }
    }
    let found = Gguf::parse(&Broken, &STRICT).unwrap_err();
    assert!(
        matches!(&found, GgufError::Io { range, .. } if range.start() == 0 && !range.is_empty()),
        "{found:?}"
    );
}
