//! One token ends every call, whatever the server does: says nothing, sends a byte at a time, or has a name that the system
//! never finds. The library gives such a server up after a minute: a call that ends before has been ended.
#![cfg(all(feature = "objects", target_os = "linux"))]
#![allow(
    missing_docs,
    unsafe_code,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

mod common;

use common::{reading::until, tensor, write_model};
use hoistway::{
    Cancel, Checkpoint, Dtype, Error, FillTarget, LoadOptions, Loaded, Result, Route, StreamOptions,
    catalog::OpenOptions,
    objects::StoreOptions,
    plan::Selection,
    read::{Priority, ReadRequest, Reader, ReaderOptions, Target},
    verify::Manifest,
};
use objectd::{Fault, Faults, Server};
use std::{
    ffi::{CStr, c_char, c_int, c_void},
    ops::ControlFlow,
    panic::{self, AssertUnwindSafe},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

/// How long a server stalls that does not answer any more.
const ENDLESS: Duration = Duration::from_secs(6000);
/// Less than the minute after which the library gives such a server up.
const WATCHDOG: Duration = Duration::from_secs(40);
/// How long a call may take to end.
const SOON: Duration = Duration::from_secs(1);
/// A machine that is busy may take longer now and then, but not so many times in a row.
const TRIES: usize = 5;
/// A name of this machine, until its look-ups are to hang.
const NAME: &CStr = c"hangs.test";

/// Whether look-ups of [`NAME`] hang. If they do not, they find this machine.
static HANGS: AtomicBool = AtomicBool::new(false);
/// Look-ups that hang.
static HANGING: AtomicUsize = AtomicUsize::new(0);

/// Has look-ups answer again, and waits until none hangs.
fn answer_names() {
    HANGS.store(false, Ordering::SeqCst);
    until("look-ups are answered", || HANGING.load(Ordering::SeqCst) == 0);
}

/// What the system's resolver is for this process.
///
/// # Safety
/// That of the system's.
#[unsafe(no_mangle)]
unsafe extern "C" fn getaddrinfo(
    node: *const c_char,
    service: *const c_char,
    hints: *const c_void,
    found: *mut *mut c_void,
) -> c_int {
    type Resolver =
        unsafe extern "C" fn(*const c_char, *const c_char, *const c_void, *mut *mut c_void) -> c_int;
    // SAFETY: the caller passes a name that ends with a NUL, or none.
    let is_own = !node.is_null() && unsafe { CStr::from_ptr(node) } == NAME;
    if is_own {
        HANGING.fetch_add(1, Ordering::SeqCst);
        while HANGS.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(1));
        }
        HANGING.fetch_sub(1, Ordering::SeqCst);
    }
    let node = if is_own { c"127.0.0.1".as_ptr() } else { node };
    // SAFETY: the name of a function, and the handle that means the libraries after this program.
    let resolver = unsafe { libc::dlsym(libc::RTLD_NEXT, c"getaddrinfo".as_ptr()) };
    assert!(!resolver.is_null());
    // SAFETY: the system's function of this name has this type; the arguments are the caller's.
    unsafe { std::mem::transmute::<*mut c_void, Resolver>(resolver)(node, service, hints, found) }
}

/// How the server is of no use.
#[derive(Clone, Copy, Debug)]
enum Trouble {
    Silent,
    Trickling,
    NoAddress,
}

const TROUBLES: [Trouble; 3] = [Trouble::Silent, Trouble::Trickling, Trouble::NoAddress];

/// Look-ups are the process's, so that one test goes after the other.
static TURN: Mutex<()> = Mutex::new(());

/// A server with a checkpoint, which is open and loaded.
struct Remote {
    server: Server,
    checkpoint: Checkpoint,
    loaded: Loaded,
}

fn options(server: &Server) -> OpenOptions {
    let (_, port) =
        server.url().rsplit_once(':').map(|parts| (parts.0.to_owned(), parts.1.to_owned())).unwrap();
    let endpoint = format!("http://{}:{port}", NAME.to_str().unwrap());
    let mut store = StoreOptions::default();
    for (name, value) in [("endpoint", &*endpoint), ("anonymous", "true")] {
        store.set(name, value).unwrap();
    }
    OpenOptions::default().store(store)
}

const URL: &str = "s3://models/llama/model.safetensors";

impl Remote {
    fn serving() -> Server {
        answer_names();
        let directory = tempfile::tempdir().unwrap();
        let tensors = [tensor("small", Dtype::U8, &[200 << 10]), tensor("large", Dtype::U8, &[3 << 20])];
        let file = write_model(&directory.path().join("model.safetensors"), &tensors, 0, 5);
        let server = Server::start().unwrap();
        server.put("models/llama/model.safetensors", &file);
        server
    }

