//! Keeping a rehearsal: what was written over a moment of a replica becomes a delta in a file, and that delta, if its user so decides, the
//! first thing that the replica has as a source.
//!
//! The delta is bound to the very state that the rehearsal began at, and is merged through the journal like any other. The step that
//! moves the lineage to it also makes the replica the source: so after a crash the replica is the one that it was, or the source with all
//! of it, and what was written is in its unsure set, which the source's first epoch takes over. What has arrived in the journal of such
//! a delta is nothing that another may go on from; once it is sealed, opening the replica completes it.

use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use delta::{Decoder, Encoder, Event, Header, Method, Unit, Units, Writer};
use device::{Buf, Disk};
use extents::Extents;

use crate::error::{ReplicaError, Result, io_error};
use crate::old::Old;
use crate::receive::Commit;
use crate::replica::Replica;
use crate::role::Promoted;
use crate::view::View;

impl View {
    /// Writes what these ranges of `disk` hold, which lies over this moment, as a delta that makes the replica the source
    /// ([`Replica::promote_with`]). Returns the bytes of the blocks that it names.
    ///
    /// # Errors
    /// If the disk cannot be read, or the delta cannot be written.
    pub fn save(&self, disk: Arc<dyn Disk>, written: &[Range<u64>], out: impl Write) -> io::Result<u64> {
        let shown = self.shown();
        // No finer than what clients write to, and no coarser: what they have not written is not read, as it may be lost by now.
        let block = u64::from(shown.block_size.clamp(512, 4096));
        let mut blocks = Extents::new();
        for range in written {
            blocks.insert(range.start / block * block..(range.end.div_ceil(block) * block).min(shown.size));
        }
        let sizes = (shown.size, shown.size);
        let header = Header::new(shown.source, Method::Tracked, vec![shown.epoch], sizes, shown.block_size);
        let header =
            Header { binds: Some(shown.state), fuzzy: shown.fuzzy, batch: true, rehearsed: true, ..header };
        let (mut encoder, unit) = Encoder::new(&header, None).map_err(io::Error::other)?;
        let mut writer = Writer::new(out);
        let mut put = |unit: &Unit| {
            writer.unit(unit).map_err(|error| match error {
                delta::Error::Write(error) => error,
                other => io::Error::other(other),
            })
        };
        put(&unit)?;
        Old::each(disk, blocks.iter(), |frame| put(&encoder.frame(frame).map_err(io::Error::other)?))?;
        put(&encoder.trailer())?;
        Ok(blocks.iter().map(|range| range.end - range.start).sum())
    }
}

/// What was written to a rehearsal, as [`View::save`] has saved it.
pub struct Rehearsed<R> {
    name: PathBuf,
    header: Header,
    first: Unit,
    rest: Units<R>,
}

impl Rehearsed<BufReader<File>> {
    /// Opens a file.
    ///
    /// # Errors
    /// Refused if it does not begin as such a delta.
    #[allow(clippy::disallowed_methods, reason = "named by the user, wherever it is")]
    pub fn open(path: &Path) -> Result<Rehearsed<BufReader<File>>> {
        let mut partial = path.as_os_str().to_owned();
        partial.push(".partial");
        let file = File::open(path).map_err(|error| match error.kind() {
            ErrorKind::NotFound if Path::new(&partial).exists() => ReplicaError::Refused(format!(
                "{0} is not there yet: the server of the rehearsal writes it when it ends ({0}.partial). Stop that server first, and run this again",
                path.display()
            )),
            _ => io_error("open", path)(error),
        })?;
        Rehearsed::read(path, BufReader::with_capacity(1 << 20, file))
    }
}

impl<R: Read> Rehearsed<R> {
    pub(crate) fn read(name: &Path, input: R) -> Result<Rehearsed<R>> {
        let other = || {
            ReplicaError::Refused(format!(
                "{} does not hold what was written to a rehearsal: pass a file that \"dsync serve REPLICA@now --writable --save FILE\" \
                 has written",
                name.display()
            ))
        };
        let mut rest = Units::new(input);
        let first = rest.next().ok().flatten().ok_or_else(other)?;
        let copy = Unit { kind: first.kind, head: first.head.clone(), body: Buf::default() };
        match Decoder::new().push(copy) {
            Ok(Event::Header(header)) if header.rehearsed => {
                Ok(Rehearsed { name: name.to_path_buf(), header, first, rest })
            }
            _ => Err(other()),
        }
    }
}

