//! Keys and their values: scalars in memory, arrays where they lie in the file.
#![forbid(unsafe_code)]

use super::{
    ByteOrder, ByteSource, GgufError, HeaderPart,
    reader::{Reader, read, zeroed},
};
use crate::ByteRange;
use std::{collections::HashMap, fmt, sync::Arc};

/// Defines what there is of each type of values, in the order of their numbers in files: the variant, its name, the bytes
/// of a value unless they differ, and the Rust types of a value and of an element of an array.
macro_rules! value_types {
    ($($variant:ident, $name:literal, $width:expr, $value:ty, $element:ty;)+) => {
        /// The type of a value.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[allow(missing_docs)]
        pub enum ValueType {
            $($variant,)+
        }

        /// The value of a key.
        #[derive(Clone, Debug, PartialEq)]
        #[allow(missing_docs)]
        pub enum Value {
            $($variant($value),)+
        }

        /// The values of an array.
        #[derive(Clone, Debug, PartialEq)]
        #[allow(missing_docs)]
        pub enum ArrayValues {
            $($variant(Vec<$element>),)+
        }

        impl ValueType {
            const ALL: &[Self] = &[$(Self::$variant),+];

            /// The type of this number in files.
            pub const fn from_id(id: u32) -> Option<Self> {
                if id < Self::ALL.len() as u32 { Some(Self::ALL[id as usize]) } else { None }
            }

            /// Its name, such as `u32` or `string`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }

            /// Bytes of one value, or `None` if that differs from one to the next.
            pub const fn width(self) -> Option<u64> {
                match self {
                    $(Self::$variant => $width,)+
                }
            }
        }

        impl Value {
            /// Its type.
            pub const fn value_type(&self) -> ValueType {
                match self {
                    $(Self::$variant(_) => ValueType::$variant,)+
                }
            }
        }
    };
}

value_types! {
    U8, "u8", Some(1), u8, u8;
    I8, "i8", Some(1), i8, i8;
    U16, "u16", Some(2), u16, u16;
    I16, "i16", Some(2), i16, i16;
    U32, "u32", Some(4), u32, u32;
    I32, "i32", Some(4), i32, i32;
    F32, "f32", Some(4), f32, f32;
    Bool, "bool", Some(1), bool, bool;
    String, "string", None, Box<str>, String;
    Array, "array", None, Array, Array;
    U64, "u64", Some(8), u64, u64;
    I64, "i64", Some(8), i64, i64;
    F64, "f64", Some(8), f64, f64;
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Value {
    /// The text, if it is a string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    /// The number, if it is an integer of any width and not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U8(number) => Some(number.into()),
            Self::U16(number) => Some(number.into()),
            Self::U32(number) => Some(number.into()),
            Self::U64(number) => Some(number),
            Self::I8(number) => number.try_into().ok(),
            Self::I16(number) => number.try_into().ok(),
            Self::I32(number) => number.try_into().ok(),
            Self::I64(number) => number.try_into().ok(),
            Self::F32(_) | Self::F64(_) | Self::Bool(_) | Self::String(_) | Self::Array(_) => None,
        }
    }

    /// The array, if it is one.
    pub fn as_array(&self) -> Option<&Array> {
        match self {
            Self::Array(array) => Some(array),
            _ => None,
        }
    }
}

/// For people: the scalar itself; of an array its type and length, such as `[string; 262144]`.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::U8(number) => write!(f, "{number}"),
            Self::I8(number) => write!(f, "{number}"),
            Self::U16(number) => write!(f, "{number}"),
            Self::I16(number) => write!(f, "{number}"),
            Self::U32(number) => write!(f, "{number}"),
            Self::I32(number) => write!(f, "{number}"),
            Self::U64(number) => write!(f, "{number}"),
            Self::I64(number) => write!(f, "{number}"),
            // As Rust writes them in its own sources: `1.0`, `1e-6`, never a long row of zeros.
            Self::F32(number) => write!(f, "{number:?}"),
            Self::F64(number) => write!(f, "{number:?}"),
            Self::Bool(truth) => write!(f, "{truth}"),
            Self::String(text) => f.write_str(text),
            Self::Array(array) => write!(f, "[{}; {}]", array.element, array.len),
        }
    }
}

