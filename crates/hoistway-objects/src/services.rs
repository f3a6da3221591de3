//! Services that give credentials, and the files that have some. A caller that stops does not wait for a service. Services
//! are asked by the same policy as stores.

use crate::{
    Problem,
    http::{Answer, Connection, Ends, Network, Origin, Roots, TICK, Waiting, send},
    location::is_aws_host,
    options::aws_roots,
    pace::{Again, Fault, Pace},
    policy::Failure,
};
use bytes::Bytes;
use http::{Request, Response};
use reqsign_core::{Error, FileRead, HttpSend, Result};
use std::{
    io::{self, Read},
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
/// How long the service of the machine itself is waited for, which is there or not.
const SHORT_PATIENCE: Duration = Duration::from_secs(2);
/// How long a program may take that prints credentials: it may ask a service, or a person in a browser.
pub(crate) const PROGRAM_PATIENCE: Duration = Duration::from_secs(30);
/// How long a connection to another service may take.
const CONNECT: Duration = Duration::from_secs(5);
const METADATA_HOSTS: &[&str] = &["169.254.169.254", "metadata.google.internal"];

/// Runs a future on this thread. Returns `None` soon after the caller is to end.
pub(crate) fn block_on<'a, T>(future: impl Future<Output = T>, ends: impl Into<Ends<'a>>) -> Option<T> {
    let ends = ends.into();
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return Some(value);
        }
        if ends.are_over() {
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
    /// What gave the credentials, without anything of them.
    giver: Arc<Mutex<Option<String>>>,
}

impl Services {
    /// What a service said last in place of credentials. It holds nothing of the answer but its status.
    pub(crate) fn refusal(&self) -> Option<String> {
        self.refusal.lock().unwrap_or_else(PoisonError::into_inner).clone()
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
        Asked::of(move |stop| output_of(&command, PROGRAM_PATIENCE, stop))?
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
        match Asked::of(move |stop| ask(request, stop))?.await {
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
#[derive(Debug)]
struct Question<T> {
    stop: AtomicBool,
    state: Mutex<Waited<T>>,
}

/// The answer to a question, and what wakes the thread that waits for it.
#[derive(Debug)]
struct Waited<T> {
    answer: Option<std::result::Result<T, Problem>>,
    waker: Option<Waker>,
}

/// Waits for the answer to a question. The question is withdrawn when this is dropped.
#[derive(Debug)]
pub(crate) struct Asked<T>(Arc<Question<T>>);

impl<T: Send + 'static> Asked<T> {
    /// Has a thread of its own find the answer: the caller does not wait itself, and so ends as soon as it is stopped. The thread
    /// ends soon after.
    pub(crate) fn of(
        find: impl FnOnce(&AtomicBool) -> std::result::Result<T, Problem> + Send + 'static,
    ) -> Result<Self> {
        let state = Mutex::new(Waited { answer: None, waker: None });
        let question = Arc::new(Question { stop: AtomicBool::new(false), state });
        let own = Answering(question.clone());
        let thread = thread::Builder::new().name("hoistway-credentials".into());
        let body = move || own.0.answer(find(&own.0.stop));
        thread.spawn(body).map_err(|error| Error::unexpected(error.to_string()))?;
        Ok(Self(question))
    }
}

impl<T> Asked<T> {
    /// The answer, if it is there.
    pub(crate) fn answer(&self) -> Option<std::result::Result<T, Problem>> {
        self.0.lock().answer.take()
    }
}

/// Has a question answered, also where its thread unwinds.
struct Answering<T>(Arc<Question<T>>);

impl<T> Drop for Answering<T> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.answer(Err(Problem::Credentials("the question for credentials was not answered".into())));
        }
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

/// Runs a program and returns what it prints. Kills it, and what it started, soon after `stop` is set, and after `patience`.
fn output_of(
    command: &[String],
    patience: Duration,
    stop: &AtomicBool,
) -> std::result::Result<Vec<u8>, Problem> {
    let failed = |why: String| Problem::Credentials(why);
    let [program, arguments @ ..] = command else { return Err(failed("is empty".into())) };
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped());
    // What it starts is killed with it.
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut child = command.spawn().map_err(|error| failed(format!("cannot be run: {program}: {error}")))?;
    outcome_of(&mut child, patience, stop)
}

