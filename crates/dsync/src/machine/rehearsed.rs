//! The definition of a VM as it is rehearsed: under another name, and without what reaches beyond it.

use std::collections::BTreeSet;

use roxmltree::{Document, Node};

use super::define::{Edit, edited};
use super::domain::{child, children};
use super::virsh::quoted;

/// Devices that reach the network, the host's devices, files or memory, or that only one VM of a host may have.
const APART: [&str; 8] =
    ["interface", "hostdev", "filesystem", "redirdev", "shmem", "vsock", "lease", "smartcard"];
/// Devices that carry characters, to wherever their type says.
const PORTS: [&str; 4] = ["serial", "parallel", "console", "channel"];
/// Their types that reach nobody beyond libvirt's own clients.
const WITHIN: [&str; 6] = ["pty", "vc", "null", "spicevmc", "qemu-vdagent", "unix"];

/// A definition for a rehearsal, and what it has no more.
pub(super) struct Alone {
    pub text: String,
    pub left_out: BTreeSet<String>,
}

/// Gives the VM another name and, by leaving it out, another UUID, and takes from it what reaches beyond it, and the disks with these targets.
///
/// # Errors
/// Why the text is not read.
pub(super) fn alone(text: &str, name: &str, without: &[String]) -> Result<Alone, String> {
    let document = Document::parse(text).map_err(|error| error.to_string())?;
    let root = document.root_element();
    let mut edits: Vec<Edit> = Vec::new();
    let mut left_out = BTreeSet::new();
    let own = child(root, "name").and_then(|node| node.first_child()).ok_or("it has no name")?;
    edits.push((own.range(), quoted(name)));
    let systems = children(root, "sysinfo").flat_map(|sysinfo| children(sysinfo, "system"));
    let entries = systems.flat_map(|system| children(system, "entry"));
    let uuids = entries.filter(|entry| entry.attribute("name") == Some("uuid"));
    edits.extend(child(root, "uuid").into_iter().chain(uuids).map(removed));
    // In its own name space, whatever it is called.
    for node in root.children().filter(|node| node.tag_name().name() == "commandline") {
        edits.push(removed(node));
        left_out.insert("options of QEMU".to_owned());
    }
    for device in child(root, "devices").into_iter().flat_map(|devices| devices.children()) {
        let what = device.tag_name().name();
        if is_apart(device) {
            edits.push(removed(device));
            left_out.insert(what.to_owned());
        } else if what == "disk" {
            let target = child(device, "target").and_then(|target| target.attribute("dev"));
            let Some(target) = target.filter(|target| without.iter().any(|disk| disk == target)) else {
                continue;
            };
            let is_drive = matches!(device.attribute("device"), Some("cdrom" | "floppy"));
            // A drive stays, and is empty.
            match child(device, "source").filter(|_| is_drive) {
                Some(source) => edits.push(removed(source)),
                None => edits.push(removed(device)),
            }
            left_out.insert(target.to_owned());
        } else if what == "graphics" {
            edits.extend(listens_here(device));
        }
    }
    Ok(Alone { text: edited(text, edits), left_out })
}

fn removed(node: Node<'_, '_>) -> Edit {
    (node.range(), String::new())
}

/// True for a device that a rehearsal does not have.
fn is_apart(device: Node<'_, '_>) -> bool {
    let what = device.tag_name().name();
    let kind = device.attribute("type").unwrap_or("pty");
    let has_path = || child(device, "source").is_some_and(|source| source.has_attribute("path"));
    let is_nvdimm = what == "memory" && device.attribute("model") == Some("nvdimm");
    let is_far = PORTS.contains(&what) && (!WITHIN.contains(&kind) || (kind == "unix" && has_path()));
    APART.contains(&what) || is_nvdimm || is_far
}

/// Has a screen listen where libvirt does by itself, at a port that is free.
fn listens_here(graphics: Node<'_, '_>) -> Vec<Edit> {
    let fixed = ["port", "tlsPort", "listen", "websocket", "socket"];
    let fixed = graphics.attributes().filter(|attribute| fixed.contains(&attribute.name()));
    let mut edits: Vec<Edit> = fixed.map(|attribute| (attribute.range(), String::new())).collect();
    match graphics.attribute_node("autoport") {
        Some(auto) => edits.push((auto.range_value(), "yes".to_owned())),
        None => {
            let behind = graphics.range().start + "<graphics".len();
            edits.push((behind..behind, " autoport='yes'".to_owned()));
        }
    }
    edits.extend(children(graphics, "listen").map(removed));
    edits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rehearsal_reaches_nothing_beyond_it() {
        let kept = "<disk type='file' device='disk'><source file='/r/a'/><target dev='vda'/></disk><rng \
                    model='virtio'/><serial type='pty'/><channel type='unix'><target type='virtio'/></channel>";
        let text = format!(
            "<domain type='kvm' xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0'><name>a&amp;b</name><uuid>8f3a</uuid><sysinfo type='smbios'><system><entry \
             name='uuid'>8f3a</entry><entry name='serial'>7</entry></system></sysinfo><devices>{kept}<interface type='bridge'/><hostdev/><serial \
             type='tcp'/><channel type='unix'><source path='/x'/></channel><memory model='nvdimm'/><disk \
             type='file' device='cdrom'><source file='/iso'/><target dev='sda'/></disk><disk type='network'><source/><target \
             dev='vdb'/></disk><graphics type='vnc' port='5901' autoport='no' listen='10.0.0.1' passwd='p'><listen type='address' \
             address='10.0.0.1'/></graphics></devices><q:commandline><q:arg value='-nic'/></q:commandline></domain>"
        );
        let alone = alone(&text, "a&b-rehearsal", &["sda".to_owned(), "vdb".to_owned()]).unwrap();
        let expected = format!(
            "<domain type='kvm' xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0'><name>a&amp;b-rehearsal</name><sysinfo type='smbios'><system><entry \
             name='serial'>7</entry></system></sysinfo><devices>{kept}<disk type='file' device='cdrom'><target dev='sda'/></disk><graphics type='vnc'  \
             autoport='yes'  passwd='p'></graphics></devices></domain>"
        );
        assert_eq!(alone.text, expected);
        let left_out: Vec<&str> = alone.left_out.iter().map(String::as_str).collect();
        let all = ["channel", "hostdev", "interface", "memory", "options of QEMU", "sda", "serial", "vdb"];
        assert_eq!(left_out, all);
        assert!(super::alone("<domain/>", "a", &[]).is_err());
    }
}
