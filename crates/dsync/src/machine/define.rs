//! The definition that came with the disks of a machine, as its replicas need it: with their paths in the place of those of the disks.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use roxmltree::{Document, Node};

use super::carry;
use super::definition::DISKS;
use super::libvirt::virsh::{quoted, quoted_path};
use super::libvirt::xml::{self, child, children};
use crate::failure::Failure;
use crate::output::Output;
use crate::terms::shell_word;

/// The user and the group as which libvirt runs an emulated TPM.
const SWTPM: &str = "tss";

/// Writes the definition that came with the replicas in a folder, which have these names, to a file, with their paths in it.
///
/// # Errors
/// If there is none, and if the file cannot be written.
pub(crate) fn define(dir: &Path, files: &[String], to: &Path, output: &Output) -> Result<()> {
    let mut carried = CarriedFiles::among(files).ok_or_else(|| {
        Failure::refused(format!(
            "there is no definition of a VM in {}: --define is for the replicas of \"dsync sync vm:NAME\"",
            dir.display()
        ))
    })?;
    let definition = dir.join(carried.definition);
    let failed =
        |path: &Path| format!("cannot define the VM of {}: {}", definition.display(), path.display());
    let text = std::fs::read_to_string(&definition).with_context(|| failed(&definition))?;
    carried.assign(&text);
    let image = |target: &str| carried.image(target).map(|file| DiskPlace::File(dir.join(file)));
    let nvram = carried.beside("nvram").map(|file| dir.join(file));
    let defined = with_images(&text, image, nvram.as_deref())
        .map_err(|why| anyhow::anyhow!("{} is not the definition of a VM: {why}", definition.display()))?;
    carry::put(to, defined.text.trim_end().as_bytes()).with_context(|| failed(to))?;
    for disk in &defined.left {
        output.warn(&format!(
            "{disk} is none of the replicas: its path in {} is that of the old host",
            to.display()
        ));
    }
    output.say(&format!("the VM is defined by {0}, with these disks: \"virsh define {0}\"", to.display()));
    let place = xml::domain(text.trim_end()).ok().and_then(|domain| domain.tpm);
    if let (Some(state), Some(place)) = (carried.beside("tpm"), place) {
        output.say(&format!(
            "before it starts, put the state of its TPM in place, or it gets a new TPM: \"install -D -m 600 -o {SWTPM} -g {SWTPM} {} {}\"",
            shell_word(&dir.join(state).to_string_lossy()),
            shell_word(&place.to_string_lossy()),
        ));
    }
    Ok(())
}

/// The replicas of a machine, by their names in their folder.
pub(super) struct CarriedFiles<'a> {
    files: &'a [String],
    /// The file of its definition.
    pub definition: &'a str,
    /// What the names of all begin with.
    name: &'a str,
    /// Which replica each disk is, by its target, where its definition says so.
    disks: Option<BTreeMap<String, String>>,
}

impl<'a> CarriedFiles<'a> {
    /// Finds the replicas of a machine among files; `None` without a definition.
    pub(super) fn among(files: &'a [String]) -> Option<CarriedFiles<'a>> {
        let named = |file: &'a String| Some((file.as_str(), file.strip_suffix(".xml")?));
        let (definition, name) = files.iter().find_map(named)?;
        Some(CarriedFiles { files, definition, name, disks: None })
    }

    /// Takes from the text of the definition which replica each disk is.
    pub(super) fn assign(&mut self, text: &str) {
        let Ok(document) = Document::parse(text) else { return };
        let said = document.root().children().find_map(|node| node.pi().filter(|pi| pi.target == DISKS));
        let pairs = said.and_then(|said| said.value).map(|value| value.split_whitespace());
        self.disks = pairs.map(|pairs| {
            let pair =
                |word: &str| word.split_once('=').map(|(target, file)| (target.to_owned(), file.to_owned()));
            pairs.filter_map(pair).collect()
        });
    }

    /// The target of a disk that was copied, and of which there is no replica among the files.
    pub(super) fn lacking(&self) -> Option<&str> {
        let is_there = |file: &String| self.files.contains(file);
        self.disks.iter().flatten().find(|(_, file)| !is_there(file)).map(|(target, _)| target.as_str())
    }

    /// The file of the disk with this target.
    pub(super) fn image(&self, target: &str) -> Option<&'a str> {
        if let Some(disks) = &self.disks {
            let file = disks.get(target)?;
            return self.files.iter().find(|of| *of == file).map(String::as_str);
        }
        let is_meant = |file: &&str| {
            let rest = file.strip_prefix(self.name).and_then(|rest| rest.strip_prefix('-'));
            let rest = rest.and_then(|rest| rest.strip_prefix(target));
            rest.is_some_and(|rest| rest.starts_with('.') && rest.ends_with(".img"))
        };
        self.files.iter().map(String::as_str).find(is_meant)
    }

