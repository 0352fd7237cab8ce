//! The common commits of a group before the last one: what each of its replicas was at each of them. So replicas that keep their past
//! can be brought back together.
//!
//! A log of intents, one a line. An intent is appended before the next one takes its place: a crash in between leaves it in both
//! places, never in none.

use std::io;

use device::Folder;

use crate::state::intent::Intent;

/// The file's name in the group's folder.
const NAME: &str = "past";
/// After how many more commits it is looked which of them can still be reached.
const LOOK_AFTER: usize = 64;
/// The longest log, in bytes.
const MOST: u64 = 256 << 20;

/// The log, as far as it was read.
#[derive(Debug, Default)]
pub(crate) struct PastCommits {
    /// In the order in which they were replaced.
    pub intents: Vec<Intent>,
    /// Where the next one goes: what was torn by a crash is overwritten.
    end: u64,
}

impl PastCommits {
    /// Reads the log in a group's folder.
    pub(crate) fn load(folder: &dyn Folder) -> io::Result<PastCommits> {
        let mut past = PastCommits::default();
        match folder.open(NAME, false) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            opened => {
                let file = opened?;
                let len = file.len()?;
                if len > MOST {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, "it is too large"));
                }
                let mut bytes = vec![0; len as usize];
                file.read_at(0, &mut bytes)?;
                for line in bytes.split_inclusive(|byte| *byte == b'\n') {
                    let Ok(intent) = serde_json::from_slice(line) else { break };
                    if !line.ends_with(b"\n") {
                        break;
                    }
                    past.intents.push(intent);
                    past.end += line.len() as u64;
                }
            }
        }
        Ok(past)
    }

    /// Appends an intent, durably, unless it is the last already.
    pub(crate) fn append(&mut self, folder: &dyn Folder, intent: &Intent) -> io::Result<()> {
        let same = |last: &Intent| (last.cut, &last.members) == (intent.cut, &intent.members);
        if self.intents.last().is_some_and(same) {
            return Ok(());
        }
        let line = line(intent)?;
        let file = folder.open(NAME, true)?;
        file.write_at(self.end, &line)?;
        file.set_len(self.end + line.len() as u64)?;
        file.sync()?;
        if self.end == 0 {
            folder.sync()?;
        }
        self.end += line.len() as u64;
        self.intents.push(intent.clone());
        Ok(())
    }

    /// True if it is time to look which of the commits can still be reached.
    pub(crate) fn is_long(&self) -> bool {
        !self.intents.is_empty() && self.intents.len() % LOOK_AFTER == 0
    }

    /// Forgets all intents but those that `keep` accepts.
    pub(crate) fn retain(&mut self, folder: &dyn Folder, keep: impl Fn(&Intent) -> bool) -> io::Result<()> {
        let intents: Vec<Intent> = self.intents.iter().filter(|intent| keep(intent)).cloned().collect();
        let lines = intents.iter().map(line).collect::<io::Result<Vec<_>>>()?.concat();
        device::replace(folder, NAME, &lines)?;
        *self = PastCommits { end: lines.len() as u64, intents };
        Ok(())
    }

    /// Forgets all intents.
    pub(crate) fn remove(&mut self, folder: &dyn Folder) -> io::Result<()> {
        if self.end > 0 {
            folder.remove(NAME)?;
            *self = PastCommits::default();
        }
        Ok(())
    }
}

fn line(intent: &Intent) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(intent)?;
    line.push(b'\n');
    Ok(line)
}

#[cfg(test)]
mod tests {
    use delta::Epoch;
    use uuid::Uuid;

    use super::*;

    fn intent(number: u64) -> Intent {
        let cut = Epoch { number, id: Uuid::from_u128(number.into()) };
        Intent { time: number, ..Intent::new("db", cut, Default::default()) }
    }

    #[test]
    fn what_a_crash_tears_is_overwritten() {
        let temp = testing::in_memory();
        let folder = device::Dir::open(temp.path()).unwrap();
        let mut past = PastCommits::load(&folder).unwrap();
        for number in [1, 2, 2, 3] {
            past.append(&folder, &intent(number)).unwrap();
        }
        let numbers = |past: &PastCommits| past.intents.iter().map(|i| i.cut.number).collect::<Vec<_>>();
        assert_eq!(numbers(&past), [1, 2, 3]);
        let path = temp.path().join(NAME);
        let bytes = std::fs::read(&path).unwrap();
        for cut in [1, 10, 40] {
            std::fs::write(&path, &bytes[..bytes.len() - cut]).unwrap();
            let mut past = PastCommits::load(&folder).unwrap();
            assert_eq!(numbers(&past), [1, 2], "{cut}");
            past.append(&folder, &intent(4)).unwrap();
            assert_eq!(numbers(&PastCommits::load(&folder).unwrap()), [1, 2, 4], "{cut}");
        }
        past.retain(&folder, |intent| intent.cut.number == 3).unwrap();
        past.append(&folder, &intent(5)).unwrap();
        assert_eq!(numbers(&PastCommits::load(&folder).unwrap()), [3, 5]);
        past.remove(&folder).unwrap();
        assert_eq!(numbers(&PastCommits::load(&folder).unwrap()), [0; 0]);
    }
}
