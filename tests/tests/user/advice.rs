//! What messages advise is there, and works.

use std::fs::rename;

use dsync_tests::far::Far;
use dsync_tests::mount::{Loop, Mount};
use dsync_tests::{Output, Run, Scene, Site, image, need, need_root, skipped};

const MIB: u64 = 1 << 20;

/// A command that a message quotes: what begins with `dsync` and ends at the quotation mark, in words.
fn quoted<'a>(text: &'a str, begins: &str) -> Vec<&'a str> {
    let at = text.find(begins).unwrap_or_else(|| panic!("{begins} is not advised: {text}"));
    let command = text[at..].split('"').next().expect("a command");
    command.split_whitespace().skip(1).collect()
}

#[test]
fn epochs_and_checkpoints_that_are_asked_for_are_listed_where_the_refusal_says() {
    let mut scene = Scene::synced("advice", 4 * MIB);
    scene.change(3);
    scene.site.dsync(["checkpoint", "vm", "backup"]).ok();
    for wrong in ["999", "nothing"] {
        let refused = scene.site.dsync(["changes", "vm", "--since", wrong]).code(1);
        let listed = scene.site.dsync(quoted(&refused.stderr, "dsync status")).ok().text();
        assert!(listed.contains("  epoch 2, ") && listed.contains("12.0 KiB changed"), "{listed}");
        assert!(listed.contains("checkpoint backup at epoch 2"), "{listed}");
    }
}

#[test]
fn a_delta_that_the_refusal_of_another_names_fits() {
    let mut scene = Scene::synced("advice of merge", 4 * MIB);
    let extract =
        |scene: &Scene, since: &str| scene.site.dsync(["extract", "vm", "--since", since]).ok().stdout;
    let merge = |scene: &Scene, delta: &[u8]| scene.site.dsync(["merge"]).arg(&scene.replica).input(delta);
    scene.change(1);
    let first = extract(&scene, "1");
    scene.change(1);
    let second = extract(&scene, "2");
    let refused = merge(&scene, &second).code(4);
    let advised = quoted(&refused.stderr, "dsync extract");
    assert_eq!(advised, ["extract", "SRC", "--since", "1"]);
    let both = extract(&scene, advised[3]);
    merge(&scene, &both).ok();
    scene.equal();
    merge(&scene, &first).code(4).says(&["is at epoch 3", "end of this delta at epoch 2", "skip"]);
}

#[test]
fn a_served_image_that_was_renamed_is_known_as_such() {
    let mut scene = Scene::synced("renamed", 4 * MIB);
    let renamed = scene.site.path("renamed.raw");
    scene.change(2);
    rename(&scene.image, &renamed).expect("a rename");
    let status = scene.site.dsync(["status", "-v"]).ok().text();
    assert!(status.contains("was moved or deleted") && status.contains("2 blocks written since"), "{status}");
    scene.site.sync(&renamed, &scene.replica, &[]).ok();
    image::assert_equal(&renamed, &scene.replica);
}

#[test]
fn every_command_says_the_same_of_a_replica_whose_file_system_is_not_mounted() {
    let mut scene = Scene::synced("not mounted", 4 * MIB);
    let folder = scene.replica.parent().expect("a folder");
    rename(folder, scene.site.path("elsewhere")).expect("a rename");
    std::fs::create_dir(folder).expect("an empty mount point");
    scene.change(1);
    let missing = ["is missing", "last synced on", "epoch 1", "not mounted"];
    scene.sync(&[]).code(4).says(&missing);
    let verify = scene.site.dsync(["verify"]).arg(&scene.image).arg(&scene.replica);
    verify.code(4).says(&missing);
    for command in ["recover", "status"] {
        scene.site.dsync([command]).arg(&scene.replica).code(1).says(&missing);
    }
}

