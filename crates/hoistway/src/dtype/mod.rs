//! Element types of tensors, by the names that safetensors and ggml give them.
#![forbid(unsafe_code)]

mod ggml;

pub use ggml::GgmlType;

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{self, EnumAccess, VariantAccess, Visitor},
};
use std::{borrow::Cow, fmt};

/// What the names of types begin with that only their number in ggml is known of.
const UNKNOWN_PREFIX: &str = "GGML_";

/// Defines the types of safetensors files: what each is, the variant, its name in headers and its bits.
macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident, $name:literal, $bits:literal;)+) => {
        /// The type of one element.
        ///
        /// These are the types of the `safetensors` 0.8 format, under the names that it writes in headers, and the block
        /// types of GGUF files. Types of less than a byte are packed: a tensor of them always fills whole bytes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Dtype {
            $($(#[$doc])* $variant,)+
            /// Blocks of elements that share scales, from a GGUF file.
            Quantized(GgmlType),
            /// A type of a GGUF file that is newer than this library, by its number in ggml. Tensors of it can be listed,
            /// not loaded.
            UnknownGgml(u32),
        }

        impl Dtype {
            /// Every type that safetensors files have. [`GgmlType::ALL`] are the others.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// Bits of one block, which is [`block_len`](Self::block_len) elements: of one element but for quantised
            /// types. 0 if that is not known.
            pub const fn block_bits(self) -> u64 {
                match self {
                    $(Self::$variant => $bits,)+
                    Self::Quantized(block) => block.block_bytes() * 8,
                    Self::UnknownGgml(_) => 0,
                }
            }

            /// The name that safetensors headers use, such as `BF16`, or ggml's own in capitals, such as `Q4_K`.
            pub fn name(self) -> Cow<'static, str> {
                match self {
                    $(Self::$variant => $name.into(),)+
                    Self::Quantized(block) => block.name().into(),
                    Self::UnknownGgml(id) => format!("{UNKNOWN_PREFIX}{id}").into(),
                }
            }
        }
    };
}

// In the order of the reference implementation, which writes tensors of later types first.
dtypes! {
    /// Boolean, one byte.
    Bool, "BOOL", 8;
    /// 4-bit float, two elements a byte (OCP MX).
    F4, "F4", 4;
    /// 6-bit float with 2 exponent and 3 mantissa bits (OCP MX).
    F6E2M3, "F6_E2M3", 6;
    /// 6-bit float with 3 exponent and 2 mantissa bits (OCP MX).
    F6E3M2, "F6_E3M2", 6;
    /// Unsigned 8-bit integer.
    U8, "U8", 8;
    /// Signed 8-bit integer.
    I8, "I8", 8;
    /// 8-bit float with 5 exponent and 2 mantissa bits.
    F8E5M2, "F8_E5M2", 8;
    /// 8-bit float with 4 exponent and 3 mantissa bits, finite only (`e4m3fn`).
    F8E4M3, "F8_E4M3", 8;
    /// 8-bit power-of-two scale (OCP MX).
    F8E8M0, "F8_E8M0", 8;
    /// `e4m3` without negative zero (AMD).
    F8E4M3Fnuz, "F8_E4M3FNUZ", 8;
    /// `e5m2` without negative zero (AMD).
    F8E5M2Fnuz, "F8_E5M2FNUZ", 8;
    /// Signed 16-bit integer.
    I16, "I16", 16;
    /// Unsigned 16-bit integer.
    U16, "U16", 16;
    /// IEEE half precision.
    F16, "F16", 16;
    /// bfloat16.
    Bf16, "BF16", 16;
    /// Signed 32-bit integer.
    I32, "I32", 32;
    /// Unsigned 32-bit integer.
    U32, "U32", 32;
    /// IEEE single precision.
    F32, "F32", 32;
    /// Complex number of two 32-bit floats.
    C64, "C64", 64;
    /// IEEE double precision.
    F64, "F64", 64;
    /// Signed 64-bit integer.
    I64, "I64", 64;
    /// Unsigned 64-bit integer.
    U64, "U64", 64;
}

