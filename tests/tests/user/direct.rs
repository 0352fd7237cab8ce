//! Servers that write bypassing the page cache, through queues whose completions must be looked for.

use std::path::Path;
use std::time::{Duration, Instant};

use dsync_tests::load::{Load, Options};
use dsync_tests::mount::Loop;
use dsync_tests::{Random, Site, image, need_root, skipped};

/// Serves `device`, whose bytes are those of the sparse `image`.
fn load_with_everything_beside_it(site: &Site, image: &Path, device: &Path, options: &[&str]) {
    let mut random = Random::new("direct");
    // Regions fall idle after a fifth of a second, not after ten.
    let server = site.serve_with(&[device], options, &[("DSYNC_SWEEP_MS", "20")]);
    let export = device.file_stem().expect("a name").to_str().expect("UTF-8");
    // A rate at which regions fall idle, and are written again.
    let load = Options { connections: 2, longest: 2, rate: 150, flush_every: 50, ..Options::default() };
    let load = Load::start(&server.address(), export, &load, &mut random);
    let copy = site.path(&format!("copy-of-{export}.raw"));
    let limit = Duration::from_secs(if dsync_tests::soak() { 60 } else { 2 });
    let began = Instant::now();
    let mut rounds = 0;
    while began.elapsed() < limit || rounds < 3 {
        let before = load.answered();
        site.dsync(["status"]).limit(Duration::from_secs(60)).ok();
        site.sync(device, &copy, &[]).limit(Duration::from_secs(120)).ok();
        load.wait_for(before + 20);
        rounds += 1;
    }
    // The end comes in the midst of the writes.
    server.stop();
    let written = load.stop();
    written.check(image);
    site.sync(device, &copy, &["--method", "tracked", "--trust-device"]).ok();
    image::assert_equal(image, &copy);
}

#[test]
fn a_sparse_image_written_directly_is_served_synced_and_ended() {
    let site = Site::new();
    let image = site.image("vm.raw", 64 << 30);
    load_with_everything_beside_it(&site, &image, &image, &["--direct"]);
}

#[test]
fn a_block_device_is_served_synced_and_ended() {
    if !need_root("serving a loop device") {
        return;
    }
    let site = Site::new();
    let image = site.image("disk.raw", 1 << 30);
    let Some(device) = Loop::new(&image) else {
        return skipped("serving a loop device", "losetup cannot attach one");
    };
    load_with_everything_beside_it(&site, &image, device.device(), &["--trust-device"]);
}