/// A link has a name of its own, and a device behind it one that the kernel gave: what serves it under the first is found by that.
#[test]
fn an_image_behind_a_link_is_found_by_the_name_of_its_export() {
    let mut scene = Scene::new("behind a link", 4 * MIB);
    scene.stop();
    let link = scene.site.path("data.raw");
    std::os::unix::fs::symlink(&scene.image, &link).expect("a link");
    let server = scene.site.serve(&[&link], &[]);
    let sync = |what: &str| scene.site.dsync(["sync", what]).arg(&scene.replica);
    sync("data").ok();
    scene.equal();
    sync("vm").ok();
    server.stop();
    sync("data").ok();
    scene.site.dsync(["demote", "data"]).arg(&scene.replica).ok();
    // Another name from then on.
    scene.site.dsync(["promote", "--force"]).arg(&scene.image).ok();
    scene.site.serve(&[&scene.image], &[]).stop();
    sync("data").code(1).says(&["no source data"]);
    // The link leads elsewhere, and a file of that name is there as well.
    scene.site.serve(&[&link], &[]).stop();
    let other = scene.site.path("other.raw");
    image::copy(&scene.image, &other);
    std::fs::remove_file(&link).and_then(|()| std::os::unix::fs::symlink(&other, &link)).expect("a link");
    scene.site.serve(&[&link], &[]).stop();
    let found = || scene.site.dsync(["status", "data", "--json"]).ok().summary()["path"].clone();
    assert_eq!(found(), other.to_str().expect("a path"));
    std::fs::create_dir(scene.site.path("own")).expect("a folder");
    let own = scene.site.path("own/data.raw");
    image::copy(&scene.image, &own);
    scene.site.serve(&[&own], &[]).stop();
    assert_eq!(found(), own.to_str().expect("a path"));
}

/// Also where nothing is left of it but its state and its entry in the list: a dry run promises nothing that is refused then.
#[test]
fn a_replica_whose_file_is_gone_is_begun_anew_or_forgotten() {
    let scene = Scene::synced("gone for good", 4 * MIB);
    let whole = scene.site.dsync(["extract", "vm", "--since", "0"]).ok().stdout;
    let on_replica = |words: &[&str]| scene.site.dsync(words).arg(&scene.replica);
    let forgotten = |told: &dsync_tests::Output| {
        scene.site.dsync(quoted(&told.stderr, "dsync forget")).ok();
    };
    let aside = scene.site.path("aside.raw");
    std::fs::rename(&scene.replica, &aside).expect("another name");
    // Its source knows it, and says both ways out.
    let missing = scene.sync(&[]).code(4);
    missing.says(&["is missing", "dsync sync --create"]);
    // One that is there stays a replica of that source.
    std::fs::rename(&aside, &scene.replica).expect("its name");
    forgotten(&missing);
    std::fs::remove_file(&scene.replica).expect("a replica");
    let gone = ["the file of replica", "is gone", "--create"];
    for options in [&[][..], &["-n"], &["--adopt"], &["-n", "--adopt"]] {
        scene.sync(options).code(4).says(&gone);
    }
    // Its host lists it: no command says that there was none.
    let listed = ["missing", "last at epoch 1", "dsync forget"];
    for command in ["status", "recover"] {
        let told = on_replica(&[command]).code(1).stderr;
        assert!(listed.iter().all(|word| told.contains(word)), "{told}");
    }
    on_replica(&["promote", "--force"]).code(4).says(&["is gone", "dsync forget"]);
    let mut moment = scene.replica.clone().into_os_string();
    moment.push("@now");
    scene.site.dsync(["serve", "--socket", "s"]).arg(moment).code(4).says(&["no longer exists"]);
    let merge = |delta: &[u8]| on_replica(&["merge"]).input(delta);
    let told = merge(&whole).code(4);
    told.says(&gone[..2]);
    forgotten(&told);
    merge(&whole).ok();
    scene.equal();

    // One that took over, and is gone: both of what it was is forgotten.
    on_replica(&["promote", "--force"]).ok();
    std::fs::remove_file(&scene.replica).expect("a replica");
    let told = scene.sync(&[]).code(4);
    told.says(&["was promoted", "is gone"]);
    forgotten(&told);
    scene.sync(&[]).ok();
    scene.equal();
    assert_eq!(scene.site.dsync(["status", "--check"]).ok().text(), "OK\n");
}

