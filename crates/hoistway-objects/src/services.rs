//! Services that give credentials, and the files that have some. A caller that stops does not wait for a service. Services
//! are asked by the same policy as stores.

use crate::{
    Problem,
    http::{Answer, Connection, Network, Origin, Roots, TICK, Waiting, send},
    options::aws_roots,
    pace::{Again, Fault, Pace},
    policy::Failure,
};
use bytes::Bytes;
use http::{Request, Response};
use reqsign_core::{Error, FileRead, HttpSend, Result};
use std::{
    io::Read,
    pin::{Pin, pin},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    task::{Context, Poll, Wake, Waker},
    thread::{self, Thread},
    time::{Duration, Instant},
};

/// Longest answer of a service.
const MAX_ANSWER_BYTES: usize = 1 << 20;
/// How long the service of the machine itself is waited for, which is there or not, and one that is asked early.
const SHORT_PATIENCE: Duration = Duration::from_secs(2);
/// How long a program may take that prints credentials: people may have to sign in.
const PROGRAM_PATIENCE: Duration = Duration::from_secs(60);
/// How long a connection to another service may take.
const CONNECT: Duration = Duration::from_secs(5);
const METADATA_HOSTS: &[&str] = &["169.254.169.254", "metadata.google.internal"];

/// Runs a future on this thread. Returns `None` soon after `stop` is set.
pub(crate) fn block_on<T>(future: impl Future<Output = T>, stop: &AtomicBool) -> Option<T> {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return Some(value);
        }
        if stop.load(Ordering::Relaxed) {
            return None;
        }
        thread::park_timeout(TICK);
    }
}

/// Wakes a thread that runs a future.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Reads files that have credentials.
#[derive(Debug)]
pub(crate) struct Files;

impl FileRead for Files {
    async fn file_read(&self, path: &str) -> Result<Vec<u8>> {
        std::fs::read(path).map_err(|error| Error::unexpected(error.to_string()))
    }
}

/// Asks services that give credentials.
#[derive(Clone, Debug, Default)]
pub(crate) struct Services {
    /// What a service said last, if it gave no credentials.
    refusal: Arc<Mutex<Option<String>>>,
    /// Whether what the caller has is still valid: then a service is asked once, and soon.
    is_early: Arc<AtomicBool>,
    /// What gave the credentials, without anything of them.
    giver: Arc<Mutex<Option<String>>>,
}

