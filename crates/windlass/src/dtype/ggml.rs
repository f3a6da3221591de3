//! The block types of ggml, as GGUF files hold them.
#![forbid(unsafe_code)]

use super::Dtype;

/// A quantised type of ggml: so many elements along the innermost dimension share a block of so many bytes.
///
/// Names, numbers and sizes are those of ggml itself. Its plain types, such as `F32`, are [`Dtype`]s of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum GgmlType {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q8_1,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Q8K,
    Iq2Xxs,
    Iq2Xs,
    Iq3Xxs,
    Iq1S,
    Iq4Nl,
    Iq3S,
    Iq2S,
    Iq4Xs,
    Iq1M,
    Tq1_0,
    Tq2_0,
    Mxfp4,
    Nvfp4,
    Q1_0,
    Q2_0,
}

/// What ggml says of a block type.
struct Facts {
    id: u32,
    name: &'static str,
    block_len: u64,
    block_bytes: u64,
}

impl GgmlType {
    /// Every block type, in the order of ggml's numbers.
    pub const ALL: &[Self] = &[
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q8_1,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Q8K,
        Self::Iq2Xxs,
        Self::Iq2Xs,
        Self::Iq3Xxs,
        Self::Iq1S,
        Self::Iq4Nl,
        Self::Iq3S,
        Self::Iq2S,
        Self::Iq4Xs,
        Self::Iq1M,
        Self::Tq1_0,
        Self::Tq2_0,
        Self::Mxfp4,
        Self::Nvfp4,
        Self::Q1_0,
        Self::Q2_0,
    ];

    /// ggml's number of the type.
    pub const fn id(self) -> u32 {
        self.facts().id
    }

    /// ggml's name of the type in capitals, such as `Q4_K`.
    pub const fn name(self) -> &'static str {
        self.facts().name
    }

    /// Elements of one block.
    pub const fn block_len(self) -> u64 {
        self.facts().block_len
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> u64 {
        self.facts().block_bytes
    }

    const fn facts(self) -> Facts {
        let (id, name, block_len, block_bytes) = match self {
            Self::Q4_0 => (2, "Q4_0", 32, 18),
            Self::Q4_1 => (3, "Q4_1", 32, 20),
            Self::Q5_0 => (6, "Q5_0", 32, 22),
            Self::Q5_1 => (7, "Q5_1", 32, 24),
            Self::Q8_0 => (8, "Q8_0", 32, 34),
            Self::Q8_1 => (9, "Q8_1", 32, 36),
            Self::Q2K => (10, "Q2_K", 256, 84),
            Self::Q3K => (11, "Q3_K", 256, 110),
            Self::Q4K => (12, "Q4_K", 256, 144),
            Self::Q5K => (13, "Q5_K", 256, 176),
            Self::Q6K => (14, "Q6_K", 256, 210),
            Self::Q8K => (15, "Q8_K", 256, 292),
            Self::Iq2Xxs => (16, "IQ2_XXS", 256, 66),
            Self::Iq2Xs => (17, "IQ2_XS", 256, 74),
            Self::Iq3Xxs => (18, "IQ3_XXS", 256, 98),
            Self::Iq1S => (19, "IQ1_S", 256, 50),
            Self::Iq4Nl => (20, "IQ4_NL", 32, 18),
            Self::Iq3S => (21, "IQ3_S", 256, 110),
            Self::Iq2S => (22, "IQ2_S", 256, 82),
            Self::Iq4Xs => (23, "IQ4_XS", 256, 136),
            Self::Iq1M => (29, "IQ1_M", 256, 56),
            Self::Tq1_0 => (34, "TQ1_0", 256, 54),
            Self::Tq2_0 => (35, "TQ2_0", 256, 66),
            Self::Mxfp4 => (39, "MXFP4", 32, 17),
            Self::Nvfp4 => (40, "NVFP4", 64, 36),
            Self::Q1_0 => (41, "Q1_0", 128, 18),
            Self::Q2_0 => (42, "Q2_0", 64, 18),
        };
        Facts { id, name, block_len, block_bytes }
    }
}

/// ggml's numbers of plain types.
const PLAIN: [(u32, Dtype); 8] = [
    (0, Dtype::F32),
    (1, Dtype::F16),
    (24, Dtype::I8),
    (25, Dtype::I16),
    (26, Dtype::I32),
    (27, Dtype::I64),
    (28, Dtype::F64),
    (30, Dtype::Bf16),
];

impl Dtype {
    /// The type of this number of ggml, or `None` if ggml has given that number up.
    ///
    /// Numbers that ggml has not given out yet are [`Dtype::UnknownGgml`].
    ///
    /// ```
    /// use windlass::Dtype;
    /// assert_eq!(Dtype::from_ggml(0), Some(Dtype::F32));
    /// assert_eq!(Dtype::from_ggml(12).map(|dtype| dtype.to_string()).as_deref(), Some("Q4_K"));
    /// assert_eq!(Dtype::from_ggml(4), None);
    /// ```
    pub fn from_ggml(id: u32) -> Option<Self> {
        if matches!(id, 4 | 5 | 31..=33 | 36..=38) {
            return None;
        }
        let plain = PLAIN.into_iter().find(|(number, _)| *number == id).map(|(_, dtype)| dtype);
        let block = GgmlType::ALL.iter().copied().find(|block| block.id() == id).map(Self::Quantized);
        Some(plain.or(block).unwrap_or(Self::UnknownGgml(id)))
    }

    /// ggml's number of the type, if ggml has it.
    pub fn ggml_id(self) -> Option<u32> {
        match self {
            Self::Quantized(block) => Some(block.id()),
            Self::UnknownGgml(id) => Some(id),
            plain => PLAIN.into_iter().find(|(_, dtype)| *dtype == plain).map(|(id, _)| id),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_that_ggml_has_given_out_is_known() {
        let unknown = |id| matches!(Dtype::from_ggml(id), Some(Dtype::UnknownGgml(_)));
        assert!((0..43).all(|id| !unknown(id)));
        assert!((43..200).all(unknown));
        for dtype in (0..200).filter_map(Dtype::from_ggml) {
            assert_eq!(dtype.ggml_id().and_then(Dtype::from_ggml), Some(dtype));
        }
        for &block in GgmlType::ALL {
            assert_eq!(Dtype::from_ggml(block.id()), Some(Dtype::Quantized(block)));
        }
    }

    #[test]
    fn every_row_of_blocks_begins_aligned() {
        for &block in GgmlType::ALL {
            let alignment = Dtype::Quantized(block).alignment();
            assert_eq!(block.block_bytes() % alignment, 0, "{}", block.name());
        }
    }
}