    fn new() -> Self {
        let server = Self::serving();
        let checkpoint = Checkpoint::open_with(&[URL], &options(&server)).unwrap();
        let loaded = checkpoint.load(&LoadOptions::default()).unwrap();
        Self { server, checkpoint, loaded }
    }
}

impl Trouble {
    fn begin(self, server: &Server) {
        server.take_requests();
        let fault = match self {
            Self::Silent => Fault::Stall(ENDLESS),
            Self::Trickling => Fault::Trickle,
            Self::NoAddress => {
                HANGS.store(true, Ordering::SeqCst);
                // Other connections are made, once the addresses are forgotten that are known.
                return server.go_away(true);
            }
        };
        server.fail(Faults::always(fault));
    }

    fn end(server: &Server) {
        server.fail(Faults::default());
        server.go_away(false);
        answer_names();
    }

    /// Waits until a call meets it.
    fn wait(self, server: &Server) {
        until("the call waits for the server", || match self {
            Self::NoAddress => HANGING.load(Ordering::SeqCst) > 0,
            _ => !server.take_requests().is_empty(),
        });
    }
}

/// Ends what a call waits for, and returns how long that took.
fn ended(
    what: &str,
    trouble: Trouble,
    server: &Server,
    call: impl FnOnce() -> Result<()> + Send,
    end: impl FnOnce() + Send,
) -> Duration {
    trouble.begin(server);
    let (tell, told) = mpsc::channel();
    let took = thread::scope(|scope| {
        scope.spawn(move || tell.send(call()).unwrap());
        // The scope would wait for a call that goes on.
        let bug = |what: String| -> ! {
            eprintln!("{what}");
            std::process::abort()
        };
        let waits = panic::catch_unwind(AssertUnwindSafe(|| trouble.wait(server)));
        if waits.is_err() || told.try_recv().is_ok() {
            bug(format!("{what}, {trouble:?}: it does not wait for the server"));
        }
        let begun = Instant::now();
        end();
        let ended = told.recv_timeout(WATCHDOG).unwrap_or_else(|_| {
            bug(format!("{what}, {trouble:?}: the call goes on"));
        });
        assert!(matches!(ended, Err(Error::Cancelled)), "{what}, {trouble:?}: {ended:?}");
        begun.elapsed()
    });
    Trouble::end(server);
    took
}

/// Has a call end soon in one of several tries.
#[track_caller]
fn assert_soon(what: &str, trouble: Trouble, mut ended: impl FnMut() -> Duration) {
    let mut tries = Vec::new();
    while tries.last().is_none_or(|took| *took > SOON) {
        assert!(tries.len() < TRIES, "{what}, {trouble:?}: {tries:?}");
        tries.push(ended());
    }
}

/// A call that a token is given to.
type Call = fn(&Remote, &Cancel) -> Result<()>;

/// Each of them, and what it is called.
fn calls() -> Vec<(&'static str, Call)> {
    fn loads(cancel: &Cancel) -> LoadOptions {
        LoadOptions::default().cancel(cancel.clone())
    }
    fn read(remote: &Remote, options: &ReaderOptions) -> Result<()> {
        let reader = Reader::new(options)?;
        let entry = &remote.checkpoint.catalog().tensors()[1];
        let file = remote.checkpoint.read_file(entry.file).unwrap();
        let request = || ReadRequest::new(&file, entry.bytes, Target::memory());
        let batch = reader.submit([request(), request()], Priority::Demand)?;
        batch.wait().map_err(|error| match error {
            Error::Cancelled => Error::Cancelled,
            other => Error::Internal(other.to_string()),
        })
    }
    vec![
        ("load", |remote, cancel| remote.checkpoint.load(&loads(cancel)).map(drop)),
        ("load by threads", |remote, cancel| {
            remote.checkpoint.load(&loads(cancel).route(Route::Threads)).map(drop)
        }),
        ("load of a small tensor", |remote, cancel| {
            let small = Selection::all().select("small");
            remote.checkpoint.load(&loads(cancel).selection(small)).map(drop)
        }),
        ("stream", |remote, cancel| {
            let stream = StreamOptions::default().max_in_flight_bytes(1 << 20);
            remote.checkpoint.stream(&loads(cancel), &stream)?.try_for_each(|tensor| tensor.map(drop))
        }),
        ("fill", |remote, cancel| {
            let mut memory: Vec<_> =
                remote.loaded.tensors().iter().map(|tensor| vec![0u8; tensor.len_bytes() as usize]).collect();
            let requests = Selection::all().resolve(remote.checkpoint.catalog())?;
            let targets: Vec<_> = requests
                .into_iter()
                .zip(&mut memory)
                .map(|(request, memory)| {
                    let address = memory.as_mut_ptr().expose_provenance() as u64;
                    FillTarget::new(request, hoistway::DeviceId::Cpu, address, memory.len() as u64)
                })
                .collect();
            // SAFETY: the memory outlives the load, and is not looked at.
            let mut filling =
                unsafe { remote.checkpoint.fill(&targets, &loads(cancel), hoistway::Order::Arrival) }?;
            let result = filling.next_within(WATCHDOG).map(drop).map_err(|error| match error {
                Error::Cancelled => Error::Cancelled,
                other => Error::Internal(other.to_string()),
            });
            drop(filling);
            result
        }),
        ("reader", |remote, cancel| read(remote, &ReaderOptions::default().cancel(cancel.clone()))),
        ("reader by http", |remote, cancel| {
            read(remote, &ReaderOptions::default().route(Route::Http).cancel(cancel.clone()))
        }),
        ("manifest", |remote, cancel| {
            Manifest::of_until(cancel, &remote.checkpoint, |_| ControlFlow::Continue(())).map(drop)
        }),
        ("verify", |remote, cancel| {
            let mut loaded = remote.loaded.clone();
            remote.checkpoint.verify_until(cancel, &mut loaded, None)
        }),
    ]
}

