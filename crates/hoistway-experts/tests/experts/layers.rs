//! Layers of a dense model, pass after pass, under budgets of every size.

use crate::{
    kit::{LONG, SHORT, bytes_of, disk, safetensors},
    stand_in::{STAND_IN, Turn, Vendor},
};
use hoistway::{
    Checkpoint, Dtype, Route,
    read::{Reader, ReaderOptions},
    route::fault::{Fault, FaultScript},
};
use hoistway_device::{CopyStream, Device};
use hoistway_experts::{
    Error,
    layers::{Layer, LayerOptions, LayerSpec, LayerStream, numbered_layers},
};
use std::{collections::BTreeSet, fs, sync::Arc, thread, time::Duration};

const LAYERS: usize = 6;
/// Blocks of a layer, as it lies in memory at most.
const LAYER_BYTES: u64 = 5 * 4096;

pub(crate) struct Dense {
    _directory: tempfile::TempDir,
    /// The file for writing: opened first, as Windows lets no writer in later.
    writer: fs::File,
    checkpoint: Checkpoint,
    layers: Vec<LayerSpec>,
}

pub(crate) fn dense() -> Dense {
    let directory = disk();
    let path = directory.path().join("model.safetensors");
    let names: Vec<String> = (0..LAYERS)
        .flat_map(|layer| ["attn.weight", "mlp.weight"].map(|name| format!("model.layers.{layer}.{name}")))
        .collect();
    let mut tensors: Vec<(&str, Dtype, &[u64])> = vec![("model.embed.weight", Dtype::F32, &[100, 3])];
    for name in &names {
        tensors.push((name, Dtype::U8, if name.contains("attn") { &[61, 100] } else { &[97, 100] }));
    }
    safetensors(&path, &tensors);
    let writer = fs::OpenOptions::new().write(true).open(&path).unwrap();
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    let layers = numbered_layers(checkpoint.catalog());
    Dense { _directory: directory, writer, checkpoint, layers }
}

fn open(
    dense: &Dense,
    budget: u64,
    ahead: usize,
    reader: ReaderOptions,
) -> hoistway_experts::Result<LayerStream> {
    open_with(dense, LayerOptions::default().budget_bytes(budget).ahead(ahead).timeout(LONG), reader)
}

pub(crate) fn open_with(
    dense: &Dense,
    options: LayerOptions,
    reader: ReaderOptions,
) -> hoistway_experts::Result<LayerStream> {
    let reader = Arc::new(Reader::new(&reader).unwrap());
    LayerStream::new(&dense.checkpoint, &reader, &dense.layers, &options)
}

pub(crate) fn assert_is(layer: &Layer, number: usize) {
    assert_eq!(layer.name(), format!("model.layers.{number}"));
    assert_eq!(layer.tensors().len(), 2);
    for tensor in layer.tensors() {
        let len = tensor.shape().iter().product();
        assert_eq!(tensor.len(), len);
        let mut bytes = tensor.bytes().to_vec();
        if !tensor.device().is_host() {
            assert!(bytes.is_empty() && tensor.address().is_multiple_of(256));
            bytes = vec![0; len as usize];
            let copies = CopyStream::new(&Device::open(tensor.device()).unwrap()).unwrap();
            copies.read_back(tensor.address(), &mut bytes).unwrap();
        }
        assert!(bytes == bytes_of(tensor.name(), len), "{}", tensor.name());
        assert_eq!(tensor.dtype(), Dtype::U8);
    }
    let name = format!("model.layers.{number}.mlp.weight");
    assert_eq!(layer.tensor(&name).unwrap().shape(), [97, 100]);
}

#[test]
fn layers_are_found_by_their_numbers_in_order() {
    let dense = dense();
    let names: Vec<&str> = dense.layers.iter().map(|layer| layer.name.as_str()).collect();
    let expected: Vec<String> = (0..LAYERS).map(|layer| format!("model.layers.{layer}")).collect();
    assert_eq!(names, expected);
    assert!(dense.layers.iter().all(|layer| layer.tensors.len() == 2));
}

