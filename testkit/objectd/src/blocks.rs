//! Blobs of Azure that are written: by one request, or in blocks that a list puts together.

use crate::{
    Request, State, Step, lock,
    stream::Stream,
    uploads::{Reply, etag_of},
};
use base64::{Engine, engine::general_purpose::STANDARD};
use crc_fast::{CrcAlgorithm::Crc64Nvme, checksum};
use std::{
    collections::BTreeMap,
    io::{self, Write},
};

/// The blocks of a blob, by their names.
#[derive(Debug, Default)]
pub(crate) struct Blocks {
    uncommitted: BTreeMap<String, Vec<u8>>,
    committed: Vec<(String, Vec<u8>)>,
}

impl Blocks {
    pub(crate) fn has_uncommitted(&self) -> bool {
        !self.uncommitted.is_empty()
    }

    fn find(&self, name: &str) -> Option<Vec<u8>> {
        let committed = || self.committed.iter().find(|(own, _)| own == name).map(|(_, bytes)| bytes);
        self.uncommitted.get(name).or_else(committed).cloned()
    }
}

impl State {
    pub(crate) fn written_to_azure(
        &self,
        request: &Request,
        step: Step,
        path: String,
        name: &str,
        body: Vec<u8>,
    ) -> Reply {
        let sum = STANDARD.encode(checksum(Crc64Nvme, &body).to_le_bytes());
        if request.checksum.as_ref().is_some_and(|said| *said != sum) {
            return Reply::Refused("400 Bad Request", "Crc64Mismatch");
        }
        let created = |headers: String| {
            Reply::Done("201 Created", format!("{headers}x-ms-content-crc64: {sum}\r\n"), String::new())
        };
        let mut uploads = lock(&self.uploads);
        match step {
            Step::Put => {
                if request.blob_type.as_deref() != Some("BlockBlob") {
                    return Reply::Refused("400 Bad Request", "MissingRequiredHeader");
                }
                uploads.blocks.remove(&path);
                let etag = etag_of(&body);
                self.put(&path, body, etag.clone());
                created(format!("ETag: {etag}\r\n"))
            }
            Step::Part => {
                if STANDARD.decode(name).map_or(true, |name| !(1..=64).contains(&name.len())) {
                    return Reply::Refused("400 Bad Request", "InvalidQueryParameterValue");
                }
                let blocks = uploads.blocks.entry(path).or_default();
                if blocks.uncommitted.keys().any(|other| other.len() != name.len()) {
                    return Reply::Refused("400 Bad Request", "InvalidBlobOrBlock");
                }
                blocks.uncommitted.insert(name.to_owned(), body);
                created(String::new())
            }
            Step::Complete => {
                let text = String::from_utf8_lossy(&body);
                let names = text.split("<Latest>").skip(1).filter_map(|rest| rest.split_once("</Latest>"));
                let blocks = uploads.blocks.entry(path.clone()).or_default();
                let listed: Option<Vec<_>> =
                    names.map(|(name, _)| Some((name.to_owned(), blocks.find(name)?))).collect();
                let Some(committed) = listed else {
                    return Reply::Refused("400 Bad Request", "InvalidBlockList");
                };
                let whole: Vec<u8> = committed.iter().flat_map(|(_, bytes)| bytes).copied().collect();
                *blocks = Blocks { uncommitted: BTreeMap::new(), committed };
                let etag = etag_of(&whole);
                self.put_as(&path, whole, etag.clone(), true);
                created(format!("ETag: {etag}\r\n"))
            }
            Step::Remove => {
                uploads.blocks.remove(&path);
                match lock(&self.objects).remove(&path) {
                    Some(_) => Reply::Done("202 Accepted", String::new(), String::new()),
                    None => Reply::Refused("404 Not Found", "BlobNotFound"),
                }
            }
            Step::Create | Step::Abort => Reply::Refused("400 Bad Request", "InvalidQueryParameterValue"),
        }
    }

    /// The blocks that a blob is made of.
    pub(crate) fn list_blocks(&self, socket: &mut Stream, path: &str) -> io::Result<()> {
        let uploads = lock(&self.uploads);
        let committed = uploads.blocks.get(path).map_or(&[][..], |own| &own.committed);
        let blocks: String = committed
            .iter()
            .map(|(name, bytes)| format!("<Block><Name>{name}</Name><Size>{}</Size></Block>", bytes.len()))
            .collect();
        drop(uploads);
        let text = format!(
            "\u{feff}<?xml version=\"1.0\" encoding=\"utf-8\"?><BlockList><CommittedBlocks>{blocks}</CommittedBlocks></BlockList>"
        );
        write!(socket, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{text}", text.len())
    }
}
