//! Which bytes of a job go in one read or write, which of them straight from or to the caller's memory, and which by
//! way of memory of our own. Pure: no I/O, no memory.
//!
//! A job is a row of spans in the order of the file, cut into steps. A step is one run of bytes of the file, and one
//! vectored read or write; or, where a device moves bytes itself, a run of pieces of its memory.
#![forbid(unsafe_code)]

use super::Part;
use crate::format::{BLOCK_LEN, HEADER_LEN};
use hoistway_device::DeviceId;
use std::collections::VecDeque;

/// Shorter pieces are gathered in memory of our own: that is cheaper than a segment of a request.
const SHORTEST_IN_PLACE: u64 = 4096;

/// What a transfer must be multiples of to need no memory of ours: powers of two, at most [`BLOCK_LEN`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grid {
    /// Addresses of host memory.
    pub(super) memory: u64,
    /// Offsets and lengths.
    pub(super) offset: u64,
}

impl Grid {
    /// Through the page cache: anything goes.
    pub(super) const BUFFERED: Self = Self { memory: 1, offset: 1 };
}

/// How pieces of device memory are moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DevicePieces {
    /// By way of host memory.
    Staged,
    /// By the device, where they lie at whole blocks.
    Direct,
}

/// How much a step may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Bytes of the file.
    pub(super) step_bytes: u64,
    /// Pieces of memory, but for those that memory of ours is made of.
    pub(super) segments: usize,
    /// Bytes of memory of ours.
    pub(super) bounce_bytes: u64,
}

/// What bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// That of the member with this number.
    Header(usize),
    /// Zeros up to the next block; or bytes of a file between two that are read, which no job asks for.
    Padding,
    /// Bytes of a part.
    Payload {
        part: usize,
        /// Where they begin in it.
        start: u64,
        /// Where they are in the caller's memory.
        address: u64,
        device: DeviceId,
    },
}

/// Which memory takes part in the read or write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SpanMemory {
    /// The caller's.
    InPlace,
    /// Ours, from this byte of the step's on.
    Bounced(u64),
}

/// Bytes that are treated alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) content: Content,
    pub(super) len: u64,
    pub(super) place: SpanMemory,
}

impl Span {
    fn split(self, len: u64) -> (Self, Self) {
        let mut rest = Self { len: self.len - len, ..self };
        if let Content::Payload { start, address, .. } = &mut rest.content {
            *start += len;
            *address += len;
        }
        if let SpanMemory::Bounced(at) = &mut rest.place {
            *at += len;
        }
        (Self { len, ..self }, rest)
    }

    /// Whether a device moves it.
    fn is_devices(&self) -> bool {
        self.place == SpanMemory::InPlace
            && matches!(self.content, Content::Payload { device, .. } if device != DeviceId::Cpu)
    }
}

/// A run of bytes of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) offset: u64,
    pub(super) spans: Vec<Span>,
    pub(super) len: u64,
    /// Bytes of our memory that it takes.
    pub(super) bounced: u64,
    /// Whether its spans are moved by a device.
    pub(super) is_devices: bool,
    in_place: usize,
    runs: usize,
}

impl Step {
    fn new(offset: u64, is_devices: bool) -> Self {
        Self { offset, spans: Vec::new(), len: 0, bounced: 0, is_devices, in_place: 0, runs: 0 }
    }

    /// Bytes from its start that are wanted: padding at its end is not.
    pub(super) fn wanted(&self) -> u64 {
        let padding = self.spans.iter().rev().take_while(|span| span.content == Content::Padding);
        self.len - padding.map(|span| span.len).sum::<u64>()
    }

    /// Bytes of the caller's that go by way of our memory.
    pub(super) fn bounced_payload(&self) -> u64 {
        let bounced = |span: &&Span| {
            matches!(span.place, SpanMemory::Bounced(_)) && matches!(span.content, Content::Payload { .. })
        };
        self.spans.iter().filter(bounced).map(|span| span.len).sum()
    }

