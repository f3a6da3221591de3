//! Own blocks that went to make room, or as their time was over, until somebody asks which.
#![forbid(unsafe_code)]

use crate::{Evicted, Fingerprint};
use std::{collections::VecDeque, sync::Mutex};
use windlass_io::parallel::lock;

/// Blocks that are remembered; older ones are forgotten.
const MOST_DEPARTED: usize = 1 << 16;

#[derive(Debug, Default)]
pub(super) struct Departed {
    queue: Mutex<Queue>,
}

#[derive(Debug, Default)]
struct Queue {
    blocks: VecDeque<Fingerprint>,
    forgotten: u64,
}

impl Departed {
    pub(super) fn note(&self, blocks: impl IntoIterator<Item = Fingerprint>) {
        let mut queue = lock(&self.queue);
        for block in blocks {
            if queue.blocks.len() == MOST_DEPARTED {
                queue.blocks.pop_front();
                queue.forgotten += 1;
            }
            queue.blocks.push_back(block);
        }
    }

    pub(super) fn take(&self) -> Evicted {
        let Queue { blocks, forgotten } = std::mem::take(&mut *lock(&self.queue));
        Evicted { blocks: blocks.into(), forgotten }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_asks_for_is_forgotten_and_counted() {
        let departed = Departed::default();
        let block = |number: u32| {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&number.to_le_bytes());
            Fingerprint(bytes)
        };
        departed.note((0..MOST_DEPARTED as u32 + 2).map(block));
        let evicted = departed.take();
        assert_eq!((evicted.blocks.len(), evicted.forgotten), (MOST_DEPARTED, 2));
        assert_eq!(evicted.blocks[0], block(2));
        assert_eq!(departed.take(), Evicted::default());
    }
}
