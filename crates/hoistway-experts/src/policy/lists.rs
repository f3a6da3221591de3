//! Lists of experts in the order of their use, for policies that evict the front of a list.
//!
//! A visit puts an expert into its list before it is read, so that the list has the order of the visits whatever order the
//! reads end in. An expert that did not become resident is dropped from its list when a victim is looked for later.
#![forbid(unsafe_code)]

use super::{CatalogShape, ExpertId};

/// No expert.
const NONE: u32 = u32::MAX;
/// No list.
const UNLISTED: u8 = u8::MAX;

#[derive(Clone, Copy, Debug)]
struct Link {
    previous: u32,
    next: u32,
    /// The visit in which it came to its place.
    visit: u64,
    list: u8,
    is_resident: bool,
}

#[derive(Clone, Copy, Debug)]
struct Ends {
    front: u32,
    back: u32,
    len: usize,
}

/// `N` lists of experts. An expert is in one of them at most. Each operation takes constant time.
#[derive(Debug)]
pub(super) struct Lists<const N: usize> {
    shape: CatalogShape,
    links: Vec<Link>,
    ends: [Ends; N],
    residents: usize,
    visit: u64,
}

impl<const N: usize> Lists<N> {
    pub(super) fn new(shape: &CatalogShape) -> Self {
        let absent = Link { previous: NONE, next: NONE, visit: 0, list: UNLISTED, is_resident: false };
        Self {
            links: vec![absent; shape.experts()],
            shape: shape.clone(),
            ends: [Ends { front: NONE, back: NONE, len: 0 }; N],
            residents: 0,
            visit: 0,
        }
    }

    /// Begins a visit. Experts that come to a list from now on are waited for.
    pub(super) fn begin_visit(&mut self) {
        self.visit += 1;
    }

    /// The number of an expert, if there is such an expert.
    pub(super) fn index(&self, id: ExpertId) -> Option<usize> {
        self.shape.index(id)
    }

    /// Experts in a list.
    pub(super) fn len(&self, list: usize) -> usize {
        self.ends[list].len
    }

    /// Resident experts in all lists.
    pub(super) fn residents(&self) -> usize {
        self.residents
    }

    pub(super) fn list_of(&self, index: usize) -> Option<usize> {
        let list = self.links[index].list;
        (list != UNLISTED).then_some(usize::from(list))
    }

    pub(super) fn is_resident(&self, index: usize) -> bool {
        self.links[index].is_resident
    }

    /// Says whether an expert is resident. Returns whether that is new.
    pub(super) fn set_resident(&mut self, index: usize, is_resident: bool) -> bool {
        let was_resident = std::mem::replace(&mut self.links[index].is_resident, is_resident);
        match (was_resident, is_resident) {
            (false, true) => self.residents += 1,
            (true, false) => self.residents -= 1,
            _ => return false,
        }
        true
    }

    /// Puts an expert at the back of a list, from wherever it is.
    pub(super) fn push_back(&mut self, list: usize, index: usize) {
        self.unlink(index);
        let ends = &mut self.ends[list];
        let back = std::mem::replace(&mut ends.back, index as u32);
        ends.len += 1;
        if back == NONE {
            ends.front = index as u32;
        } else {
            self.links[back as usize].next = index as u32;
        }
        let link = &mut self.links[index];
        (link.previous, link.next, link.list, link.visit) = (back, NONE, list as u8, self.visit);
    }

    /// Takes an expert out of its list, if it is in one.
    pub(super) fn unlink(&mut self, index: usize) {
        let Some(list) = self.list_of(index) else { return };
        let Link { previous, next, .. } = self.links[index];
        match previous {
            NONE => self.ends[list].front = next,
            previous => self.links[previous as usize].next = next,
        }
        match next {
            NONE => self.ends[list].back = previous,
            next => self.links[next as usize].previous = previous,
        }
        self.ends[list].len -= 1;
        self.links[index].list = UNLISTED;
    }

    /// Takes the front out of a list and returns it.
    pub(super) fn pop_front(&mut self, list: usize) -> Option<usize> {
        let front = self.ends[list].front;
        if front == NONE {
            return None;
        }
        self.unlink(front as usize);
        Some(front as usize)
    }

    /// Returns the resident expert nearest to the front of a list that may be evicted. Drops those on the way there that an
    /// earlier visit put into the list and that are not resident.
    pub(super) fn victim(
        &mut self,
        list: usize,
        may_evict: &mut dyn FnMut(ExpertId) -> bool,
    ) -> Option<ExpertId> {
        let mut at = self.ends[list].front;
        while at != NONE {
            let index = at as usize;
            at = self.links[index].next;
            if !self.is_resident(index) {
                if self.links[index].visit != self.visit {
                    self.unlink(index);
                }
                continue;
            }
            let id = self.shape.id(index);
            if may_evict(id) {
                return Some(id);
            }
        }
        None
    }
}
