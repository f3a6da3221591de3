//! Archives of blocks: what is in the tar file, and how much of it is believed.
//!
//! `<namespace>/namespace.json`, then for each block of it `<namespace>/<number>/block.json` and
//! `<namespace>/<number>/<shard>`; at the end `end.json`.

use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use windlass_kv::{BlockInfo, Key, NamespaceId};

/// Most bytes of a file of JSON in an archive.
const MAX_JSON: u64 = 1 << 20;
/// Most bytes of a shard that is read from an archive: no segment holds a longer one.
const MAX_SHARD: u64 = 1 << 30;
const MAX_SHARDS: usize = 256;

/// A block without its bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Block {
    /// In hexadecimal.
    key: String,
    pub(super) shards: Vec<Shard>,
    /// After which it is not found any more, in seconds since 1970.
    pub(super) expires: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Shard {
    pub(super) len: u64,
    /// CRC-32C, if the block has one.
    pub(super) checksum: Option<u32>,
}

impl Block {
    pub(super) fn new(key: &Key, info: &BlockInfo, expires: Option<u64>) -> Self {
        let shards =
            info.shards.iter().map(|shard| Shard { len: shard.len, checksum: shard.checksum }).collect();
        Self { key: to_hex(key.as_bytes()), shards, expires }
    }

    pub(super) fn key(&self) -> Option<Key> {
        Key::new(&from_hex(&self.key)?).ok()
    }
}

/// The last file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct End {
    blocks: u64,
}

pub(super) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Bytes of pairs of hexadecimal digits.
pub(super) fn from_hex(digits: &str) -> Option<Vec<u8>> {
    let value = |digit: u8| char::from(digit).to_digit(16).and_then(|value| u8::try_from(value).ok());
    let pairs = digits.as_bytes().chunks(2);
    pairs.map(|pair| Some(value(*pair.first()?)? << 4 | value(*pair.get(1)?)?)).collect()
}

/// Writes an archive.
pub(super) struct Writer<W: Write> {
    tar: tar::Builder<W>,
    blocks: u64,
}

impl<W: Write> Writer<W> {
    pub(super) fn new(output: W) -> Self {
        Self { tar: tar::Builder::new(output), blocks: 0 }
    }

    pub(super) fn namespace(&mut self, id: NamespaceId, description: &str) -> io::Result<()> {
        self.add(&format!("{id}/namespace.json"), description.as_bytes())
    }

    pub(super) fn block<'a>(
        &mut self,
        namespace: NamespaceId,
        block: &Block,
        shards: impl IntoIterator<Item = &'a [u8]>,
    ) -> io::Result<()> {
        let number = self.blocks;
        self.add(&format!("{namespace}/{number}/block.json"), &serde_json::to_vec(block)?)?;
        for (shard, bytes) in shards.into_iter().enumerate() {
            self.add(&format!("{namespace}/{number}/{shard}"), bytes)?;
        }
        self.blocks += 1;
        Ok(())
    }

    /// Ends the archive, which is not whole without. How many blocks it has.
    pub(super) fn finish(mut self) -> io::Result<u64> {
        self.add("end.json", &serde_json::to_vec(&End { blocks: self.blocks })?)?;
        self.tar.into_inner()?.flush()?;
        Ok(self.blocks)
    }

    fn add(&mut self, path: &str, bytes: &[u8]) -> io::Result<()> {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o600);
        self.tar.append_data(&mut header, path, bytes)
    }
}

/// What an archive is made of, in order.
pub(super) enum Part {
    Namespace(NamespaceId, String),
    Block(Block, Vec<Vec<u8>>),
}

/// Why an archive is not taken.
#[derive(Debug)]
pub(super) enum Problem {
    Unreadable(io::Error),
    /// A sentence.
    Wrong(String),
}

impl From<io::Error> for Problem {
    fn from(error: io::Error) -> Self {
        Self::Unreadable(error)
    }
}

/// Reads an archive to its end, and hands out its parts.
pub(super) fn read<E: From<Problem>>(
    input: impl Read,
    mut each: impl FnMut(Part) -> Result<(), E>,
) -> Result<u64, E> {
    let mut archive = tar::Archive::new(input);
    let mut entries = archive.entries().map_err(Problem::from)?;
    let mut namespace = None;
    let mut blocks = 0;
    loop {
        let Some(entry) = entries.next() else {
            return Err(wrong("the archive has no end.json: it is not whole").into());
        };
        let (path, mut entry) = named(entry)?;
        match &path.split('/').collect::<Vec<_>>()[..] {
            ["end.json"] => {
                let end: End = json(&path, &mut entry)?;
                if end.blocks != blocks {
                    let told = format!("the archive has {blocks} blocks, and end.json says {}", end.blocks);
                    return Err(Problem::Wrong(told).into());
                }
                return Ok(blocks);
            }
            [id, "namespace.json"] => {
                let id = id.parse::<NamespaceId>().map_err(|error| Problem::Wrong(error.to_string()))?;
                namespace = Some(id.to_string());
                each(Part::Namespace(id, text(&path, &mut entry)?))?;
            }
            [id, number, "block.json"]
                if namespace.as_deref() == Some(*id) && *number == blocks.to_string() =>
            {
                let block: Block = json(&path, &mut entry)?;
                if block.key().is_none() || block.shards.is_empty() || block.shards.len() > MAX_SHARDS {
                    return Err(Problem::Wrong(format!("{path} describes no block")).into());
                }
                drop(entry);
                let mut shards = Vec::new();
                for (shard, described) in block.shards.iter().enumerate() {
                    let Some(entry) = entries.next() else {
                        return Err(wrong("the archive ends within a block: it is not whole").into());
                    };
                    shards.push(bytes(entry, &format!("{id}/{number}/{shard}"), described)?);
                }
                blocks += 1;
                each(Part::Block(block, shards))?;
            }
            _ => {
                return Err(Problem::Wrong(format!(
                    "{path} does not belong there: this is no archive of blocks"
                ))
                .into());
            }
        }
    }
}