/// Keys and values, in the order of the file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KeyValues {
    entries: Vec<(Arc<str>, Value)>,
    positions: HashMap<Arc<str>, usize>,
}

impl KeyValues {
    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        let &position = self.positions.get(key)?;
        self.entries.get(position).map(|(_, value)| value)
    }

    /// Every key and its value.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (&**key, value))
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no key.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(super) fn contains(&self, key: &str) -> bool {
        self.positions.contains_key(key)
    }

    pub(super) fn push(&mut self, key: Arc<str>, value: Value) {
        self.positions.insert(key.clone(), self.entries.len());
        self.entries.push((key, value));
    }
}

/// An array that was checked and left in the file.
///
/// It is read from the same source that it was found in. An [`OpenArray`](crate::OpenArray) knows which file that is.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    pub(super) key: Arc<str>,
    pub(super) element: ValueType,
    pub(super) len: u64,
    pub(super) bytes: ByteRange,
    pub(super) byte_order: ByteOrder,
}

impl Array {
    /// Type of each element.
    pub const fn element(&self) -> ValueType {
        self.element
    }

    /// Number of elements.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no element.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its elements' bytes in the file, of strings with their lengths.
    pub const fn bytes(&self) -> ByteRange {
        self.bytes
    }

    /// Its first `len` elements, or all if there are no more: reading these reads no others. It is not known how many
    /// bytes of strings or arrays they are, so [`bytes`](Self::bytes) stays that of all.
    pub fn first(&self, len: u64) -> Self {
        let len = self.len.min(len);
        let of_these = self.element.width().and_then(|width| len.checked_mul(width));
        let bytes = of_these.and_then(|bytes| ByteRange::at(self.bytes.start(), bytes));
        Self { len, bytes: bytes.unwrap_or(self.bytes), ..self.clone() }
    }

    /// Reads all elements.
    ///
    /// # Errors
    /// [`GgufError::Io`], [`GgufError::Allocation`], or [`GgufError::NotUtf8`] for a string that is not text.
    pub fn read(&self, source: &dyn ByteSource) -> Result<ArrayValues, GgufError> {
        macro_rules! numbers {
            ($variant:ident, $number:ty) => {{
                let bytes = self.read_bytes(source)?;
                let (stored, _) = bytes.as_chunks::<{ size_of::<$number>() }>();
                let mut numbers: Vec<$number> = zeroed(stored.len() as u64, self.bytes)?;
                for (number, stored) in numbers.iter_mut().zip(stored) {
                    *number = <$number>::from_le_bytes(*stored);
                }
                ArrayValues::$variant(numbers)
            }};
        }
        Ok(match self.element {
            ValueType::U8 => ArrayValues::U8(self.read_bytes(source)?),
            ValueType::I8 => numbers!(I8, i8),
            ValueType::U16 => numbers!(U16, u16),
            ValueType::I16 => numbers!(I16, i16),
            ValueType::U32 => numbers!(U32, u32),
            ValueType::I32 => numbers!(I32, i32),
            ValueType::F32 => numbers!(F32, f32),
            ValueType::U64 => numbers!(U64, u64),
            ValueType::I64 => numbers!(I64, i64),
            ValueType::F64 => numbers!(F64, f64),
            ValueType::Bool => {
                ArrayValues::Bool(self.read_bytes(source)?.into_iter().map(|byte| byte != 0).collect())
            }
            ValueType::String => ArrayValues::String(self.strings(source)?.collect::<Result<_, _>>()?),
            ValueType::Array => ArrayValues::Array(self.arrays(source)?),
        })
    }

    /// Reads the bytes of all numbers or booleans, lowest byte first in each.
    ///
    /// # Errors
    /// [`GgufError::Io`], [`GgufError::Allocation`]; [`GgufError::ElementType`] of strings and arrays.
    pub fn read_bytes(&self, source: &dyn ByteSource) -> Result<Vec<u8>, GgufError> {
        self.number_width()?;
        // The range was in the file when the array was found: what is allocated here was there once.
        let mut bytes = zeroed(self.bytes.len(), self.bytes)?;
        self.read_into(source, &mut bytes)?;
        Ok(bytes)
    }

