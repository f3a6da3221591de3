//! Services that give credentials, and the files that have some. A caller that stops does not wait for a service.

use crate::http::{Connection, Origin, TICK, Waiting, send};
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
/// How long a service is waited for; and one of the machine itself, which is there or not.
const PATIENCE: Duration = Duration::from_secs(10);
const METADATA_PATIENCE: Duration = Duration::from_secs(1);
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
        std::fs::read(path).map_err(failed)
    }
}

/// Asks services that give credentials.
#[derive(Debug)]
pub(crate) struct Services;

impl HttpSend for Services {
    async fn http_send(&self, request: Request<Bytes>) -> Result<Response<Bytes>> {
        let question = Arc::new(Question::default());
        let own = question.clone();
        // Name servers have a patience of their own, which no flag ends: so the caller does not wait itself. The thread ends
        // soon after the caller has stopped, or when the name server answers.
        let thread = thread::Builder::new().name("hoistway-credentials".into());
        let body = move || own.answer(ask(request, &own.stop));
        thread.spawn(body).map_err(failed)?;
        Asked(question).await
    }
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
    answer: Option<Result<Response<Bytes>>>,
    waker: Option<Waker>,
}

/// Waits for the answer to a question. The question is withdrawn when this is dropped.
struct Asked(Arc<Question>);

impl Question {
    fn answer(&self, answer: Result<Response<Bytes>>) {
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
    type Output = Result<Response<Bytes>>;

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

/// Sends a request, and waits for the whole answer.
fn ask(request: Request<Bytes>, stop: &AtomicBool) -> Result<Response<Bytes>> {
    let (parts, body) = request.into_parts();
    let host = parts.uri.host().unwrap_or_default().to_owned();
    let is_tls = parts.uri.scheme_str() == Some("https");
    let patience = if METADATA_HOSTS.contains(&&*host) { METADATA_PATIENCE } else { PATIENCE };
    let port = parts.uri.port_u16().unwrap_or(if is_tls { 443 } else { 80 });
    let waiting = Waiting { stop, patience };
    let connection = Connection::open(&Origin { is_tls, host, port }, patience, stop).map_err(failed)?;
    let answer = send(connection, &parts, &body, &waiting).map_err(failed)?;
    let mut response = Response::builder().status(answer.status);
    for (name, value) in &answer.headers {
        response = response.header(name, value);
    }
    let (body, _) = answer.into_body(MAX_ANSWER_BYTES, &waiting).map_err(failed)?;
    response.body(body.into()).map_err(|error| Error::unexpected(error.to_string()))
}

fn failed(error: std::io::Error) -> Error {
    Error::unexpected(error.to_string())
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
                block_on(Services.http_send(request), &stop).is_none()
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
