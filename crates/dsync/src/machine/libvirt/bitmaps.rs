//! Bitmaps of the raw disks of a machine, of which libvirt keeps no checkpoint: its QEMU is asked for them, by way of libvirt.
//!
//! - *A bitmap is on the node of the file or the device*, below that of the format, which is all that libvirt looks at: it knows of all that QEMU writes
//!   there, also by a job that merges a snapshot, and is never merged, copied or disabled for one.
//! - *It begins before the job, and the one before is taken after*: what is written between is told of twice, and never missed.
//! - *What the one before has* is taken into a bitmap of the job's scratch image, which is exported once more, with it. Both end with the job.

use std::collections::BTreeSet;
use std::process::Stdio;

use serde_json::{Value, json};

use super::virsh::{IS_OFF, Virsh};
use crate::failure::Failure;
use crate::machine::part::{Basis, OURS, Part, block_of, shown_as};

/// What it is about that QEMU has said.
type Said = Result<(), String>;

/// True if QEMU keeps a bitmap of a disk, and libvirt no checkpoint.
pub(super) fn is_meant(part: &Part) -> bool {
    part.is_listed && !part.is_qcow2
}

/// The export of a disk, with what its bitmap has; `None` if it is that of libvirt.
pub(super) fn export(part: &Part) -> Option<String> {
    (is_meant(part) && part.has_bitmap()).then(|| export_name(part))
}

/// A node of a file or a device.
struct Node {
    name: String,
    /// In bytes.
    size: u64,
    /// The names of our bitmaps on it.
    bitmaps: BTreeSet<String>,
}

/// The nodes of all files and devices.
///
/// # Errors
/// An inner `Err` is why they are not known.
fn nodes(virsh: &Virsh) -> Result<Result<Vec<Node>, String>, Failure> {
    let said = virsh.monitor("query-named-block-nodes", json!({ "flat": true }))?;
    Ok(said.map(|nodes| nodes.as_array().into_iter().flatten().filter_map(node).collect()))
}

fn node(node: &Value) -> Option<Node> {
    let name = node["node-name"].as_str().filter(|name| name.ends_with(STORAGE))?.to_owned();
    let bitmaps = node["dirty-bitmaps"].as_array().into_iter().flatten();
    let bitmaps = bitmaps.filter_map(|bitmap| bitmap["name"].as_str()).filter(|name| name.starts_with(OURS));
    let bitmaps = bitmaps.map(str::to_owned).collect();
    Some(Node { name, size: node["image"]["virtual-size"].as_u64()?, bitmaps })
}

/// The end of the name of a node that libvirt has made of a file or a device.
const STORAGE: &str = "-storage";

fn name_of(part: &Part) -> String {
    format!("libvirt-{}{STORAGE}", part.index.as_deref().unwrap_or_default())
}

/// The names of the bitmaps that are there. They end with the QEMU.
///
/// # Errors
/// If QEMU runs, and does not tell them: those that are not known are not removed.
pub(super) fn names(virsh: &Virsh) -> Result<BTreeSet<String>, Failure> {
    match nodes(virsh)? {
        Ok(nodes) => Ok(nodes.into_iter().flat_map(|node| node.bitmaps).collect()),
        Err(why) if why.contains(IS_OFF) => Ok(BTreeSet::new()),
        Err(why) => Err(Failure::failed(format!("its QEMU does not tell what bitmaps it has: {why}"))),
    }
}