#[test]
fn a_replica_on_a_read_only_mount_is_proven_and_not_changed() {
    let what = "a replica on a file system that is mounted read-only";
    if !need_root(what) || !need(&["mkfs.ext4"], what) {
        return;
    }
    let site = Site::new();
    let (fs, place) = (site.image("fs", 64 * MIB), site.path("mounted"));
    Run::new("mkfs.ext4").arg("-q").arg(&fs).ok();
    let Some(device) = Loop::new(&fs) else { return skipped(what, "loop devices are not allowed here") };
    let Some(_mount) = Mount::new(&[], device.device(), &place) else {
        return skipped(what, "mounting is not allowed here");
    };
    let (disk, replica) = (site.image("vm.raw", 4 * MIB), place.join("vm.raw"));
    site.sync(&disk, &replica, &[]).ok();
    // A source whose state is there as well, and its replica.
    let (state, other, kept) = (place.join("state"), site.image("other.raw", MIB), site.path("kept.raw"));
    let of_state = |command: &[&str]| site.dsync(["--state-dir"]).arg(&state).args(command);
    of_state(&["sync"]).args([&other, &kept]).ok();
    Run::new("mount").args(["-o", "remount,ro"]).arg(&place).ok();
    let other = other.to_str().expect("a name");
    of_state(&["status", "-v"]).ok();
    for command in [&["status", "-v", other][..], &["status", "--check", other], &["status", "--prometheus"]]
    {
        of_state(command).ok();
    }
    let forced = site.dsync(["promote", "--force"]).arg(&replica).code(1);
    assert!(forced.stderr.contains("nothing was changed"), "{forced}");
    let verify = || site.dsync(["verify"]).arg(&disk).arg(&replica);
    verify().ok();
    site.dsync(["status"]).arg(&replica).ok();
    site.sync(&disk, &replica, &["-n"]).ok();
    std::fs::write(&disk, vec![7; 4 << 20]).expect("another content");
    verify().code(5);
    site.sync(&disk, &replica, &[]).code(1).says(&["mounted read-only", "remount"]);
    Run::new("mount").args(["-o", "remount,rw"]).arg(&place).ok();
    site.sync(&disk, &replica, &[]).ok();
    image::assert_equal(&disk, &replica);
}

#[test]
fn two_disks_that_had_one_name_are_told_apart() {
    let what = "two disks under one name";
    if !need_root(what) {
        return;
    }
    let site = Site::new();
    let images = [site.image("one", MIB), site.image("two", MIB)];
    let mut ids = Vec::new();
    let mut name: Option<std::path::PathBuf> = None;
    for image in &images {
        let attached = match &name {
            None => Loop::new(image),
            Some(name) => Loop::named(name, image),
        };
        let Some(device) = attached else { return skipped(what, "loop devices are not allowed here") };
        let replica = image.with_extension("replica");
        site.sync(device.device(), &replica, &[]).ok();
        name = Some(device.device().to_path_buf());
        let status = site.dsync(["status", "--json"]).arg(device.device()).ok().summary();
        ids.push(status["uuid"].as_str().expect("an id").to_owned());
    }
    assert_ne!(ids[0], ids[1]);
    let status = site.dsync(["status", "-v"]).ok().text();
    assert!(ids.iter().all(|id| status.contains(id.as_str())), "{status}");
    // The one that is gone can be named by it.
    site.dsync(["forget", &ids[0]]).ok();
    let status = site.dsync(["status", "-v"]).ok().text();
    let lists = |id: &str| status.contains(&format!("id {id}\n"));
    assert!(!lists(&ids[0]) && lists(&ids[1]), "{status}");
}

#[test]
fn what_is_refused_is_blamed_on_what_caused_it() {
    let site = Site::new();
    let disk = site.image("vm.raw", MIB);
    let sync = |options: &[&str]| site.dsync(["sync"]).args(options).arg(&disk).arg("far:/vm.raw");
    sync(&["--compress", "3"]).code(2).says(&["--compress=3"]);
    sync(&["--timeout", "0"]).code(2).says(&["1s to 1h"]);
    sync(&["-e", "false"]).code(1).says(&["remote shell \"false\"", "--rsh"]);
    // A source that was never synced has no identity that the next refusal would not contradict.
    let replica = site.path("replica.raw");
    site.sync(&disk, &replica, &[]).ok();
    let other = site.image("other.raw", MIB);
    let refusals = [(); 2].map(|()| site.sync(&other, &replica, &[]).code(4).stderr);
    assert_eq!(refusals[0], refusals[1]);
}

