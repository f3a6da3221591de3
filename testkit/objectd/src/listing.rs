//! What a folder holds, in the words of S3 or of Azure.

use super::{State, decoded, lock, stream::Stream};
use std::io::{self, Write};

impl State {
    /// Two keys a page.
    pub(crate) fn list(&self, socket: &mut Stream, bucket: &str, query: &str) -> io::Result<()> {
        let value = |name: &str| {
            let found = query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
            found.map(decoded).unwrap_or_default()
        };
        let is_azure = query.contains("comp=list");
        let (prefix, after) =
            (value("prefix"), value(if is_azure { "marker" } else { "continuation-token" }));
        let folder = format!("{bucket}/{prefix}");
        let keys: Vec<String> = lock(&self.objects)
            .keys()
            .filter_map(|path| path.strip_prefix(&folder).filter(|name| !name.contains('/')))
            .map(|name| format!("{prefix}{name}"))
            .filter(|key| *key > after)
            .collect();
        let is_truncated = keys.len() > 2;
        let next = keys.get(1).filter(|_| is_truncated && !lock(&self.faults).0.endless_listing);
        let page = keys.iter().take(2).map(|key| key.replace('&', "&amp;").replace('<', "&lt;"));
        let text = if is_azure {
            let blobs: String = page.map(|key| format!("<Blob><Name>{key}</Name></Blob>")).collect();
            let next =
                next.map_or("<NextMarker />".into(), |next| format!("<NextMarker>{next}</NextMarker>"));
            format!(
                "\u{feff}<?xml version=\"1.0\"?><EnumerationResults><Blobs>{blobs}</Blobs>{next}</EnumerationResults>"
            )
        } else {
            let contents: String =
                page.map(|key| format!("<Contents><Key>{key}</Key><Size>1</Size></Contents>")).collect();
            let next = next.map_or(String::new(), |next| {
                format!("<NextContinuationToken>{next}</NextContinuationToken>")
            });
            format!(
                "<?xml version=\"1.0\"?><ListBucketResult>{contents}<IsTruncated>{is_truncated}</IsTruncated>{next}\
                 </ListBucketResult>"
            )
        };
        // As AWS does.
        write!(socket, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")?;
        for part in text.as_bytes().chunks(50) {
            write!(socket, "{:x}\r\n", part.len())?;
            socket.write_all(part)?;
            socket.write_all(b"\r\n")?;
        }
        socket.write_all(b"0\r\n\r\n")
    }
}