    /// The members whose headers it has.
    pub(super) fn headers(&self) -> impl Iterator<Item = usize> {
        self.spans.iter().filter_map(|span| match span.content {
            Content::Header(member) => Some(member),
            _ => None,
        })
    }

    /// Whether bytes of devices go by way of our memory.
    pub(super) fn bounces_devices(&self) -> bool {
        self.spans.iter().any(|span| {
            matches!(span.place, SpanMemory::Bounced(_))
                && matches!(span.content, Content::Payload { device, .. } if device != DeviceId::Cpu)
        })
    }

    /// The same bytes by way of our memory.
    pub(super) fn bounced(&self) -> Self {
        let mut step = Self::new(self.offset, false);
        for span in &self.spans {
            step.push(Span { place: SpanMemory::Bounced(0), ..*span });
        }
        step
    }

    /// The same bytes in steps of at most so many bytes, but at least a block. Bytes that no job asks for are left out where a
    /// step would have no others.
    pub(super) fn cut_into(self, most: u64) -> Vec<Self> {
        let most = (most / BLOCK_LEN).max(1) * BLOCK_LEN;
        let mut steps = Vec::new();
        let mut current = Self::new(self.offset, self.is_devices);
        for mut span in self.spans {
            loop {
                // From block to block of the file, so that no header is cut.
                let end = (current.offset / BLOCK_LEN * BLOCK_LEN).saturating_add(most);
                let room = end - (current.offset + current.len);
                if span.len < room {
                    current.push(span);
                    break;
                }
                let (head, tail) = span.split(room);
                current.push(head);
                let next = Self::new(end, self.is_devices);
                steps.push(std::mem::replace(&mut current, next));
                if tail.len == 0 {
                    break;
                }
                span = tail;
            }
        }
        steps.push(current);
        steps.retain(|step| step.spans.iter().any(|span| span.content != Content::Padding));
        steps
    }

    /// The same bytes in a step for each member, where `member_of` knows those of parts.
    pub(super) fn cut_by(self, member_of: impl Fn(usize) -> Option<usize>) -> Vec<Self> {
        self.cut_at(|before, span| match span.content {
            Content::Header(member) => Some(member),
            Content::Payload { part, .. } => member_of(part),
            Content::Padding => before,
        })
    }

    /// The same bytes, headers in steps of their own.
    pub(super) fn without_headers(self) -> Vec<Self> {
        self.cut_at(|_, span| matches!(span.content, Content::Header(_)))
    }

    /// Cuts between spans of which `kind` says something else, which is told what it said before.
    fn cut_at<K: Copy + Default + PartialEq>(self, kind: impl Fn(K, &Span) -> K) -> Vec<Self> {
        let mut steps: Vec<Self> = Vec::new();
        let (mut offset, mut before) = (self.offset, K::default());
        for span in self.spans {
            let kind_of_span = kind(before, &span);
            match steps.last_mut().filter(|_| kind_of_span == before) {
                Some(last) => last.push(span),
                None => {
                    let mut step = Self::new(offset, self.is_devices);
                    step.push(span);
                    steps.push(step);
                }
            }
            (offset, before) = (offset + span.len, kind_of_span);
        }
        steps
    }

    /// Whether another begins where this one ends.
    pub(super) fn precedes(&self, other: &Self) -> bool {
        self.offset + self.len == other.offset && self.is_devices == other.is_devices
    }

    /// Adds the bytes of a step that begins where this one ends.
    pub(super) fn append(&mut self, other: Self) {
        other.spans.into_iter().for_each(|span| self.push(span));
    }

    fn ends_bounced(&self) -> bool {
        matches!(self.spans.last(), Some(Span { place: SpanMemory::Bounced(_), .. }))
    }

