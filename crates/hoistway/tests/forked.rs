//! Children of `fork`: what began before is their parent's, what they begin is theirs.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod common;

use common::{
    assert_is_file, mixed_model,
    reading::{Gate, LONG, until},
    tensor, write_model,
};
use hoistway::{
    Arrival, ByteRange, Checkpoint, Dtype, Error, LoadOptions, Route,
    memory::{MemoryPool, SpareMemory},
    read::{Priority, ReadFile, ReadRequest, Reader, ReaderOptions, Target},
    route::fault::FaultScript,
};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

/// Keeps the standard library from handling stack overflows, as it does in programs whose `main` is of Rust. For that,
/// each of its threads takes a lock as it begins and as it ends. A child of `fork` that finds the lock taken cannot
/// begin a thread. The programs that fork and load, those of Python and C, have no such handler.
#[cfg(target_os = "linux")]
#[used]
#[unsafe(link_section = ".init_array")]
static WITHOUT_STACK_OVERFLOW_HANDLER: extern "C" fn() = {
    extern "C" fn before_main() {
        for signal in [libc::SIGSEGV, libc::SIGBUS] {
            // The library replaces only the default. A fault ends the process all the same.
            // SAFETY: no function is named that would be called.
            unsafe { libc::signal(signal, libc::SIG_IGN) };
        }
    }
    before_main
};

/// Runs `work` in a child, and fails unless that ends well and in time.
fn in_forked_child(work: impl FnOnce()) {
    // SAFETY: the child runs `work` alone, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let ended_well = catch_unwind(AssertUnwindSafe(work)).is_ok();
        // SAFETY: ends the child without running what belongs to the parent.
        unsafe { libc::_exit(if ended_well { 0 } else { 1 }) };
    }
    let mut status = -1;
    until("the child ends", || {
        // SAFETY: a child of this test, and a place for its status.
        unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) == child }
    });
    assert_eq!(status, 0, "the child failed");
}

#[test]
fn a_load_under_way_is_the_parents_and_the_child_loads_by_itself() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (path, file) = mixed_model(directory.path());
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    for route in [Route::Auto, Route::Threads] {
        let (gate, reads) = (Gate::default(), Arc::new(AtomicUsize::new(0)));
        let held = {
            let (gate, reads) = (gate.clone(), reads.clone());
            FaultScript::new(move |_, _| {
                reads.fetch_add(1, Ordering::Relaxed);
                gate.pass();
                None
            })
        };
        let by_route = LoadOptions::default().route(route).chunk_bytes(64 << 10);
        let options = by_route.clone().faults(held);
        let mut held = Some(checkpoint.start(&options).unwrap());
        until("a read begins", || reads.load(Ordering::Relaxed) > 0);
        in_forked_child(|| {
            let mut loading = held.take().unwrap();
            let next = loading.next_within(LONG);
            assert!(matches!(next, Err(Error::Forked)), "{:?}", next.err());
            assert_eq!(loading.report().tensor_bytes, loading.progress().bytes_total);
            loading.cancel();
            let waited = loading.wait();
            assert!(matches!(waited, Err(Error::Forked)), "{:?}", waited.err());
            assert_is_file(&checkpoint.load(&by_route).unwrap(), &file);
            assert_is_file(&hoistway::load(&[&path], &by_route).unwrap(), &file);
        });
        gate.open();
        let (mut loading, mut tensors) = (held.take().unwrap(), Vec::new());
        while let Arrival::Tensor(tensor) = loading.next_within(LONG).unwrap() {
            tensors.push(tensor);
        }
        assert_is_file(&loading.into_loaded(tensors), &file);
    }
}

#[test]
fn a_child_keeps_the_tensors_that_its_parent_drops() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (path, file) = mixed_model(directory.path());
    let loaded = hoistway::load(&[&path], &LoadOptions::default()).unwrap();
    let mut ends = [0; 2];
    // SAFETY: writes two descriptors.
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
    let mut loaded = Some(loaded);
    // SAFETY: the child reads memory that it has, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let mut byte = 0u8;
        // SAFETY: one byte, until the parent has dropped its tensors.
        unsafe { libc::read(ends[0], (&raw mut byte).cast(), 1) };
        let is_same =
            catch_unwind(AssertUnwindSafe(|| assert_is_file(loaded.as_ref().unwrap(), &file))).is_ok();
        drop(loaded.take());
        // SAFETY: ends the child without running what belongs to the parent.
        unsafe { libc::_exit(if is_same { 0 } else { 1 }) };
    }
    drop(loaded.take());
    // SAFETY: one byte of a live array.
    assert_eq!(unsafe { libc::write(ends[1], [1u8].as_ptr().cast(), 1) }, 1);
    let mut status = -1;
    until("the child ends", || {
        // SAFETY: a child of this test, and a place for its status.
        unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) == child }
    });
    assert_eq!(status, 0, "the child has other bytes");
}