#[test]
fn passes_bring_every_layer_within_any_budget() {
    let dense = dense();
    for (layers, ahead, kept) in [(1, 0, 0), (2, 1, 0), (3, 1, 1), (5, 2, 2), (7, 3, 6)] {
        let mut stream = open(&dense, layers * LAYER_BYTES, ahead, ReaderOptions::default()).unwrap();
        for pass in 0..3 {
            let mut seen = 0;
            for layer in stream.pass() {
                assert_is(&layer.unwrap(), seen);
                seen += 1;
            }
            assert_eq!(seen, LAYERS, "pass {pass} with a budget of {layers}");
        }
        let stats = stream.stats();
        assert!(stats.kept >= kept && stats.ahead == ahead, "{stats:?} with a budget of {layers}");
        assert_eq!((stats.layers, stats.served), (LAYERS, 3 * LAYERS as u64));
        assert!(stats.peak_bytes <= layers * LAYER_BYTES, "{stats:?}");
        // The first pass reads all, the others what does not stay.
        let most = (LAYERS + 2 * (LAYERS - stats.kept)) as u64 * LAYER_BYTES;
        assert!(stats.bytes_read <= most, "{stats:?}");
    }
}

/// Where the first page of a layer is.
fn page(layer: &Layer) -> u64 {
    layer.tensors().map(|tensor| tensor.address() / 4096).min().unwrap()
}

#[test]
fn layers_use_memory_of_layers_that_were_dropped() {
    let dense = dense();
    for (layers, ahead) in [(1, 0), (2, 1), (3, 2)] {
        let mut stream = open(&dense, layers * LAYER_BYTES, ahead, ReaderOptions::default()).unwrap();
        let mut pages = BTreeSet::new();
        for number in (0..3 * LAYERS).map(|number| number % LAYERS) {
            let layer = stream.next_layer().unwrap();
            assert_is(&layer, number);
            pages.insert(page(&layer));
        }
        let stats = stream.stats();
        assert_eq!(stats.allocations, layers, "{stats:?}");
        assert_eq!(stats.bytes_read, 3 * LAYERS as u64 * (6100 + 9700));
        assert_eq!(pages.len() as u64, layers, "{pages:?}");
    }
}

#[test]
fn a_layer_in_host_memory_has_no_stream_that_uses_it() {
    let dense = dense();
    let mut stream = open(&dense, LAYER_BYTES, 0, ReaderOptions::default()).unwrap();
    let layer = stream.next_layer().unwrap();
    // SAFETY: 0 is the default stream, and nothing uses the layer on a device.
    let error = unsafe { layer.used_behind(0) }.unwrap_err();
    assert!(matches!(error, Error::InvalidOption { option: "stream", .. }), "{error}");
}

#[test]
fn a_layer_that_is_held_keeps_its_memory_and_others_do_without() {
    let dense = dense();
    let mut stream = open(&dense, 3 * LAYER_BYTES, 1, ReaderOptions::default()).unwrap();
    let mut held = stream.next_layer().unwrap();
    for number in 1..3 * LAYERS {
        let layer = stream.next_layer().unwrap();
        assert_is(&layer, number % LAYERS);
        assert_ne!(page(&layer), page(&held));
        assert_is(&held, 0);
        if number == LAYERS {
            held = layer;
        }
    }
    drop(stream);
    assert_is(&held, 0);
}

/// Bytes of a layer on a device, where tensors begin at multiples of 256.
pub(crate) const ON_DEVICE: u64 = 6144 + 9728;

#[test]
fn layers_on_a_device_have_memory_of_the_budget_that_is_used_again() {
    let turn = Turn::take();
    let dense = dense();
    for vendor in Vendor::ALL {
        for (layers, ahead) in [(1, 0), (2, 1), (3, 1), (7, 3)] {
            let options = LayerOptions::default().device(vendor.device(0)).ahead(ahead).timeout(LONG);
            let options = options.budget_bytes(layers * ON_DEVICE);
            let before = vendor.count("device_bytes");
            let mut stream = open_with(&dense, options, ReaderOptions::default()).unwrap();
            for _ in 0..3 {
                assert_eq!(
                    stream.pass().enumerate().map(|(n, layer)| assert_is(&layer.unwrap(), n)).count(),
                    LAYERS
                );
            }
            let stats = stream.stats();
            assert!(stats.peak_device_bytes <= layers * ON_DEVICE, "{stats:?}");
            assert_eq!(stats.peak_device_bytes, stats.peak_bytes);
            assert!(vendor.count("device_bytes") - before >= stats.peak_device_bytes);
            drop(stream);
        }
    }
    drop(dense);
    turn.assert_nothing_left("streams to devices");
}

