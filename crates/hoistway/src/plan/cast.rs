//! Conversions of element types that devices make while tensors are on their way.
#![forbid(unsafe_code)]

use crate::Dtype;
use hoistway_device::{Conversion, Element};

/// A conversion from one element type to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cast(Conversion);

impl Cast {
    /// Types that elements can be converted to.
    pub const TARGETS: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];
    /// Types that elements can be converted from.
    pub const SOURCES: [Dtype; 5] = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::F8E4M3, Dtype::F8E5M2];

    /// The conversion that turns tensors of type `from` into what a load with `dtype=to` delivers. Numbers that are
    /// no floats, quantised ones included, and those that are of that type already, stay what they are.
    ///
    /// # Errors
    /// The types, if a float cannot be converted.
    pub fn between(from: Dtype, to: Dtype) -> Result<Option<Self>, (Dtype, Dtype)> {
        if from == to || !is_float(from) {
            return Ok(None);
        }
        let conversion = element(from).zip(element(to)).and_then(|(from, to)| Conversion::between(from, to));
        conversion.map(|conversion| Some(Self(conversion))).ok_or((from, to))
    }

    /// The type in the file.
    pub fn from(self) -> Dtype {
        dtype(self.0.from())
    }

    /// The type in memory.
    pub fn to(self) -> Dtype {
        dtype(self.0.to())
    }

    /// Returns the bytes in memory that a number of bytes in the file becomes.
    pub(crate) fn resize(self, bytes: u64) -> Option<u64> {
        (bytes / self.0.from().bytes()).checked_mul(self.0.to().bytes())
    }

    /// What a device does for it.
    pub(crate) fn conversion(self) -> Conversion {
        self.0
    }
}

/// The element type as devices name it, if they convert it.
fn element(dtype: Dtype) -> Option<Element> {
    match dtype {
        Dtype::F32 => Some(Element::F32),
        Dtype::F16 => Some(Element::F16),
        Dtype::Bf16 => Some(Element::Bf16),
        Dtype::F8E4M3 => Some(Element::F8E4M3),
        Dtype::F8E5M2 => Some(Element::F8E5M2),
        _ => None,
    }
}

fn dtype(element: Element) -> Dtype {
    match element {
        Element::F32 => Dtype::F32,
        Element::F16 => Dtype::F16,
        Element::Bf16 => Dtype::Bf16,
        Element::F8E4M3 => Dtype::F8E4M3,
        Element::F8E5M2 => Dtype::F8E5M2,
    }
}

fn is_float(dtype: Dtype) -> bool {
    match dtype {
        Dtype::Bool
        | Dtype::U8
        | Dtype::I8
        | Dtype::I16
        | Dtype::U16
        | Dtype::I32
        | Dtype::U32
        | Dtype::I64
        | Dtype::U64
        | Dtype::Quantized(_)
        | Dtype::UnknownGgml(_) => false,
        Dtype::F4
        | Dtype::F6E2M3
        | Dtype::F6E3M2
        | Dtype::F8E5M2
        | Dtype::F8E4M3
        | Dtype::F8E8M0
        | Dtype::F8E4M3Fnuz
        | Dtype::F8E5M2Fnuz
        | Dtype::F16
        | Dtype::Bf16
        | Dtype::F32
        | Dtype::C64
        | Dtype::F64 => true,
    }
}
