//! Objects that are written: by one request, in parts, as S3 and Google have them, or in [blocks](crate::blocks).

use super::{Dialect, Request, State, blocks::Blocks, decoded, lock, refuse, stream::Stream};
use base64::{Engine, engine::general_purpose::STANDARD};
use crc_fast::{
    CrcAlgorithm::{Crc32Iscsi, Crc64Nvme},
    checksum,
};
use std::{
    collections::BTreeMap,
    io::{self, Write},
    time::{Duration, Instant},
};

/// Fewest bytes of a part that is not the last.
const MIN_PART_BYTES: usize = 5 << 20;

/// What a request is of the writing of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// All of an object.
    Put,
    /// The beginning of an upload.
    Create,
    /// A part.
    Part,
    /// The end of an upload.
    Complete,
    /// Its abortion.
    Abort,
    /// The removal of an object.
    Remove,
}

/// What goes wrong with a request that writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteFault {
    /// A refusal with this status, and nothing is done.
    Status(u16),
    /// The connection is reset in the middle of the body, or without an answer if there is none. Nothing is done.
    Reset,
    /// It is done, and the connection ends without an answer.
    Lost,
    /// It is done, and the answer is none: its body has a length, and comes in chunks.
    Garbled,
    /// It is done, and the answer is that of a proxy that waited for it no longer: status 503, without a code.
    Unavailable,
    /// It is not done, and the answer has status 200 and an error of this code for a body.
    ErrorInBody(&'static str),
    /// One bit of the body is another as it comes.
    Flip,
    /// Nothing for this long.
    Stall(Duration),
    /// It is done, and the answer does not say the checksum.
    Silent,
    /// Requests with checksums are refused.
    NoChecksums,
    /// It is done after this time, and meanwhile the answer begins, with a blank now and then, as that of S3 to a completion.
    Trickle(Duration),
    /// An abort is answered as a success, and a part that was on its way comes after it.
    PartAfter,
    /// It is done, and the answer says another checksum.
    OtherChecksum,
}

impl Step {
    /// A step and its fault by their names on the command line, such as `part:stall`.
    pub fn named(name: &str) -> Option<(Self, WriteFault)> {
        let (step, fault) = name.split_once(':')?;
        let step = match step {
            "put" => Self::Put,
            "create" => Self::Create,
            "part" => Self::Part,
            "complete" => Self::Complete,
            "abort" => Self::Abort,
            _ => return None,
        };
        let fault = match fault {
            "stall" => WriteFault::Stall(Duration::from_secs(600)),
            "reset" => WriteFault::Reset,
            "lost" => WriteFault::Lost,
            "part-after" => WriteFault::PartAfter,
            status => WriteFault::Status(status.parse().ok()?),
        };
        Some((step, fault))
    }
}

/// The uploads that were begun, and what goes wrong with them.
#[derive(Debug, Default)]
pub(crate) struct Uploads {
    open: BTreeMap<String, Upload>,
    /// Those of blobs of Azure, by their paths.
    pub(crate) blocks: BTreeMap<String, Blocks>,
    begun: usize,
    faults: Vec<(Step, usize, WriteFault)>,
    /// The requests whose whole body has come.
    received: Vec<Step>,
}

#[derive(Debug)]
struct Upload {
    path: String,
    /// Whether its parts have checksums.
    has_checksums: bool,
    parts: BTreeMap<usize, Vec<u8>>,
}

impl Uploads {
    pub(crate) fn open_paths(&self) -> Vec<String> {
        let with_blocks = self.blocks.iter().filter(|(_, own)| own.has_uncommitted());
        let open = self.open.values().map(|upload| upload.path.clone());
        open.chain(with_blocks.map(|(path, _)| path.clone())).collect()
    }

    pub(crate) fn received(&self, step: Step) -> usize {
        self.received.iter().filter(|own| **own == step).count()
    }

    pub(crate) fn fail(&mut self, step: Step, count: usize, fault: WriteFault) {
        self.faults = vec![(step, count, fault)];
    }

