//! Which bytes of a new file come from where: headers, shards and offsets. Pure.
#![forbid(unsafe_code)]

use super::content::{ContentError, TensorData};
use crate::{
    ByteRange, Dtype,
    catalog::safetensors::{LENGTH_PREFIX_BYTES, MAX_HEADER_BYTES, Metadata},
};
use serde::{Serialize, Serializer, ser::SerializeMap};
use std::cmp::Reverse;

/// One file to be: its header, and where each tensor goes.
#[derive(Debug)]
pub(super) struct PlannedFile {
    /// The length prefix and the text.
    header: Vec<u8>,
    /// Bytes of these and of the blanks after them.
    header_len: u64,
    /// In the order of their bytes, empty ones included.
    ranges: Vec<TensorRange>,
    len: u64,
}

/// Where a tensor goes.
#[derive(Clone, Copy, Debug)]
struct TensorRange {
    /// Position among the tensors of the save.
    tensor: usize,
    /// Its bytes in the file.
    range: ByteRange,
}

/// Blanks of headers. They are made as they are written: a header may be padded to 100 MB, in each of many shards.
static BLANKS: [u8; 64 << 10] = [b' '; 64 << 10];

/// A part of a file, and what it is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Piece<'a> {
    /// These bytes of the header, or some of the blanks after its text.
    Header(&'a [u8]),
    /// These bytes of the tensor of that position.
    Tensor(usize, ByteRange),
}

impl Piece<'_> {
    /// Length in bytes.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Header(header) => header.len(),
            Self::Tensor(_, part) => part.len() as usize,
        }
    }
}

impl PlannedFile {
    /// The file of the `chosen` of these tensors, which were checked, and have these lengths. Tensors are ordered as
    /// the reference implementation does it: wide types first, then by name.
    pub(super) fn new(
        tensors: &[TensorData<'_>],
        lens: &[u64],
        mut chosen: Vec<usize>,
        metadata: Option<&Metadata>,
        alignment: u64,
    ) -> Result<Self, ContentError> {
        chosen.sort_by_key(|&tensor| (Reverse(tensors[tensor].dtype), tensors[tensor].name));
        let mut entries = Vec::with_capacity(chosen.len());
        let mut end = 0u64;
        for &tensor in &chosen {
            let data = ByteRange::at(end, lens[tensor]).ok_or(ContentError::TooLarge)?;
            end = data.end();
            entries.push((tensor, data));
        }
        let (header, start) = header(tensors, &entries, metadata, alignment)?;
        let len = start.checked_add(end).filter(|&len| i64::try_from(len).is_ok());
        let len = len.ok_or(ContentError::TooLarge)?;
        let ranges = entries.into_iter().map(|(tensor, data)| {
            let range = ByteRange::new(start + data.start(), start + data.end()).unwrap_or(data);
            TensorRange { tensor, range }
        });
        Ok(Self { header, header_len: start, ranges: ranges.collect(), len })
    }

    /// Its length in bytes.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// All of it.
    pub(super) fn range(&self) -> ByteRange {
        ByteRange::at(0, self.len).unwrap_or_default()
    }

    /// The positions of its tensors, in the order of their bytes.
    pub(super) fn tensors(&self) -> impl Iterator<Item = usize> {
        self.ranges.iter().map(|placed| placed.tensor)
    }

    /// Bytes of its tensors.
    pub(super) fn tensor_bytes(&self) -> u64 {
        self.len - self.header_len
    }

    /// The tensor that byte `offset` belongs to, if it is one's.
    pub(super) fn tensor_at(&self, offset: u64) -> Option<usize> {
        let position = self.ranges.partition_point(|placed| placed.range.end() <= offset);
        self.ranges.get(position).filter(|placed| placed.range.start() <= offset).map(|placed| placed.tensor)
    }

    /// Its header, and where the bytes of each of its `count` tensors go: of all tensors of the save.
    pub(super) fn into_layout(mut self, count: usize) -> (Vec<u8>, Vec<ByteRange>) {
        self.header.resize(self.header_len as usize, b' ');
        let mut ranges = vec![ByteRange::default(); count];
        for placed in self.ranges {
            ranges[placed.tensor] = placed.range;
        }
        (self.header, ranges)
    }

    /// What the bytes of `range` are made of, in order.
    pub(super) fn pieces(&self, range: ByteRange) -> impl Iterator<Item = Piece<'_>> {
        let text_len = self.header.len() as u64;
        let text = &self.header[range.start().min(text_len) as usize..range.end().min(text_len) as usize];
        let blanks = range.start().max(text_len)..range.end().min(self.header_len);
        let blanks = blanks.step_by(BLANKS.len()).map(move |start| {
            &BLANKS[..(range.end().min(self.header_len) - start).min(BLANKS.len() as u64) as usize]
        });
        let header = (!text.is_empty()).then_some(text).into_iter().chain(blanks).map(Piece::Header);
        let first = self.ranges.partition_point(|placed| placed.range.end() <= range.start());
        let tensors =
            self.ranges[first..].iter().take_while(move |placed| placed.range.start() < range.end());
        let pieces = tensors.filter_map(move |place| {
            let part = place.range.intersection(range)?;
            let start = part.start() - place.range.start();
            Some(Piece::Tensor(place.tensor, ByteRange::at(start, part.len())?))
        });
        header.chain(pieces)
    }
}

