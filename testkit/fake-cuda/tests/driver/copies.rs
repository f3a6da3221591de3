//! Copies between host and device.

use crate::{
    fixture::{Session, pattern},
    library::{Memcpy2D, Memcpy2DSide},
};
use std::{
    fs, process,
    time::{Duration, Instant},
};

#[test]
fn bytes_go_there_and_back() {
    let session = Session::new();
    let stream = session.stream();
    let bytes = pattern(100_000);
    let (first, second) = (session.allocate(bytes.len()), session.allocate(bytes.len()));
    assert_eq!(session.cuMemcpyHtoDAsync_v2(first, bytes.as_ptr(), bytes.len(), stream), 0);
    assert_eq!(session.cuMemcpyDtoDAsync_v2(second, first, bytes.len(), stream), 0);
    assert_eq!(session.cuMemsetD8Async(second + 10, 7, 3, stream), 0);
    let mut back = vec![0; bytes.len()];
    let copied = (session.count("copies"), session.count("copied_bytes"));
    // Not pinned, so that the call waits.
    assert_eq!(session.cuMemcpyDtoHAsync_v2(back.as_mut_ptr(), second, back.len(), stream), 0);
    assert_eq!(session.cuStreamQuery(stream), 0);
    assert_eq!(back[10..13], [7; 3]);
    back[10..13].copy_from_slice(&bytes[10..13]);
    assert!(back == bytes);
    assert!(session.count("copies") > copied.0 && session.count("copied_bytes") >= copied.1 + 100_000);
}

#[test]
fn pinned_sources_are_read_late_and_others_at_once() {
    let session = Session::new();
    let stream = session.stream();
    let destination = session.allocate(8);
    let pinned = session.pinned(b"old!");
    let mut pageable = *b"old!";
    let gate = session.gate(stream);
    assert_eq!(session.cuMemcpyHtoDAsync_v2(destination, pinned.as_ptr(), 4, stream), 0);
    assert_eq!(session.cuMemcpyHtoDAsync_v2(destination + 4, pageable.as_ptr(), 4, stream), 0);
    pinned.copy_from_slice(b"new!");
    pageable.copy_from_slice(b"new!");
    assert_eq!(session.cuStreamQuery(stream), 600);
    drop(gate);
    assert_eq!(session.cuStreamSynchronize(stream), 0);
    assert_eq!((session.download(destination, 8), &pageable), (b"new!old!".to_vec(), b"new!"));
}

#[test]
fn a_pinned_destination_is_written_late() {
    let session = Session::new();
    let stream = session.stream();
    let source = session.upload(b"data");
    let pinned = session.pinned(b"none");
    let gate = session.gate(stream);
    assert_eq!(session.cuMemcpyDtoHAsync_v2(pinned.as_mut_ptr(), source, 4, stream), 0);
    assert_eq!(pinned, b"none");
    drop(gate);
    assert_eq!(session.cuStreamSynchronize(stream), 0);
    assert_eq!(pinned, b"data");
}

#[test]
fn memory_that_is_unpinned_too_early_is_noticed() {
    let session = Session::new();
    let stream = session.stream();
    let destination = session.allocate(4);
    let host = *b"data";
    assert_eq!(session.cuMemHostRegister_v2(host.as_ptr(), 4, 0), 0);
    let gate = session.gate(stream);
    assert_eq!(session.cuMemcpyHtoDAsync_v2(destination, host.as_ptr(), 4, stream), 0);
    assert_eq!(session.cuMemHostUnregister(host.as_ptr()), 0);
    drop(gate);
    assert_eq!(session.cuStreamSynchronize(stream), 700);
}

/// Copies of two streams take turns on one bus, which moves nothing if it is told so.
#[test]
fn simulated_copies_pass_one_bus() {
    const BYTES: usize = 32 << 20;
    let session = Session::new();
    let (host, destination) = (session.pinned(&vec![1; BYTES]), session.allocate(BYTES));
    let streams = [session.stream(), session.stream()];
    session.configure("COSTS=h100");
    session.configure("MOVES=0");
    let begin = Instant::now();
    for stream in streams {
        assert_eq!(session.cuMemcpyHtoDAsync_v2(destination, host.as_ptr(), BYTES, stream), 0);
    }
    for stream in streams {
        assert_eq!(session.cuStreamSynchronize(stream), 0);
    }
    // At 55 bytes a nanosecond.
    assert!(begin.elapsed() >= Duration::from_nanos((2 * BYTES / 55) as u64));
    session.configure("COSTS=");
    session.configure("MOVES=1");
    assert_eq!(session.download(destination, 4), [0xa5; 4]);
}