/// Waits for a program, and returns what it prints.
fn outcome_of(
    child: &mut Child,
    patience: Duration,
    stop: &AtomicBool,
) -> std::result::Result<Vec<u8>, Problem> {
    let failed = |why: String| Problem::Credentials(why);
    let printed = printed_by(child, patience, stop);
    if printed.is_err() {
        kill(child);
    }
    match (printed, child.wait()) {
        (Ok(_), Ok(status)) if !status.success() => Err(failed(format!("failed: {status}"))),
        // Where the process that loads reaps all its children, the output alone tells how the program ended.
        (Ok(_), Err(error)) if !is_reaped(&error) => Err(failed(format!("cannot be waited for: {error}"))),
        (printed, _) => printed,
    }
}

/// Kills a program and what it started. Its number is that of no other group until it is waited for, as long as no one else waits
/// for it: a process that reaps all its children may do so between the two calls here.
fn kill(child: &mut Child) {
    #[cfg(target_os = "linux")]
    {
        use rustix::process::{Pid, Signal, kill_process_group};
        if state_of(child).is_err() {
            return;
        }
        // It may have ended, and what it started may not.
        let _ = kill_process_group(Pid::from_child(child), Signal::KILL);
    }
    let _ = child.kill();
}

/// Whether an error says that a program was waited for already.
fn is_reaped(error: &io::Error) -> bool {
    // ECHILD of Linux, macOS and the BSDs.
    cfg!(unix) && error.raw_os_error() == Some(10)
}

/// What a program does.
enum ProgramState {
    Runs,
    /// It reads from the terminal or writes to it, which another group has.
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "Linux alone says it"))]
    WantsTerminal,
    Ended,
}

/// What a program does. On Linux its number stays taken.
fn state_of(child: &mut Child) -> io::Result<ProgramState> {
    #[cfg(target_os = "linux")]
    {
        use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, waitid};
        let options =
            WaitIdOptions::EXITED | WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let terminal = [Signal::TTIN.as_raw(), Signal::TTOU.as_raw()];
        Ok(match waitid(WaitId::Pid(Pid::from_child(child)), options)? {
            None => ProgramState::Runs,
            Some(status) if !status.stopped() => ProgramState::Ended,
            Some(status) if status.stopping_signal().is_some_and(|own| terminal.contains(&own)) => {
                ProgramState::WantsTerminal
            }
            Some(_) => ProgramState::Runs,
        })
    }
    #[cfg(not(target_os = "linux"))]
    Ok(if child.try_wait()?.is_some() { ProgramState::Ended } else { ProgramState::Runs })
}

/// What a program prints, once it has ended.
fn printed_by(
    child: &mut Child,
    patience: Duration,
    stop: &AtomicBool,
) -> std::result::Result<Vec<u8>, Problem> {
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
    let mut bytes = None;
    loop {
        if stop.load(Ordering::Relaxed) {
            return Err(Problem::Stopped);
        }
        if begun.elapsed() > patience {
            return Err(failed(format!("did not end within {} s", patience.as_secs())));
        }
        match receiver.recv_timeout(TICK) {
            Ok(read) => bytes = Some(read.map_err(|error| failed(format!("cannot be read: {error}")))?),
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            // All that it printed is there.
            Err(mpsc::RecvTimeoutError::Disconnected) => thread::sleep(TICK),
        }
        let has_ended = match state_of(child) {
            Ok(ProgramState::Runs) => false,
            Ok(ProgramState::Ended) => true,
            Ok(ProgramState::WantsTerminal) => {
                return Err(failed("asked for input at the terminal, which it does not have".into()));
            }
            Err(error) if is_reaped(&error) => true,
            Err(error) => return Err(failed(format!("cannot be waited for: {error}"))),
        };
        if let (true, Some(bytes)) = (has_ended, &mut bytes) {
            return Ok(std::mem::take(bytes));
        }
    }
}

