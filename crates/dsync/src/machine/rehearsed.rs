//! The definition of a VM as it is rehearsed: under another name, and with what needs nothing of this host.
//!
//! It came from another host, whose root may have written anything into it. So what is kept is named here, and all else is left out: networks and
//! devices, files and programs of this host, security labels, what is pinned to its processors.

use std::collections::BTreeSet;
use std::path::Path;

use roxmltree::{Document, Node};
use uuid::Uuid;

use super::define::{Edit, edited};
use super::libvirt::virsh::{quoted, quoted_path};
use super::libvirt::xml::{child, children};

/// What a machine is made of.
const PARTS: [&str; 20] = [
    "name",
    "title",
    "genid",
    "memory",
    "currentMemory",
    "maxMemory",
    "vcpu",
    "vcpus",
    "iothreads",
    "iothreadids",
    "os",
    "sysinfo",
    "features",
    "cpu",
    "clock",
    "on_poweroff",
    "on_reboot",
    "on_crash",
    "pm",
    "devices",
];
/// What nobody misses: libvirt has its own QEMU.
const SILENT: [&str; 5] = ["uuid", "metadata", "description", "resource", "emulator"];
/// What it boots by.
const BOOT: [&str; 8] = ["type", "boot", "bootmenu", "bios", "smbios", "firmware", "loader", "nvram"];
/// Devices that QEMU makes by itself.
const DEVICES: [&str; 5] = ["controller", "memballoon", "panic", "sound", "iommu"];
/// Devices that carry characters, to wherever their type says.
const PORTS: [&str; 4] = ["serial", "parallel", "console", "channel"];
/// Their types that reach nobody beyond libvirt's own clients.
const WITHIN: [&str; 6] = ["pty", "vc", "null", "spicevmc", "qemu-vdagent", "unix"];
/// Where firmware is that came with this host's QEMU.
const FIRMWARE: &str = "/usr/share/";

/// A definition for a rehearsal, and what it has no more.
pub(super) struct Alone {
    pub text: String,
    pub left_out: BTreeSet<String>,
}

/// Gives the VM another name and UUID, and its NVRAM; takes from it all that is not named above, and the disks with these targets.
///
/// # Errors
/// Why the text is not read.
pub(super) fn alone(
    text: &str,
    (name, uuid): (&str, Uuid),
    nvram: &Path,
    without: &[String],
) -> Result<Alone, String> {
    let document = Document::parse(text).map_err(|error| error.to_string())?;
    let root = document.root_element();
    let mut edits: Vec<Edit> = Vec::new();
    let mut left_out = BTreeSet::new();
    let named = child(root, "name").filter(|node| node.text().is_some()).ok_or("it has no name")?;
    edits.push((named.range(), format!("<name>{}</name><uuid>{uuid}</uuid>", quoted(name))));
    let pinned = child(root, "vcpu").and_then(|node| node.attribute_node("cpuset"));
    edits.extend(pinned.map(|cpuset| (cpuset.range(), String::new())));
    // An id that is not that of the domain is refused.
    let systems = children(root, "sysinfo").flat_map(|sysinfo| children(sysinfo, "system"));
    let entries = systems.flat_map(|system| children(system, "entry"));
    edits.extend(entries.filter(|entry| entry.attribute("name") == Some("uuid")).map(removed));
    // A core dump goes to a file of this host.
    let dumps = |part: &Node<'_, '_>| {
        is_one(*part, &["on_crash"]) && part.text().is_some_and(|what| what.contains("coredump"))
    };
    let parts = root.children().filter(|part| !is_one(*part, &PARTS) || dumps(part));
    let os = child(root, "os").into_iter().flat_map(|os| os.children());
    let devices = child(root, "devices").into_iter().flat_map(|devices| devices.children());
    let unkept = os.filter(|part| !is_kept_to_boot(*part)).chain(devices.filter(|device| !is_kept(*device)));
    for part in parts.chain(unkept).filter(Node::is_element) {
        edits.push(removed(part));
        if !is_one(part, &SILENT) {
            left_out.insert(part.tag_name().name().to_owned());
        }
    }
    let devices = child(root, "devices");
    for disk in devices.into_iter().flat_map(|devices| children(devices, "disk")) {
        let target = child(disk, "target").and_then(|target| target.attribute("dev")).unwrap_or("disk");
        // A drive stays, and is empty.
        let is_drive = matches!(disk.attribute("device"), Some("cdrom" | "floppy"))
            && matches!(disk.attribute("type"), None | Some("file" | "block"));
        match child(disk, "source") {
            None if is_drive => continue,
            Some(_) if !without.iter().any(|left| left == target) => continue,
            Some(source) if is_drive => edits.push(removed(source)),
            _ => edits.push(removed(disk)),
        }
        left_out.insert(target.to_owned());
    }
    let screens =
        devices.into_iter().flat_map(|devices| children(devices, "graphics")).filter(|node| is_kept(*node));
    edits.extend(screens.flat_map(listens_here));
    edits.extend(child(root, "os").and_then(|os| own_nvram(os, nvram)));
    Ok(Alone { text: edited(text, edits), left_out })
}