    pub(crate) fn then_fail(&mut self, step: Step, count: usize, fault: WriteFault) {
        self.faults.push((step, count, fault));
    }

    fn next_fault(&mut self, step: Step) -> Option<WriteFault> {
        let mut left = self.faults.iter_mut();
        let (_, count, fault) = left.find(|(of, count, _)| *of == step && *count > 0)?;
        *count -= 1;
        Some(*fault)
    }
}

/// What a request is of the writing of an object, if it writes.
pub(crate) fn step_of(request: &Request) -> Option<Step> {
    let query = request.target.split_once('?').map_or("", |(_, query)| query);
    match query.split('&').find_map(|pair| pair.strip_prefix("comp=")) {
        Some("block") => return Some(Step::Part),
        Some("blocklist") if request.method == "PUT" => return Some(Step::Complete),
        _ => {}
    }
    let is_of_upload = query.contains("uploadId=");
    match (request.method.as_str(), is_of_upload) {
        ("PUT", false) => Some(Step::Put),
        ("PUT", true) => Some(Step::Part),
        ("POST", false) => Some(Step::Create),
        ("POST", true) => Some(Step::Complete),
        ("DELETE", false) => Some(Step::Remove),
        ("DELETE", true) => Some(Step::Abort),
        _ => None,
    }
}

