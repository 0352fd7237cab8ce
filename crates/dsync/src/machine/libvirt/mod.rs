//! Machines of libvirt, which is asked by its own client.
//!
//! *A job is ours by its socket*, which is in the folder of this QEMU: one that a killed run left is ended by the next, and that of another program is
//! never touched.

mod bitmaps;
pub(super) mod child;
pub(super) mod virsh;
pub(super) mod xml;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Instant, UNIX_EPOCH};

use roxmltree::Document;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde_json::json;
use uuid::Uuid;

use super::definition::Definition;
use super::domain::{Domain, Image};
use super::hypervisor::{Backup, Hypervisor, Which, closes_safely};
use super::part::{Basis, ENDS_WITHIN, LOOK_EVERY, OURS, Part};
use crate::failure::Failure;
use virsh::{Virsh, quoted, quoted_path};

/// Bytes at the beginning of an image, which say of which version it is.
const HEAD: usize = 8;

/// A machine of libvirt.
pub(super) struct Libvirt {
    virsh: Virsh,
    /// As its user calls it.
    name: String,
    /// A disk of it may have bitmaps that its QEMU alone knows of. What is asked of that, libvirt notes in the log of the domain.
    has_bitmaps: bool,
}

/// The backup job of a machine of libvirt.
struct LibvirtJob {
    machine: String,
    virsh: Virsh,
    socket: PathBuf,
    /// Where QEMU keeps what is overwritten meanwhile: a path to which `TARGET.scratch` is added.
    scratch: String,
}

/// The machine of this name.
///
/// # Errors
/// If there is none, and if libvirt cannot be asked.
pub(super) fn find(name: &str) -> Result<(Libvirt, Domain), Failure> {
    let domain = xml::domain(&virsh::look_up(name)?)?;
    if domain.name != name {
        return Err(Failure::usage(format!(
            "{name} is the number or the UUID of the VM {0}: name it vm:{0}",
            domain.name
        )));
    }
    Ok((Libvirt::of(&domain), domain))
}

/// The machine whose definition was carried, or has this name; `None` if libvirt has it no more.
///
/// # Errors
/// If libvirt cannot be asked.
pub(super) fn seek(carried: Option<&str>, name: &str) -> Result<Option<(Libvirt, Domain)>, Failure> {
    let uuid = carried.and_then(|text| Some(xml::domain(text.trim_end()).ok()?.uuid));
    let Some(text) = virsh::seek(uuid.as_deref().unwrap_or(name))? else { return Ok(None) };
    let domain = xml::domain(&text)?;
    Ok(Some((Libvirt::of(&domain), domain)))
}

impl Libvirt {
    fn of(domain: &Domain) -> Libvirt {
        let may_have = |(_, image): (_, &Image)| !image.is_qcow2 || !image.beneath.is_empty();
        let has_bitmaps = domain.followed().any(may_have);
        Libvirt { virsh: Virsh::of(&domain.uuid), name: domain.name.clone(), has_bitmaps }
    }

    /// The names of the bitmaps of which libvirt does not know.
    fn bitmaps(&self) -> Result<BTreeSet<String>, Failure> {
        if self.has_bitmaps { bitmaps::names(&self.virsh) } else { Ok(BTreeSet::new()) }
    }
}

impl Hypervisor for Libvirt {
    fn look(&self) -> Result<Domain, Failure> {
        xml::domain(&self.virsh.text()?)
    }

    fn definition(&self) -> Result<Definition, Failure> {
        self.virsh.definition().map(Definition::Libvirt)
    }

    fn stopped(&self) -> Result<Option<(String, String)>, Failure> {
        let condition = self.virsh.condition()?;
        let way = format!("run \"virsh resume {}\"", self.name);
        Ok(condition.contains("I/O error").then_some((condition, way)))
    }

    fn checkpoints(&self) -> Result<Vec<String>, Failure> {
        let mut names = self.bitmaps()?;
        names.extend(self.virsh.checkpoints()?);
        Ok(names.into_iter().collect())
    }

    fn created(&self, checkpoint: &str) -> Result<Option<String>, Failure> {
        // Of bitmaps alone, none of this name was there before: they end with the QEMU.
        let of_bitmap = || Ok(self.bitmaps()?.take(checkpoint));
        self.virsh.created(checkpoint)?.map_or_else(of_bitmap, |created| Ok(Some(created)))
    }

    fn delete_checkpoint(&self, name: &str) -> Result<Result<(), String>, Failure> {
        if let Err(why) = self.virsh.delete_checkpoint(name)? {
            return Ok(Err(why));
        }
        if self.has_bitmaps { bitmaps::remove(&self.virsh, name) } else { Ok(Ok(())) }
    }

    fn deletion(&self, name: &str) -> String {
        let virsh = format!("\"virsh checkpoint-delete {} {name}\"", self.name);
        if self.has_bitmaps {
            format!("{virsh}, and \"block-dirty-bitmap-remove\" of a raw disk,")
        } else {
            virsh
        }
    }