#[test]
fn options_without_effect_are_named() {
    let scene = Scene::synced("options", 4 * MIB);
    let says = |options: &[&str], words: &[&str]| {
        let output = scene.sync(options).ok();
        assert!(words.iter().all(|word| output.text().contains(word)), "{output}");
    };
    says(&["--timeout", "9s", "--rsh", "ssh"], &["--rsh and --timeout have no effect", "on this host"]);
    says(&["--passes", "3"], &["--passes has no effect", "not a disk tracked"]);
    says(&["--allow-shrink"], &["--allow-shrink has no effect", "is served"]);
    says(&["--block-size", "64K"], &["--block-size has no effect", "is served"]);
    says(&["--method", "tracked", "--hash", "xxh3"], &["--hash has no effect"]);
    let quiet = scene.sync(&["--compress", "--bwlimit", "1G", "--block-size", "4K"]).ok();
    assert!(!quiet.text().contains("effect"), "{quiet}");
    scene.sync(&["--freeze", "require"]).code(4).says(&["not a tracked disk"]);
    let verify = scene.site.dsync(["verify"]).arg(&scene.image).arg(&scene.replica);
    verify.args(["--commit", "in-place"]).code(2).says(&["--repair"]);
    let serve = scene.site.dsync(["serve"]).arg(&scene.image).args(["--socket", "s", "--read-only"]);
    serve.args(["--block-size", "8K"]).code(2).says(&["--block-size"]);
}

#[test]
fn a_state_directory_that_was_removed_beneath_its_server_is_found_out() {
    let mut scene = Scene::synced("removed state", 4 * MIB);
    std::fs::remove_dir_all(scene.site.state()).expect("the state");
    scene.change(2);
    scene.sync(&[]).code(6).says(&["--state-dir", "removed", "restart"]);
    scene.server.take().expect("a server").kill();
    // Nothing is known any more, and nothing is taken for known.
    scene.start();
    scene.sync(&[]).code(4).says(&["another source", "--adopt"]);
    scene.sync(&["--adopt"]).ok();
    scene.equal();
}

/// The condition of the replicas of a host, as a monitor gets it.
fn check(site: &Site) -> Run {
    site.dsync(["status", "--check"])
}

#[test]
fn a_larger_file_is_not_cut_to_be_adopted_unless_that_is_asked_for() {
    let mut scene = Scene::new("a larger file", 4 * MIB);
    let adopt = ["--adopt=overwrite", "--allow-shrink"];
    let larger = scene.random.bytes(6 << 20);
    std::fs::write(&scene.replica, &larger).expect("another disk");
    scene.sync(&adopt[..1]).code(4).says(&[
        "4.00 MiB",
        "6.00 MiB",
        "wrong destination",
        "--adopt --allow-shrink",
    ]);
    scene.sync(&["--adopt", "-n"]).code(4).says(&["wrong destination"]);
    let text = |options: &[&str]| {
        let run = scene.site.dsync(["sync"]).arg(&scene.image).arg(&scene.replica).args(adopt).args(options);
        let output = run.ok();
        assert!(!output.stderr.contains("no effect"), "{output}");
        output.text()
    };
    let said = text(&["-n"]);
    assert!(said.contains("would cut") && said.contains("from 6.00 MiB to 4.00 MiB"), "{said}");
    assert!(std::fs::read(&scene.replica).expect("the other disk") == larger, "it was changed");
    let said = text(&[]);
    assert!(said.contains("cut ") && said.contains("from 6.00 MiB to 4.00 MiB"), "{said}");
    scene.equal();
}

#[test]
fn what_another_host_says_names_it_and_a_command_that_is_right_here() {
    let scene = Scene::new("names of another host", 4 * MIB);
    let far = Far::new(env!("CARGO_BIN_EXE_rsh"));
    far.sync(&scene, &[], None).ok();
    std::fs::write(far.replica(), "another content").expect("a write");
    let destination = format!("far:{}", far.replica().display());
    let commands = format!("dsync verify --repair {} {destination}\"", scene.image.display());
    let refused = far.sync(&scene, &[], None).code(4);
    refused.says(&["dsync: far: replica ", "was modified outside dsync", &commands]);
    // The same words on one host, without the host.
    let local = scene.site.dsync(["sync"]).arg(&scene.image).arg(far.replica()).code(4);
    assert!(local.stderr.starts_with("dsync: replica "), "{local}");
    let mirror = far.run("mirror", &scene, &[], None).code(4);
    mirror.says(&["dsync: far: replica ", &commands]);
    // A remote shell that fails is named with its options, to be tried by hand.
    let failing = scene.site.dsync(["sync", "-e", "false -x"]).arg(&scene.image).arg("far:/vm.raw").code(1);
    failing.says(&["\"false -x\"", "false -x far dsync receive"]);
}