#[test]
fn a_token_ends_every_call() {
    let _turn = TURN.lock();
    let remote = Remote::new();
    for trouble in TROUBLES {
        for (what, call) in calls() {
            assert_soon(what, trouble, || {
                let cancel = Cancel::default();
                ended(what, trouble, &remote.server, || call(&remote, &cancel), || cancel.cancel())
            });
            // Its connections and the server are as good as before.
            remote.checkpoint.load(&LoadOptions::default()).unwrap();
        }
    }
}

#[test]
fn a_token_that_is_cancelled_before_lets_no_call_begin() {
    let _turn = TURN.lock();
    let (remote, cancel) = (Remote::new(), Cancel::default());
    cancel.cancel();
    for (what, call) in calls() {
        let ended = call(&remote, &cancel);
        assert!(matches!(ended, Err(Error::Cancelled)), "{what}: {ended:?}");
    }
}

#[test]
fn an_opening_is_ended() {
    let _turn = TURN.lock();
    for trouble in TROUBLES {
        for url in [URL, "s3://models/llama/"] {
            // Listings have no other faults.
            if !matches!(trouble, Trouble::NoAddress) && url != URL {
                continue;
            }
            assert_soon(url, trouble, || {
                let (server, cancel) = (Remote::serving(), Cancel::default());
                // A connection, which is of no use afterwards.
                Checkpoint::open_with(&[URL], &options(&server)).unwrap();
                let options = options(&server).cancel(cancel.clone());
                let open = || Checkpoint::open_with(&[url], &options).map(drop);
                ended(url, trouble, &server, open, || cancel.cancel())
            });
        }
    }
}

#[test]
fn what_is_dropped_or_cancelled_by_itself_ends_too() {
    let _turn = TURN.lock();
    for trouble in TROUBLES {
        let remote = Remote::new();
        let reader = Reader::new(&ReaderOptions::default()).unwrap();
        let entry = &remote.checkpoint.catalog().tensors()[1];
        let file = remote.checkpoint.read_file(entry.file).unwrap();
        let read =
            || reader.submit([ReadRequest::new(&file, entry.bytes, Target::memory())], Priority::Demand);
        let batch = read().unwrap();
        batch.wait().unwrap();
        trouble.begin(&remote.server);
        let batch = read().unwrap();
        trouble.wait(&remote.server);
        let cancelled = || {
            batch.cancel();
            batch.wait().map_err(|_| Error::Cancelled)
        };
        assert!(within(cancelled).is_err());
        // Another batch of the reader goes on, until the reader is dropped.
        let other = read().unwrap();
        assert!(other.status(0).is_pending());
        within(|| drop((other, reader)));
        let loading = remote.checkpoint.start(&LoadOptions::default()).unwrap();
        within(|| drop(loading));
        Trouble::end(&remote.server);
    }
}

/// Does what must end.
fn within<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let (tell, told) = mpsc::channel();
        scope.spawn(move || tell.send(work()).unwrap());
        told.recv_timeout(WATCHDOG).unwrap_or_else(|_| {
            eprintln!("it goes on");
            std::process::abort()
        })
    })
}