impl Dtype {
    /// Elements along the innermost dimension that belong together: 1 but for quantised types.
    pub const fn block_len(self) -> u64 {
        match self {
            Self::Quantized(block) => block.block_len(),
            _ => 1,
        }
    }

    /// Address alignment in bytes that frameworks need to view an element in place.
    pub const fn alignment(self) -> u64 {
        match self {
            // Blocks begin with scales of up to 4 bytes, and every row of blocks begins on a multiple of this.
            Self::Quantized(block) => {
                let divisor = block.block_bytes() & block.block_bytes().wrapping_neg();
                if divisor > 4 { 4 } else { divisor }
            }
            _ if self.block_bits() < 8 => 1,
            _ => self.block_bits() / 8,
        }
    }

    /// The type of this name.
    fn from_name(name: &str) -> Option<Self> {
        let blocks = GgmlType::ALL.iter().copied().map(Self::Quantized);
        Self::ALL.iter().copied().chain(blocks).find(|dtype| dtype.name() == name).or_else(|| {
            let id: u32 = name.strip_prefix(UNKNOWN_PREFIX)?.parse().ok()?;
            Some(Self::UnknownGgml(id)).filter(|dtype| dtype.name() == name)
        })
    }

    /// Whether safetensors files have this type.
    pub(crate) const fn is_of_safetensors(self) -> bool {
        !matches!(self, Self::Quantized(_) | Self::UnknownGgml(_))
    }

    /// Bytes of a tensor of this type and `shape`.
    ///
    /// ```
    /// use hoistway::Dtype;
    /// assert_eq!(Dtype::Bf16.size_of(&[3, 5]), Ok(30));
    /// assert_eq!(Dtype::F4.size_of(&[2, 4]), Ok(4));
    /// assert!(Dtype::F4.size_of(&[3]).is_err());
    /// ```
    ///
    /// # Errors
    /// The product does not fit 64 bits, its bits do not fill whole bytes, the innermost dimension does not fill whole
    /// blocks, or the type is not known.
    pub fn size_of(self, shape: &[u64]) -> Result<u64, SizeError> {
        if let Self::UnknownGgml(_) = self {
            return Err(SizeError::UnknownType);
        }
        if !shape.last().copied().unwrap_or(1).is_multiple_of(self.block_len()) {
            return Err(SizeError::PartialBlock);
        }
        // Multiplied in order, as the reference implementation does: `[0, huge, huge]` is empty,
        // `[huge, huge, 0]` overflows.
        let elements = shape
            .iter()
            .try_fold(1u64, |product, &dim| product.checked_mul(dim))
            .ok_or(SizeError::Overflow)?;
        let blocks = elements / self.block_len();
        let bits = blocks.checked_mul(self.block_bits()).ok_or(SizeError::Overflow)?;
        if !bits.is_multiple_of(8) {
            return Err(SizeError::PartialByte);
        }
        Ok(bits / 8)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name())
    }
}

impl Serialize for Dtype {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.name())
    }
}

impl<'de> Deserialize<'de> for Dtype {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // What `serialize` writes, also in formats that do not say what comes.
        deserializer.deserialize_str(DtypeVisitor)
    }
}

impl Dtype {
    /// From a safetensors header: as an enum, since that is what the reference implementation takes, also
    /// `{"F32": null}`.
    pub(crate) fn deserialize_of_header<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Self, D::Error> {
        deserializer.deserialize_enum("Dtype", &[], DtypeVisitor)
    }
}

struct DtypeVisitor;

impl<'de> Visitor<'de> for DtypeVisitor {
    type Value = Dtype;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of an element type")
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<Dtype, E> {
        Dtype::from_name(name).ok_or_else(|| E::custom(format_args!("'{name}' is not a known element type")))
    }

    fn visit_enum<A: EnumAccess<'de>>(self, access: A) -> Result<Dtype, A::Error> {
        let (dtype, variant) = access.variant()?;
        variant.unit_variant()?;
        Ok(dtype)
    }
}

