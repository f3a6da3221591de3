//! The block types of ggml, as GGUF files hold them.
#![forbid(unsafe_code)]

use super::Dtype;

/// Defines ggml's block types: the variant, ggml's number and name, and the elements and bytes of a block.
macro_rules! block_types {
    ($($variant:ident, $id:literal, $name:literal, $len:literal, $bytes:literal;)+) => {
        /// A quantised type of ggml: a fixed number of elements along the innermost dimension share a block of bytes.
        ///
        /// Names, numbers and sizes are those of ggml itself. Its plain types, such as `F32`, are [`Dtype`]s of their own.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        #[allow(missing_docs)]
        pub enum GgmlType {
            $($variant,)+
        }

        impl GgmlType {
            /// Every block type, in the order of ggml's numbers.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// ggml's number of the type.
            pub const fn id(self) -> u32 {
                match self {
                    $(Self::$variant => $id,)+
                }
            }

            /// ggml's name of the type in capitals, such as `Q4_K`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }

            /// Elements of one block.
            pub const fn block_len(self) -> u64 {
                match self {
                    $(Self::$variant => $len,)+
                }
            }

            /// Bytes of one block.
            pub const fn block_bytes(self) -> u64 {
                match self {
                    $(Self::$variant => $bytes,)+
                }
            }
        }
    };
}

block_types! {
    Q4_0, 2, "Q4_0", 32, 18;
    Q4_1, 3, "Q4_1", 32, 20;
    Q5_0, 6, "Q5_0", 32, 22;
    Q5_1, 7, "Q5_1", 32, 24;
    Q8_0, 8, "Q8_0", 32, 34;
    Q8_1, 9, "Q8_1", 32, 36;
    Q2K, 10, "Q2_K", 256, 84;
    Q3K, 11, "Q3_K", 256, 110;
    Q4K, 12, "Q4_K", 256, 144;
    Q5K, 13, "Q5_K", 256, 176;
    Q6K, 14, "Q6_K", 256, 210;
    Q8K, 15, "Q8_K", 256, 292;
    Iq2Xxs, 16, "IQ2_XXS", 256, 66;
    Iq2Xs, 17, "IQ2_XS", 256, 74;
    Iq3Xxs, 18, "IQ3_XXS", 256, 98;
    Iq1S, 19, "IQ1_S", 256, 50;
    Iq4Nl, 20, "IQ4_NL", 32, 18;
    Iq3S, 21, "IQ3_S", 256, 110;
    Iq2S, 22, "IQ2_S", 256, 82;
    Iq4Xs, 23, "IQ4_XS", 256, 136;
    Iq1M, 29, "IQ1_M", 256, 56;
    Tq1_0, 34, "TQ1_0", 256, 54;
    Tq2_0, 35, "TQ2_0", 256, 66;
    Mxfp4, 39, "MXFP4", 32, 17;
    Nvfp4, 40, "NVFP4", 64, 36;
    Q1_0, 41, "Q1_0", 128, 18;
    Q2_0, 42, "Q2_0", 64, 18;
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
    /// use hoistway::Dtype;
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
