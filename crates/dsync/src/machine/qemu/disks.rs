//! The disks of a QEMU, as its monitor lists them.

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde_json::Value;

use crate::machine::domain::{Answer, Disk, Image};

/// What QEMU's own paths of devices with an id begin with.
const NAMED: &str = "/machine/peripheral/";

/// The node of a disk, by which QEMU's commands name it.
pub(super) struct Node {
    pub target: String,
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// The names of the bitmaps that record what is written to it.
    pub bitmaps: BTreeSet<String>,
}

/// The drivers of filters that jobs put on top of a disk for as long as they are at work.
const OF_JOBS: [&str; 4] = ["copy-before-write", "mirror_top", "commit_top", "backup-top"];

/// The name and the target of a disk's filter, if a job has put one on top of it.
pub(super) fn filters(blocks: &Value) -> Vec<(String, String)> {
    let filter = |block: &Value| {
        let top = &block["inserted"];
        let is_filter = OF_JOBS.contains(&top["drv"].as_str()?);
        is_filter.then(|| (top["node-name"].as_str().unwrap_or_default().to_owned(), target(block)))
    };
    blocks.as_array().into_iter().flatten().filter_map(filter).collect()
}

/// Puts the disks in the place of the filters on top of them, by what `query-named-block-nodes` says. A disk whose node is not known by its images alone
/// keeps the filter.
pub(super) fn without_filters(mut blocks: Value, nodes: &Value) -> Value {
    for block in blocks.as_array_mut().into_iter().flatten() {
        let top = &block["inserted"];
        if !top["drv"].as_str().is_some_and(|driver| OF_JOBS.contains(&driver)) {
            continue;
        }
        let images = chain(&top["image"]["backing-image"]);
        let mut found = nodes.as_array().into_iter().flatten().filter(|node| chain(&node["image"]) == images);
        if let (Some(node), None) = (found.next(), found.next()) {
            block["inserted"] = node.clone();
        }
    }
    blocks
}

/// The names and the formats of an image and those beneath it, from above.
fn chain(image: &Value) -> Vec<(Option<&str>, Option<&str>)> {
    let images = std::iter::successors(Some(image), |image| image.get("backing-image"));
    images.map(|image| (image["filename"].as_str(), image["format"].as_str())).collect()
}

/// The disks in what `query-block` says, whose images have the paths that `place` gives for their names.
pub(super) fn disks(blocks: &Value, place: impl Fn(&str) -> Option<PathBuf>) -> Vec<Disk> {
    let mut nodes = BTreeSet::new();
    let disk = |block: &Value| {
        let inserted = &block["inserted"];
        let is_seen = inserted["node-name"].as_str().is_some_and(|node| !nodes.insert(node.to_owned()));
        let answer = match is_seen {
            true => Answer::LeftOut("another device of a disk before it"),
            false => answer(inserted, &place),
        };
        Disk { target: target(block), answer }
    };
    blocks.as_array().into_iter().flatten().map(disk).collect()
}

/// The targets of the disks, with the paths of their devices.
pub(super) fn devices(blocks: &Value) -> Vec<(String, String)> {
    let device = |block: &Value| Some((target(block), block["qdev"].as_str()?.to_owned()));
    blocks.as_array().into_iter().flatten().filter_map(device).collect()
}

/// The nodes of the disks in what `query-block` says.
pub(super) fn nodes(blocks: &Value) -> Vec<Node> {
    let blocks = blocks.as_array().into_iter().flatten();
    let node = |block: &Value| {
        let inserted = &block["inserted"];
        let name = inserted["node-name"].as_str()?.to_owned();
        let bitmaps = inserted["dirty-bitmaps"].as_array().into_iter().flatten();
        let bitmaps = bitmaps.filter(|bitmap| bitmap["recording"] == true && bitmap["inconsistent"] != true);
        let bitmaps = bitmaps.filter_map(|bitmap| Some(bitmap["name"].as_str()?.to_owned()));
        let size = inserted["image"]["virtual-size"].as_u64()?;
        Some(Node { target: target(block), name, size, bitmaps: bitmaps.collect() })
    };
    blocks.filter_map(node).collect()
}

/// A disk is called by the id of its device, of its drive, or of its node.
fn target(block: &Value) -> String {
    let device = block["qdev"].as_str().unwrap_or_default();
    // The id itself, or the path of a part of the device.
    let id = match device.contains('/') {
        true => device.strip_prefix(NAMED).and_then(|path| path.split('/').next()),
        false => Some(device),
    };
    let names = [id, block["device"].as_str(), block["inserted"]["node-name"].as_str()];
    let name = names.into_iter().flatten().find(|name| !name.is_empty()).unwrap_or("disk");
    let allowed = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' };
    name.trim_start_matches(['#', '.', '-']).chars().map(allowed).collect()
}