    /// Where the next bounced span goes.
    fn bounce_cursor(&self) -> u64 {
        // A run of them begins at a block, as direct transfers want it.
        if self.ends_bounced() { self.bounced } else { self.bounced.next_multiple_of(BLOCK_LEN) }
    }

    fn push(&mut self, mut span: Span) {
        match &mut span.place {
            SpanMemory::InPlace => self.in_place += 1,
            SpanMemory::Bounced(at) => {
                *at = self.bounce_cursor();
                self.runs += usize::from(!self.ends_bounced());
                self.bounced = *at + span.len;
            }
        }
        self.len += span.len;
        self.spans.push(span);
    }

    /// How many bytes more, of which kind, it may take.
    fn room(&self, place: SpanMemory, limits: &Limits) -> u64 {
        let is_new_segment = place == SpanMemory::InPlace || !self.ends_bounced();
        if is_new_segment && self.in_place + self.runs >= limits.segments {
            return 0;
        }
        let bytes = limits.step_bytes.saturating_sub(self.len);
        match place {
            SpanMemory::InPlace => bytes,
            SpanMemory::Bounced(_) => bytes.min(limits.bounce_bytes.saturating_sub(self.bounce_cursor())),
        }
    }

    /// Takes away what lies past `len` bytes, and puts it before `rest`.
    fn cut(&mut self, len: u64, rest: &mut VecDeque<(u64, Span)>) {
        while self.len > len {
            let Some(last) = self.spans.pop() else { break };
            self.len -= last.len;
            let kept = len.saturating_sub(self.len);
            let (head, tail) = last.split(kept);
            rest.push_front((self.offset + self.len + kept, tail));
            if kept > 0 {
                self.len += kept;
                self.spans.push(head);
            }
        }
        let ends = self.spans.iter().filter_map(|span| match span.place {
            SpanMemory::Bounced(at) => Some(at + span.len),
            SpanMemory::InPlace => None,
        });
        self.bounced = ends.max().unwrap_or(0);
    }
}

/// What a job asks for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted<'a> {
    /// Members whose headers are read or written, and the offsets of these.
    pub(super) headers: &'a [(usize, u64)],
    pub(super) parts: &'a [Part],
    /// Bytes between two extents that are read with them rather than that there are two reads.
    pub(super) gap: u64,
    pub(super) grid: Grid,
    pub(super) devices: DevicePieces,
    pub(super) limits: Limits,
}

/// Bytes of the file that are wanted.
enum Extent {
    Header(usize),
    Part(usize),
}