    /// What was carried beside the definition under this ending: the NVRAM, or the state of the TPM.
    pub(super) fn beside(&self, ending: &str) -> Option<&'a str> {
        let name = format!("{}.{ending}", self.name);
        self.files.iter().map(String::as_str).find(|file| *file == name)
    }
}

/// Where a disk in a definition is.
pub(super) enum DiskPlace<'a> {
    File(PathBuf),
    /// An export of the NBD server at this socket.
    Export(&'a Path, String),
}

/// A definition with other paths, and the disks that still have their own.
pub(super) struct Defined {
    pub text: String,
    pub left: Vec<String>,
}

/// A change to a text: what stands there, and what is to.
pub(super) type Edit = (Range<usize>, String);

/// Makes changes to a text, none of which overlap.
pub(super) fn edited(text: &str, mut edits: Vec<Edit>) -> String {
    let mut text = text.to_owned();
    edits.sort_by_key(|(range, _)| std::cmp::Reverse(range.start));
    edits.into_iter().for_each(|(range, new)| text.replace_range(range, &new));
    text
}

/// Gives each disk what `image` has for its target, and the VM its NVRAM.
///
/// # Errors
/// Why the text is not read.
pub(super) fn with_images<'a>(
    text: &str,
    image: impl Fn(&str) -> Option<DiskPlace<'a>>,
    nvram: Option<&Path>,
) -> Result<Defined, String> {
    let document = Document::parse(text).map_err(|error| error.to_string())?;
    let root = document.root_element();
    let own = document.root().children().filter(|node| node.pi().is_some_and(|pi| pi.target == DISKS));
    let mut edits: Vec<Edit> = own.map(|node| (node.range(), String::new())).collect();
    let mut left = Vec::new();
    for disk in child(root, "devices").iter().flat_map(|devices| children(*devices, "disk")) {
        let Some(target) = child(disk, "target") else { continue };
        let name = target.attribute("dev").unwrap_or_default();
        match image(name) {
            Some(shown) => replace(disk, target, &shown, &mut edits),
            None if child(disk, "source").is_some() => left.push(name.to_owned()),
            None => {}
        }
    }
    if let (Some(node), Some(path)) = (child(root, "os").and_then(|os| child(os, "nvram")), nvram) {
        match child(node, "source").and_then(|source| source.attribute_node("file")) {
            Some(file) => edits.push((file.range_value(), quoted_path(path))),
            None => edits.extend(node.first_child().map(|text| (text.range(), quoted_path(path)))),
        }
    }
    Ok(Defined { text: edited(text, edits), left })
}

