//! What a commit adds to the trail: the record of the source's changes that a replica begins its history with when it is promoted
//! (`source/src/record/history/trail.rs`). So another replica of the same source goes on from it without a comparison.
//!
//! **The entry of a commit from epoch F to epoch T** says: what differs between the two lies in these blocks. They are all that the delta
//! names (with the parts of it that were received before and resumed, as the journal has them), the unsure set before, the unsure set after,
//! and all beyond the smallest size of the disk on the way. A tracked delta names all that its source has recorded after the epoch at
//! which it was told that the replica is, but for two cases, in which the replica was not wholly at F:
//!
//! - Batches of a mirror had brought it further. All that they wrote is in the unsure set before.
//! - It is a former source, and the delta begins at a later epoch of its own. All that it wrote after F is in the unsure set before.
//!
//! The delta's chain names the epochs of the source between F and T. What was recorded after one of them was recorded after F, so
//! the same blocks hold for a replica that stands there.
//!
//! **Everything else is a gap**, written down as one: the entry says only that the replica came to T, and which epochs its source had before.
//!
//! - What was found by comparing, or copied, names what differed from *this* replica's disk, which another program may have changed, or a
//!   live copy brought ahead, before.
//! - An interrupted commit that wrote to the destination, or to a clone, and is resumed: the first part of what it wrote is gone.
//! - A replica whose parts are of different moments (a live copy without a freeze), before or after, has blocks that are ahead of its
//!   epoch, and nothing says which.
//!
//! Nothing at all is written for a commit that stays at its epoch (a repair, a batch: what they leave open is in the unsure set), or that
//! goes back: the entries up to there are as true as they were. An entry that cannot be written is a gap as well, and no
//! reason for a commit to fail.

use std::io;

use delta::{Epoch, Frame, Header, Method, Record};
use device::Folder;
use extents::Bitmap;
use source::{TrailStep, note_step};

use crate::journal::Target;
use crate::journal::unsure::UnsureSet;
use crate::state::lineage::{Lineage, State, Toward, Unsure};

/// The fewest bytes that a bit of an entry covers.
const LEAST_BLOCK: u32 = 4096;

/// What the commit under way adds to the trail.
pub(crate) struct Footprint {
    /// The epoch before, and the bytes of the disk then.
    from: Option<(Epoch, u64)>,
    /// The replica was brought to the epoch before as a whole.
    whole: bool,
    through: Vec<Epoch>,
    set: UnsureSet,
    /// The smallest size on the way.
    least: u64,
    lost: Option<&'static str>,
    fuzzy: bool,
}

impl Footprint {
    /// Nothing yet, of a replica of this lineage with this unsure set.
    pub(crate) fn new(lineage: &Lineage, unsure: UnsureSet) -> Footprint {
        let whole = lineage.step.is_none() && lineage.unsure != Unsure::Everything;
        Footprint {
            from: lineage.epoch.map(|epoch| (epoch, lineage.size)),
            whole: whole && lineage.state != State::Fuzzy,
            through: Vec::new(),
            set: unsure,
            least: lineage.size,
            lost: None,
            fuzzy: false,
        }
    }

    /// A part of what leads to the next epoch was written before, and which blocks those are is not known.
    pub(crate) fn is_late(&mut self) {
        self.whole = false;
    }

    /// A delta with this header comes, or the next part of one.
    pub(crate) fn header(&mut self, header: &Header) {
        self.set.reach(header.size_after.max(self.least), header.block_size.into());
        let before = if header.binds.is_none() { header.size_before } else { u64::MAX };
        self.least = self.least.min(header.size_after).min(before);
        self.through.clone_from(&header.chain);
        self.fuzzy = header.fuzzy;
        let why = match () {
            () if header.method != Method::Tracked => {
                "a replica was compared or copied, and others had not been"
            }
            () if header.fuzzy => "it was copied from a disk in use without a freeze",
            () => return,
        };
        self.lost = Some(why);
    }

    /// The delta is a seed: its source had these epochs before.
    pub(crate) fn begins_after(&mut self, before: &[Epoch]) {
        self.through = before.to_vec();
    }

    /// Takes a frame's records.
    pub(crate) fn records(&mut self, records: &[Record]) {
        records.iter().for_each(|record| self.set.insert(record.offset()..record.end()));
    }

    /// The epoch is reached, with the unsure set that is left: notes that, and goes on from there.
    pub(crate) fn reach(&mut self, folder: &dyn Folder, toward: &Toward, unsure: &UnsureSet) {
        let Toward { epoch: to, size, batch, .. } = *toward;
        let before = self.from.replace((to, size));
        let forth = before.is_none_or(|(from, _)| from.number < to.number);
        if before.is_some_and(|(from, _)| from == to) || !forth || batch {
            // What has come so far counts for the next epoch as well.
            self.set.join(unsure);
            return;
        }
        let block_size = u32::try_from(self.set.unit()).unwrap_or(LEAST_BLOCK).max(LEAST_BLOCK);
        let fine = u64::from(block_size) >= self.set.unit();
        let changes = Bitmap::new(size.div_ceil(block_size.into()));
        let lost = match () {
            () if !self.whole => Some("a commit was interrupted, or its beginning was of different moments"),
            () if !fine => Some("the disk is too large"),
            () => self.lost,
        };
        if lost.is_none() {
            self.set.mark(&changes, block_size.into());
            unsure.mark(&changes, block_size.into());
            if self.least < size {
                changes.set(self.least / u64::from(block_size)..changes.blocks());
            }
        }
        let same = before.is_some_and(|(_, before)| before == size) && self.least == size;
        // What leads from one of them to a disk of another size is not told.
        let through = if same || lost.is_some() { &self.through[..] } else { &[] };
        let changes = lost.map_or(Ok(&changes), Err);
        let step = TrailStep { from: before, through, to, size, block_size, changes };
        // Without it there is a gap in the trail.
        let _ = note_step(folder, &step);
        (self.set, self.least, self.lost, self.whole) = (unsure.clone(), size, None, !self.fuzzy);
        self.through.clear();
    }
}

/// Brings a journal to a target, and notes what it names.
pub(crate) struct Noting<'a> {
    pub target: &'a mut dyn Target,
    pub footprint: &'a mut Footprint,
}

impl Target for Noting<'_> {
    fn rewind(&mut self, header: &Header, known: u64) -> io::Result<()> {
        self.footprint.header(header);
        self.target.rewind(header, known)
    }

    fn frame(&mut self, frame: Frame) -> io::Result<()> {
        self.footprint.records(&frame.records);
        self.target.frame(frame)
    }
}