#[test]
fn a_stream_that_is_gone_leaves_the_memory_of_layers_that_are_held_and_no_other() {
    let turn = Turn::take();
    let dense = dense();
    for vendor in Vendor::ALL {
        let options = LayerOptions::default().device(vendor.device(0)).timeout(LONG);
        let mut stream =
            open_with(&dense, options.budget_bytes(4 * ON_DEVICE), ReaderOptions::default()).unwrap();
        let held = stream.next_layer().unwrap();
        assert!(stream.pass().all(|layer| layer.is_ok()));
        assert!(stream.stats().peak_device_bytes > 2 * ON_DEVICE);
        drop(stream);
        let before = vendor.count("device_bytes");
        assert_is(&held, 0);
        drop(held);
        assert_eq!(before - vendor.count("device_bytes"), ON_DEVICE);
    }
    drop(dense);
    turn.assert_nothing_left("layers that outlive their stream");
}

/// Reading ahead is given up then: a layer that was read is handed out.
#[test]
fn a_layer_is_handed_out_though_the_next_one_gets_no_memory() {
    let turn = Turn::take();
    let dense = dense();
    for vendor in Vendor::ALL {
        let options = LayerOptions::default().device(vendor.device(0)).timeout(LONG);
        let options = options.budget_bytes(2 * ON_DEVICE);
        let mut stream = open_with(&dense, options, ReaderOptions::default()).unwrap();
        let before = vendor.count("device_bytes");
        // That of the second layer, which is tried twice.
        STAND_IN.configure(&vendor.faults("cuMemAlloc_v2:2=2,cuMemAlloc_v2:3=2"));
        assert_is(&stream.next_layer().unwrap(), 0);
        assert_eq!(vendor.count("device_bytes") - before, ON_DEVICE);
        for number in 1..LAYERS {
            assert_is(&stream.next_layer().unwrap(), number);
        }
        STAND_IN.reset();
        assert_eq!(stream.stats().bytes_read, LAYERS as u64 * (6100 + 9700));
    }
    drop(dense);
    turn.assert_nothing_left("layers without memory ahead");
}

#[test]
fn a_layer_that_a_device_fails_is_the_next_one_again() {
    let turn = Turn::take();
    let dense = dense();
    for fault in ["cuMemAlloc_v2:*=2", "copy:2=700", "cuEventSynchronize:*=999"] {
        let vendor = Vendor::Cuda;
        let options = LayerOptions::default().device(vendor.device(0)).timeout(LONG);
        let options = options.budget_bytes(2 * ON_DEVICE);
        let mut stream = open_with(&dense, options.clone(), ReaderOptions::default()).unwrap();
        STAND_IN.configure(&vendor.faults(fault));
        let failed = stream.pass().find_map(Result::err).expect(fault);
        assert!(matches!(failed, Error::Read { .. } | Error::Engine(_)), "{fault}: {failed}");
        drop(stream);
        STAND_IN.reset();
        // A device that was lost is opened anew.
        let mut stream = open_with(&dense, options, ReaderOptions::default()).unwrap();
        assert_eq!(stream.pass().enumerate().map(|(n, layer)| assert_is(&layer.unwrap(), n)).count(), LAYERS);
    }
    drop(dense);
    turn.assert_nothing_left("streams that failed");
}

#[test]
fn what_is_read_ahead_shrinks_before_the_budget_is_exceeded() {
    let dense = dense();
    let stream = open(&dense, 2 * LAYER_BYTES, 4, ReaderOptions::default()).unwrap();
    assert_eq!(stream.stats().ahead, 1);
    let error = open(&dense, 1000, 1, ReaderOptions::default()).unwrap_err();
    assert!(matches!(error, Error::BudgetTooSmall { budget: 1000, .. }), "{error:?}");
}