impl Wanted<'_> {
    /// The steps, by offset.
    ///
    /// # Errors
    /// What is wrong with the job.
    pub(super) fn steps(&self) -> Result<VecDeque<Step>, &'static str> {
        let mut spans = self.spans()?;
        let mut steps: VecDeque<Step> = VecDeque::new();
        let mut current: Option<Step> = None;
        while let Some((offset, span)) = spans.pop_front() {
            let mut step = match current.take() {
                Some(step) if step.offset + step.len == offset && step.is_devices == span.is_devices() => {
                    step
                }
                finished => {
                    steps.extend(finished);
                    Step::new(offset, span.is_devices())
                }
            };
            let mut room = step.room(span.place, &self.limits);
            if span.len <= room {
                step.push(span);
                current = Some(step);
                continue;
            }
            if matches!(span.content, Content::Header(_)) {
                // It stays in one piece.
                room = 0;
            }
            // A step ends where the next may begin.
            let len = (step.len + room) / self.unit() * self.unit();
            if len == 0 {
                return Err("the limits of a step are less than a block");
            }
            if len > step.len {
                let (head, tail) = span.split(len - step.len);
                spans.push_front((offset + head.len, tail));
                step.push(head);
            } else {
                spans.push_front((offset, span));
                step.cut(len, &mut spans);
            }
            steps.push_back(step);
        }
        steps.extend(current);
        Ok(steps)
    }

    /// The job's bytes in the order of the file, each with its offset.
    fn spans(&self) -> Result<VecDeque<(u64, Span)>, &'static str> {
        let headers = self.headers.iter().map(|&(member, offset)| (offset, Extent::Header(member)));
        let parts = self.parts.iter().enumerate().filter(|(_, part)| part.len > 0);
        let mut extents: Vec<(u64, Extent)> =
            headers.chain(parts.map(|(index, part)| (part.offset, Extent::Part(index)))).collect();
        extents.sort_unstable_by_key(|&(offset, _)| offset);
        let mut spans = VecDeque::new();
        let mut end = 0;
        for (offset, extent) in extents {
            if offset % BLOCK_LEN != 0 {
                return Err("a part begins within a block");
            }
            if offset < end {
                return Err("two parts overlap");
            }
            let bounced = |content, len| Span { content, len, place: SpanMemory::Bounced(0) };
            if offset > end
                && offset - end <= self.gap
                && !spans.is_empty()
                && self.devices == DevicePieces::Staged
            {
                spans.push_back((end, bounced(Content::Padding, offset - end)));
            }
            end = match extent {
                Extent::Header(member) => {
                    let len = HEADER_LEN as u64;
                    spans.push_back((offset, bounced(Content::Header(member), len)));
                    offset.checked_add(len)
                }
                Extent::Part(index) => self.part(index, &mut spans)?,
            }
            .filter(|&end| i64::try_from(end).is_ok())
            .ok_or("a part ends past the end of any file")?;
        }
        Ok(spans)
    }

    fn part(&self, index: usize, spans: &mut VecDeque<(u64, Span)>) -> Result<Option<u64>, &'static str> {
        let part = &self.parts[index];
        let pieces = part.pieces.iter().try_fold(0u64, |sum, piece| sum.checked_add(piece.len));
        if pieces != Some(part.len) {
            return Err("the pieces of a part are not as long as the part");
        }
        let Some(end) =
            part.offset.checked_add(part.len).and_then(|end| end.checked_next_multiple_of(BLOCK_LEN))
        else {
            return Ok(None);
        };
        let mut start = 0;
        for piece in part.pieces.iter().filter(|piece| piece.len > 0) {
            if piece.address.checked_add(piece.len).is_none() {
                return Err("a piece of memory ends past the end of all memory");
            }
            let content =
                Content::Payload { part: index, start, address: piece.address, device: piece.device };
            let whole = Span { content, len: piece.len, place: SpanMemory::Bounced(0) };
            let mut offset = part.offset + start;
            let (head, rest) = whole.split(self.before_in_place(offset, piece).min(piece.len));
            let (mut middle, tail) = rest.split(self.in_place_len(rest.len));
            middle.place = SpanMemory::InPlace;
            for span in [head, middle, tail].into_iter().filter(|span| span.len > 0) {
                spans.push_back((offset, span));
                offset += span.len;
            }
            start += piece.len;
        }
        let padding = end - part.offset - part.len;
        if padding > 0 {
            let span = Span { content: Content::Padding, len: padding, place: SpanMemory::Bounced(0) };
            spans.push_back((part.offset + part.len, span));
        }
        Ok(Some(end))
    }

    /// Bytes of a piece before the first that can go in place: all if none can.
    fn before_in_place(&self, offset: u64, piece: &crate::Piece) -> u64 {
        let memory = match (piece.device, self.devices) {
            (DeviceId::Cpu, _) => self.grid.memory,
            (_, DevicePieces::Direct) => BLOCK_LEN,
            (_, DevicePieces::Staged) => return piece.len,
        };
        let skipped = offset.next_multiple_of(self.unit()) - offset;
        let is_aligned = piece.address.checked_add(skipped).is_some_and(|address| address % memory == 0);
        let is_long = piece.len.saturating_sub(skipped) >= SHORTEST_IN_PLACE;
        if is_aligned && is_long { skipped } else { piece.len }
    }

    /// Of bytes that begin where they can go in place, how many do.
    fn in_place_len(&self, len: u64) -> u64 {
        len / self.unit() * self.unit()
    }

    /// What offsets and lengths in place are multiples of. Pieces of devices are on a grid of blocks, and so is all that
    /// is moved with them.
    fn unit(&self) -> u64 {
        if self.devices == DevicePieces::Direct { BLOCK_LEN } else { self.grid.offset }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Piece;
    use proptest::prelude::*;

    const GRIDS: [Grid; 4] = [
        Grid::BUFFERED,
        Grid { memory: 4, offset: 512 },
        Grid { memory: 512, offset: 512 },
        Grid { memory: 4096, offset: 4096 },
    ];

    /// Parts after a header, with gaps of whole blocks; each piece somewhere else.
    fn parts() -> impl Strategy<Value = Vec<Part>> {
        let piece = (1u64..30_000, prop_oneof![Just(0u64), 0u64..4096], 0u32..4);
        let part = (prop::collection::vec(piece, 0..20), 0u64..3);
        prop::collection::vec(part, 0..5).prop_map(|shapes| {
            let (mut offset, mut place) = (BLOCK_LEN, 1u64 << 20);
            let mut parts = Vec::new();
            for (pieces, gap) in shapes {
                offset += gap * BLOCK_LEN;
                let pieces: Vec<Piece> = pieces
                    .into_iter()
                    .map(|(len, skew, kind)| {
                        let len = if kind > 1 { len / 4096 * 4096 + 4096 } else { len };
                        place += 1 << 16;
                        let device = if kind == 3 { DeviceId::Cuda(0) } else { DeviceId::Cpu };
                        Piece { address: place + skew, len, device }
                    })
                    .collect();
                let len = pieces.iter().map(|piece| piece.len).sum::<u64>();
                parts.push(Part { offset, pieces, len });
                offset += len.next_multiple_of(BLOCK_LEN);
            }
            parts
        })
    }

    proptest! {
        #[test]
        fn steps_have_every_byte_once_within_their_limits(
            parts in parts(),
            grid in prop::sample::select(&GRIDS[..]),
            devices in prop_oneof![Just(DevicePieces::Staged), Just(DevicePieces::Direct)],
            step_blocks in 1u64..40,
            bounce_blocks in 1u64..10,
            segments in 1usize..8,
            has_header in any::<bool>(),
            gap_blocks in 0u64..3,
            is_cut in any::<bool>(),
            cut_blocks in 1u64..10,
        ) {
            let limits =
                Limits { step_bytes: step_blocks * BLOCK_LEN, segments, bounce_bytes: bounce_blocks * BLOCK_LEN };
            let headers: Vec<_> = has_header.then_some((7, 0)).into_iter().collect();
            let gap = gap_blocks * BLOCK_LEN;
            let mut steps = Wanted { headers: &headers, parts: &parts, gap, grid, devices, limits }.steps().unwrap();
            let most = cut_blocks * BLOCK_LEN;
            if is_cut {
                steps = steps.into_iter().flat_map(|step| step.cut_into(most)).collect();
                prop_assert!(steps.iter().all(|step| step.len <= most));
            }
            // No step begins with bytes that were not asked for, unless a limit has cut it.
            let wanted = |step: &Step| step.spans.iter().any(|span| span.content != Content::Padding);
            let is_limited = steps.iter().any(|step| step.len + step.bounced >= limits.step_bytes.min(limits.bounce_bytes));
            prop_assert!(is_cut || is_limited || limits.segments < 3 || steps.iter().all(wanted));

            let mut reached = vec![0; parts.len()];
            let (mut headers, mut end) = (0, 0);
            for step in &steps {
                prop_assert!(step.offset >= end && step.offset % grid.offset == 0);
                end = step.offset + step.len;
                prop_assert!(step.len <= limits.step_bytes && step.bounced <= limits.bounce_bytes);
                prop_assert!(step.in_place + step.runs <= segments);
                prop_assert_eq!(step.spans.iter().map(|span| span.len).sum::<u64>(), step.len);
                let mut offset = step.offset;
                let mut ours = 0u64;
                let mut follows_bounced = false;
                for span in &step.spans {
                    match span.content {
                        Content::Header(member) => {
                            prop_assert_eq!((member, offset, span.len), (7, 0, BLOCK_LEN));
                            headers += 1;
                        }
                        Content::Padding => {}
                        Content::Payload { part, start, address, device } => {
                            prop_assert_eq!(parts[part].offset + start, offset);
                            prop_assert_eq!(reached[part], start);
                            reached[part] += span.len;
                            let mut left = start;
                            let piece = parts[part].pieces.iter().find(|piece| {
                                let is_here = left < piece.len;
                                left = left.saturating_sub(if is_here { 0 } else { piece.len });
                                is_here
                            }).unwrap();
                            prop_assert_eq!((piece.address + left, piece.device), (address, device));
                            prop_assert!(left + span.len <= piece.len);
                            if span.place == SpanMemory::InPlace {
                                let (memory, unit) = match device {
                                    DeviceId::Cpu => (grid.memory, grid.offset),
                                    _ => (BLOCK_LEN, BLOCK_LEN),
                                };
                                prop_assert!(address % memory == 0 && offset % unit == 0 && span.len % unit == 0);
                                prop_assert_eq!(step.is_devices, device != DeviceId::Cpu);
                                prop_assert!(device == DeviceId::Cpu || devices == DevicePieces::Direct);
                            }
                        }
                    }
                    if let SpanMemory::Bounced(at) = span.place {
                        prop_assert!(!step.is_devices);
                        let next = if follows_bounced { ours } else { ours.next_multiple_of(BLOCK_LEN) };
                        prop_assert_eq!(at, next);
                        ours = at + span.len;
                    }
                    follows_bounced = span.place != SpanMemory::InPlace;
                    offset += span.len;
                }
                prop_assert_eq!(step.bounced, ours);
            }
            prop_assert_eq!(headers, usize::from(has_header));
            prop_assert_eq!(reached, parts.iter().map(|part| part.len).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_whole_block_is_one_step() {
        let piece = Piece { address: 1 << 20, len: 1 << 20, device: DeviceId::Cpu };
        let parts =
            [0u64, 1].map(|shard| Part { offset: 4096 + (shard << 20), pieces: vec![piece], len: 1 << 20 });
        let limits = Limits { step_bytes: 8 << 20, segments: 512, bounce_bytes: 8 << 20 };
        let grid = GRIDS[2];
        let devices = DevicePieces::Staged;
        let wanted = Wanted { headers: &[(0, 0)], parts: &parts, gap: 0, grid, devices, limits };
        let steps = wanted.steps().unwrap();
        assert_eq!(steps.len(), 1);
        assert_eq!((steps[0].len, steps[0].bounced), (4096 + (2 << 20), 4096));
    }

    #[test]
    fn the_whole_of_a_device_step_can_be_staged() {
        let piece = Piece { address: 1 << 20, len: 1 << 20, device: DeviceId::Cuda(0) };
        let parts = [Part { offset: 4096, pieces: vec![piece], len: 1 << 20 }];
        let limits = Limits { step_bytes: 8 << 20, segments: 512, bounce_bytes: 8 << 20 };
        let wanted = Wanted {
            headers: &[],
            parts: &parts,
            gap: 0,
            grid: GRIDS[2],
            devices: DevicePieces::Direct,
            limits,
        };
        let steps = wanted.steps().unwrap();
        assert!(steps.len() == 1 && steps[0].is_devices);
        let staged = steps[0].bounced();
        assert_eq!((staged.is_devices, staged.bounced, staged.bounced_payload()), (false, 1 << 20, 1 << 20));
    }
}