/// Threads of the parent have any lock of the engine as it forks.
#[test]
fn a_child_never_waits_for_a_thread_of_its_parent() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("small.safetensors");
    let file = write_model(&path, &[tensor("small", Dtype::U8, &[1000])], 3, 7);
    let (checkpoint, pool) = (Checkpoint::open(&[&path]).unwrap(), MemoryPool::new(64 << 20).unwrap());
    let in_pool = LoadOptions::default().pool(pool.clone());
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    assert_is_file(&checkpoint.load(&in_pool).unwrap(), &file);
                }
            });
        }
        let forked = catch_unwind(AssertUnwindSafe(|| {
            for _ in 0..50 {
                let mut pooled = Some(checkpoint.load(&in_pool).unwrap());
                in_forked_child(|| {
                    assert_is_file(&pooled.take().unwrap(), &file);
                    assert_is_file(&checkpoint.load(&LoadOptions::default()).unwrap(), &file);
                });
            }
        }));
        is_over.store(true, Ordering::Relaxed);
        forked.unwrap();
    });
    assert_eq!(pool.free_bytes(), pool.capacity_bytes());
}

#[test]
fn memory_that_is_lent_again_is_the_parents() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (path, file) = mixed_model(directory.path());
    let pool = MemoryPool::new(64 << 20).unwrap();
    let in_pool = LoadOptions::default().pool(pool.clone());
    let (opened, spare) = (ReadFile::open(&path).unwrap(), SpareMemory::new(1 << 20));
    let read = |memory: &SpareMemory| {
        let told = |error: &Error| error.to_string();
        let reader = Reader::new(&ReaderOptions::default()).unwrap();
        let request = ReadRequest::new(&opened, ByteRange::at(0, 100).unwrap(), Target::memory_of(memory));
        let batch = reader.submit([request], Priority::Demand).map_err(|error| told(&error))?;
        batch.wait().map_err(told)?;
        Ok::<_, String>(batch.take(0).unwrap())
    };
    let mut held = Some((hoistway::load(&[&path], &in_pool).unwrap(), read(&spare).unwrap()));
    in_forked_child(|| {
        let (loaded, block) = held.take().unwrap();
        assert_is_file(&loaded, &file);
        assert_eq!(block[..], file[..100]);
        let error = hoistway::load(&[&path], &in_pool).unwrap_err();
        assert!(matches!(error, Error::Forked), "{error}");
        assert_eq!((pool.free_bytes(), spare.bytes(), spare.clear()), (0, 0, 0));
        assert_eq!(read(&spare).map(|_| ()), Err(Error::Forked.to_string()));
        assert_eq!(read(&SpareMemory::new(1 << 20)).unwrap()[..], file[..100]);
        let own = LoadOptions::default().pool(MemoryPool::new(64 << 20).unwrap());
        assert_is_file(&hoistway::load(&[&path], &own).unwrap(), &file);
    });
    drop(held);
    assert_eq!((pool.free_bytes(), spare.allocations()), (pool.capacity_bytes(), 1));
    assert!(spare.clear() > 0);
}

/// To release what was never opened does not make the keeping of things its parent's.
#[test]
fn a_child_keeps_what_devices_use_though_its_parent_has_released_them() {
    hoistway_device::release_devices();
    in_forked_child(|| {
        hoistway_device::release_devices();
        assert!(hoistway_device::keep_while_used(), "streams and pinned memory are not kept");
        hoistway_device::look_again();
        in_forked_child(|| assert!(!hoistway_device::keep_while_used(), "the thread is its parent's"));
    });
}

#[test]
#[cfg(feature = "objects")]
fn a_child_makes_connections_of_its_own() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (_, file) = mixed_model(directory.path());
    let server = objectd::Server::start().unwrap();
    server.put("models/a.safetensors", &file);
    let checkpoint = Checkpoint::open(&[format!("{}/models/a.safetensors", server.url())]).unwrap();
    let options = LoadOptions::default().route(Route::Http);
    assert_is_file(&checkpoint.load(&options).unwrap(), &file);
    let before = server.connections();
    in_forked_child(|| assert_is_file(&checkpoint.load(&options).unwrap(), &file));
    assert!(server.connections() > before, "the child used a connection of its parent");
    assert_is_file(&checkpoint.load(&options).unwrap(), &file);
}