#[test]
fn a_pass_that_is_left_goes_on_where_it_was() {
    let dense = dense();
    let mut stream = open(&dense, 3 * LAYER_BYTES, 1, ReaderOptions::default()).unwrap();
    assert_is(&stream.pass().next().unwrap().unwrap(), 0);
    let rest: Vec<Layer> = stream.pass().take(2).map(Result::unwrap).collect();
    assert_is(&rest[0], 1);
    assert_is(&rest[1], 2);
    drop(rest);
    assert_eq!(stream.pass().map(Result::unwrap).count(), LAYERS - 3);
    assert_is(&stream.next_layer().unwrap(), 0);
}

#[test]
fn layers_that_are_held_end_the_stream_with_an_error_and_not_with_more_memory() {
    let dense = dense();
    let options = LayerOptions::default().budget_bytes(2 * LAYER_BYTES).ahead(1).timeout(SHORT);
    let mut stream = open_with(&dense, options, ReaderOptions::default()).unwrap();
    let held: Vec<Layer> = (0..2).map(|_| stream.next_layer().unwrap()).collect();
    let error = stream.next_layer().unwrap_err();
    assert!(matches!(error, Error::NoRoom { .. }), "{error:?}");
    assert!(stream.stats().peak_bytes <= 2 * LAYER_BYTES);
    for (number, layer) in held.iter().enumerate() {
        assert_is(layer, number);
    }
    drop(held);
    assert_is(&stream.next_layer().unwrap(), 2);
}

#[test]
fn a_wait_for_room_can_be_watched_and_ended() {
    let dense = dense();
    let options = LayerOptions::default().budget_bytes(LAYER_BYTES).ahead(0).timeout(Duration::MAX);
    let mut stream = open_with(&dense, options, ReaderOptions::default()).unwrap();
    let watch = stream.watch();
    let held = stream.next_layer().unwrap();
    let waiting = thread::spawn(move || stream.next_layer().map(drop));
    // Neither waits for the other thread, whether it has come to its wait or not.
    assert_eq!(watch.stats().served, 1);
    watch.stop();
    let error = waiting.join().unwrap().unwrap_err();
    assert!(matches!(error, Error::Engine(hoistway::Error::Cancelled)), "{error:?}");
    assert_is(&held, 0);
}

#[test]
fn a_layer_that_cannot_be_read_is_tried_again_when_asked_again() {
    let dense = dense();
    let script = FaultScript::new(|number, _| (number == 2).then_some(Fault::Broken));
    let reader = ReaderOptions::default().route(Route::Threads).in_flight(1).faults(script);
    let mut stream = open(&dense, 2 * LAYER_BYTES, 1, reader).unwrap();
    let (mut failures, mut next) = (0, 0);
    while next < 2 * LAYERS {
        match stream.next_layer() {
            Ok(layer) => {
                assert_is(&layer, next % LAYERS);
                next += 1;
            }
            Err(Error::Read { source, .. }) => {
                assert_eq!(source.error().errno(), Fault::Broken.errno());
                failures += 1;
            }
            Err(other) => panic!("{other:?}"),
        }
    }
    assert_eq!(failures, 1);
    dense.writer.set_len(4096).unwrap();
    let error = stream.pass().find_map(Result::err).unwrap();
    assert!(matches!(error, Error::Read { .. }), "{error:?}");
}

#[test]
fn what_is_no_layer_is_an_error() {
    let dense = dense();
    let reader = Arc::new(Reader::new(&ReaderOptions::default()).unwrap());
    let options = LayerOptions::default().timeout(LONG);
    let layer = |tensors: &[&str]| LayerSpec {
        name: "layer".into(),
        tensors: tensors.iter().map(ToString::to_string).collect(),
    };
    let error =
        |layers: &[LayerSpec]| LayerStream::new(&dense.checkpoint, &reader, layers, &options).unwrap_err();
    assert!(matches!(error(&[]), Error::InvalidOption { option: "layers", .. }));
    assert!(matches!(error(&[layer(&[])]), Error::InvalidOption { option: "layers", .. }));
    assert!(matches!(error(&[layer(&["nothing"])]), Error::Engine(hoistway::Error::NoSuchTensor { .. })));
}