#[test]
fn a_device_address_is_no_host_address() {
    let session = Session::new();
    let address = session.allocate(8);
    assert_eq!(session.cuMemcpyHtoDAsync_v2(address, address as *const u8, 4, 0), 1);
    assert_eq!(session.cuMemcpyDtoH_v2(address as *mut u8, address, 4), 1);
}

/// Three rows of four bytes, out of rows of ten and into rows of sixteen.
fn rows(source: Memcpy2DSide, destination: Memcpy2DSide) -> Memcpy2D {
    let source = Memcpy2DSide { x: 2, y: 1, pitch: 10, ..source };
    let destination = Memcpy2DSide { x: 1, y: 0, pitch: 16, ..destination };
    Memcpy2D { source, destination, width: 4, height: 3 }
}

fn on_host(address: *const u8) -> Memcpy2DSide {
    Memcpy2DSide { memory_type: 1, host: address.addr(), ..Memcpy2DSide::default() }
}

fn on_device(address: u64) -> Memcpy2DSide {
    Memcpy2DSide { memory_type: 2, device: address, ..Memcpy2DSide::default() }
}

fn check_rows(source: &[u8], destination: &[u8], untouched: u8) {
    for (offset, byte) in destination.iter().enumerate() {
        let (row, column) = (offset / 16, offset % 16);
        let expected =
            if row < 3 && (1..5).contains(&column) { source[(row + 1) * 10 + column + 1] } else { untouched };
        assert_eq!(*byte, expected, "{offset}");
    }
}

#[test]
fn rows_are_copied_in_all_directions() {
    let session = Session::new();
    let stream = session.stream();
    let source = pattern(40);
    // Not one byte more than the last row needs.
    let destination = session.allocate(37);
    for host in [source.as_ptr(), session.pinned(&source).as_ptr()] {
        assert_eq!(session.cuMemsetD8Async(destination, 0, 37, stream), 0);
        let parameters = rows(on_host(host), on_device(destination));
        assert_eq!(session.cuMemcpy2DAsync_v2(&parameters, stream), 0);
        assert_eq!(session.cuStreamSynchronize(stream), 0);
        check_rows(&source, &session.download(destination, 37), 0);
    }

    let on_device_source = session.upload(&source);
    assert_eq!(session.cuMemsetD8Async(destination, 9, 37, stream), 0);
    let parameters = rows(on_device(on_device_source), on_device(destination));
    assert_eq!(session.cuMemcpy2DAsync_v2(&parameters, stream), 0);
    assert_eq!(session.cuStreamSynchronize(stream), 0);
    check_rows(&source, &session.download(destination, 37), 9);

    let mut back = [1; 37];
    let parameters = rows(on_device(on_device_source), on_host(back.as_mut_ptr()));
    assert_eq!(session.cuMemcpy2DAsync_v2(&parameters, stream), 0);
    check_rows(&source, &back, 1);
}

#[test]
fn rows_that_cannot_be_are_refused() {
    let session = Session::new();
    let address = session.allocate(100);
    let mut parameters = rows(on_device(address), on_device(address));
    parameters.width = 9;
    assert_eq!(session.cuMemcpy2DAsync_v2(&parameters, 0), 1, "wider than the source's rows");
    parameters = rows(on_device(address), Memcpy2DSide { memory_type: 3, ..on_device(address) });
    assert_eq!(session.cuMemcpy2DAsync_v2(&parameters, 0), 1, "an array");
    parameters = rows(on_device(address), on_device(address));
    parameters.destination.pitch = 1 << 31;
    assert_eq!(session.cuMemcpy2DAsync_v2(&parameters, 0), 1, "too far apart");
    parameters = rows(on_device(address + 70), on_device(address));
    assert_eq!(session.cuMemcpy2DAsync_v2(&parameters, 0), 0);
    assert_eq!(session.cuCtxSynchronize(), 700, "beyond the allocation");
}

