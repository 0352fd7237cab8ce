//! The demotion of a group of block devices. What another program writes to one meanwhile shows in the kernel's count alone: it is not given
//! up with a word that there was nothing.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use link::Link;
use source::{GroupHandle, Source, SourceGroup, SourceOptions, StateDir};
use sync::{DemoteOptions, GroupSummary, Summary, SyncError, SyncOptions};
use testing::{Loop, need, need_root, skipped};

const MIB: u64 = 1 << 20;

/// A host with two devices, which are a group at rest, and the folder of their replicas.
struct Host {
    folder: tempfile::TempDir,
    state: StateDir,
    devices: [Loop; 2],
}

impl Host {
    fn new(what: &str) -> Option<Host> {
        if !need_root(what) || !need(&["losetup"], what) {
            return None;
        }
        let folder = testing::temporary();
        let image = |name: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, vec![7; 4 * MIB as usize]).unwrap();
            Loop::new(&path)
        };
        let (Some(data), Some(log)) = (image("data"), image("log")) else {
            skipped(what, "there is no loop device");
            return None;
        };
        let state = StateDir::find(Some(&folder.path().join("state")));
        std::fs::create_dir(folder.path().join("replicas")).unwrap();
        let host = Host { folder, state, devices: [data, log] };
        let open = |device: &Loop| {
            Arc::new(Source::open(&host.state, device.device(), &SourceOptions::default()).unwrap())
        };
        let sources: Vec<_> = host.devices.iter().map(open).collect();
        let named = host.devices.iter().map(|device| device.device().to_path_buf());
        drop(SourceGroup::new(&host.state, "db", named.zip(sources.iter().cloned()).collect()).unwrap());
        sources.into_iter().for_each(|source| Arc::into_inner(source).unwrap().close().unwrap());
        Some(host)
    }

    fn dir(&self) -> PathBuf {
        self.folder.path().join("replicas")
    }

    fn sync(&self, group: &GroupHandle) -> Result<(GroupSummary, Vec<Summary>), SyncError> {
        let (near, far) = Link::pair();
        std::thread::scope(|scope| {
            let received = scope.spawn(|| sync::receive(far, &self.state));
            let pushed =
                sync::push_group(group, near, (&self.dir(), "replicas"), &SyncOptions::default(), &|_, _| {});
            received.join().unwrap()?;
            pushed
        })
    }

    /// Demotes the group after a last sync, and `meanwhile`. True if the replicas may be told that there was no more.
    fn demote(&self, meanwhile: &dyn Fn()) -> Result<bool, SyncError> {
        let mut last_sync = |group: &GroupHandle| {
            let synced = self.sync(group);
            meanwhile();
            synced
        };
        let demoted = sync::demote_group(
            &self.state,
            "db",
            &DemoteOptions::default(),
            Some(&mut last_sync),
            &mut |_| Ok(()),
            &|_, _| {},
        )?;
        Ok(demoted.iter().all(|summary| summary.released.is_some()))
    }

    fn are_equal(&self) -> bool {
        self.devices.iter().all(|device| {
            let replica = self.dir().join(device.device().file_name().unwrap());
            std::fs::read(device.device()).unwrap() == std::fs::read(replica).unwrap()
        })
    }
}

fn write(device: &Path, at: u64) {
    let file = File::options().write(true).open(device).unwrap();
    file.write_all_at(&[9; 4096], at).unwrap();
    file.sync_all().unwrap();
}

#[test]
fn a_write_after_the_last_sync_is_not_given_up() {
    let Some(host) = Host::new("a write to a device while its group is demoted") else { return };
    for device in &host.devices {
        let refused = host.demote(&|| write(device.device(), MIB)).unwrap_err().to_string();
        let path = device.device().display();
        assert!(refused.starts_with(&format!("{path} was written to while it was demoted")), "{refused}");
        assert_eq!(host.state.survey().unwrap().sources.len(), 2, "they are the sources that they were");
        write(device.device(), 2 * MIB);
    }
    assert!(host.demote(&|| ()).unwrap(), "nothing was written any more");
    assert!(host.are_equal());
    assert_eq!(host.state.survey().unwrap().sources.len(), 0);
}