    /// Like [`read_bytes`](Self::read_bytes), into memory that is there: as long as [`bytes`](Self::bytes).
    ///
    /// # Errors
    /// Those of [`read_bytes`](Self::read_bytes); [`GgufError::BufferLen`].
    pub fn read_into(&self, source: &dyn ByteSource, buffer: &mut [u8]) -> Result<(), GgufError> {
        let width = self.number_width()?;
        let (needed, len) = (self.bytes.len(), buffer.len() as u64);
        if len != needed {
            return Err(GgufError::BufferLen { key: self.key.clone(), needed, len });
        }
        read(source, buffer, self.bytes.start())?;
        if self.byte_order == ByteOrder::Big {
            buffer.chunks_exact_mut(width).for_each(<[u8]>::reverse);
        }
        if self.element == ValueType::Bool {
            // Lenient files have others than 0 and 1, which no reader of booleans expects.
            buffer.iter_mut().for_each(|byte| *byte = (*byte != 0).into());
        }
        Ok(())
    }

    /// Reads strings one after the other, through a window.
    ///
    /// # Errors
    /// [`GgufError::ElementType`] if the elements are no strings.
    pub fn strings<'a>(&self, source: &'a dyn ByteSource) -> Result<Strings<'a>, GgufError> {
        self.byte_strings(source).map(Strings)
    }

    /// Like [`strings`](Self::strings), whether or not they are text: some vocabularies have tokens that are not.
    ///
    /// # Errors
    /// [`GgufError::ElementType`] if the elements are no strings.
    pub fn byte_strings<'a>(&self, source: &'a dyn ByteSource) -> Result<ByteStrings<'a>, GgufError> {
        Ok(ByteStrings { reader: self.reader_of(ValueType::String, "strings", source)?, left: self.len })
    }

    /// Finds the arrays of an array of arrays, and leaves them in the file.
    ///
    /// # Errors
    /// [`GgufError::Io`], [`GgufError::Allocation`]; [`GgufError::ElementType`] if the elements are no arrays.
    pub fn arrays(&self, source: &dyn ByteSource) -> Result<Vec<Self>, GgufError> {
        let mut reader = self.reader_of(ValueType::Array, "arrays", source)?;
        (0..self.len).map(|_| super::parse::array_of_array(&mut reader, &self.key)).collect()
    }

    fn reader_of<'a>(
        &self,
        element: ValueType,
        wanted: &'static str,
        source: &'a dyn ByteSource,
    ) -> Result<Reader<'a>, GgufError> {
        if self.element != element {
            return Err(self.differs(wanted));
        }
        let mut reader = Reader::new(source, self.bytes, self.byte_order);
        reader.enter(HeaderPart::Value(self.key.clone()));
        Ok(reader)
    }

    fn number_width(&self) -> Result<usize, GgufError> {
        let width = self.element.width().and_then(|width| usize::try_from(width).ok());
        width.ok_or_else(|| self.differs("numbers"))
    }

    fn differs(&self, wanted: &'static str) -> GgufError {
        GgufError::ElementType { key: self.key.clone(), element: self.element, wanted }
    }
}

/// The strings of an array as bytes; see [`Array::byte_strings`].
pub struct ByteStrings<'a> {
    reader: Reader<'a>,
    left: u64,
}

impl<'a> ByteStrings<'a> {
    /// The next one, after which there is no other if it fails.
    fn next_by<T>(
        &mut self,
        read: impl FnOnce(&mut Reader<'a>) -> Result<T, GgufError>,
    ) -> Option<Result<T, GgufError>> {
        self.left = self.left.checked_sub(1)?;
        let string = read(&mut self.reader);
        if string.is_err() {
            self.left = 0;
        }
        Some(string)
    }
}

impl Iterator for ByteStrings<'_> {
    type Item = Result<Vec<u8>, GgufError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_by(Reader::byte_string)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (0, usize::try_from(self.left).ok())
    }
}

/// The strings of an array as text; see [`Array::strings`].
pub struct Strings<'a>(ByteStrings<'a>);

impl Iterator for Strings<'_> {
    type Item = Result<String, GgufError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next_by(Reader::string)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}
