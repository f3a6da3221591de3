//! Rows of a table, against the file that it lies in.

use crate::kit::{bytes_of, disk, safetensors};
use hoistway::{
    ByteRange, Checkpoint, Dtype,
    read::{Reader, ReaderOptions},
    route::fault::{Fault, FaultScript},
};
use hoistway_experts::{Error, rows::Rows};
use proptest::prelude::*;
use std::{fs, sync::Arc};

const ROWS: u64 = 3000;
const ROW_BYTES: u64 = 2 * 3 * 37;

struct Table {
    _directory: tempfile::TempDir,
    /// The file for writing: opened first, as Windows lets no writer in later.
    writer: fs::File,
    checkpoint: Checkpoint,
    bytes: Vec<u8>,
}

fn table() -> Table {
    let directory = disk();
    let path = directory.path().join("model.safetensors");
    let tensors: [(&str, Dtype, &[u64]); 4] = [
        ("before", Dtype::U8, &[77]),
        ("table", Dtype::Bf16, &[ROWS, 3, 37]),
        ("none", Dtype::U8, &[0, 8]),
        ("scalar", Dtype::F32, &[]),
    ];
    safetensors(&path, &tensors);
    let writer = fs::OpenOptions::new().write(true).open(&path).unwrap();
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    Table { _directory: directory, writer, checkpoint, bytes: bytes_of("table", ROWS * ROW_BYTES) }
}

fn reader(options: ReaderOptions) -> Arc<Reader> {
    Arc::new(Reader::new(&options.in_flight(32)).unwrap())
}

fn row(bytes: &[u8], row: u64) -> &[u8] {
    &bytes[(row * ROW_BYTES) as usize..((row + 1) * ROW_BYTES) as usize]
}

#[test]
fn rows_are_those_of_the_table_in_any_order() {
    let table = table();
    let rows = Rows::of_tensor(&reader(ReaderOptions::default()), &table.checkpoint, "table").unwrap();
    assert_eq!((rows.len(), rows.row_bytes()), (ROWS, ROW_BYTES));
    proptest!(ProptestConfig::with_cases(24), |(wanted in prop::collection::vec(0..ROWS, 0..200))| {
        let gathered = rows.gather(&wanted).unwrap();
        prop_assert_eq!(gathered.len(), wanted.len());
        for (found, wanted) in gathered.iter().zip(&wanted) {
            prop_assert!(found == row(&table.bytes, *wanted), "row {wanted}");
        }
        prop_assert_eq!(gathered.row(wanted.len()), None);
    });
    // All of them, which are one run.
    let all: Vec<u64> = (0..ROWS).collect();
    let gathered = rows.gather(&all).unwrap();
    assert!(gathered.iter().zip(&all).all(|(found, wanted)| found == row(&table.bytes, *wanted)));
}

#[test]
fn neighbours_and_doubles_are_read_once() {
    let table = table();
    let script = FaultScript::new(|_, _| None);
    // Nothing comes from the page cache without a read.
    let options = ReaderOptions::default().direct(hoistway::DirectIo::Never).route(hoistway::Route::Threads);
    let reader = reader(options.faults(script.clone()));
    let rows = Rows::of_tensor(&reader, &table.checkpoint, "table").unwrap();
    let wanted: Vec<u64> = (100..150).chain(100..150).collect();
    assert_eq!(rows.gather(&wanted).unwrap().len(), 100);
    // One run of 50 rows, which may cross a chunk.
    assert!((1..=3).contains(&script.reads()), "{} reads", script.reads());
}

#[test]
fn what_is_no_row_is_an_error() {
    let table = table();
    let reader = reader(ReaderOptions::default());
    let rows = Rows::of_tensor(&reader, &table.checkpoint, "table").unwrap();
    let error = rows.gather(&[5, ROWS]).unwrap_err();
    assert_eq!(error.to_string(), "the table 'table' has 3000 rows, counted from 0: there is no row 3000");
    for name in ["none", "scalar"] {
        let error = Rows::of_tensor(&reader, &table.checkpoint, name).unwrap_err();
        assert!(matches!(error, Error::InvalidOption { option: "table", .. }), "{name}: {error:?}");
    }
    let error = Rows::of_tensor(&reader, &table.checkpoint, "tabel").unwrap_err();
    assert!(matches!(error, Error::Engine(hoistway::Error::NoSuchTensor { .. })), "{error:?}");
    let file = table.checkpoint.read_file(table.checkpoint.catalog().file_ids().next().unwrap()).unwrap();
    for (range, row_bytes) in [(ByteRange::at(0, 10).unwrap(), 3), (ByteRange::at(0, 1 << 40).unwrap(), 1)] {
        let error = Rows::new(&reader, &file, range, row_bytes, "t").unwrap_err();
        assert!(matches!(error, Error::InvalidOption { option: "table", .. }), "{error:?}");
    }
}

#[test]
fn a_row_that_cannot_be_read_fails_all_of_the_request() {
    let table = table();
    let script = FaultScript::new(|number, _| (number == 3).then_some(Fault::Broken));
    let reader = reader(
        ReaderOptions::default()
            .direct(hoistway::DirectIo::Never)
            .route(hoistway::Route::Threads)
            .faults(script),
    );
    let rows = Rows::of_tensor(&reader, &table.checkpoint, "table").unwrap();
    let wanted: Vec<u64> = (0..20).map(|row| row * 100).collect();
    let error = rows.gather(&wanted).unwrap_err();
    let Error::Read { unit, source } = &error else { panic!("{error:?}") };
    assert_eq!((unit.as_str(), source.error().errno()), ("table 'table'", Fault::Broken.errno()));
    // The fault is over.
    let gathered = rows.gather(&wanted).unwrap();
    assert!(gathered.iter().zip(&wanted).all(|(found, wanted)| found == row(&table.bytes, *wanted)));
    table.writer.set_len(5000).unwrap();
    let error = rows.gather(&wanted).unwrap_err();
    assert!(matches!(error, Error::Read { .. }), "{error:?}");
}