#[test]
fn a_trace_tells_when_copies_ran() {
    let path = std::env::temp_dir().join(format!("fake-cuda-trace-{}", process::id()));
    // The trace appends: a test that was killed may have left such a file.
    let _ = fs::remove_file(&path);
    let session = Session::configured(&[&format!("TRACE={}", path.display()), "COPY_LATENCY_US=2000"]);
    let stream = session.stream();
    let source = session.pinned(&[1; 1000]);
    let destination = session.allocate(1000);
    assert_eq!(session.cuMemcpyHtoDAsync_v2(destination, source.as_ptr(), 1000, stream), 0);
    assert_eq!(session.cuMemcpyDtoDAsync_v2(destination, destination + 500, 500, stream), 0);
    assert_eq!(session.cuStreamSynchronize(stream), 0);
    session.configure("TRACE=");
    let trace = fs::read_to_string(&path).unwrap();
    fs::remove_file(&path).unwrap();
    let lines: Vec<_> = trace.lines().collect();
    let field = |line: &str, name: &str| {
        let rest = line.split_once(&format!("\"{name}\":")).unwrap().1;
        rest.split([',', '}']).next().unwrap().to_owned()
    };
    assert_eq!(lines.iter().map(|line| field(line, "op")).collect::<Vec<_>>(), ["\"h2d\"", "\"d2d\""]);
    assert_eq!(lines.iter().map(|line| field(line, "bytes")).collect::<Vec<_>>(), ["1000", "500"]);
    for line in lines {
        let [begin, end] = ["begin_ns", "end_ns"].map(|name| field(line, name).parse::<u64>().unwrap());
        assert!(end - begin >= 2_000_000, "{line}");
    }
}

/// Copies with these attributes, of which one applies from each of `firsts` on.
fn batch(
    session: &Session,
    copies: &[(u64, u64, usize)],
    firsts: &[usize],
    order: i32,
    stream: usize,
) -> [i32; 2] {
    let to: Vec<u64> = copies.iter().map(|copy| copy.0).collect();
    let from: Vec<u64> = copies.iter().map(|copy| copy.1).collect();
    let sizes: Vec<usize> = copies.iter().map(|copy| copy.2).collect();
    let attributes = vec![[order, 0, 0, 0, 0, 0]; firsts.len()];
    let (to, from, sizes, count) = (to.as_ptr(), from.as_ptr(), sizes.as_ptr(), copies.len());
    let (attributes, firsts, kinds) = (attributes.as_ptr(), firsts.as_ptr(), firsts.len());
    let mut refused = 0;
    [
        session.cuMemcpyBatchAsync(to, from, sizes, count, attributes, firsts, kinds, &mut refused, stream),
        session.cuMemcpyBatchAsync_v2(to, from, sizes, count, attributes, firsts, kinds, stream),
    ]
}

#[test]
fn one_call_makes_several_copies_either_way() {
    let session = Session::new();
    let (stream, bytes) = (session.stream(), pattern(3000));
    let (pinned, back) = (session.pinned(&bytes), session.pinned(&[0; 3000]));
    let device = session.allocate(3000);
    let [host, back_at] = [pinned.as_ptr() as u64, back.as_ptr() as u64];
    let copies = session.count("copies");
    assert_eq!(
        batch(&session, &[(device, host, 1000), (device + 1000, host + 1000, 2000)], &[0], 1, stream),
        [0; 2]
    );
    assert_eq!(
        batch(&session, &[(back_at + 10, device + 10, 90), (back_at, device, 10)], &[0, 1], 3, stream),
        [0; 2]
    );
    assert_eq!(session.cuStreamSynchronize(stream), 0);
    assert!(session.download(device, 3000) == bytes);
    assert!(back[..100] == bytes[..100] && back[100..].iter().all(|byte| *byte == 0));
    assert_eq!(session.count("copies"), copies + 9, "four each way, and the download");
}

#[test]
fn a_batch_that_makes_no_sense_is_refused() {
    let session = Session::new();
    let (stream, pinned) = (session.stream(), session.pinned(&[1; 100]));
    let (to, from) = (session.allocate(100), pinned.as_ptr() as u64);
    let good = [(to, from, 10), (to + 10, from + 10, 10)];
    assert_eq!(batch(&session, &good, &[0], 1, 0), [1; 2], "the default stream");
    assert_eq!(batch(&session, &good, &[0], 0, stream), [1; 2], "no order");
    assert_eq!(batch(&session, &good, &[], 1, stream), [1; 2], "no attributes");
    assert_eq!(batch(&session, &good, &[1], 1, stream), [1; 2], "a copy without attributes");
    assert_eq!(batch(&session, &good, &[0, 2], 1, stream), [1; 2], "attributes without a copy");
    assert_eq!(batch(&session, &[], &[0], 1, stream), [1; 2], "no copies");
    assert_eq!(batch(&session, &[good[0], (to, from, 0)], &[0], 1, stream), [1; 2], "an empty copy");
}
