//! Tensor names as a tree, numbered neighbours that are alike folded into one line.

use crate::output;
use bytesize::ByteSize;
use hoistway::{catalog::TensorEntry, counted};
use std::{collections::BTreeMap, fmt::Write};

/// Parts that a name is split into, at most; a name may be nothing but dots.
const MAX_DEPTH: usize = 32;

/// A part of the names: what lies below it, and the tensor that ends here, if one does.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Tree {
    children: BTreeMap<Key, Tree>,
    tensor: Option<String>,
    tensors: usize,
    bytes: u64,
}

/// One part of a name. Numbers come first, in their own order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Number(u64),
    Name(String),
}

impl Key {
    fn new(part: &str) -> Self {
        match part.parse::<u64>() {
            // `007` is a name: the number would not give it back.
            Ok(number) if number.to_string() == part => Self::Number(number),
            _ => Self::Name(part.to_owned()),
        }
    }

    fn text(&self) -> String {
        match self {
            Self::Number(number) => number.to_string(),
            Self::Name(name) => output::printable(name).into_owned(),
        }
    }
}

impl Tree {
    pub(crate) fn insert(&mut self, tensor: &TensorEntry) {
        let mut node = self;
        for part in tensor.name.splitn(MAX_DEPTH, '.') {
            node.tensors += 1;
            node.bytes += tensor.bytes.len();
            node = node.children.entry(Key::new(part)).or_default();
        }
        node.tensors += 1;
        node.bytes += tensor.bytes.len();
        node.tensor = Some(format!("{} {:?}", tensor.dtype, tensor.shape));
    }

    /// Writes everything below. Folds neighbours that are alike, unless `all` are wanted.
    pub(crate) fn write(&self, text: &mut String, all: bool) {
        self.write_children(text, 0, all);
    }

    fn write_children(&self, text: &mut String, depth: usize, all: bool) {
        let mut children = self.children.iter().peekable();
        while let Some((first, child)) = children.next() {
            let mut last = first;
            let mut alike = 1;
            while !all
                && let (Key::Number(number), Some((next @ Key::Number(following), sibling))) =
                    (last, children.peek())
                && *following == number + 1
                && *sibling == child
            {
                last = next;
                alike += 1;
                children.next();
            }
            let mut name =
                if alike == 1 { first.text() } else { format!("{}..{}", first.text(), last.text()) };
            let mut node = child;
            // What has only one thing below it shares a line with that.
            while node.tensor.is_none()
                && node.children.len() == 1
                && let Some((key, only)) = node.children.first_key_value()
            {
                name = format!("{name}.{}", key.text());
                node = only;
            }
            node.write_line(text, depth, name, alike);
            node.write_children(text, depth + 1, all);
        }
    }

    fn write_line(&self, text: &mut String, depth: usize, name: String, alike: usize) {
        let indented = format!("{:indent$}{name}", "", indent = depth * 2);
        let what = match (&self.tensor, self.tensors) {
            (Some(tensor), 1) => tensor.clone(),
            // A tensor whose name begins those of others: `weight` beside `weight.absmax`.
            (Some(tensor), tensors) => format!("{tensor}, and {} more below it", tensors - 1),
            (None, tensors) => counted(tensors, "tensor", "tensors"),
        };
        let each = if alike > 1 { " each" } else { "" };
        let size = ByteSize(self.bytes).to_string();
        let _ = writeln!(text, "{indented:<48} {size:>10}{each}  {what}");
    }
}
