//! Where memory comes from, and threads run, that bytes of a device pass through.
#![forbid(unsafe_code)]

use crate::{
    counted, parallel,
    sys::{
        numa::{self, Node},
        threads::{run_on, usable},
    },
};
use hoistway_device::Device;
use std::io;

/// Where the memory of a load, a save or a store comes from, and its threads run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// The NUMA node of its memory, if it is to be of one.
    pub node: Option<u32>,
    /// The processors that its threads stay on, if not on all.
    pub cpus: Option<Vec<usize>>,
    /// Why they do not, although its memory is on a node.
    pub note: Option<String>,
}

impl Placement {
    /// What is best for copies between the host and a device.
    pub fn near_device(device: &Device) -> Self {
        let near = |id| Self::near(id, &numa::nodes(), usable, parallel::cores());
        device.info().numa_node.map_or_else(Self::default, near)
    }

    /// On a node, on those of its processors that this thread may use, as the process's owner may have chosen.
    pub fn on(node: &Node) -> Self {
        Self::on_usable(node, usable)
    }

    /// Keeps this thread on its processors, if there are such.
    ///
    /// # Errors
    /// The system's, which may forbid it: the thread runs where it did.
    pub fn bind(&self) -> io::Result<()> {
        self.cpus.as_ref().map_or(Ok(()), |cpus| run_on(cpus))
    }

    /// What a report says where the system did not let a thread be [bound](Self::bind).
    pub fn unbound(error: &io::Error) -> String {
        format!(
            "threads ran on any node: the system does not let them stay on the processors of one: {error}"
        )
    }

    /// How many processors its threads may use.
    pub fn cores(&self) -> usize {
        self.cpus.as_ref().map_or_else(parallel::cores, |cpus| cpus.len().min(parallel::cores()))
    }

    /// On the node of a device: pinned memory far from it halves the speed of copies. Threads stay there only if they lose no more than
    /// half of the `cores` that they may use.
    fn near(
        id: u32,
        nodes: &[Node],
        usable: impl FnOnce(&[usize]) -> Option<Vec<usize>>,
        cores: usize,
    ) -> Self {
        let own = nodes.iter().find(|own| own.id == id);
        let Some(own) = own.filter(|_| nodes.len() > 1) else { return Self::default() };
        match Self::on_usable(own, usable) {
            Self { cpus: Some(cpus), .. } if cpus.len() < cores.div_ceil(2) => {
                let few = counted(cpus.len() as u64, "processor", "processors");
                let note = format!(
                    "threads ran on any node: of the device's NUMA node, {id}, the process may use {few}, fewer than half of {cores}"
                );
                Self { node: Some(id), cpus: None, note: Some(note) }
            }
            near => near,
        }
    }

    fn on_usable(node: &Node, usable: impl FnOnce(&[usize]) -> Option<Vec<usize>>) -> Self {
        let id = node.id;
        let (cpus, why_not) = match usable(&node.cpus) {
            Some(cpus) if cpus.is_empty() => (None, "the process may use no processor of NUMA node"),
            None => (None, "the system does not say which processors the process may use of NUMA node"),
            cpus => (cpus, ""),
        };
        let note = cpus.is_none().then(|| format!("threads ran on any node: {why_not} {id}"));
        Self { node: Some(id), cpus, note }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(of: &[&[usize]]) -> Vec<Node> {
        of.iter().zip(0..).map(|(cpus, id)| Node { id, cpus: cpus.to_vec() }).collect()
    }

    fn allowed(allowed: &[usize]) -> impl Fn(&[usize]) -> Option<Vec<usize>> {
        move |cpus| Some(cpus.iter().copied().filter(|cpu| allowed.contains(cpu)).collect())
    }

    #[test]
    fn threads_near_a_device_stay_on_what_the_process_may_use() {
        let two = nodes(&[&[0, 1, 4, 5], &[2, 3, 6, 7]]);
        let near = |node, cpus: &[usize]| Placement::near(node, &two, allowed(cpus), cpus.len());
        let all: Vec<usize> = (0..8).collect();
        let expected = Placement { node: Some(1), cpus: Some(vec![2, 3, 6, 7]), note: None };
        assert_eq!(near(1, &all), expected);
        assert_eq!(near(0, &[0, 1, 2]).cpus, Some(vec![0, 1]));
        let far = near(1, &[0, 1]);
        assert_eq!((far.node, &far.cpus), (Some(1), &None));
        assert!(far.note.unwrap().contains("no processor of NUMA node 1"));
        assert_eq!(near(7, &all), Placement::default(), "the system does not know the node");
    }

    #[test]
    fn threads_are_not_crowded_on_a_few_processors_near_a_device() {
        let two = nodes(&[&[0, 1, 4, 5], &[2, 3, 6, 7]]);
        let near = |cpus: &[usize]| Placement::near(1, &two, allowed(cpus), cpus.len());
        assert_eq!(near(&[0, 1, 2, 3]).cpus, Some(vec![2, 3]));
        for few in [&[0, 1, 4, 5, 2][..], &[0, 1, 2]] {
            let far = near(few);
            assert_eq!((far.node, &far.cpus), (Some(1), &None));
            assert!(far.note.unwrap().contains("may use 1 processor, fewer than half of"));
        }
    }

    #[test]
    fn threads_on_a_node_that_is_named_stay_on_what_the_process_may_use() {
        let node = Node { id: 3, cpus: vec![4, 5, 6] };
        let expected = Placement { node: Some(3), cpus: Some(vec![5]), note: None };
        assert_eq!(Placement::on_usable(&node, allowed(&[0, 1, 5])), expected);
        let (no_processors, memory_only) = (allowed(&[0]), Node { id: 3, cpus: Vec::new() });
        for far in [
            Placement::on_usable(&node, no_processors),
            Placement::on_usable(&memory_only, allowed(&[4])),
            Placement::on_usable(&node, |_| None),
        ] {
            assert_eq!((far.node, &far.cpus), (Some(3), &None));
            assert!(far.cores() > 0 && far.note.unwrap().contains("NUMA node 3"));
        }
    }

    #[test]
    fn a_machine_of_one_node_changes_nothing() {
        for nodes in [nodes(&[&[0, 1]]), Vec::new()] {
            assert_eq!(Placement::near(0, &nodes, allowed(&[0, 1]), 2), Placement::default());
        }
    }
}
