//! The text of a domain of libvirt: what it is made of.

use std::path::{Path, PathBuf};

use roxmltree::{Document, Node};

use crate::failure::Failure;
use crate::machine::domain::{Answer, Disk, Domain, Image};

/// Reads the text of a domain.
///
/// # Errors
/// If it is not one.
pub(in crate::machine) fn domain(text: &str) -> Result<Domain, Failure> {
    let unread =
        |why: &str| Failure::failed(format!("the XML that libvirt gives of the VM cannot be read: {why}"));
    let document = Document::parse(text).map_err(|error| unread(&error.to_string()))?;
    let root = document.root_element();
    let own = |name| child(root, name).and_then(|node| node.text()).map(str::to_owned);
    let (Some(name), Some(uuid)) = (own("name"), own("uuid")) else {
        return Err(unread("it has no name and UUID"));
    };
    let devices = child(root, "devices");
    let nodes = devices.iter().flat_map(|devices| children(*devices, "disk"));
    let disks = nodes.map(disk).collect::<Option<Vec<_>>>();
    let disks = disks.ok_or_else(|| unread("a disk has no target"))?;
    let nvram = child(root, "os").and_then(|os| child(os, "nvram"));
    let file = |node: Node<'_, '_>| {
        let named = child(node, "source").and_then(|source| source.attribute("file"));
        named.or(node.text()).map(str::trim).filter(|path| path.starts_with('/')).map(PathBuf::from)
    };
    let has = |name| devices.is_some_and(|devices| child(devices, name).is_some());
    let is_nvdimm = |memory: Node<'_, '_>| memory.attribute("model") == Some("nvdimm");
    let also = [
        (has("hostdev"), "devices of this host"),
        (has("filesystem"), "its shared folders"),
        (devices.is_some_and(|devices| children(devices, "memory").any(is_nvdimm)), "its NVDIMM"),
        (
            child(root, "os").is_some_and(|os| child(os, "kernel").is_some()),
            "its kernel, a file of this host",
        ),
    ];
    let also = also.into_iter().filter_map(|(needed, what)| needed.then_some(what));
    let nvram_of_other =
        nvram.filter(|node| file(*node).is_none()).map(|_| "its NVRAM, which is not in a file");
    let tpm = devices.and_then(|devices| child(devices, "tpm")).and_then(|tpm| tpm_state(tpm, &uuid));
    Ok(Domain {
        name,
        uuid,
        tpm,
        id: root.attribute("id").map(str::to_owned),
        disks,
        nvram: nvram.and_then(file),
        also: also.chain(nvram_of_other).collect(),
    })
}

pub(in crate::machine) fn children<'a, 'b>(
    node: Node<'a, 'b>,
    name: &'static str,
) -> impl Iterator<Item = Node<'a, 'b>> {
    node.children().filter(move |child| child.has_tag_name(name))
}

pub(in crate::machine) fn child<'a, 'b>(node: Node<'a, 'b>, name: &'static str) -> Option<Node<'a, 'b>> {
    children(node, name).next()
}

/// The disks of a domain with an I/O thread, by their targets: those that have one, and those on a controller that has one.
pub(in crate::machine) fn with_io_thread(text: &str) -> Vec<String> {
    let Ok(document) = Document::parse(text) else { return Vec::new() };
    let Some(devices) = child(document.root_element(), "devices") else { return Vec::new() };
    let has = |node: Node<'_, '_>| {
        let driver = child(node, "driver");
        driver.is_some_and(|driver| driver.has_attribute("iothread") || child(driver, "iothreads").is_some())
    };
    let is_scsi = |node: &Node<'_, '_>| node.attribute("type") == Some("scsi") && has(*node);
    let by_controller = children(devices, "controller").any(|node| is_scsi(&node));
    let disks = children(devices, "disk").filter_map(|disk| Some((disk, child(disk, "target")?)));
    let threaded = disks
        .filter(|(disk, target)| has(*disk) || (by_controller && target.attribute("bus") == Some("scsi")));
    threaded.filter_map(|(_, target)| target.attribute("dev").map(str::to_owned)).collect()
}

/// Where the daemon of the system keeps the TPMs that it emulates.
const TPMS: &str = "/var/lib/libvirt/swtpm";