fn removed(node: Node<'_, '_>) -> Edit {
    (node.range(), String::new())
}

/// True for an element of libvirt's own with one of these names.
fn is_one(node: Node<'_, '_>, names: &[&str]) -> bool {
    node.tag_name().namespace().is_none() && names.contains(&node.tag_name().name())
}

fn is_kept_to_boot(part: Node<'_, '_>) -> bool {
    let is_ours =
        || part.text().is_some_and(|path| path.trim().starts_with(FIRMWARE) && !path.contains("/.."));
    let is_read = || part.attribute("readonly") == Some("yes");
    is_one(part, &BOOT) && (!is_one(part, &["loader"]) || is_ours() && is_read())
}

/// True for a device that needs nothing of this host.
fn is_kept(device: Node<'_, '_>) -> bool {
    let kind = device.attribute("type");
    let has = |name| child(device, name).is_some();
    if is_one(device, &PORTS) {
        return kind.is_none_or(|kind| WITHIN.contains(&kind)) && !has("source") && !has("log");
    }
    let is_input =
        is_one(device, &["input"]) && !has("source") && !matches!(kind, Some("passthrough" | "evdev"));
    let is_screen = is_one(device, &["graphics"]) && matches!(kind, Some("vnc" | "spice"));
    // One that draws by itself needs a device of this host, or another program.
    let draws =
        |node: Node<'_, '_>| node.has_attribute("rendernode") || node.attribute("type") == Some("vhostuser");
    let is_card = is_one(device, &["video"]) && !device.descendants().any(draws);
    let is_watchdog = is_one(device, &["watchdog"]) && device.attribute("action") != Some("dump");
    let is_silent = is_one(device, &["audio"]) && matches!(kind, Some("none" | "spice"));
    let backend = child(device, "backend");
    let is_random = is_one(device, &["rng"])
        && backend.is_some_and(|backend| match backend.attribute("model") {
            Some("random") => matches!(backend.text().map(str::trim), Some("/dev/urandom" | "/dev/random")),
            model => model == Some("builtin"),
        });
    let is_plain = is_one(device, &["disk"]) || is_one(device, &DEVICES);
    is_plain || is_input || is_screen || is_card || is_watchdog || is_silent || is_random
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
    edits.extend(graphics.children().filter(Node::is_element).map(removed));
    edits
}