#[test]
fn a_chmod_or_a_move_is_told_from_a_write_and_goes_on() {
    use std::os::unix::fs::PermissionsExt;
    let mut scene = Scene::synced("a chmod", 4 * MIB);
    let why = "the owner, mode, name or links of ";
    let told = |synced: &Output| {
        let told = synced.summary()["recovered"].as_str().is_some_and(|said| said.contains(why));
        assert!(!told || synced.text().contains("changed outside dsync"), "{synced}");
        told
    };
    let chmod = |scene: &Scene, mode| {
        std::fs::set_permissions(&scene.replica, std::fs::Permissions::from_mode(mode)).expect("a chmod");
    };
    chmod(&scene, 0o640);
    let shown = scene.site.dsync(["status"]).arg(&scene.replica).ok().text();
    assert!(shown.contains(why) && shown.contains("at epoch 1"), "{shown}");
    assert!(!scene.site.dsync(["status"]).arg(&scene.replica).ok().text().contains(why));
    chmod(&scene, 0o600);
    scene.change(1);
    let synced = scene.sync(&[]).ok();
    assert!(told(&synced), "{synced}");
    assert_eq!(synced.summary()["method"], "tracked");
    scene.equal();
    chmod(&scene, 0o640);
    // It is told once.
    assert!(told(&scene.sync(&[]).ok()) && !told(&scene.sync(&[]).ok()));
    let link = scene.site.path("a-link");
    std::fs::hard_link(&scene.replica, &link).expect("a link");
    let verified = scene.site.dsync(["verify"]).arg(&scene.image).arg(&scene.replica).ok();
    verified.says(&[why]);
    // Before a write its time is moved, whoever does it, and however.
    for at in [0, 1] {
        std::thread::sleep(std::time::Duration::from_millis(20));
        let file = std::fs::File::options().read(true).write(true).open(&link).expect("the replica");
        match at {
            0 => std::os::unix::fs::FileExt::write_all_at(&file, &[7], MIB).expect("a write"),
            _ => file.set_len(4 * MIB).expect("a size"),
        }
        chmod(&scene, 0o640);
        scene.sync(&[]).code(4).says(&["content written "]);
        let repair = scene.site.dsync(["verify", "--repair"]).arg(&scene.image).arg(&scene.replica);
        repair.ok();
    }
    scene.equal();
    std::fs::remove_file(&link).expect("the link");
    assert!(told(&scene.sync(&[]).ok()));

    // Moved within its folder without its state.
    let moved = scene.replica.with_file_name("moved.raw");
    rename(&scene.replica, &moved).expect("a rename");
    let state = |name: &str| scene.replica.with_file_name(format!(".{name}.dsync"));
    let refused = scene.site.sync(&scene.image, &moved, &["--create"]).code(4);
    refused.says(&["moved without its state", "dsync verify --repair "]);
    rename(state("vm.raw"), state("moved.raw")).expect("a rename");
    scene.site.dsync(quoted(&refused.stderr, "dsync verify --repair")).ok().says(&[why]);
    scene.site.sync(&scene.image, &moved, &[]).ok();
    image::assert_equal(&scene.image, &moved);

    // A write is told as one by each command, however often it was noticed.
    std::thread::sleep(std::time::Duration::from_millis(50));
    image::scribble(&moved, MIB, image::BLOCK, &mut scene.random);
    scene.site.sync(&scene.image, &moved, &[]).code(4).says(&["content written "]);
    for _ in 0..2 {
        let warned = scene.site.dsync(["verify"]).arg(&scene.image).arg(&moved).code(5);
        assert!(warned.stderr.contains("content written ") && !warned.stderr.contains("owner"), "{warned}");
    }
}