/// The file of the state of a TPM, which swtpm writes; `None` of one that is not emulated.
fn tpm_state(tpm: Node<'_, '_>, uuid: &str) -> Option<PathBuf> {
    let backend = child(tpm, "backend").filter(|backend| backend.attribute("type") == Some("emulator"))?;
    let (folder, file) = match backend.attribute("version") {
        Some("1.2") => ("tpm1.2", "tpm-00.permall"),
        _ => ("tpm2", "tpm2-00.permall"),
    };
    let source = child(backend, "source");
    match source.and_then(|source| Some((source.attribute("type")?, source.attribute("path")?))) {
        Some(("file", path)) => Some(path.into()),
        Some((_, path)) => Some(Path::new(path).join(file)),
        None => Some([TPMS, uuid, folder, file].iter().collect()),
    }
}

/// A disk; `None` if it has no name that can be used.
fn disk(node: Node<'_, '_>) -> Option<Disk> {
    let target = child(node, "target")?.attribute("dev")?;
    let plain = !target.is_empty() && target.chars().all(|c| c.is_ascii_alphanumeric());
    plain.then(|| Disk { target: target.to_owned(), answer: answer(node) })
}

fn answer(node: Node<'_, '_>) -> Answer {
    let has = |name| child(node, name).is_some();
    let refused = |why: &str| Answer::Refused(why.to_owned());
    match node.attribute("device").unwrap_or("disk") {
        "cdrom" => return Answer::LeftOut("a CD-ROM"),
        "floppy" => return Answer::LeftOut("a floppy disk"),
        "lun" => return refused("a LUN, to which its guest sends commands that QEMU does not see"),
        _ if has("readonly") => return Answer::LeftOut("read-only: copy it by itself"),
        _ if has("transient") => {
            return Answer::LeftOut("transient: what is written to it is thrown away");
        }
        _ if has("shareable") => return refused("shared with other VMs, whose writes are of other moments"),
        _ => {}
    }
    let source = child(node, "source");
    let kind = node.attribute("type").unwrap_or("file");
    let attribute = |name| source.and_then(|source| source.attribute(name));
    let path = match kind {
        "file" => attribute("file"),
        "block" => attribute("dev"),
        other => {
            return Answer::Refused(format!(
                "of the type \"{other}\", and not a file or a block device of this host"
            ));
        }
    };
    let Some(path) = path else { return Answer::LeftOut("empty") };
    let within = |name| source.is_some_and(|source| child(source, name).is_some());
    if has("encryption") || within("encryption") {
        return refused("encrypted by QEMU");
    }
    if within("slices") {
        return refused("a slice of a file");
    }
    let format = child(node, "driver").and_then(|driver| driver.attribute("type")).unwrap_or("raw");
    let beneath = beneath(node);
    match format {
        "qcow2" | "raw" => {
            let index = attribute("index").map(str::to_owned);
            Answer::Followed(Image { path: path.into(), is_qcow2: format == "qcow2", index, beneath })
        }
        other => Answer::Refused(format!("of the format {other}, and not raw or qcow2")),
    }
}