impl Services {
    /// What a service said last in place of credentials. It holds nothing of the answer but its status.
    pub(crate) fn refusal(&self) -> Option<String> {
        self.refusal.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Says whether what the caller has is still valid.
    pub(crate) fn set_early(&self, is_early: bool) {
        self.is_early.store(is_early, Ordering::Relaxed);
    }

    /// What gave the credentials last.
    pub(crate) fn giver(&self) -> Option<String> {
        self.giver.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set_giver(&self, giver: Option<String>) {
        *self.giver.lock().unwrap_or_else(PoisonError::into_inner) = giver;
    }

    /// Forgets what an earlier question led to.
    pub(crate) fn forget(&self) {
        self.note(None);
    }

    /// Runs a program that prints credentials, and returns what it printed. `whose` tells it in refusals, which hold nothing of
    /// that.
    pub(crate) async fn run(&self, whose: &str, command: Vec<String>) -> Result<Vec<u8>> {
        Asked::of(move |stop| output_of(&command, stop))?
            .await
            .map_err(|problem| self.refuse(format!("{whose} {problem}")))
    }

    /// Notes why there are no credentials.
    pub(crate) fn refuse(&self, refusal: String) -> Error {
        self.note(Some(refusal.clone()));
        Error::unexpected(refusal)
    }

    fn note(&self, refusal: Option<String>) {
        *self.refusal.lock().unwrap_or_else(PoisonError::into_inner) = refusal;
    }
}

impl HttpSend for Services {
    async fn http_send(&self, request: Request<Bytes>) -> Result<Response<Bytes>> {
        let origin = origin_of(&request);
        let is_early = self.is_early.load(Ordering::Relaxed);
        match Asked::of(move |stop| ask(request, is_early, stop))?.await {
            Ok(response) => {
                let status = response.status();
                self.note(
                    (!status.is_success())
                        .then(|| format!("{} answered with status {}", origin.url(), status.as_u16())),
                );
                Ok(response)
            }
            Err(problem) => {
                // The service of a machine is not there on most.
                let is_missing = METADATA_HOSTS.contains(&&*origin.host);
                if !is_missing {
                    self.note(Some(format!("{} did not answer: {problem}", origin.url())));
                }
                Err(Error::unexpected(problem.to_string()))
            }
        }
    }
}

fn origin_of(request: &Request<Bytes>) -> Origin {
    let uri = request.uri();
    let is_tls = uri.scheme_str() == Some("https");
    let port = uri.port_u16().unwrap_or(if is_tls { 443 } else { 80 });
    Origin { is_tls, host: uri.host().unwrap_or_default().to_owned(), port }
}

/// A question to a service or a program, and its answer once that is there.
struct Question<T> {
    stop: AtomicBool,
    state: Mutex<Waited<T>>,
}

/// The answer to a question, and what wakes the thread that waits for it.
struct Waited<T> {
    answer: Option<std::result::Result<T, Problem>>,
    waker: Option<Waker>,
}

/// Waits for the answer to a question. The question is withdrawn when this is dropped.
struct Asked<T>(Arc<Question<T>>);

impl<T: Send + 'static> Asked<T> {
    /// Has a thread of its own find the answer: the caller does not wait itself, and so ends as soon as it is stopped. The thread
    /// ends soon after.
    fn of(
        find: impl FnOnce(&AtomicBool) -> std::result::Result<T, Problem> + Send + 'static,
    ) -> Result<Self> {
        let state = Mutex::new(Waited { answer: None, waker: None });
        let question = Arc::new(Question { stop: AtomicBool::new(false), state });
        let own = question.clone();
        let thread = thread::Builder::new().name("hoistway-credentials".into());
        let body = move || own.answer(find(&own.stop));
        thread.spawn(body).map_err(|error| Error::unexpected(error.to_string()))?;
        Ok(Self(question))
    }
}

impl<T> Question<T> {
    fn answer(&self, answer: std::result::Result<T, Problem>) {
        let waker = {
            let mut state = self.lock();
            state.answer = Some(answer);
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Waited<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Future for Asked<T> {
    type Output = std::result::Result<T, Problem>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.0.lock();
        match state.answer.take() {
            Some(answer) => Poll::Ready(answer),
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl<T> Drop for Asked<T> {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }
}

/// Runs a program and returns what it prints. It ends soon after `stop` is set, and after [`PROGRAM_PATIENCE`].
fn output_of(command: &[String], stop: &AtomicBool) -> std::result::Result<Vec<u8>, Problem> {
    let failed = |why: &str| Problem::Credentials(why.to_owned());
    let [program, arguments @ ..] = command else { return Err(failed("is empty")) };
    let running = Command::new(program).args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut child = running.map_err(|error| failed(&format!("cannot be run: {program}: {error}")))?;
    let result = printed_by(&mut child, stop);
    if result.is_err() {
        // It may have ended.
        let _ = child.kill();
        let _ = child.wait();
    }
    result
}

fn printed_by(child: &mut Child, stop: &AtomicBool) -> std::result::Result<Vec<u8>, Problem> {
    let failed = |why: String| Problem::Credentials(why);
    let (sender, receiver) = mpsc::channel();
    let pipe = child.stdout.take().ok_or_else(|| failed("has no output".into()))?;
    // What the program starts itself may hold the pipe for as long as it likes.
    let reading = thread::Builder::new().name("hoistway-credentials".into()).spawn(move || {
        let mut bytes = Vec::new();
        let read = pipe.take(MAX_ANSWER_BYTES as u64).read_to_end(&mut bytes);
        let _ = sender.send(read.map(|_| bytes));
    });
    reading.map_err(|error| failed(error.to_string()))?;
    let begun = Instant::now();
    let (mut bytes, mut status) = (None, None);
    while bytes.is_none() || status.is_none() {
        if stop.load(Ordering::Relaxed) {
            return Err(Problem::Stopped);
        }
        if begun.elapsed() > PROGRAM_PATIENCE {
            return Err(failed(format!("did not end within {} s", PROGRAM_PATIENCE.as_secs())));
        }
        match receiver.recv_timeout(TICK) {
            Ok(read) => bytes = Some(read.map_err(|error| failed(format!("cannot be read: {error}")))?),
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            // All that it printed is there.
            Err(mpsc::RecvTimeoutError::Disconnected) => thread::sleep(TICK),
        }
        status = child.try_wait().map_err(|error| failed(format!("cannot be waited for: {error}")))?;
    }
    match (bytes, status) {
        (Some(bytes), Some(status)) if status.success() => Ok(bytes),
        (_, status) => Err(failed(status.map_or_else(String::new, |status| format!("failed: {status}")))),
    }
}

/// Sends a request, and waits for the whole answer. Tries again what may pass, unless it `is_early`; an answer of another status
/// than success is given back if it does not pass.
fn ask(
    request: Request<Bytes>,
    is_early: bool,
    stop: &AtomicBool,
) -> std::result::Result<Response<Bytes>, Problem> {
    let origin = origin_of(&request);
    let is_metadata = METADATA_HOSTS.contains(&&*origin.host);
    let (parts, body) = request.into_parts();
    let roots = if origin.host.contains("amazonaws.com") { aws_roots() } else { Roots::Machine };
    let network = Network { roots, is_outside: false };
    let mut refused = None;
    let answered = Pace::new().persist(stop, |waiting| {
        let patience = if is_metadata || is_early { SHORT_PATIENCE } else { waiting.patience };
        let waiting = Waiting { patience, ..*waiting };
        let again = |failure: Failure, error: std::io::Error| {
            let why = format!("{}: {error}", origin.url());
            match failure {
                _ if waiting.is_stopped() => Problem::Stopped.into(),
                // It is not there.
                Failure::Unreached | Failure::Silent if is_metadata => Problem::Credentials(why).into(),
                _ if is_early => Problem::Credentials(why).into(),
                _ => Fault::Again(Again { failure, why, was_reused: false, bytes: 0 }),
            }
        };
        let connection = Connection::open(&origin, &network, CONNECT.min(patience), stop)
            .map_err(|error| again(Failure::Unreached, error))?;
        let answer =
            send(connection, &parts, &body, &waiting).map_err(|error| again(Failure::Silent, error))?;
        let status = answer.status;
        let response = response(answer, &waiting).map_err(|error| again(Failure::Broken, error))?;
        if matches!(status, 429 | 500..) && !is_early {
            let why = format!("{} answered with status {status}", origin.url());
            refused = Some(response);
            return Err(Fault::Again(Again { failure: Failure::Refused, why, was_reused: false, bytes: 0 }));
        }
        Ok(response)
    });
    match (answered, refused) {
        (Err(Problem::Unreliable { .. }), Some(refused)) => Ok(refused),
        (answered, _) => answered,
    }
}

fn response(answer: Answer, waiting: &Waiting<'_>) -> std::io::Result<Response<Bytes>> {
    let mut response = Response::builder().status(answer.status);
    for (name, value) in &answer.headers {
        response = response.header(name, value);
    }
    let (body, _) = answer.into_body(MAX_ANSWER_BYTES, waiting)?;
    response.body(body.into()).map_err(std::io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn a_service_that_does_not_answer_holds_up_no_caller_that_stops() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/role", listener.local_addr().unwrap());
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let asking = scope.spawn(|| {
                let request = Request::get(url).body(Bytes::new()).unwrap();
                block_on(Services::default().http_send(request), &stop).is_none()
            });
            // The connection stays open, and silent.
            let socket = listener.accept().unwrap().0;
            thread::sleep(Duration::from_millis(200));
            let begun = Instant::now();
            stop.store(true, Ordering::Relaxed);
            assert!(asking.join().unwrap(), "an answer came from nowhere");
            assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
            drop(socket);
        });
    }
}