/// What a header says of one tensor, in the order of the fields that the reference implementation writes.
#[derive(Serialize)]
struct Entry<'a> {
    dtype: Dtype,
    shape: &'a [u64],
    data_offsets: (u64, u64),
}

/// A header as an object whose keys are in this order.
struct Header<'a> {
    tensors: &'a [TensorData<'a>],
    entries: &'a [(usize, ByteRange)],
    metadata: Option<&'a Metadata>,
}

impl Serialize for Header<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        if let Some(metadata) = self.metadata {
            map.serialize_entry("__metadata__", metadata)?;
        }
        for &(tensor, data) in self.entries {
            let TensorData { name, dtype, shape, .. } = self.tensors[tensor];
            let data_offsets = (data.start(), data.end());
            map.serialize_entry(name, &Entry { dtype, shape, data_offsets })?;
        }
        map.end()
    }
}

/// The bytes in front of the data but for the blanks, which are its length and the text, and how many there are with blanks up
/// to the alignment.
fn header(
    tensors: &[TensorData<'_>],
    entries: &[(usize, ByteRange)],
    metadata: Option<&Metadata>,
    alignment: u64,
) -> Result<(Vec<u8>, u64), ContentError> {
    let prefix = LENGTH_PREFIX_BYTES as usize;
    let mut header = vec![0; prefix];
    // Writing to memory does not fail, and every key is text.
    serde_json::to_writer(&mut header, &Header { tensors, entries, metadata })
        .map_err(|_| ContentError::TooLarge)?;
    let padded = (header.len() as u64).checked_next_multiple_of(alignment).ok_or(ContentError::TooLarge)?;
    let len = padded - LENGTH_PREFIX_BYTES;
    if len > MAX_HEADER_BYTES {
        return Err(ContentError::HeaderTooLarge { len });
    }
    header[..prefix].copy_from_slice(&len.to_le_bytes());
    Ok((header, padded))
}

/// The files of a set, of at most `max_bytes` of tensors each: of these tensors, which were checked, and have these lengths.
pub(super) fn files(
    tensors: &[TensorData<'_>],
    lens: &[u64],
    metadata: Option<&Metadata>,
    max_bytes: u64,
    alignment: u64,
) -> Result<Vec<PlannedFile>, ContentError> {
    let shards = shards(lens, max_bytes).into_iter();
    shards.map(|shard| PlannedFile::new(tensors, lens, shard, metadata, alignment)).collect()
}

/// Gives tensors of these lengths out to files of at most `max_bytes`, in order: the positions in each file.
fn shards(lens: &[u64], max_bytes: u64) -> Vec<Vec<usize>> {
    let mut shards = Vec::new();
    let mut current = Vec::new();
    let mut current_bytes = 0u64;
    for (tensor, &len) in lens.iter().enumerate() {
        if len > max_bytes {
            shards.push(vec![tensor]);
            continue;
        }
        if current_bytes.saturating_add(len) > max_bytes {
            shards.push(std::mem::take(&mut current));
            current_bytes = 0;
        }
        current.push(tensor);
        current_bytes += len;
    }
    if !current.is_empty() || shards.is_empty() {
        shards.push(current);
    }
    shards
}

#[cfg(test)]
mod tests {
    use super::{super::content::TensorBytes, *};
    use crate::catalog::safetensors;
    use proptest::{collection, prelude::*, sample};

    #[derive(Clone, Debug)]
    struct Owned {
        name: String,
        dtype: Dtype,
        shape: Vec<u64>,
        bytes: Vec<u8>,
    }

    fn tensor() -> impl Strategy<Value = Owned> {
        let shape = collection::vec(0..5u64, 0..4);
        (any::<String>(), sample::select(Dtype::ALL.to_vec()), shape, any::<u8>()).prop_map(
            |(name, dtype, mut shape, seed)| {
                // Whole bytes, whatever the type.
                shape.push(8);
                let len = dtype.size_of(&shape).unwrap() as usize;
                let bytes = (0..len).map(|i| seed.wrapping_add(i as u8)).collect();
                Owned { name, dtype, shape, bytes }
            },
        )
    }

    fn tensors() -> impl Strategy<Value = Vec<Owned>> {
        collection::vec(tensor(), 0..12).prop_map(|mut tensors| {
            tensors.sort_by(|a, b| a.name.cmp(&b.name));
            tensors.dedup_by(|a, b| a.name == b.name);
            tensors
        })
    }

    fn data(tensors: &[Owned]) -> (Vec<TensorData<'_>>, Vec<u64>) {
        let data: Vec<_> = tensors
            .iter()
            .map(|Owned { name, dtype, shape, bytes }| TensorData {
                name,
                dtype: *dtype,
                shape,
                bytes: TensorBytes::Host(bytes),
            })
            .collect();
        let lens = tensors.iter().map(|tensor| tensor.bytes.len() as u64).collect();
        (data, lens)
    }

    /// Carries out the pieces of `step` bytes each.
    fn written(file: &PlannedFile, tensors: &[Owned], step: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut start = 0;
        while start < file.len() {
            let end = file.len().min(start + step);
            for piece in file.pieces(ByteRange::new(start, end).unwrap()) {
                match piece {
                    Piece::Header(header) => bytes.extend_from_slice(header),
                    Piece::Tensor(tensor, part) => {
                        let source = &tensors[tensor].bytes;
                        bytes.extend_from_slice(&source[part.start() as usize..part.end() as usize]);
                    }
                }
            }
            assert_eq!(bytes.len() as u64, end);
            start = end;
        }
        bytes
    }

    fn metadata() -> impl Strategy<Value = Option<Metadata>> {
        // The reference implementation orders several entries by chance.
        proptest::option::of(collection::btree_map(any::<String>(), any::<String>(), 0..2))
    }

    proptest! {
        #[test]
        fn files_are_those_of_the_reference(tensors in tensors(), metadata in metadata(), step in 1..700u64) {
            // Of no tensors and empty metadata the reference makes what it does not read itself.
            prop_assume!(!tensors.is_empty() || metadata.as_ref().is_none_or(|metadata| !metadata.is_empty()));
            let (data, lens) = data(&tensors);
            let all = (0..tensors.len()).collect();
            let file = PlannedFile::new(&data, &lens, all, metadata.as_ref(), 8).unwrap();
            let views = tensors.iter().map(|tensor| {
                let dtype = serde_json::from_str(&format!("\"{}\"", tensor.dtype)).unwrap();
                let shape = tensor.shape.iter().map(|&size| size as usize).collect();
                (&tensor.name, safetensors_view(dtype, shape, &tensor.bytes))
            });
            let metadata = metadata.map(|metadata| metadata.into_iter().collect());
            let expected = ::safetensors::serialize(views, metadata).unwrap();
            prop_assert_eq!(written(&file, &tensors, step), expected);
        }

        #[test]
        fn shards_parse_back_to_the_same_tensors(
            tensors in tensors(), max_bytes in 1..400u64, eights in 1..1000u64, step in 1..700u64,
        ) {
            let (data, lens) = data(&tensors);
            let alignment = 8 * eights;
            let mut seen = 0;
            for shard in shards(&lens, max_bytes) {
                let bytes: u64 = shard.iter().map(|&tensor| lens[tensor]).sum();
                prop_assert!(bytes <= max_bytes || shard.len() == 1);
                let file = PlannedFile::new(&data, &lens, shard.clone(), None, alignment).unwrap();
                let written = written(&file, &tensors, step);
                let prefix = written[..8].try_into().unwrap();
                let header_len = safetensors::header_len(prefix, written.len() as u64).unwrap();
                let start = 8 + header_len as usize;
                prop_assert!((start as u64).is_multiple_of(alignment));
                let header = safetensors::Header::parse(&written[8..start], written.len() as u64).unwrap();
                prop_assert_eq!(header.tensors.len(), shard.len());
                for parsed in header.tensors {
                    let tensor = tensors.iter().find(|tensor| tensor.name == parsed.name).unwrap();
                    prop_assert_eq!((parsed.dtype, &parsed.shape), (tensor.dtype, &tensor.shape));
                    let place = parsed.data;
                    let data = &written[start + place.start() as usize..start + place.end() as usize];
                    prop_assert_eq!(data, &tensor.bytes);
                    if !place.is_empty() {
                        let at = file.tensor_at(start as u64 + place.start());
                        prop_assert_eq!(&tensors[at.unwrap()].name, &parsed.name);
                    }
                    seen += 1;
                }
                prop_assert_eq!(file.tensor_at(0), None);
            }
            prop_assert_eq!(seen, tensors.len());
        }
    }

    #[test]
    fn blanks_after_a_header_take_no_memory() {
        let tensors = [Owned { name: "a".into(), dtype: Dtype::U8, shape: vec![9], bytes: vec![7; 9] }];
        let (data, lens) = data(&tensors);
        let plan = |alignment| PlannedFile::new(&data, &lens, vec![0], None, alignment).unwrap();
        assert!(plan(MAX_HEADER_BYTES / 8 * 8).header.capacity() < 4096);
        let file = plan(200_000);
        for step in [1 << 20, 65_536, 70_001] {
            let written = written(&file, &tensors, step);
            assert_eq!((&written[..7], written.len()), (&199_992u64.to_le_bytes()[..7], 200_009));
            assert!(written[150..200_000].iter().all(|&byte| byte == b' '));
            assert_eq!(written[200_000..], [7; 9]);
        }
        assert_eq!(file.into_layout(1).0.len(), 200_000);
    }

    fn safetensors_view(
        dtype: ::safetensors::Dtype,
        shape: Vec<usize>,
        bytes: &[u8],
    ) -> ::safetensors::tensor::TensorView<'_> {
        ::safetensors::tensor::TensorView::new(dtype, shape, bytes).unwrap()
    }

    #[test]
    fn shards_are_those_of_hugging_face() {
        assert_eq!(shards(&[4, 4, 4], 8), [vec![0, 1], vec![2]]);
        // What is too large for any shard is written at once, and the shard under way goes on after it.
        assert_eq!(shards(&[3, 20, 3, 3], 8), [vec![1], vec![0, 2], vec![3]]);
        assert_eq!(shards(&[20], 8), [vec![0]]);
        assert_eq!(shards(&[], 8), [Vec::<usize>::new()]);
        assert_eq!(shards(&[0, 8, 0], 8), [vec![0, 1, 2]]);
    }

    #[test]
    fn headers_and_files_that_are_too_large_are_refused() {
        let name = "n".repeat(101_000_000);
        let long = TensorData { name: &name, dtype: Dtype::U8, shape: &[0], bytes: TensorBytes::Host(&[]) };
        let refused = PlannedFile::new(&[long], &[0], vec![0], None, 8).unwrap_err();
        assert!(matches!(refused, ContentError::HeaderTooLarge { len } if len > 101_000_000), "{refused}");
        let tensor = TensorData { name: "a", dtype: Dtype::U8, shape: &[0], bytes: TensorBytes::Host(&[]) };
        let huge = PlannedFile::new(&[tensor], &[u64::MAX - 64], vec![0], None, 8).unwrap_err();
        assert_eq!(huge, ContentError::TooLarge);
    }
}
