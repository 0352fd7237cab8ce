//! What the epochs of a source held, on all branches of it: by that it is judged whether a disk is what it says it is.

use std::collections::{BTreeSet, HashMap};

use uuid::Uuid;

use crate::machine::inode::PAGE;

/// Pages, by number.
pub(crate) type Pages = BTreeSet<u64>;

/// The pages in which two contents differ.
pub(crate) fn differing(one: &[u8], other: &[u8]) -> Pages {
    let pages = one.len().max(other.len()).div_ceil(PAGE);
    let page = |of: &[u8], at: usize| {
        of.get(at * PAGE..((at + 1) * PAGE).min(of.len())).unwrap_or_default().to_vec()
    };
    (0..pages).filter(|at| page(one, *at) != page(other, *at)).map(|at| at as u64).collect()
}

/// An epoch.
struct Known {
    /// What it held; `None` until that is known.
    content: Option<Vec<u8>>,
    /// The one before it.
    parent: Option<Uuid>,
    /// The pages that were written in it, at most.
    changed: Pages,
}

/// The epochs of a source.
#[derive(Default)]
pub(crate) struct Epochs {
    all: HashMap<Uuid, Known>,
    /// In the order in which they were learnt of: a parent comes first.
    order: Vec<Uuid>,
}

impl Epochs {
    pub(crate) fn knows(&self, id: Uuid) -> bool {
        self.all.contains_key(&id)
    }

    /// An epoch that came after `parent`, in which at most these pages were written.
    pub(crate) fn add(&mut self, id: Uuid, parent: Option<Uuid>, content: Option<Vec<u8>>, changed: Pages) {
        self.order.extend(Some(id).filter(|id| !self.knows(*id)));
        self.all.insert(id, Known { content, parent, changed });
    }

    /// Each epoch with the one before it, that one first.
    pub(crate) fn in_order(&self) -> impl Iterator<Item = (Uuid, Option<Uuid>)> {
        self.order.iter().filter_map(|id| Some((*id, self.all.get(id)?.parent)))
    }

    pub(crate) fn content(&self, id: Uuid) -> Option<&Vec<u8>> {
        self.all.get(&id)?.content.as_ref()
    }

    /// Says that an epoch holds a content, if that was not known. False if it holds another.
    pub(crate) fn bind(&mut self, id: Uuid, content: &[u8]) -> bool {
        let Some(known) = self.all.get_mut(&id) else { return true };
        known.content.get_or_insert_with(|| content.to_vec()) == content
    }

    /// An epoch and those before it, the last first.
    pub(crate) fn past(&self, id: Option<Uuid>) -> Vec<Uuid> {
        std::iter::successors(id, |id| self.all.get(id)?.parent).take(self.all.len() + 1).collect()
    }

    /// The pages that were written after `since`, up to an epoch that came of it; `None` if it did not.
    pub(crate) fn written(&self, since: Uuid, to: Option<Uuid>) -> Option<Pages> {
        let mut pages = Pages::new();
        for id in self.past(to) {
            if id == since {
                return Some(pages);
            }
            pages.extend(&self.all.get(&id)?.changed);
        }
        None
    }

    /// The last epoch that two have in their past.
    pub(crate) fn common(&self, one: Option<Uuid>, other: Option<Uuid>) -> Option<Uuid> {
        let past: BTreeSet<Uuid> = self.past(one).into_iter().collect();
        self.past(other).into_iter().find(|id| past.contains(id))
    }
}

/// Where a disk is among the epochs.
#[derive(Debug, Clone, Default)]
pub(crate) struct Place {
    /// The last epoch of a source, that of a replica's lineage.
    pub at: Option<Uuid>,
    /// The pages that were written since, at most.
    pub dirty: Pages,
}
