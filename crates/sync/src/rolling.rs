//! Finding what has moved: the far side tells the sums of its blocks, and what it can copy is sent as copies.

use std::io;
use std::sync::Arc;

use compare::rolling::{InPlace, Index, Shape, Told, changes};
use delta::Header;
use device::Disk;
use link::{Receiver, Sender};
use source::View;
use uuid::Uuid;

use crate::compared::Sending;
use crate::error::SyncError;
use crate::messages::{PLAN, Plan, SUMS, expect};
use crate::push::{Packing, Progress, Totals};

/// So much of a replica is looked at, however small the source is.
const LEAST_ASKED: u64 = 1 << 30;

/// A key that nobody can foresee.
fn key() -> [u8; 32] {
    let mut key = [0; 32];
    key[..16].copy_from_slice(Uuid::new_v4().as_bytes());
    key[16..].copy_from_slice(Uuid::new_v4().as_bytes());
    key
}

/// Sends what makes the replica equal to the view as a delta that copies what the replica has elsewhere.
#[allow(clippy::too_many_arguments)]
pub(crate) fn send_moved(
    sender: &Sender,
    receiver: &Receiver,
    view: &Arc<View>,
    header: &Header,
    in_place: Option<InPlace>,
    keep_going: bool,
    how: Packing,
    totals: &Totals,
    progress: Progress<'_>,
) -> Result<(), SyncError> {
    let reading = || SyncError::io("read the source");
    // Of a replica that is said to be far larger than its source, not all is worth the memory.
    let before = header.size_before.min(view.len().saturating_mul(2).max(LEAST_ASKED));
    let shape = Shape { keep_going, ..Shape::new(view.len().max(before), key()) };
    let all = shape.size + view.len();
    sender.send_json(PLAN, &Plan { rolling: Some(shape.clone()), delta: true, ..Plan::default() })?;
    let mut index = Index::new(shape.clone(), before).map_err(reading())?;
    while !index.is_whole() {
        let message = expect(receiver, SUMS)?;
        let told = message.json::<Told>()?;
        index.hear(&told, &message.body).map_err(SyncError::io("use the replica's sums"))?;
        progress(index.heard(), all);
    }
    index.unreadable().iter().for_each(|range| totals.unreadable_there(range));
    index.finish();
    let mut sending = Sending::begin(sender, header, how, totals)?;
    // Errors of the link keep their words.
    let mut trouble = None;
    let disk: Arc<dyn Disk> = view.clone();
    let found = |change| {
        sending.change(change).map_err(|error| {
            trouble = Some(error);
            io::Error::other("the far side stopped")
        })
    };
    let taken = |upto| {
        view.taken(upto);
        progress(shape.size + upto, all);
    };
    let read = match changes(&disk, &index, in_place, found, taken) {
        Ok(read) => read,
        Err(error) => return Err(trouble.unwrap_or_else(|| reading()(error))),
    };
    totals.read.fetch_add(read, std::sync::atomic::Ordering::Relaxed);
    // The last moment to notice that what was read was no one moment.
    view.verify().map_err(reading())?;
    sending.end()
}