/// Begins a bitmap of this name of each disk that is meant. `held` stays open until that has been carried out or refused.
///
/// # Errors
/// An inner `Err` is why there is none.
pub(super) fn begin(virsh: &Virsh, parts: &[Part], name: &str, held: Stdio) -> Result<Said, Failure> {
    let meant: Vec<&Part> = parts.iter().filter(|part| is_meant(part)).collect();
    if meant.is_empty() {
        return Ok(Ok(()));
    }
    let nodes = match nodes(virsh)? {
        Ok(nodes) => nodes,
        Err(why) => return Ok(Err(why)),
    };
    let mut begins = Vec::new();
    for part in meant {
        let of_part = name_of(part);
        let Some(node) = nodes.iter().find(|node| node.name == of_part) else {
            return Ok(Err(format!("QEMU has no node {of_part} of disk '{}'", part.target)));
        };
        let data = json!({ "node": node.name, "name": name, "granularity": block_of(node.size) });
        begins.push(json!({ "type": "block-dirty-bitmap-add", "data": data }));
    }
    Ok(virsh.monitor_held("transaction", json!({ "actions": begins }), held)?.map(|_| ()))
}

/// Shows what was recorded of each disk that is meant, in the job that is running. `scratch` tells the scratch image of a disk.
///
/// # Errors
/// An inner `Err` is why it is not shown, with the target of the disk in single quotes.
pub(super) fn show(
    virsh: &Virsh,
    parts: &[Part],
    scratch: impl Fn(&Part) -> String,
) -> Result<Said, Failure> {
    if parts.iter().all(|part| export(part).is_none()) {
        return Ok(Ok(()));
    }
    let said = virsh.monitor("query-named-block-nodes", json!({ "flat": true }))?;
    let nodes = match &said {
        Ok(nodes) => nodes.as_array(),
        Err(why) => return Ok(Err(why.clone())),
    };
    for part in parts.iter().filter(|part| is_meant(part)) {
        let Ok(Basis::Checkpoint(since)) = &part.since else { continue };
        // That of its format has the disk beneath it.
        let file = scratch(part);
        let is_shown = |node: &&Value| node["file"] == file.as_str() && node["drv"] == "qcow2";
        let node = nodes.into_iter().flatten().find(is_shown);
        let name = node.and_then(|node| node["node-name"].as_str());
        let size = node.and_then(|node| node["image"]["virtual-size"].as_u64());
        let shown = match name.zip(size) {
            Some(scratch) => show_one(virsh, part, since, scratch)?,
            None => Err(format!("QEMU has not opened {file}")),
        };
        if let Err(why) = shown {
            return Ok(Err(format!("disk '{}': {why}", part.target)));
        }
    }
    Ok(Ok(()))
}

fn show_one(virsh: &Virsh, part: &Part, since: &str, (scratch, size): (&str, u64)) -> Result<Said, Failure> {
    let shown = shown_as(&part.target);
    let add = json!({ "node": scratch, "name": shown, "granularity": block_of(size), "disabled": true });
    let take =
        json!({ "node": scratch, "target": shown, "bitmaps": [{ "node": name_of(part), "name": since }] });
    let actions = json!([
        { "type": "block-dirty-bitmap-add", "data": add },
        { "type": "block-dirty-bitmap-merge", "data": take },
    ]);
    if let Err(why) = virsh.monitor("transaction", json!({ "actions": actions }))? {
        return Ok(Err(why));
    }
    let name = export_name(part);
    let export = json!({ "type": "nbd", "id": name, "node-name": scratch, "name": name, "bitmaps": [shown] });
    Ok(virsh.monitor("block-export-add", export)?.map(|_| ()))
}

fn export_name(part: &Part) -> String {
    format!("{OURS}{}", part.target)
}

/// Removes all of this name.
///
/// # Errors
/// An inner `Err` is why one is left.
pub(super) fn remove(virsh: &Virsh, name: &str) -> Result<Said, Failure> {
    let nodes = match nodes(virsh)? {
        Ok(nodes) => nodes,
        Err(why) => return Ok(Err(why)),
    };
    for node in nodes.iter().filter(|node| node.bitmaps.contains(name)) {
        let bitmap = json!({ "node": node.name, "name": name });
        if let Err(why) = virsh.monitor("block-dirty-bitmap-remove", bitmap)? {
            return Ok(Err(why));
        }
    }
    Ok(Ok(()))
}