/// The images beneath that of a disk, from above. One that is no file or device has an empty path.
fn beneath(disk: Node<'_, '_>) -> Vec<PathBuf> {
    let (mut found, mut at) = (Vec::new(), disk);
    while let Some(store) = child(at, "backingStore").filter(|store| store.attribute("type").is_some()) {
        let source = child(store, "source");
        let path = source.and_then(|source| source.attribute("file").or(source.attribute("dev")));
        found.push(path.unwrap_or_default().into());
        at = store;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(devices: &str) -> Domain {
        let text = format!(
            "<domain type='kvm' id='7'><name>a &amp; b</name><uuid>8f3a1c1e-0000-4000-8000-000000000001</uuid>\
             <os><nvram template='/usr/share/OVMF/OVMF_VARS.fd'>/var/lib/nvram/a_VARS.fd</nvram></os>\
             <devices>{devices}</devices></domain>"
        );
        domain(&text).unwrap()
    }

    fn answer_of(disk: &str) -> Answer {
        let disk = format!("{disk}<target dev='vda' bus='virtio'/></disk>");
        machine(&disk).disks.remove(0).answer
    }

    #[test]
    fn each_kind_of_disk_has_an_answer() {
        let image = |path: &str, is_qcow2, beneath: &[&str]| {
            let beneath = beneath.iter().map(PathBuf::from).collect();
            let index = path.contains("a's").then(|| "1".to_owned());
            Answer::Followed(Image { path: path.into(), is_qcow2, index, beneath })
        };
        let source = "<source file='/i/a&apos;s.img' index='1'/>";
        let qcow2 = "<driver name='qemu' type='qcow2'/>";
        let file = |rest: &str| answer_of(&format!("<disk type='file' device='disk'>{qcow2}{source}{rest}"));
        assert_eq!(file("<backingStore/>"), image("/i/a's.img", true, &[]));
        let overlay = "<backingStore type='file'><format type='raw'/><source file='/i/base'/><backingStore type='block'><source \
                       dev='/dev/b'/><backingStore/></backingStore></backingStore>";
        assert_eq!(file(overlay), image("/i/a's.img", true, &["/i/base", "/dev/b"]));
        let block =
            "<disk type='block' device='disk'><driver name='qemu' type='raw'/><source dev='/dev/vg/a'/>";
        assert_eq!(answer_of(block), image("/dev/vg/a", false, &[]));
        for (rest, why) in [("<readonly/>", "read-only"), ("<transient/>", "transient")] {
            assert!(matches!(file(rest), Answer::LeftOut(said) if said.contains(why)), "{rest}");
        }
        for device in ["cdrom", "floppy"] {
            let disk = format!("<disk type='file' device='{device}'>{source}");
            assert!(matches!(answer_of(&disk), Answer::LeftOut(_)), "{device}");
        }
        assert_eq!(answer_of("<disk type='file' device='disk'>"), Answer::LeftOut("empty"));
        for (disk, why) in [
            (format!("<disk type='file' device='disk'>{qcow2}{source}<shareable/>"), "shared"),
            (
                format!("<disk type='file' device='disk'>{qcow2}{source}<encryption format='luks'/>"),
                "encrypted",
            ),
            (format!("<disk type='file' device='disk'><driver type='vmdk'/>{source}"), "of the format vmdk"),
            ("<disk type='network' device='disk'><source protocol='rbd' name='p/a'/>".into(), "\"network\""),
            ("<disk type='block' device='lun'><source dev='/dev/sda'/>".into(), "LUN"),
        ] {
            let answer = answer_of(&disk);
            assert!(matches!(&answer, Answer::Refused(said) if said.contains(why)), "{answer:?}");
        }
    }

    #[test]
    fn the_disks_with_io_threads_are_known() {
        let disk = |driver: &str, target: &str| {
            format!("<disk><driver name='qemu' {driver}<target {target}/></disk>")
        };
        let of = |devices: String| with_io_thread(&format!("<domain><devices>{devices}</devices></domain>"));
        let plain = disk("type='raw'/>", "dev='vda' bus='virtio'");
        let own = disk("iothread='1'/>", "dev='vdb' bus='virtio'");
        let queues = disk("><iothreads><iothread id='1'/></iothreads></driver>", "dev='vdc' bus='virtio'");
        let scsi = disk("type='raw'/>", "dev='sda' bus='scsi'");
        let controller = "<controller type='scsi' model='virtio-scsi'><driver iothread='1'/></controller>";
        assert_eq!(of(format!("{plain}{own}{queues}{scsi}")), ["vdb", "vdc"]);
        assert_eq!(of(format!("{plain}{scsi}{controller}")), ["sda"]);
    }

    #[test]
    fn a_domain_is_read_with_what_it_needs() {
        let read = machine("<filesystem/>");
        assert_eq!((read.name.as_str(), read.id.as_deref()), ("a & b", Some("7")));
        assert_eq!(read.nvram, Some("/var/lib/nvram/a_VARS.fd".into()));
        assert_eq!(read.also, ["its shared folders"]);
        let of = "/var/lib/libvirt/swtpm/8f3a1c1e-0000-4000-8000-000000000001";
        for (backend, expected) in [
            ("type='emulator' version='2.0'/>", Some(format!("{of}/tpm2/tpm2-00.permall"))),
            ("type='emulator' version='1.2'/>", Some(format!("{of}/tpm1.2/tpm-00.permall"))),
            ("type='emulator'><source type='dir' path='/t'/></backend>", Some("/t/tpm2-00.permall".into())),
            ("type='emulator'><source type='file' path='/t/a'/></backend>", Some("/t/a".into())),
            ("type='passthrough'><device path='/dev/tpm0'/></backend>", None),
        ] {
            let read = machine(&format!("<tpm model='tpm-crb'><backend {backend}</tpm>"));
            assert_eq!(read.tpm, expected.map(PathBuf::from), "{backend}");
        }
        assert!(domain("<domain").is_err() && domain("<domain/>").is_err());
    }
}