#[test]
fn a_merge_that_is_refused_makes_no_replica() {
    let mut scene = Scene::synced("a refused merge", 4 * MIB);
    scene.change(1);
    let delta = scene.site.dsync(["extract", "vm", "--since", "1"]).ok().stdout;
    let far = Site::new();
    let merge = |delta: &[u8]| far.dsync(["merge"]).arg(far.path("vm.raw")).input(delta);
    merge(&delta).code(4).says(&["does not exist yet"]);
    let listed = far.dsync(["status", "-v"]).ok().text();
    assert!(!listed.contains("vm.raw"), "{listed}");
    let whole = scene.site.dsync(["extract", "vm", "--since", "0"]).ok().stdout;
    merge(&whole).ok();
    let checked = check(&far).ok().text();
    assert_eq!(checked, "OK\n");
    let listed = far.dsync(["status", "-v"]).ok().text();
    assert!(listed.contains("vm.raw"), "{listed}");
}

#[test]
fn a_state_folder_that_was_given_once_is_named_when_it_is_not_given() {
    let scene = Scene::new("a folder for state", 4 * MIB);
    let folder = scene.site.path("journals");
    let given = ["--journal-dir", folder.to_str().expect("a path")];
    scene.sync(&given).ok();
    let forgotten = ["is a replica whose state is in", given[1], "--journal-dir"];
    scene.sync(&[]).code(4).says(&forgotten);
    scene.site.dsync(["status"]).arg(&scene.replica).code(4).says(&forgotten);
    scene.site.dsync(["verify"]).arg(&scene.image).arg(&scene.replica).code(4).says(&forgotten);
    let delta = scene.site.dsync(["extract", "vm"]).ok().stdout;
    scene.site.dsync(["merge"]).arg(&scene.replica).input(delta).code(4).says(&forgotten);
    scene.sync(&given).ok();
}

#[test]
fn a_device_with_something_in_its_middle_is_not_blank() {
    let what = "a first copy to a device that is not blank";
    if !need_root(what) {
        return;
    }
    let mut scene = Scene::new("a device in use", 4 * MIB);
    let backing = scene.site.image("backing", 64 * MIB);
    // As much as the gap between two samples.
    image::scribble(&backing, 20 * MIB, 2 * MIB, &mut scene.random);
    let Some(device) = Loop::new(&backing) else { return skipped(what, "loop devices are not allowed here") };
    scene.site.sync(&scene.image, device.device(), &[]).code(4).says(&["not a dsync replica", "--adopt"]);
    std::fs::write(&backing, vec![0; 64 << 20]).expect("zeroes");
    scene.site.sync(&scene.image, device.device(), &[]).ok();
    // File systems that have lost their first MiB are mended by what they keep elsewhere, whatever the size of the disk.
    for (make, size) in [("mkfs.ext4 -q", 20 << 30), ("mkfs.btrfs -q", 20 << 30), ("mkfs.xfs -q", 20 << 30)] {
        let program = make.split(' ').next().unwrap_or_default();
        if !need(&[program], what) {
            continue;
        }
        let backing = scene.site.image(&format!("of-{program}"), size);
        Run::shell(&format!(
            "{make} {0} && dd if=/dev/zero of={0} bs=1M count=1 conv=notrunc status=none",
            backing.display()
        ))
        .ok();
        let Some(device) = Loop::new(&backing) else {
            return skipped(what, "there are no more loop devices");
        };
        scene.site.sync(&scene.image, device.device(), &[]).code(4).says(&["not a dsync replica"]);
    }
}

#[test]
fn a_server_that_cannot_listen_leaves_no_source_behind() {
    let site = Site::new();
    let (image, other) = (site.image("vm.raw", MIB), site.path("other"));
    std::fs::create_dir(&other).expect("a folder");
    let namesake = other.join("vm.raw");
    std::fs::write(&namesake, vec![0; 1 << 20]).expect("an image");
    let server = site.serve(&[&image], &[]);
    let serve = |socket: &std::path::Path| site.dsync(["serve"]).arg(&namesake).arg("--socket").arg(socket);
    serve(server.socket()).code(4).says(&["already listening"]);
    serve(&site.path("nowhere/s")).code(1).says(&["cannot listen on", "create its folder"]);
    site.dsync(["serve", "--tcp", "127.0.0.1"]).arg(&namesake).code(2).says(&["127.0.0.1:10809"]);
    // The name is not ambiguous.
    let status = site.dsync(["status", "vm"]).ok().text();
    assert!(status.contains(&image.display().to_string()), "{status}");
    let second = site.serve(&[&namesake], &[]);
    let ambiguous = site.dsync(["sync", "vm"]).arg(site.path("copy")).output();
    ambiguous.says(&["is ambiguous", "dsync forget"]);
    second.stop();
    server.stop();
}