fn answer(inserted: &Value, place: &impl Fn(&str) -> Option<PathBuf>) -> Answer {
    if inserted.is_null() {
        return Answer::LeftOut("empty");
    }
    if inserted["ro"] == true {
        return Answer::LeftOut("read-only: copy it by itself");
    }
    if inserted["encrypted"] == true {
        return Answer::Refused("encrypted by QEMU".into());
    }
    let is_qcow2 = match inserted["drv"].as_str().unwrap_or_default() {
        "qcow2" => true,
        "raw" | "file" | "host_device" => false,
        other => return Answer::Refused(format!("of the format {other}, and not raw or qcow2")),
    };
    let image = &inserted["image"];
    let name = |image: &Value| {
        let name = image["filename"].as_str().unwrap_or_default().to_owned();
        Some(name).filter(|name| name.starts_with('/') || !(name.is_empty() || name.contains(':')))
    };
    let Some(name_here) = name(image) else {
        return Answer::Refused("not a file or a block device of this host".into());
    };
    let Some(path) = place(&name_here) else {
        return Answer::Refused(format!("not a file that its QEMU has open by its name, {name_here}"));
    };
    let mut beneath = Vec::new();
    let mut at = image;
    while let Some(next) = at.get("backing-image") {
        beneath.push(name(next).and_then(|name| place(&name)).unwrap_or_default());
        at = next;
    }
    // A chain of which QEMU has not opened all images is shown as long as it is.
    let known = inserted["backing_file_depth"].as_u64().unwrap_or(0) as usize;
    beneath.resize(beneath.len().max(known), PathBuf::new());
    let index = inserted["node-name"].as_str().map(str::to_owned);
    Answer::Followed(Image { path, is_qcow2, index, beneath })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn answer_of(inserted: Value) -> Answer {
        let block = json!([{ "device": "virtio0", "inserted": inserted }]);
        let place = |name: &str| (name != "/gone").then(|| PathBuf::from("/srv").join(name));
        disks(&block, place).remove(0).answer
    }

    #[test]
    fn each_kind_of_disk_has_an_answer() {
        let image = |path: &str, is_qcow2, beneath: &[&str]| {
            let beneath = beneath.iter().map(PathBuf::from).collect();
            Answer::Followed(Image { path: path.into(), is_qcow2, index: Some("n".into()), beneath })
        };
        let inserted = |drv: &str, filename: &str| json!({ "node-name": "n", "drv": drv, "ro": false, "encrypted": false, "image": { "filename": filename } });
        assert_eq!(answer_of(inserted("qcow2", "/i/a.qcow2")), image("/i/a.qcow2", true, &[]));
        assert_eq!(answer_of(inserted("raw", "a.img")), image("/srv/a.img", false, &[]));
        assert_eq!(answer_of(inserted("host_device", "/dev/vg/a")), image("/dev/vg/a", false, &[]));
        let mut overlay = inserted("qcow2", "/i/b");
        overlay["image"]["backing-image"] =
            json!({ "filename": "/i/a", "backing-image": { "filename": "nbd://h/a" } });
        assert_eq!(answer_of(overlay), image("/i/b", true, &["/i/a", ""]));
        let mut unknown = inserted("qcow2", "/i/b");
        unknown["backing_file_depth"] = json!(1);
        assert_eq!(answer_of(unknown), image("/i/b", true, &[""]));
        for (key, value) in [("ro", json!(true)), ("encrypted", json!(true))] {
            let mut other = inserted("raw", "/a");
            other[key] = value;
            assert!(!matches!(answer_of(other), Answer::Followed(_)), "{key}");
        }
        assert_eq!(answer_of(Value::Null), Answer::LeftOut("empty"));
        for (drv, name) in [
            ("vmdk", "/a"),
            ("raw", "rbd:pool/a"),
            ("raw", "json:{}"),
            ("raw", "nbd://h/a"),
            ("raw", "/gone"),
        ] {
            assert!(matches!(answer_of(inserted(drv, name)), Answer::Refused(_)), "{drv} {name}");
        }
    }

    #[test]
    fn a_disk_with_two_devices_is_one() {
        let block = |device: &str| {
            let inserted = json!({ "node-name": "n", "drv": "raw", "image": { "filename": "/a" } });
            json!({ "device": device, "inserted": inserted })
        };
        let disks = disks(&json!([block("a"), block("b")]), |name| Some(name.into()));
        assert!(
            matches!(disks[0].answer, Answer::Followed(_)) && matches!(disks[1].answer, Answer::LeftOut(_))
        );
    }

    #[test]
    fn a_disk_is_called_by_its_id() {
        let called = |block: Value| target(&block);
        let node = json!({ "node-name": "#block12" });
        let id =
            json!({ "device": "", "qdev": "/machine/peripheral/disk1/virtio-backend", "inserted": node });
        assert_eq!(called(id), "disk1");
        assert_eq!(called(json!({ "device": "d0", "qdev": "sda", "inserted": node })), "sda");
        let drive =
            json!({ "device": "d 0", "qdev": "/machine/peripheral-anon/device[0]", "inserted": node });
        assert_eq!(called(drive), "d-0");
        assert_eq!(called(json!({ "device": "", "inserted": node })), "block12");
    }

    #[test]
    fn a_bitmap_that_does_not_record_is_none() {
        let bitmap = |name: &str, recording: bool| json!({ "name": name, "recording": recording });
        let blocks = json!([{ "device": "a", "inserted": {
            "node-name": "n", "image": { "virtual-size": 7 }, "dirty-bitmaps": [bitmap("on", true), bitmap("off", false)]
        } }]);
        let nodes = nodes(&blocks);
        assert_eq!((nodes[0].size, nodes[0].bitmaps.len()), (7, 1));
        assert!(nodes[0].bitmaps.contains("on"));
    }
}