/// How a request is answered.
pub(crate) enum Reply {
    /// Status, headers and text.
    Done(&'static str, String, String),
    Refused(&'static str, &'static str),
}

impl State {
    /// Takes the body of a request that writes, and answers. An error closes the connection.
    pub(crate) fn write(
        &self,
        socket: &mut Stream,
        buffer: &mut Vec<u8>,
        request: &Request,
        step: Step,
    ) -> io::Result<()> {
        lock(&self.requests).push(request.clone());
        let fault = lock(&self.uploads).next_fault(step);
        if fault == Some(WriteFault::Reset) {
            Request::read_body(socket, buffer, request.body_len / 2)?;
            // What was sent and not read makes the system send a reset.
            socket.shutdown()?;
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        let mut body = Request::read_body(socket, buffer, request.body_len)?;
        lock(&self.uploads).received.push(step);
        if let Some(refused) = self.refuse_region(socket, request) {
            return refused;
        }
        match fault {
            Some(WriteFault::Status(status)) => {
                let (status, code) = match status {
                    400 => ("400 Bad Request", "InvalidRequest"),
                    403 => ("403 Forbidden", "AccessDenied"),
                    404 => ("404 Not Found", "ContainerNotFound"),
                    409 => ("409 Conflict", "BlockCountExceedsLimit"),
                    412 => ("412 Precondition Failed", "LeaseIdMissing"),
                    // That of a proxy.
                    501 => ("501 Not Implemented", ""),
                    500 => ("500 Internal Server Error", "InternalError"),
                    _ => ("503 Slow Down", "SlowDown"),
                };
                return refuse(socket, status, code, "");
            }
            Some(WriteFault::ErrorInBody(code)) => return refuse(socket, "200 OK", code, ""),
            Some(WriteFault::Flip) => {
                if let Some(byte) = body.last_mut() {
                    *byte ^= 1;
                }
            }
            Some(WriteFault::Stall(time)) => {
                self.wait(time);
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            Some(WriteFault::NoChecksums)
                if request.checksum_algorithm.is_some() || request.checksum.is_some() =>
            {
                return match *lock(&self.dialect) {
                    Dialect::Azure => refuse(socket, "500 Internal Server Error", "FeatureNotSupported", ""),
                    _ => refuse(socket, "501 Not Implemented", "NotImplemented", ""),
                };
            }
            Some(WriteFault::Trickle(time)) => {
                socket.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")?;
                let begun = Instant::now();
                while begun.elapsed() < time {
                    self.wait(Duration::from_millis(100));
                    socket.write_all(b"1\r\n \r\n")?;
                }
                let text = match self.written(request, step, body) {
                    Reply::Done(_, _, text) => text,
                    Reply::Refused(_, code) => format!("<Error><Code>{code}</Code></Error>"),
                };
                return write!(socket, "{:x}\r\n{text}\r\n0\r\n\r\n", text.len());
            }
            Some(WriteFault::PartAfter) => {
                return socket.write_all(b"HTTP/1.1 204 No Content\r\n\r\n");
            }
            _ => {}
        }
        let reply = self.written(request, step, body);
        if fault == Some(WriteFault::Lost) {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        if fault == Some(WriteFault::Garbled) {
            let framing = "Content-Length: 0\r\nTransfer-Encoding: chunked";
            return write!(socket, "HTTP/1.1 200 OK\r\n{framing}\r\n\r\n0\r\n\r\n");
        }
        if fault == Some(WriteFault::Unavailable) {
            return refuse(socket, "503 Service Unavailable", "", "");
        }
        match reply {
            Reply::Done(status, headers, text) => {
                let is_silent = fault == Some(WriteFault::Silent);
                let mut headers = if is_silent { without_checksum(&headers) } else { headers };
                if fault == Some(WriteFault::OtherChecksum) {
                    headers = without_checksum(&headers)
                        + "x-amz-checksum-crc64nvme: AAAAAAAAAAA=\r\nx-ms-content-crc64: AAAAAAAAAAA=\r\n";
                }
                write!(socket, "HTTP/1.1 {status}\r\nContent-Length: {}\r\n{headers}\r\n{text}", text.len())
            }
            Reply::Refused(status, code) => refuse(socket, status, code, ""),
        }
    }

    fn written(&self, request: &Request, step: Step, body: Vec<u8>) -> Reply {
        let (path, query) = request.target.split_once('?').unwrap_or((&request.target, ""));
        let path = decoded(path.trim_start_matches('/'));
        let value = |name: &str| {
            let found = query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
            found.map(decoded).unwrap_or_default()
        };
        if *lock(&self.dialect) == Dialect::Azure {
            return self.written_to_azure(request, step, path, &value("blockid"), body);
        }
        let is_google = *lock(&self.dialect) == Dialect::Google;
        let sum_of = |bytes: &[u8]| match is_google {
            true => STANDARD.encode((checksum(Crc32Iscsi, bytes) as u32).to_be_bytes()),
            false => STANDARD.encode(checksum(Crc64Nvme, bytes).to_be_bytes()),
        };
        let sum = sum_of(&body);
        let is_damaged = request.checksum.as_ref().is_some_and(|said| *said != sum);
        // The checksum of what is completed is that of the whole object.
        if is_damaged && step != Step::Complete {
            return Reply::Refused("400 Bad Request", "BadDigest");
        }
        let said = match (&request.checksum, is_google) {
            (None, _) => String::new(),
            (Some(_), true) => format!("x-goog-hash: crc32c={sum}\r\n"),
            (Some(_), false) => format!("x-amz-checksum-crc64nvme: {sum}\r\n"),
        };
        let etag = etag_of(&body);
        let mut uploads = lock(&self.uploads);
        let id = value("uploadId");
        match step {
            Step::Put => {
                self.put(&path, body, etag.clone());
                Reply::Done("200 OK", format!("ETag: {etag}\r\n{said}"), String::new())
            }
            Step::Remove => {
                lock(&self.objects).remove(&path);
                Reply::Done("204 No Content", String::new(), String::new())
            }
            Step::Create => {
                uploads.begun += 1;
                let id = format!("upload/{}+a", uploads.begun);
                let has_checksums = request.checksum_algorithm.is_some();
                uploads.open.insert(id.clone(), Upload { path, has_checksums, parts: BTreeMap::new() });
                let text = format!(
                    "<?xml version=\"1.0\"?><InitiateMultipartUploadResult xmlns=\"x\"><Bucket>b</Bucket>\
                     <UploadId>{id}</UploadId></InitiateMultipartUploadResult>"
                );
                Reply::Done("200 OK", String::new(), text)
            }
            Step::Part => {
                let Some(upload) = uploads.open.get_mut(&id).filter(|own| own.path == path) else {
                    return Reply::Refused("404 Not Found", "NoSuchUpload");
                };
                let Some(number @ 1..=10_000) = value("partNumber").parse().ok() else {
                    return Reply::Refused("400 Bad Request", "InvalidArgument");
                };
                if upload.has_checksums && request.checksum.is_none() {
                    return Reply::Refused("400 Bad Request", "InvalidRequest");
                }
                upload.parts.insert(number, body);
                Reply::Done("200 OK", format!("ETag: {etag}\r\n{said}"), String::new())
            }
            Step::Complete => {
                let Some(upload) = uploads.open.get(&id).filter(|own| own.path == path) else {
                    return Reply::Refused("404 Not Found", "NoSuchUpload");
                };
                let text = String::from_utf8_lossy(&body);
                let parts: Vec<&Vec<u8>> = upload.parts.values().collect();
                if listed(&text) != upload.parts.iter().map(|(n, own)| (*n, etag_of(own))).collect::<Vec<_>>()
                {
                    return Reply::Refused("400 Bad Request", "InvalidPart");
                }
                if parts.iter().rev().skip(1).any(|part| part.len() < MIN_PART_BYTES) {
                    return Reply::Refused("400 Bad Request", "EntityTooSmall");
                }
                let (whole, count) =
                    (parts.into_iter().flatten().copied().collect::<Vec<u8>>(), upload.parts.len());
                let sum = sum_of(&whole);
                if request.checksum.as_ref().is_some_and(|said| *said != sum) {
                    return Reply::Refused("400 Bad Request", "BadDigest");
                }
                let said = match upload.has_checksums {
                    true => format!("<ChecksumCRC64NVME>{sum}</ChecksumCRC64NVME>"),
                    false => String::new(),
                };
                let etag = format!("{}-{count}\"", etag_of(&whole).trim_end_matches('"'));
                // As AWS does, while it puts the parts together.
                let text = format!(
                    " \n <CompleteMultipartUploadResult><ETag>{etag}</ETag>{said}</CompleteMultipartUploadResult>"
                );
                uploads.open.remove(&id);
                self.put(&path, whole, etag);
                Reply::Done("200 OK", String::new(), text)
            }
            Step::Abort => match uploads.open.remove(&id) {
                Some(_) => Reply::Done("204 No Content", String::new(), String::new()),
                None => Reply::Refused("404 Not Found", "NoSuchUpload"),
            },
        }
    }

    /// The uploads of a bucket that are open.
    pub(crate) fn list_uploads(&self, socket: &mut Stream, bucket: &str) -> io::Result<()> {
        let folder = format!("{bucket}/");
        let paths = lock(&self.uploads).open_paths();
        let keys = paths.iter().filter_map(|path| path.strip_prefix(&folder));
        let keys: String = keys.map(|key| format!("<Upload><Key>{key}</Key></Upload>")).collect();
        let text = format!("<ListMultipartUploadsResult>{keys}</ListMultipartUploadsResult>");
        write!(socket, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{text}", text.len())
    }
}

pub(crate) fn etag_of(bytes: &[u8]) -> String {
    format!("\"{}\"", &blake3::hash(bytes).to_hex()[..32])
}

/// The numbers and the ETags of the parts that a request for completion lists.
fn listed(text: &str) -> Vec<(usize, String)> {
    let within = |text: &str, name: &str| {
        let (_, rest) = text.split_once(&format!("<{name}>"))?;
        Some(rest.split_once(&format!("</{name}>"))?.0.replace("&quot;", "\""))
    };
    let part = |text: &str| Some((within(text, "PartNumber")?.parse().ok()?, within(text, "ETag")?));
    text.split("<Part>").skip(1).filter_map(part).collect()
}

fn without_checksum(headers: &str) -> String {
    let names = ["x-amz-checksum", "x-goog-hash", "x-ms-content-crc64"];
    let is_kept = |line: &&str| !names.iter().any(|name| line.starts_with(name));
    headers.split_inclusive("\r\n").filter(is_kept).collect()
}
