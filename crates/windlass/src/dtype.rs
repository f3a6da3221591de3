//! Element types of tensors, by their safetensors names.
#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};
use std::fmt;

/// The type of one element.
///
/// These are the types of the `safetensors` 0.8 format, under the names that it writes in headers.
/// Types of less than a byte are packed: a tensor of them always fills whole bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Dtype {
    /// Boolean, one byte.
    #[serde(rename = "BOOL")]
    Bool,
    /// 4-bit float, two elements a byte (OCP MX).
    F4,
    /// 6-bit float with 2 exponent and 3 mantissa bits (OCP MX).
    #[serde(rename = "F6_E2M3")]
    F6E2M3,
    /// 6-bit float with 3 exponent and 2 mantissa bits (OCP MX).
    #[serde(rename = "F6_E3M2")]
    F6E3M2,
    /// Unsigned 8-bit integer.
    U8,
    /// Signed 8-bit integer.
    I8,
    /// 8-bit float with 5 exponent and 2 mantissa bits.
    #[serde(rename = "F8_E5M2")]
    F8E5M2,
    /// 8-bit float with 4 exponent and 3 mantissa bits, finite only (`e4m3fn`).
    #[serde(rename = "F8_E4M3")]
    F8E4M3,
    /// 8-bit power-of-two scale (OCP MX).
    #[serde(rename = "F8_E8M0")]
    F8E8M0,
    /// `e4m3` without negative zero (AMD).
    #[serde(rename = "F8_E4M3FNUZ")]
    F8E4M3Fnuz,
    /// `e5m2` without negative zero (AMD).
    #[serde(rename = "F8_E5M2FNUZ")]
    F8E5M2Fnuz,
    /// Signed 16-bit integer.
    I16,
    /// Unsigned 16-bit integer.
    U16,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    #[serde(rename = "BF16")]
    Bf16,
    /// Signed 32-bit integer.
    I32,
    /// Unsigned 32-bit integer.
    U32,
    /// IEEE single precision.
    F32,
    /// Complex number of two 32-bit floats.
    C64,
    /// IEEE double precision.
    F64,
    /// Signed 64-bit integer.
    I64,
    /// Unsigned 64-bit integer.
    U64,
}

impl Dtype {
    /// Every type, narrowest first.
    pub const ALL: [Self; 22] = [
        Self::F4,
        Self::F6E2M3,
        Self::F6E3M2,
        Self::Bool,
        Self::U8,
        Self::I8,
        Self::F8E5M2,
        Self::F8E4M3,
        Self::F8E8M0,
        Self::F8E4M3Fnuz,
        Self::F8E5M2Fnuz,
        Self::I16,
        Self::U16,
        Self::F16,
        Self::Bf16,
        Self::I32,
        Self::U32,
        Self::F32,
        Self::C64,
        Self::F64,
        Self::I64,
        Self::U64,
    ];

    /// Width of one element in bits.
    pub const fn bits(self) -> u64 {
        match self {
            Self::F4 => 4,
            Self::F6E2M3 | Self::F6E3M2 => 6,
            Self::Bool
            | Self::U8
            | Self::I8
            | Self::F8E5M2
            | Self::F8E4M3
            | Self::F8E8M0
            | Self::F8E4M3Fnuz
            | Self::F8E5M2Fnuz => 8,
            Self::I16 | Self::U16 | Self::F16 | Self::Bf16 => 16,
            Self::I32 | Self::U32 | Self::F32 => 32,
            Self::C64 | Self::F64 | Self::I64 | Self::U64 => 64,
        }
    }

    /// Address alignment in bytes that frameworks need to view an element in place.
    pub const fn alignment(self) -> u64 {
        if self.bits() < 8 { 1 } else { self.bits() / 8 }
    }

    /// The name that safetensors headers use, such as `BF16`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bool => "BOOL",
            Self::F4 => "F4",
            Self::F6E2M3 => "F6_E2M3",
            Self::F6E3M2 => "F6_E3M2",
            Self::U8 => "U8",
            Self::I8 => "I8",
            Self::F8E5M2 => "F8_E5M2",
            Self::F8E4M3 => "F8_E4M3",
            Self::F8E8M0 => "F8_E8M0",
            Self::F8E4M3Fnuz => "F8_E4M3FNUZ",
            Self::F8E5M2Fnuz => "F8_E5M2FNUZ",
            Self::I16 => "I16",
            Self::U16 => "U16",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::I32 => "I32",
            Self::U32 => "U32",
            Self::F32 => "F32",
            Self::C64 => "C64",
            Self::F64 => "F64",
            Self::I64 => "I64",
            Self::U64 => "U64",
        }
    }

    /// Bytes of a tensor of this type and `shape`.
    ///
    /// ```
    /// use windlass::Dtype;
    /// assert_eq!(Dtype::Bf16.size_of(&[3, 5]), Ok(30));
    /// assert_eq!(Dtype::F4.size_of(&[2, 4]), Ok(4));
    /// assert!(Dtype::F4.size_of(&[3]).is_err());
    /// ```
    ///
    /// # Errors
    /// The product does not fit 64 bits, or its bits do not fill whole bytes.
    pub fn size_of(self, shape: &[u64]) -> Result<u64, SizeError> {
        // Multiplied in order, as the reference implementation does: `[0, huge, huge]` is empty,
        // `[huge, huge, 0]` overflows.
        let elements = shape
            .iter()
            .try_fold(1u64, |product, &dim| product.checked_mul(dim))
            .ok_or(SizeError::Overflow)?;
        let bits = elements.checked_mul(self.bits()).ok_or(SizeError::Overflow)?;
        if !bits.is_multiple_of(8) {
            return Err(SizeError::PartialByte);
        }
        Ok(bits / 8)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Why a shape has no size in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SizeError {
    /// The number of elements, or their bits, does not fit 64 bits.
    Overflow,
    /// The elements do not fill whole bytes.
    PartialByte,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_serde_reads_and_writes() {
        for dtype in Dtype::ALL {
            let json = serde_json::to_string(&dtype).unwrap();
            assert_eq!(json, format!("\"{dtype}\""));
            assert_eq!(serde_json::from_str::<Dtype>(&json).unwrap(), dtype);
        }
    }

    #[test]
    fn widths_are_those_of_the_reference() {
        for dtype in Dtype::ALL {
            let reference: safetensors::Dtype =
                serde_json::from_str(&format!("\"{dtype}\"")).expect("the reference knows every type");
            assert_eq!(dtype.bits(), reference.bitsize() as u64, "{dtype}");
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
}
