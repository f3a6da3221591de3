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
    pin::{Pin, pin},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    thread::{self, Thread},
    time::Duration,
};

/// Longest answer of a service.
const MAX_ANSWER_BYTES: usize = 1 << 20;
/// How long the service of the machine itself is waited for, which is there or not, and one that is asked early.
const SHORT_PATIENCE: Duration = Duration::from_secs(2);
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

    /// Forgets what an earlier question led to.
    pub(crate) fn forget(&self) {
        self.note(None);
    }

    fn note(&self, refusal: Option<String>) {
        *self.refusal.lock().unwrap_or_else(PoisonError::into_inner) = refusal;
    }
}

impl HttpSend for Services {
    async fn http_send(&self, request: Request<Bytes>) -> Result<Response<Bytes>> {
        let question = Arc::new(Question::default());
        let own = question.clone();
        // The caller does not wait itself, and so ends as soon as it is stopped. The thread ends soon after.
        let thread = thread::Builder::new().name("hoistway-credentials".into());
        let origin = origin_of(&request);
        let is_early = self.is_early.load(Ordering::Relaxed);
        let body = move || own.answer(ask(request, is_early, &own.stop));
        thread.spawn(body).map_err(|error| Error::unexpected(error.to_string()))?;
        match Asked(question).await {
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

/// A request to a service, and its answer once that is there.
#[derive(Default)]
struct Question {
    stop: AtomicBool,
    state: Mutex<Waited>,
}

/// The answer to a question, and what wakes the thread that waits for it.
#[derive(Default)]
struct Waited {
    answer: Option<std::result::Result<Response<Bytes>, Problem>>,
    waker: Option<Waker>,
}

/// Waits for the answer to a question. The question is withdrawn when this is dropped.
struct Asked(Arc<Question>);

impl Question {
    fn answer(&self, answer: std::result::Result<Response<Bytes>, Problem>) {
        let waker = {
            let mut state = self.lock();
            state.answer = Some(answer);
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Waited> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Future for Asked {
    type Output = std::result::Result<Response<Bytes>, Problem>;

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

impl Drop for Asked {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Relaxed);
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
    use std::{net::TcpListener, time::Instant};

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