/// Names the NVRAM of a VM that has one. With firmware that libvirt chooses it need not be named.
fn own_nvram(os: Node<'_, '_>, nvram: &Path) -> Option<Edit> {
    let named = child(os, "nvram");
    let chosen = child(os, "type").filter(|_| os.attribute("firmware") == Some("efi"));
    let behind = chosen.map(|kind| kind.range().end..kind.range().end);
    let place = named.map(|node| node.range()).or(behind)?;
    let template = named.and_then(|node| node.attribute("template"));
    let template = template.filter(|path| path.starts_with(FIRMWARE) && !path.contains("/.."));
    let template = template.map_or(String::new(), |path| format!(" template='{}'", quoted(path)));
    Some((place, format!("<nvram{template}>{}</nvram>", quoted_path(nvram))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rehearsal_reaches_nothing_beyond_it() {
        let kept = "<disk type='network' device='disk'><source protocol='nbd' name='a'/><target dev='vda'/></disk><controller type='usb'/><rng \
                    model='virtio'><backend model='random'>/dev/urandom</backend></rng><serial type='pty'/><channel type='unix'><target \
                    type='virtio'/></channel><input type='tablet'/><video><model type='virtio'/></video><watchdog \
                    action='reset'/>";
        let text = format!(
            "<domain type='kvm' xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0'><name>a&amp;b</name><uuid>8f3a</uuid><vcpu \
             cpuset='1'>2</vcpu><cputune/><on_crash>coredump-destroy</on_crash><seclabel type='none'/><os><type>hvm</type><loader readonly='yes'>/srv/evil</loader><kernel>/boot/k</kernel><nvram \
             template='/etc/shadow'><source file='/x'/></nvram></os><sysinfo type='smbios'><system><entry name='uuid'>8f3a</entry><entry \
             name='serial'>7</entry></system></sysinfo><devices><emulator>/bin/sh</emulator>{kept}<interface type='bridge'/><hostdev/><serial \
             type='tcp'/><serial type='pty'><log file='/etc/passwd'/></serial><channel type='unix'><source path='/x'/></channel><memory \
             model='nvdimm'/><rng><backend model='random'>/dev/mem</backend></rng><input type='evdev'><source \
             dev='/dev/input/e'/></input><tpm/><graphics type='dbus' address='unix:path=/x'/><video><model type='virtio'><acceleration \
             rendernode='/dev/dri/x'/></model></video><watchdog action='dump'/><audio type='file'/><new/><disk type='file' device='cdrom'><source file='/iso'/><target \
             dev='sda'/></disk><disk type='network'><source/><target dev='vdb'/></disk><graphics type='vnc' port='5901' autoport='no' \
             listen='10.0.0.1' passwd='p'><listen type='address' address='10.0.0.1'/></graphics></devices><q:commandline><q:arg \
             value='-nic'/></q:commandline><q:devices/></domain>"
        );
        let without = ["sda".to_owned(), "vdb".to_owned()];
        let (nvram, uuid) = (Path::new("/t/nvram"), Uuid::from_u128(7));
        let alone = |text: &str| super::alone(text, ("a&b-rehearsal", uuid), nvram, &without);
        let done = alone(&text).unwrap();
        let expected = format!(
            "<domain type='kvm' xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0'><name>a&amp;b-rehearsal</name><uuid>{uuid}</uuid><vcpu \
             >2</vcpu><os><type>hvm</type><nvram>/t/nvram</nvram></os><sysinfo type='smbios'><system><entry \
             name='serial'>7</entry></system></sysinfo><devices>{kept}<disk type='file' device='cdrom'><target dev='sda'/></disk><graphics \
             type='vnc'  autoport='yes'  passwd='p'></graphics></devices></domain>"
        );
        assert_eq!(done.text, expected);
        let left_out: Vec<&str> = done.left_out.iter().map(String::as_str).collect();
        let all = [
            "audio",
            "channel",
            "commandline",
            "cputune",
            "devices",
            "graphics",
            "hostdev",
            "input",
            "interface",
            "kernel",
            "loader",
            "memory",
            "new",
            "on_crash",
            "rng",
            "sda",
            "seclabel",
            "serial",
            "tpm",
            "vdb",
            "video",
            "watchdog",
        ];
        assert_eq!(left_out, all);
        let firmware = "<domain><name>a</name><os firmware='efi'><type>hvm</type></os></domain>";
        assert!(alone(firmware).unwrap().text.contains("</type><nvram>/t/nvram</nvram></os>"));
        assert!(alone("<domain/>").is_err());
    }
}
