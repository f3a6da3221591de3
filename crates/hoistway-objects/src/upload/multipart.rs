//! Uploads of S3 and Google: they are opened, their parts have numbers, and a list of these completes them.

use super::{
    MAX_ANSWER_BYTES, MAX_NAME_BYTES, Open, Part,
    answers::{OtherSum, is_unanswered, of_a_save, wrong_sum},
    sums::{CHECKSUM_TYPE, algorithm_of, said_sum},
    until_answered,
};
use crate::{
    Problem, StoreOptions,
    checksum::Algorithm,
    client::{Client, UNSUPPORTED, error_code},
    http::Sent,
    location::{Kind, Location, Target},
    pace::{Again, Fault},
    policy::Failure,
    stop::Stop,
};
use http::{HeaderMap, HeaderName, Method};
use serde::Deserialize;
use std::{
    fmt::Write,
    sync::{Arc, atomic::AtomicBool},
};

/// What the store calls an upload.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Created {
    upload_id: String,
}

/// Opens an upload.
pub(super) fn create(location: &Location, options: &StoreOptions, stop: &Stop) -> Result<Open, Problem> {
    let client = Client::of(location, options);
    let mut algorithm = algorithm_of(location.kind, options);
    let mut has_stray = false;
    let mut created = ask_create(&client, &location.target, algorithm, &mut has_stray, stop);
    if created.as_ref().is_err_and(|problem| refuses_checksums(problem, algorithm)) {
        algorithm = None;
        created = ask_create(&client, &location.target, algorithm, &mut has_stray, stop);
    }
    match created {
        Ok(id) => Ok(Open { client, target: location.target.clone(), id, algorithm, has_stray }),
        Err(problem) if has_stray => Err(Problem::MayBeOpen(of_a_save(problem).to_string())),
        Err(problem) => Err(of_a_save(problem)),
    }
}

/// Whether a store says that it refused a request for its checksum: some know none of this kind.
pub(super) fn refuses_checksums(problem: &Problem, algorithm: Option<Algorithm>) -> bool {
    let codes = ["NotImplemented", "InvalidArgument", "UnsupportedHeader", "InvalidHeaderValue"];
    let is_said = match problem {
        Problem::Refused { said, .. } if said.ends_with(UNSUPPORTED) => true,
        Problem::Refused { status: 501, .. } => true,
        Problem::Refused { status: 400, said } => codes.iter().any(|code| said.contains(code)),
        _ => false,
    };
    is_said && algorithm == Some(Algorithm::Crc64Nvme)
}

/// The name of a new upload. `has_stray` is set if an answer with another one may have been lost.
fn ask_create(
    client: &Arc<Client>,
    target: &Target,
    algorithm: Option<Algorithm>,
    has_stray: &mut bool,
    stop: &Stop,
) -> Result<String, Problem> {
    let headers = match algorithm {
        Some(Algorithm::Crc64Nvme) => vec![
            (HeaderName::from_static("x-amz-checksum-algorithm"), "CRC64NVME".to_owned()),
            (CHECKSUM_TYPE, "FULL_OBJECT".to_owned()),
        ],
        _ => Vec::new(),
    };
    let target = Target(format!("{}?uploads=", target.0));
    // An upload whose answer is not waited for would stay open.
    let never = AtomicBool::new(false);
    client.pace().persist(stop.flag(), |sending| {
        let waiting = until_answered(sending, stop, &never);
        let mut sent = Sent::default();
        let what = (Method::POST, &target);
        let answer = client.send(what, &headers, &[], &mut sent, (sending, &waiting));
        let body = answer.and_then(|answer| client.body(answer, MAX_ANSWER_BYTES, &waiting));
        let id = body.and_then(|body| {
            let text = std::str::from_utf8(&body).ok();
            let created = text.and_then(|text| quick_xml::de::from_str::<Created>(text).ok());
            let id = created.map(|own| own.upload_id).filter(|id| (1..=MAX_NAME_BYTES).contains(&id.len()));
            let wrong = "it does not name the upload that was asked for";
            id.ok_or_else(|| Problem::WrongAnswer(wrong.into()).into())
        });
        id.inspect_err(|fault| *has_stray |= sent.may_be_whole && is_unanswered(fault))
    })
}

/// What an answer of status 200 to the request for completion says: S3 sends the head before it begins, so that the body may be
/// an error. Returns whether the store compared the whole object with its checksum.
pub(super) fn completion(
    headers: &HeaderMap,
    body: &[u8],
    sum: Option<(Algorithm, u64)>,
) -> Result<bool, Fault> {
    let text = std::str::from_utf8(body).unwrap_or_default();
    if text.contains("<CompleteMultipartUploadResult") {
        let Some((algorithm, sum)) = sum else { return Ok(false) };
        let in_body = || {
            let (_, rest) = text.split_once("<ChecksumCRC64NVME>")?;
            algorithm.parse(rest.split_once("</ChecksumCRC64NVME>")?.0)
        };
        return match said_sum(Kind::S3, algorithm, headers).or_else(in_body) {
            Some(said) if said != sum => Err(wrong_sum(OtherSum { algorithm, said, sent: sum }, true)),
            said => Ok(said.is_some()),
        };
    }
    let Some(code) = error_code(body) else {
        return Err(Problem::WrongAnswer("it does not say whether the object is complete".into()).into());
    };
    let said = format!("status 200, {code}");
    let passing = ["InternalError", "ServiceUnavailable", "SlowDown", "RequestTimeout", "OperationAborted"];
    if passing.contains(&code.as_str()) {
        let failure = if code == "SlowDown" { Failure::Busy(None) } else { Failure::Refused };
        let why = format!("the server said {said}");
        return Err(Fault::Again(Again::of(failure, why)));
    }
    Err(Problem::Refused { status: 200, said }.into())
}

/// The list of parts by which an object is completed.
pub(super) fn parts_text(algorithm: Option<Algorithm>, parts: &[Part]) -> String {
    let mut text = "<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">".to_owned();
    for (number, part) in (1..).zip(parts) {
        let etag = quick_xml::escape::escape(&part.etag);
        let _ = write!(text, "<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag>");
        if let (Some(algorithm @ Algorithm::Crc64Nvme), Some(sum)) = (algorithm, part.sum) {
            let _ = write!(text, "<ChecksumCRC64NVME>{}</ChecksumCRC64NVME>", algorithm.text(sum));
        }
        text += "</Part>";
    }
    text + "</CompleteMultipartUpload>"
}
