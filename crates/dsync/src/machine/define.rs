//! The definition that came with the disks of a machine, as its replicas need it: with their paths in the place of those of the disks.

use std::ops::Range;
use std::path::{Path, PathBuf};

use roxmltree::{Document, Node};

use super::domain::{child, children};
use super::virsh::quoted_path;

/// A definition with other paths, and the disks that still have their own.
pub(super) struct Defined {
    pub text: String,
    pub left: Vec<String>,
}

/// Gives each disk the raw image that `image` has for its target, and the VM its NVRAM.
///
/// # Errors
/// Why the text is not read.
pub(super) fn with_images(
    text: &str,
    image: impl Fn(&str) -> Option<PathBuf>,
    nvram: Option<&Path>,
) -> Result<Defined, String> {
    let document = Document::parse(text).map_err(|error| error.to_string())?;
    let root = document.root_element();
    let mut edits: Vec<(Range<usize>, String)> = Vec::new();
    let mut left = Vec::new();
    for disk in child(root, "devices").iter().flat_map(|devices| children(*devices, "disk")) {
        let Some(target) = child(disk, "target") else { continue };
        let name = target.attribute("dev").unwrap_or_default();
        match image(name) {
            Some(path) => replace(disk, target, &path, &mut edits),
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
    let mut text = text.to_owned();
    edits.sort_by_key(|(range, _)| std::cmp::Reverse(range.start));
    edits.into_iter().for_each(|(range, new)| text.replace_range(range, &new));
    Ok(Defined { text, left })
}

/// Makes a disk one in a raw file.
fn replace(disk: Node<'_, '_>, target: Node<'_, '_>, path: &Path, edits: &mut Vec<(Range<usize>, String)>) {
    let before = target.range().start..target.range().start;
    let source = format!("<source file='{}'/>", quoted_path(path));
    let place = child(disk, "source").map_or(before.clone(), |old| old.range());
    edits.push((place, source));
    let kind = disk.attribute_node("type");
    edits.extend(kind.map(|kind| (kind.range_value(), "file".to_owned())));
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
        let image =
            |target: &str| target.starts_with("vd").then(|| format!("/r/{target}'s & more.img").into());
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
        // The other form of an NVRAM.
        let text = "<domain><os><nvram type='file'><source file='/var/x'/></nvram></os></domain>";
        let defined = with_images(text, |_| None, Some(Path::new("/r/n"))).unwrap();
        assert_eq!(defined.text, text.replace("/var/x", "/r/n"));
        assert!(with_images("<domain>", |_| None, None).is_err());
    }
}