fn wrong(sentence: &str) -> Problem {
    Problem::Wrong(sentence.to_owned())
}

fn named<R: Read>(entry: io::Result<tar::Entry<'_, R>>) -> Result<(String, tar::Entry<'_, R>), Problem> {
    let entry = entry?;
    let path = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
    if entry.header().entry_type() != tar::EntryType::Regular {
        return Err(Problem::Wrong(format!("{path} is no file: this is no archive of blocks")));
    }
    Ok((path, entry))
}

fn text(path: &str, entry: &mut impl Read) -> Result<String, Problem> {
    let mut text = String::new();
    entry.take(MAX_JSON).read_to_string(&mut text)?;
    if text.len() as u64 == MAX_JSON {
        return Err(Problem::Wrong(format!("{path} is too long")));
    }
    Ok(text)
}

fn json<T: serde::de::DeserializeOwned>(path: &str, entry: &mut impl Read) -> Result<T, Problem> {
    serde_json::from_str(&text(path, entry)?).map_err(|error| Problem::Wrong(format!("{path}: {error}")))
}

/// The bytes of a shard, which must be those that are described.
fn bytes<R: Read>(
    entry: io::Result<tar::Entry<'_, R>>,
    expected: &str,
    described: &Shard,
) -> Result<Vec<u8>, Problem> {
    let (path, entry) = named(entry)?;
    if path != expected {
        return Err(Problem::Wrong(format!("{path} does not belong there: {expected} is missing")));
    }
    if described.len > MAX_SHARD {
        return Err(Problem::Wrong(format!(
            "{path} is to have {} bytes: no store holds that",
            described.len
        )));
    }
    let mut bytes = Vec::new();
    entry.take(described.len + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 != described.len {
        return Err(Problem::Wrong(format!("{path} is to have {} bytes, and has others", described.len)));
    }
    let found = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &bytes);
    if described.checksum.is_some_and(|checksum| u64::from(checksum) != found) {
        return Err(Problem::Wrong(format!("{path} is not what was exported: its checksum differs")));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use windlass_kv::NamespaceDescription;

    fn archive() -> (Vec<u8>, NamespaceId) {
        let description = NamespaceDescription::default();
        let id = description.id().unwrap();
        let mut bytes = Vec::new();
        let mut writer = Writer::new(&mut bytes);
        writer.namespace(id, &description.to_json().unwrap()).unwrap();
        for number in 0..3_u8 {
            let payload = [vec![number; 5000], vec![7]];
            let checksum =
                |bytes: &Vec<u8>| crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32;
            let shards =
                payload.iter().map(|own| Shard { len: own.len() as u64, checksum: Some(checksum(own)) });
            let block = Block { key: to_hex(&[number, 0xff]), shards: shards.collect(), expires: None };
            writer.block(id, &block, payload.iter().map(Vec::as_slice)).unwrap();
        }
        assert_eq!(writer.finish().unwrap(), 3);
        (bytes, id)
    }

    fn read_all(bytes: &[u8]) -> Result<Vec<(Vec<u8>, Vec<Vec<u8>>)>, Problem> {
        let mut found = Vec::new();
        read(bytes, |part| {
            if let Part::Block(block, shards) = part {
                found.push((block.key().unwrap().as_bytes().to_vec(), shards));
            }
            Ok::<_, Problem>(())
        })?;
        Ok(found)
    }

    #[test]
    fn what_was_written_is_read() {
        let (bytes, _) = archive();
        let found = read_all(&bytes).unwrap();
        assert_eq!(found.len(), 3);
        assert_eq!(found[2], (vec![2, 0xff], vec![vec![2; 5000], vec![7]]));
    }

    #[test]
    fn an_archive_that_was_cut_is_not_whole() {
        let (bytes, _) = archive();
        for len in [0, 1, 511, 512, 1024, 3000, bytes.len() / 2, bytes.len() - 2048] {
            assert!(read_all(&bytes[..len]).is_err(), "{len} of {}", bytes.len());
        }
    }

    #[test]
    fn a_changed_byte_of_a_shard_is_found() {
        let (mut bytes, _) = archive();
        let position = bytes.windows(64).position(|window| window == [2; 64]).unwrap();
        bytes[position + 9] ^= 1;
        let Err(Problem::Wrong(told)) = read_all(&bytes) else { panic!("it was taken") };
        assert!(told.contains("checksum differs"), "{told}");
    }

    #[test]
    fn keys_are_hexadecimal() {
        assert_eq!(from_hex("00fF"), Some(vec![0, 255]));
        for wrong in ["0", "0g", "+1", "é"] {
            assert_eq!(from_hex(wrong), None, "{wrong}");
        }
    }
}
