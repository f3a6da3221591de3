//! Writes GGUF files, good and bad ones, from the specification alone: nothing here knows the parser.
#![allow(dead_code, missing_docs, unreachable_pub)]

/// A value as it stands in a file. Booleans are bytes, strings need not be text.
#[derive(Clone, Debug, PartialEq)]
pub enum Item {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(u8),
    Str(Vec<u8>),
    /// Number of the type, and elements.
    Array(u32, Vec<Item>),
    U64(u64),
    I64(i64),
    F64(f64),
    /// Number of the type, and bytes as they are.
    Raw(u32, Vec<u8>),
}

impl From<&str> for Item {
    fn from(text: &str) -> Self {
        Self::Str(text.into())
    }
}

impl Item {
    pub fn strings<'a>(texts: impl IntoIterator<Item = &'a str>) -> Self {
        Self::Array(8, texts.into_iter().map(Self::from).collect())
    }

    pub fn type_id(&self) -> u32 {
        match self {
            Self::U8(_) => 0,
            Self::I8(_) => 1,
            Self::U16(_) => 2,
            Self::I16(_) => 3,
            Self::U32(_) => 4,
            Self::I32(_) => 5,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::Str(_) => 8,
            Self::Array(..) => 9,
            Self::U64(_) => 10,
            Self::I64(_) => 11,
            Self::F64(_) => 12,
            Self::Raw(id, _) => *id,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: Vec<u8>,
    /// Fastest first, as in the file.
    pub dimensions: Vec<u64>,
    pub type_id: u32,
    /// Where it claims to begin; by default behind the tensor before it.
    pub offset: Option<u64>,
    pub bytes: Vec<u8>,
}

/// A file to write. Counts are what is there unless others are claimed.
#[derive(Clone, Debug)]
pub struct Writer {
    pub magic: [u8; 4],
    pub version: u32,
    pub big_endian: bool,
    pub alignment: u64,
    pub keys: Vec<(Vec<u8>, Item)>,
    pub tensors: Vec<Tensor>,
    pub claimed_keys: Option<u64>,
    pub claimed_tensors: Option<u64>,
}

impl Default for Writer {
    fn default() -> Self {
        Self {
            magic: *b"GGUF",
            version: 3,
            big_endian: false,
            alignment: 32,
            keys: Vec::new(),
            tensors: Vec::new(),
            claimed_keys: None,
            claimed_tensors: None,
        }
    }
}

impl Writer {
    pub fn key(mut self, key: &str, value: impl Into<Item>) -> Self {
        self.keys.push((key.into(), value.into()));
        self
    }

    /// `dimensions` fastest first, as in the file.
    pub fn tensor(mut self, name: &str, dimensions: &[u64], type_id: u32, bytes: Vec<u8>) -> Self {
        let dimensions = dimensions.to_vec();
        self.tensors.push(Tensor { name: name.into(), dimensions, type_id, offset: None, bytes });
        self
    }

    /// A tensor that claims to begin at `offset` of the data; adds no bytes.
    pub fn tensor_at(mut self, name: &str, dimensions: &[u64], type_id: u32, offset: u64) -> Self {
        self = self.tensor(name, dimensions, type_id, Vec::new());
        if let Some(tensor) = self.tensors.last_mut() {
            tensor.offset = Some(offset);
        }
        self
    }

    /// The header without the padding behind it.
    pub fn header(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        self.put(&mut out, &self.version.to_le_bytes());
        self.put(&mut out, &self.claimed_tensors.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        self.put(&mut out, &self.claimed_keys.unwrap_or(self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            self.put_string(&mut out, key);
            self.put(&mut out, &value.type_id().to_le_bytes());
            self.put_item(&mut out, value);
        }
        for (tensor, offset) in self.tensors.iter().zip(self.offsets()) {
            self.put_string(&mut out, &tensor.name);
            self.put(&mut out, &(tensor.dimensions.len() as u32).to_le_bytes());
            for dimension in &tensor.dimensions {
                self.put(&mut out, &dimension.to_le_bytes());
            }
            self.put(&mut out, &tensor.type_id.to_le_bytes());
            self.put(&mut out, &offset.to_le_bytes());
        }
        out
    }

    /// The whole file: header, padding, and the tensors' bytes, each padded but the last.
    pub fn finish(&self) -> Vec<u8> {
        let mut out = self.header();
        for tensor in self.tensors.iter().filter(|tensor| tensor.offset.is_none()) {
            let padded = (out.len() as u64).next_multiple_of(self.alignment.max(1));
            out.resize(padded as usize, 0);
            out.extend_from_slice(&tensor.bytes);
        }
        out
    }

    /// Where each tensor begins, from the start of the data.
    pub fn offsets(&self) -> Vec<u64> {
        let mut end = 0u64;
        let place = |tensor: &Tensor| {
            tensor.offset.unwrap_or_else(|| {
                let start = end.next_multiple_of(self.alignment.max(1));
                end = start + tensor.bytes.len() as u64;
                start
            })
        };
        self.tensors.iter().map(place).collect()
    }

    /// A number in this file's byte order.
    fn put(&self, out: &mut Vec<u8>, number: &[u8]) {
        if self.big_endian { out.extend(number.iter().rev()) } else { out.extend(number) }
    }

    fn put_string(&self, out: &mut Vec<u8>, text: &[u8]) {
        self.put(out, &(text.len() as u64).to_le_bytes());
        out.extend_from_slice(text);
    }

    fn put_item(&self, out: &mut Vec<u8>, item: &Item) {
        match item {
            Item::U8(number) => self.put(out, &number.to_le_bytes()),
            Item::I8(number) => self.put(out, &number.to_le_bytes()),
            Item::U16(number) => self.put(out, &number.to_le_bytes()),
            Item::I16(number) => self.put(out, &number.to_le_bytes()),
            Item::U32(number) => self.put(out, &number.to_le_bytes()),
            Item::I32(number) => self.put(out, &number.to_le_bytes()),
            Item::F32(number) => self.put(out, &number.to_le_bytes()),
            Item::U64(number) => self.put(out, &number.to_le_bytes()),
            Item::I64(number) => self.put(out, &number.to_le_bytes()),
            Item::F64(number) => self.put(out, &number.to_le_bytes()),
            Item::Bool(byte) => out.push(*byte),
            Item::Str(text) => self.put_string(out, text),
            Item::Raw(_, bytes) => out.extend_from_slice(bytes),
            Item::Array(element, items) => {
                self.put(out, &element.to_le_bytes());
                self.put(out, &(items.len() as u64).to_le_bytes());
                items.iter().for_each(|item| self.put_item(out, item));
            }
        }
    }
}