/// Why a shape has no size in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SizeError {
    /// The number of elements, or their bits, does not fit 64 bits.
    Overflow,
    /// The elements do not fill whole bytes.
    PartialByte,
    /// The elements along the innermost dimension do not fill whole blocks.
    PartialBlock,
    /// Nothing is known of the type but its number.
    UnknownType,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_serde_reads_and_writes() {
        let of_ggml = GgmlType::ALL.iter().copied().map(Dtype::Quantized);
        for dtype in Dtype::ALL.iter().copied().chain(of_ggml).chain([Dtype::UnknownGgml(97)]) {
            let json = serde_json::to_string(&dtype).unwrap();
            assert_eq!(json, format!("\"{dtype}\""));
            assert_eq!(serde_json::from_str::<Dtype>(&json).unwrap(), dtype);
        }
    }

    /// A format that does not say what comes: it gives a string where a string is asked for.
    struct Strings<'a>(&'a str);

    impl<'de> Deserializer<'de> for Strings<'_> {
        type Error = de::value::Error;

        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Self::Error> {
            Err(de::Error::custom("the format does not say what this is"))
        }

        fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
            visitor.visit_str(self.0)
        }

        serde::forward_to_deserialize_any! {
            bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char string bytes byte_buf option unit unit_struct
            newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
        }
    }

    #[test]
    fn names_are_read_as_they_are_written_where_nothing_says_what_comes() {
        for dtype in [Dtype::Bf16, Dtype::Quantized(GgmlType::Q4K), Dtype::UnknownGgml(97)] {
            assert_eq!(Dtype::deserialize(Strings(&dtype.name())), Ok(dtype));
        }
    }

    #[test]
    fn widths_are_those_of_the_reference() {
        for &dtype in Dtype::ALL {
            let reference: safetensors::Dtype =
                serde_json::from_str(&format!("\"{dtype}\"")).expect("the reference knows every type");
            assert_eq!(dtype.block_bits(), reference.bitsize() as u64, "{dtype}");
        }
    }

    #[test]
    fn sizes_are_checked() {
        assert_eq!(Dtype::F32.size_of(&[]), Ok(4));
        assert_eq!(Dtype::F32.size_of(&[0, u64::MAX, u64::MAX]), Ok(0));
        assert_eq!(Dtype::F32.size_of(&[u64::MAX, u64::MAX, 0]), Err(SizeError::Overflow));
        assert_eq!(Dtype::F32.size_of(&[1 << 62]), Err(SizeError::Overflow));
        assert_eq!(Dtype::F6E2M3.size_of(&[4]), Ok(3));
        assert_eq!(Dtype::F6E2M3.size_of(&[2]), Err(SizeError::PartialByte));
    }

    #[test]
    fn quantised_tensors_are_made_of_whole_blocks_along_their_rows() {
        let q4_k = Dtype::Quantized(GgmlType::Q4K);
        assert_eq!(q4_k.size_of(&[3, 512]), Ok(3 * 2 * 144));
        assert_eq!(q4_k.size_of(&[512, 3]), Err(SizeError::PartialBlock));
        assert_eq!(q4_k.size_of(&[]), Err(SizeError::PartialBlock));
        assert_eq!(q4_k.size_of(&[7, 0]), Ok(0));
        assert_eq!(q4_k.size_of(&[1 << 62, 256]), Err(SizeError::Overflow));
        assert_eq!(Dtype::UnknownGgml(97).size_of(&[1]), Err(SizeError::UnknownType));
    }

    #[test]
    fn names_of_no_type_are_refused() {
        for name in ["q4_k", "GGML_", "GGML_007", "GGML_+7", "GGML_4294967296", "F33", ""] {
            assert!(serde_json::from_value::<Dtype>(name.into()).is_err(), "{name}");
        }
        let enum_like = r#"{"F32":null}"#;
        assert!(serde_json::from_str::<Dtype>(enum_like).is_err());
        let mut header = serde_json::Deserializer::from_str(enum_like);
        assert_eq!(Dtype::deserialize_of_header(&mut header).unwrap(), Dtype::F32);
    }
}
