//! Options that have no effect on the given source or destination are reported: their user expects an effect.

use source::Handle;
use sync::SourceInfo;

use crate::args::{FarArgs, MethodArg, MirrorArgs, SourceArgs, Sync};
use crate::output::Output;
use crate::reach::far::Reach;
use crate::reach::location::Ends;

/// An option, and whether it was given.
pub(crate) type Given = (&'static str, bool);

/// Warns of the given options among `options`. `because` says why they have no effect.
fn without(options: &[Given], because: &str, output: &Output) {
    let names: Vec<&str> = options.iter().filter(|(_, given)| *given).map(|(name, _)| *name).collect();
    if let Some((last, others)) = names.split_last() {
        let (names, have) = match others {
            [] => ((*last).to_owned(), "has"),
            others => (format!("{} and {last}", others.join(", ")), "have"),
        };
        output.warn_once(&format!("{names} {have} no effect: {because}"));
    }
}

/// How the other host is reached, if there is one, against the options for reaching it.
pub(crate) fn on_way(ends: &Ends, far: &FarArgs, output: &Output) {
    let ssh = [("--rsh", far.rsh.is_some()), ("--remote-dsync", far.remote_dsync.is_some())];
    let connections = ("--connections", far.connections.is_some());
    let end = if ends.source.host.is_some() { "source" } else { "destination" };
    match ends.far().map(|far| far.reach) {
        None => {
            let timeout = ("--timeout", far.timeout.is_some());
            without(&[ssh[0], ssh[1], connections, timeout], "the destination is on this host", output);
        }
        Some(Reach::Ssh(_)) => {
            without(&[connections], &format!("the {end} is reached over ssh, not tls://"), output)
        }
        Some(Reach::Tls(_)) => without(&ssh, &format!("the {end} is reached over tls://, not ssh"), output),
    }
}

/// A method that compares nothing, against the options for comparing.
pub(crate) fn on_method(args: &Sync, output: &Output) {
    let given = [("--hash", args.hash.is_some())];
    match args.method {
        MethodArg::Copy => without(&given, "--method copy compares nothing", output),
        MethodArg::Tracked => without(&given, "--method tracked compares nothing", output),
        _ => {}
    }
}

/// A disk that is mirrored by one sync after another, against the options for batches.
pub(crate) fn on_mirror(handle: &Handle, args: &MirrorArgs, output: &Output) {
    let batches = [
        ("--interval", args.batches.interval.is_some()),
        ("--min-interval", args.batches.min_interval.is_some()),
        ("--alpha", args.batches.alpha.is_some()),
        ("--beta", args.batches.beta.is_some()),
        ("--rate", args.rate.is_some()),
        ("--epoch", args.epoch.is_some()),
    ];
    if handle.live().is_some() {
        let path = handle.about().path.display();
        let because = format!("{path} is tracked in the kernel, so it is mirrored by one sync after another");
        without(&batches, &because, output);
    }
}

/// A disk that was resized while it was served, of which only what its server offers is read.
pub(crate) fn on_size(info: &SourceInfo, output: &Output) {
    if let Some(sizes) = info.resized {
        output.warn_once(&sync::resized(&info.path, sizes));
    }
}

/// An image that contains a disk, unless the destination's name tells as well: it is copied as it is.
pub(crate) fn on_container(info: &SourceInfo, destination: &str, output: &Output) {
    let Some(format) = &info.container else { return };
    let extension = format.to_ascii_lowercase();
    let named = destination.rsplit_once('.').is_some_and(|(_, end)| end.eq_ignore_ascii_case(&extension));
    if !named {
        output.warn_once(&format!(
            "{} is a {format} image, and is copied as it is: the replica is the container, not the disk in it. Give the replica a name that \
             ends in .{extension}; for a replica of the disk, convert the image with \"qemu-img convert -O raw\"",
            info.path.display()
        ));
    }
}

/// Warns of options that have no effect on a source that is held already, and of those for tracked disks alone.
pub(crate) fn on_source(info: &SourceInfo, open: &SourceArgs, tracked_only: &[Given], output: &Output) {
    let path = info.path.display();
    let opening = [
        ("--block-size", open.block_size.is_some_and(|size| size != u64::from(info.block_size))),
        ("--trust-device", open.trust_device),
        ("--allow-shrink", open.allow_shrink),
    ];
    let tracked = info.tracked;
    on_size(info, output);
    if info.served {
        without(&opening, &format!("{path} is served, and its server has its own options"), output);
    } else if tracked {
        let because = format!("{path} is tracked, with what was given to \"dsync track add\"");
        without(&opening[..2], &because, output);
    } else {
        let because = format!("{path} is known already, with blocks of another size");
        without(&opening[..1], &because, output);
    }
    if !tracked {
        without(tracked_only, &format!("{path} is not a disk tracked with \"dsync track\""), output);
    }
}
