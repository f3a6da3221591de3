//! Copies from a staging slot to the memory of a device, and the conversions of elements on the way.
#![forbid(unsafe_code)]

/// A type of elements that devices convert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Element {
    /// IEEE 754, 32 bits.
    F32,
    /// IEEE 754, 16 bits.
    F16,
    /// The upper half of an `F32`.
    Bf16,
    /// 8 bits, 4 of them the exponent; no infinities.
    F8E4M3,
    /// 8 bits, 5 of them the exponent.
    F8E5M2,
}

impl Element {
    /// The name, as kernels have it in theirs.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F8E4M3 => "f8e4m3",
            Self::F8E5M2 => "f8e5m2",
        }
    }

    /// Bytes of one element.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::F8E4M3 | Self::F8E5M2 => 1,
        }
    }
}

/// A conversion from one type of elements to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Conversion {
    from: Element,
    to: Element,
}

impl Conversion {
    /// Types that elements can be converted from.
    pub const SOURCES: [Element; 5] =
        [Element::F32, Element::F16, Element::Bf16, Element::F8E4M3, Element::F8E5M2];
    /// Types that elements can be converted to.
    pub const TARGETS: [Element; 3] = [Element::F32, Element::F16, Element::Bf16];

    /// Every conversion that there is.
    pub fn all() -> impl Iterator<Item = Self> {
        Self::SOURCES
            .into_iter()
            .flat_map(|from| Self::TARGETS.into_iter().filter_map(move |to| Self::between(from, to)))
    }

    /// The conversion from one type to another; `None` if they are the same, or if there is no such conversion.
    pub fn between(from: Element, to: Element) -> Option<Self> {
        (from != to && Self::TARGETS.contains(&to)).then_some(Self { from, to })
    }

    /// The type before.
    pub const fn from(self) -> Element {
        self.from
    }

    /// The type afterwards.
    pub const fn to(self) -> Element {
        self.to
    }
}

impl Transfer {
    /// The arena.
    pub const fn arena(&self) -> usize {
        match *self {
            Self::Linear { arena, .. } | Self::Pitched { arena, .. } | Self::Converted { arena, .. } => arena,
        }
    }
}

/// A copy from a staging slot to an arena. Offsets in the slot count from its first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// Bytes in one piece. May take along what lies between tensors.
    Linear {
        /// Where they begin in the slot.
        source: u64,
        /// The arena.
        arena: usize,
        /// Where they begin in the arena.
        destination: u64,
        /// Bytes.
        len: u64,
    },
    /// Rows at regular distances in the slot, back to back in the arena.
    Pitched {
        /// Where the first begins in the slot.
        source: u64,
        /// From the start of one row in the slot to that of the next, in bytes.
        pitch: u64,
        /// The arena.
        arena: usize,
        /// Where the first begins in the arena.
        destination: u64,
        /// Bytes of a row.
        width: u64,
        /// Rows.
        height: u64,
    },
    /// Elements in one piece, converted.
    Converted {
        /// The conversion.
        conversion: Conversion,
        /// Where they begin in the slot.
        source: u64,
        /// The arena.
        arena: usize,
        /// Where they begin in the arena.
        destination: u64,
        /// Elements.
        elements: u64,
    },
}