    fn cannot_follow(&self, image: &Image) -> Option<&'static str> {
        if !image.beneath.is_empty() {
            return Some("its image has another beneath, as after a snapshot");
        }
        if !image.is_qcow2 {
            let unnumbered = "a raw image, and this libvirt is older than 6.0, which numbers them";
            return image.index.is_none().then_some(unnumbered);
        }
        let mut head = [0; HEAD];
        let read = File::open(&image.path).and_then(|mut file| file.read_exact(&mut head));
        match (read, head) {
            (Ok(()), [b'Q', b'F', b'I', 0xfb, 0, 0, 0, 2]) => {
                Some("a qcow2 image of version 2, which has no bitmaps")
            }
            _ => None,
        }
    }

    fn qemu(&self, domain: &Domain) -> Option<String> {
        // Its folder is made as it starts. Some file systems do not tell when that was.
        let folder = folder(domain).ok()?.metadata().ok()?;
        let made = folder.created().ok()?.duration_since(UNIX_EPOCH).ok()?;
        Some(format!("{}-{}", folder.ino(), made.as_nanos()))
    }

    fn endangered(&self) -> Result<Vec<String>, Failure> {
        let threads = xml::with_io_thread(&self.virsh.text()?);
        let is_safe = threads.is_empty()
            || self.virsh.monitor("query-version", json!({}))?.is_ok_and(|version| closes_safely(&version));
        Ok(if is_safe { Vec::new() } else { threads })
    }

    fn backup(&self, domain: &Domain, scratch: Option<&Path>) -> Result<Box<dyn Backup>, Failure> {
        let folder = folder(domain)?;
        let scratch = match scratch {
            Some(folder) => folder.join(format!("dsync-{}-", domain.uuid)),
            None => folder.join("dsync-"),
        };
        Ok(Box::new(LibvirtJob {
            machine: domain.name.clone(),
            virsh: Virsh::of(&domain.uuid),
            socket: folder.join(format!("{OURS}{:08x}.sock", Uuid::new_v4().as_fields().0)),
            scratch: scratch.to_string_lossy().into_owned(),
        }))
    }

    fn rests(&self) -> Option<String> {
        None
    }

    fn list(&self) -> String {
        format!("\"virsh domblklist {}\"", self.name)
    }

    fn merge(&self) -> &'static str {
        "\"virsh blockcommit\""
    }
}

impl Backup for LibvirtJob {
    fn is_left(&self) -> Result<bool, Failure> {
        match self.virsh.job()?.map(|job| socket_of(&job)) {
            Some(socket) if !socket.as_deref().is_some_and(|socket| self.is_ours(socket)) => {
                let whose = socket.map_or_else(String::new, |socket| format!(" (at {})", socket.display()));
                Err(Failure::busy(format!(
                    "another backup job of {} is running{whose}: wait for it, as --wait does, or end it with \"virsh domjobabort {0}\"",
                    self.machine
                )))
            }
            job => Ok(job.is_some()),
        }
    }

    fn begin(&self, parts: &[Part], checkpoint: &str) -> Result<Result<(), String>, Failure> {
        let held = self.hold_begin()?;
        // Until the job shows all that it is to show.
        let _kept = held.try_clone();
        let held_too = held.try_clone().map_or_else(|_| Stdio::null(), Stdio::from);
        let followed = bitmaps::begin(&self.virsh, parts, checkpoint, held_too)?;
        let text = parts.iter().any(has_checkpoint).then(|| checkpoint_text(parts, checkpoint));
        let begun = match self.virsh.begin(&self.text(parts), text.as_deref(), held)? {
            Ok(_) => bitmaps::show(&self.virsh, parts, |part| self.scratch(part))?,
            Err(why) => Err(why),
        };
        if begun.is_err() {
            // It may be begun anew by this name.
            self.end(Which::Own)?;
            if text.is_some() {
                let _ = self.virsh.delete_checkpoint(checkpoint)?;
            }
        }
        // One that was refused, and comes all the same, may have begun after the moment: where there is none, the next sync compares.
        if (followed.is_err() || begun.is_err()) && parts.iter().any(bitmaps::is_meant) {
            let _ = bitmaps::remove(&self.virsh, checkpoint)?;
        }
        Ok(begun)
    }