impl Replica {
    /// Fails unless the replica is at the state that the rehearsal began at. True if it is the source with what was written to that
    /// rehearsal already.
    ///
    /// # Errors
    /// Refused, with the way to get there if that state was kept.
    pub fn fits_rehearsal<R>(&self, rehearsed: &Rehearsed<R>) -> Result<bool> {
        let lineage = self.lineage();
        let (path, file, header) = (self.path().display(), rehearsed.name.display(), &rehearsed.header);
        if lineage.role.promoted.is_some() {
            return match lineage.committed == Some(header.stream) {
                true => Ok(true),
                false => Err(ReplicaError::Refused(format!(
                    "{path} was promoted already, without what {file} holds: \"dsync promote {path}\" completes that promotion if it \
                     was interrupted"
                ))),
            };
        }
        if lineage.source != Some(header.source) {
            return Err(ReplicaError::Refused(format!(
                "{file} is of a rehearsal of another source, {}: {path} follows {}",
                header.source,
                lineage.source.unwrap_or_default()
            )));
        }
        self.showable()?;
        let epoch = header.to().map_or(0, |epoch| epoch.number);
        let Some(binds) = header.binds.filter(|binds| *binds != self.nonce()) else { return Ok(false) };
        let moments = self.history()?.moments;
        Err(match moments.iter().find(|moment| moment.state == binds) {
            Some(moment) => ReplicaError::Refused(format!(
                "{path} has moved on since the rehearsal, which was of epoch {epoch} ({}). \"dsync rewind {path} --to {epoch}\" brings \
                 it back there and gives up what came after; stop its mirror and its syncs first, and run this again",
                device::moment(moment.at)
            )),
            None => ReplicaError::Refused(format!(
                "{path} has moved on since the rehearsal, and the moment of that is not kept: what {file} holds cannot be promoted any \
                 more. Rehearse at a moment that --keep has kept ({path}@EPOCH), or stop its mirror and its syncs first"
            )),
        })
    }

    /// Takes over what was written to a rehearsal of the state that the replica is at, and makes it the source, in one step: durable on
    /// return. Whoever reads it loses.
    ///
    /// # Errors
    /// As for [`Replica::fits_rehearsal`] and [`crate::DeltaReceiver::finish`]. Then it is the replica that it was, unless the delta was
    /// whole and durable already: then opening it completes the promotion.
    pub fn promote_with<R: Read>(&mut self, rehearsed: Rehearsed<R>) -> Result<Promoted> {
        if !self.fits_rehearsal(&rehearsed)? {
            self.set_promotes(true);
            let taken = self.take_rehearsal(rehearsed);
            self.set_promotes(false);
            taken?;
        }
        // It is that by now.
        self.promote()
    }

    fn take_rehearsal<R: Read>(&mut self, rehearsed: Rehearsed<R>) -> Result<()> {
        let Rehearsed { name, first, mut rest, .. } = rehearsed;
        let wrong = |error: delta::Error| {
            ReplicaError::Refused(format!(
                "{} is damaged ({error}), and cannot be promoted: the replica is unchanged",
                name.display()
            ))
        };
        let mut receiver = self.receive(first, Commit::Journal)?;
        loop {
            match rest.next().map_err(wrong) {
                Ok(Some(unit)) => {
                    if let Err(error) = receiver.unit(unit) {
                        receiver.give_up();
                        return Err(error);
                    }
                }
                Ok(None) if receiver.is_whole() => return receiver.finish().map(drop),
                end => {
                    receiver.give_up();
                    return end.and_then(|_| Err(wrong(delta::Error::NoTrailer { units: rest.count() })));
                }
            }
        }
    }
}