/// Makes a disk a raw one that is there.
fn replace(disk: Node<'_, '_>, target: Node<'_, '_>, shown: &DiskPlace<'_>, edits: &mut Vec<Edit>) {
    let before = target.range().start..target.range().start;
    let (kind_of, source) = match shown {
        DiskPlace::File(path) => ("file", format!("<source file='{}'/>", quoted_path(path))),
        DiskPlace::Export(socket, name) => {
            let host = format!("<host transport='unix' socket='{}'/>", quoted_path(socket));
            ("network", format!("<source protocol='nbd' name='{}'>{host}</source>", quoted(name)))
        }
    };
    let place = child(disk, "source").map_or(before.clone(), |old| old.range());
    edits.push((place, source));
    let kind = disk.attribute_node("type");
    match kind {
        Some(kind) => edits.push((kind.range_value(), kind_of.to_owned())),
        // Without the attribute it is a file.
        None => {
            let behind = disk.range().start + "<disk".len();
            edits.push((behind..behind, format!(" type='{kind_of}'")));
        }
    }
    match child(disk, "driver").and_then(|driver| driver.attribute_node("type")) {
        Some(format) => edits.push((format.range_value(), "raw".to_owned())),
        None => edits.push((before, "<driver name='qemu' type='raw'/>".to_owned())),
    }
    edits.extend(child(disk, "backingStore").map(|store| (store.range(), String::new())));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_disk_that_has_a_replica_gets_it_and_nothing_else_changes() {
        let text = "<domain type='kvm'>\n  <name>a &amp; b</name>\n  <os><nvram template=\"x\">/var/a_VARS.fd</nvram></os>\n  <devices>\n    <disk type=\"block\" \
                    device='disk'><driver name='qemu' type='qcow2' discard='unmap'/><source dev='/dev/vg/a'><seclabel \
                    model='dac'/></source><backingStore type='file'><source file='/base'/></backingStore><target dev='vda' bus='virtio'/></disk>\n    <disk \
                    type='file' device='cdrom'><source file='/iso'/><target dev='sda'/></disk>\n  <disk type='file'><target dev='vdb'/></disk></devices></domain>\n";
        let image = |target: &str| {
            target.starts_with("vd").then(|| DiskPlace::File(format!("/r/{target}'s & more.img").into()))
        };
        let defined = with_images(text, image, Some(Path::new("/r/a.nvram"))).unwrap();
        assert_eq!(defined.left, ["sda"]);
        let expected = text
            .replace("/var/a_VARS.fd", "/r/a.nvram")
            .replace("type=\"block\"", "type=\"file\"")
            .replace("type='qcow2'", "type='raw'")
            .replace("<source dev='/dev/vg/a'><seclabel model='dac'/></source>", "<source file='/r/vda&apos;s &amp; more.img'/>")
            .replace("<backingStore type='file'><source file='/base'/></backingStore>", "")
            .replace("<target dev='vdb'/>", "<driver name='qemu' type='raw'/><source file='/r/vdb&apos;s &amp; more.img'/><target dev='vdb'/>");
        assert_eq!(defined.text, expected);
        // Which replica each disk is stands behind it, and is taken out.
        let carried = format!("{text}<?dsync-disks vda=a-vdb.img vdb=gone.img?>\n\n");
        assert_eq!(
            with_images(&carried, image, Some(Path::new("/r/a.nvram"))).unwrap().text.trim(),
            expected.trim()
        );
        let files = ["a.xml", "a-vda.img", "a-vdb.img"].map(str::to_owned);
        let mut named = CarriedFiles::among(&files).unwrap();
        assert_eq!((named.image("vda"), named.lacking()), (Some("a-vda.img"), None));
        named.assign(&carried);
        assert_eq!((named.image("vda"), named.image("vdb")), (Some("a-vdb.img"), None));
        assert_eq!(named.lacking(), Some("vdb"));
        // The other form of an NVRAM.
        let text = "<domain><os><nvram type='file'><source file='/var/x'/></nvram></os></domain>";
        let defined = with_images(text, |_| None, Some(Path::new("/r/n"))).unwrap();
        assert_eq!(defined.text, text.replace("/var/x", "/r/n"));
        assert!(with_images("<domain>", |_| None, None).is_err());
    }
}