    fn end(&self, which: Which) -> Result<(), Failure> {
        let began = Instant::now();
        while let Some(job) = self.virsh.job()? {
            let is_meant = |socket: PathBuf| match which {
                Which::Own => socket == self.socket,
                Which::Ours => self.is_ours(&socket),
            };
            if !socket_of(&job).is_some_and(is_meant) {
                return Ok(());
            }
            if began.elapsed() > ENDS_WITHIN {
                return Err(Failure::failed(format!(
                    "the backup job of {} does not end: \"virsh domjobinfo {0}\" shows it, and \"virsh domjobabort {0}\" ends it",
                    self.machine
                )));
            }
            // It takes a moment, in which another request is refused.
            let _ = self.virsh.abort()?;
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    fn is_on(&self) -> Result<bool, Failure> {
        let job = self.virsh.job()?;
        Ok(job.and_then(|text| socket_of(&text)).as_deref() == Some(&*self.socket))
    }

    fn socket(&self) -> PathBuf {
        self.socket.clone()
    }

    fn export(&self, part: &Part) -> String {
        bitmaps::export(part).unwrap_or_else(|| part.target.clone())
    }

    fn settle(&self) -> Result<(), Failure> {
        self.hold_begin().map(drop)
    }
}

impl LibvirtJob {
    /// True if a job at this socket is ours, of this run or another.
    fn is_ours(&self, socket: &Path) -> bool {
        let is_named = socket.file_name().is_some_and(|name| name.to_string_lossy().starts_with(OURS));
        is_named && socket.parent() == self.socket.parent()
    }

    /// Holds the right to ask for a job. Of a run that was killed its virsh has it, until what that has asked for was carried out or refused: beside a
    /// second request libvirt would have one wait half a minute, and begin it thereafter.
    fn hold_begin(&self) -> Result<File, Failure> {
        let folder = self.socket.parent().unwrap_or(Path::new("/"));
        let failed = |error: io::Error| Failure::failed(format!("cannot lock {}: {error}", folder.display()));
        let (held, began) = (File::open(folder).map_err(failed)?, Instant::now());
        loop {
            match flock(&held, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(held),
                Err(Errno::WOULDBLOCK) if began.elapsed() < ENDS_WITHIN => std::thread::sleep(LOOK_EVERY),
                Err(Errno::WOULDBLOCK) => {
                    return Err(Failure::busy(format!(
                        "a backup job of {} that a killed run has asked for does not begin: end its \"virsh backup-begin\", and run this again",
                        self.machine
                    )));
                }
                Err(error) => return Err(failed(error.into())),
            }
        }
    }

    /// Where QEMU keeps what is overwritten of a disk.
    fn scratch(&self, part: &Part) -> String {
        format!("{}{}.scratch", self.scratch, part.target)
    }

    /// The job, as libvirt reads it.
    fn text(&self, parts: &[Part]) -> String {
        let disks = parts.iter().map(|part| {
            let mode = match &part.since {
                Ok(Basis::Checkpoint(since)) if !bitmaps::is_meant(part) => {
                    format!("backupmode='incremental' incremental='{}'", quoted(since))
                }
                _ => "backupmode='full'".to_owned(),
            };
            let scratch = quoted(&self.scratch(part));
            format!("<disk name='{}' type='file' {mode}><scratch file='{scratch}'/></disk>", part.target)
        });
        format!(
            "<domainbackup mode='pull'><server transport='unix' socket='{}'/><disks>{}</disks></domainbackup>",
            quoted_path(&self.socket),
            disks.collect::<String>()
        )
    }
}

/// The folder to which QEMU may write, and which libvirt removes when QEMU has ended.
fn folder(domain: &Domain) -> Result<PathBuf, Failure> {
    // libvirt's own rule for the names of its folders.
    let short: String = domain.name.chars().take(20).collect();
    let name = format!("domain-{}-{short}", domain.id.as_deref().unwrap_or_default());
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let own = variable("XDG_CONFIG_HOME").or_else(|| Some(variable("HOME")?.join(".config")));
    let places = [Some("/var/lib/libvirt/qemu".into()), own.map(|own| own.join("libvirt/qemu/lib"))];
    let places: Vec<PathBuf> = places.into_iter().flatten().map(|place| place.join(&name)).collect();
    let found = places.iter().find(|place| place.is_dir()).cloned();
    found.ok_or_else(|| {
        let shown: Vec<_> = places.iter().map(|place| place.display().to_string()).collect();
        Failure::failed(format!(
            "the folder of the QEMU of {} is not here ({}): run this on the host of the VM, as the user of its libvirt",
            domain.name,
            shown.join(", ")
        ))
    })
}

/// The socket in the text of a backup job.
fn socket_of(job: &str) -> Option<PathBuf> {
    let document = Document::parse(job).ok()?;
    let server = document.root_element().children().find(|node| node.has_tag_name("server"))?;
    server.attribute("socket").map(PathBuf::from)
}

/// True if libvirt keeps a checkpoint of a disk.
fn has_checkpoint(part: &Part) -> bool {
    part.is_listed && !bitmaps::is_meant(part)
}

fn checkpoint_text(parts: &[Part], name: &str) -> String {
    let disks = parts.iter().map(|part| {
        let kind = if has_checkpoint(part) { "bitmap" } else { "no" };
        format!("<disk name='{}' checkpoint='{kind}'/>", part.target)
    });
    format!(
        "<domaincheckpoint><name>{}</name><disks>{}</disks></domaincheckpoint>",
        quoted(name),
        disks.collect::<String>()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_socket_of_a_job_is_read_whatever_is_in_its_name() {
        let socket = Path::new("/run/a & 'b'/x.sock");
        let job = format!(
            "<domainbackup><server transport='unix' socket='{}'/></domainbackup>",
            quoted_path(socket)
        );
        assert_eq!(socket_of(&job).as_deref(), Some(socket));
        assert_eq!(socket_of("<domainbackup><server transport='tcp' name='::1'/></domainbackup>"), None);
    }
}