#[test]
fn a_result_that_cannot_be_printed_is_a_failure() {
    let scene = Scene::synced("a full disk", 4 * MIB);
    let delta = scene.site.dsync(["extract", "vm", "--since", "0"]).ok().stdout;
    let file = scene.site.path("vm.delta");
    std::fs::write(&file, delta).expect("a delta");
    let (image, replica) = (scene.image.display().to_string(), scene.replica.display().to_string());
    let file = file.display().to_string();
    for words in [
        &["status"][..],
        &["status", "--json"],
        &["status", "--check"],
        &["status", &replica],
        &["sync", &image, &replica],
        &["verify", &image, &replica],
        &["recover", &replica],
        &["inspect", &file],
        &["checkpoint", "vm", "reader"],
        &["key"],
        &["forget", "vm", &replica, "-n"],
    ] {
        let shell = scene.site.run("/bin/sh".as_ref()).args(["-c", "exec dsync \"$@\" > /dev/full", "sh"]);
        shell.args(words).code(1).says(&["cannot be printed", "No space left"]);
    }
}

#[test]
fn slips_are_named_as_what_they_are() {
    let scene = Scene::synced("slips", 4 * MIB);
    let image = scene.image.display().to_string();
    let folder = format!("{}/", scene.site.path("nowhere").display());
    scene.site.dsync(["sync", &image, &folder]).code(2).says(&["names a folder", "vm.raw"]);
    scene
        .site
        .dsync(["sync", &image, "tsl://h/x"])
        .code(2)
        .says(&["\"tsl://\" is not known", "tls://HOST/PATH"]);
    scene.site.dsync(["status", "nobody"]).code(1).says(&["no source is called \"nobody\""]);
    let repaired = scene.site.dsync(["verify", "--repair", &image]).arg(&scene.replica).ok().text();
    assert!(repaired.contains("nothing to repair") && !repaired.contains("repaired"), "{repaired}");
    scene.site.dsync(["merge"]).arg(&scene.replica).input(Vec::new()).code(1).says(&["the delta is empty"]);
    let replica = scene.replica.strip_prefix(scene.site.dir()).expect("beneath the site").to_owned();
    scene.site.dsync(["forget", "vm"]).arg(replica).ok();
    let status = scene.site.dsync(["status", "vm"]).ok().text();
    assert!(!status.contains("up to date as of"), "{status}");
}

#[test]
fn a_change_by_others_that_was_compared_is_not_found_again_after_a_kill() {
    let mut scene = Scene::synced("a change that was compared", 4 * MIB);
    scene.change(1);
    scene.sync(&[]).ok();
    // Another name for a moment changes the file's time, as a write by others does.
    let change = |scene: &Scene| {
        std::thread::sleep(std::time::Duration::from_millis(50));
        let name = scene.site.path("another name");
        std::fs::hard_link(&scene.image, &name).expect("a link");
        std::fs::remove_file(&name).expect("the end of it");
    };
    change(&scene);
    let trust = |scene: &Scene| scene.sync(&[]).ok().summary()["trust"].as_str().expect("a word").to_owned();
    let first = trust(&scene);
    assert!(first.starts_with("compared: "), "{first}");
    assert_eq!(trust(&scene), "tracked");
    scene.server.take().expect("a server").kill();
    assert_eq!(trust(&scene), "tracked");
    // One that nobody has compared is found.
    scene.start();
    scene.server.take().expect("a server").kill();
    change(&scene);
    assert!(trust(&scene).contains("changed by another program"));
}

/// Of a replica that a first copy has left incomplete there is something to say: what it is, and what completes it.
#[test]
fn an_incomplete_replica_is_not_called_one_with_nothing_to_recover() {
    let mut scene = Scene::new("a first copy that is cut off", 8 * MIB);
    scene.change(1000);
    let far = Far::new(env!("CARGO_BIN_EXE_rsh"));
    far.sync(&scene, &[], Some(1 << 20)).code(1);
    let told = far.site.dsync(["recover"]).arg(far.replica()).ok().text();
    for words in ["incomplete", "is no moment of its source", "\"dsync sync\""] {
        assert!(told.contains(words), "{told}");
    }
    assert!(!told.contains("nothing to recover"), "{told}");
}