/// Sends a request, and waits for the whole answer. Tries again what may pass; an answer of another status than success is given
/// back if it does not pass.
fn ask(request: Request<Bytes>, stop: &AtomicBool) -> std::result::Result<Response<Bytes>, Problem> {
    let origin = origin_of(&request);
    let is_metadata = METADATA_HOSTS.contains(&&*origin.host);
    let (parts, body) = request.into_parts();
    let roots = if is_aws_host(&origin.host) { aws_roots() } else { Roots::of_machine() };
    let network = Network { roots, is_outside: false };
    let mut refused = None;
    let answered = Pace::new().persist(stop, |waiting| {
        let patience = if is_metadata { SHORT_PATIENCE } else { waiting.patience };
        let waiting = Waiting { patience, ..*waiting };
        let again = |failure: Failure, error: io::Error| {
            let why = format!("{}: {error}", origin.url());
            match failure {
                _ if waiting.is_stopped() => Problem::Stopped.into(),
                // It is not there.
                Failure::Unreached | Failure::Silent if is_metadata => Problem::Credentials(why).into(),
                _ => Fault::Again(Again::of(failure, why)),
            }
        };
        let connection = Connection::open(&origin, &network, CONNECT.min(patience), stop)
            .map_err(|error| again(Failure::Unreached, error))?;
        let answer =
            send(connection, &parts, &body, &waiting).map_err(|error| again(Failure::Silent, error))?;
        let status = answer.status;
        let response = response(answer, &waiting).map_err(|error| again(Failure::Broken, error))?;
        if matches!(status, 429 | 500..) {
            let why = format!("{} answered with status {status}", origin.url());
            refused = Some(response);
            return Err(Fault::Again(Again::of(Failure::Refused, why)));
        }
        Ok(response)
    });
    match (answered, refused) {
        (Err(Problem::Unreliable { .. }), Some(refused)) => Ok(refused),
        (answered, _) => answered,
    }
}

fn response(answer: Answer, waiting: &Waiting<'_>) -> io::Result<Response<Bytes>> {
    let mut response = Response::builder().status(answer.status);
    for (name, value) in &answer.headers {
        response = response.header(name, value);
    }
    let (body, _) = answer.into_body(MAX_ANSWER_BYTES, waiting)?;
    response.body(body.into()).map_err(io::Error::other)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::net::TcpListener;

    /// Whether a process runs: one that was killed may wait for its parent.
    #[cfg(target_os = "linux")]
    pub(crate) fn runs(process: &str) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(['Z', 'X']))
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_program_that_is_killed_takes_along_what_it_started() {
        let directory = tempfile::tempdir().unwrap();
        let note = directory.path().join("started");
        let script = format!("sleep 600 & echo $! > '{0}.new'; mv '{0}.new' '{0}'; wait", note.display());
        let command = ["sh", "-c", &script].map(str::to_owned);
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let running = scope.spawn(|| output_of(&command, Duration::from_secs(600), &stop));
            let started = loop {
                match std::fs::read_to_string(&note) {
                    Ok(number) => break number.trim().to_owned(),
                    Err(_) => thread::sleep(TICK),
                }
            };
            assert!(runs(&started));
            stop.store(true, Ordering::Relaxed);
            assert!(matches!(running.join().unwrap(), Err(Problem::Stopped)));
            while runs(&started) {
                thread::sleep(TICK);
            }
        });
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_program_that_asks_at_the_terminal_fails_at_once() {
        let command = ["sh", "-c", "kill -TTIN $$; sleep 600"].map(str::to_owned);
        let result = output_of(&command, Duration::from_secs(600), &AtomicBool::new(false));
        let problem = result.unwrap_err().to_string();
        assert!(problem.contains("asked for input at the terminal"), "{problem}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_program_that_another_part_of_the_process_waited_for_is_judged_by_its_output() {
        use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
        let started = || {
            let mut child = Command::new("echo").arg("printed").stdout(Stdio::piped()).spawn().unwrap();
            waitid(WaitId::Pid(Pid::from_child(&child)), WaitIdOptions::EXITED).unwrap();
            assert!(is_reaped(&state_of(&mut child).err().unwrap()));
            child
        };
        let long = Duration::from_secs(600);
        let printed = outcome_of(&mut started(), long, &AtomicBool::new(false));
        assert_eq!(printed.unwrap(), b"printed\n");
        assert!(matches!(outcome_of(&mut started(), long, &AtomicBool::new(true)), Err(Problem::Stopped)));
    }

    #[test]
    fn a_question_whose_thread_unwinds_is_answered() {
        let asked = Asked::<()>::of(|_| std::panic::resume_unwind(Box::new(()))).unwrap();
        let answer = block_on(asked, &AtomicBool::new(false));
        assert!(matches!(answer, Some(Err(Problem::Credentials(_)))), "{answer:?}");
    }

    #[cfg(unix)]
    #[test]
    fn a_program_has_as_much_time_as_is_said() {
        let command = ["sleep", "600"].map(str::to_owned);
        let result = output_of(&command, Duration::from_secs(1), &AtomicBool::new(false));
        let problem = result.unwrap_err().to_string();
        assert!(problem.contains("did not end within 1 s"), "{problem}");
    }

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
