//! Processes that stand still for a while and go on, as where a machine is suspended: calls that wait with a time limit are then
//! interrupted, though nobody sent a signal that the program knows of. Nothing fails for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::Duration;

use dsync_tests::far::Far;
use dsync_tests::image;
use dsync_tests::{Random, Run, Scene, rounds};
use rustix::process::{Pid, Signal, kill_process_group};

const MIB: u64 = 1 << 20;
const RSH: &str = env!("CARGO_BIN_EXE_rsh");

/// Stops process groups and lets them go on, again and again, until it is dropped.
struct Pauses {
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Pauses {
    fn of(groups: Vec<Pid>, mut random: Random) -> Pauses {
        let ends = Arc::new(AtomicBool::new(false));
        let ended = ends.clone();
        let thread = std::thread::spawn(move || {
            // A group that has ended takes no signal.
            let all = |signal| {
                groups.iter().for_each(|group| {
                    let _ = kill_process_group(*group, signal);
                })
            };
            let mut rest = |below| std::thread::sleep(Duration::from_micros(random.below(below)));
            while !ended.load(SeqCst) {
                all(Signal::STOP);
                rest(3000);
                all(Signal::CONT);
                rest(6000);
            }
        });
        Pauses { ends, thread: Some(thread) }
    }
}

impl Drop for Pauses {
    fn drop(&mut self) {
        self.ends.store(true, SeqCst);
        self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
    }
}

/// Runs it among pauses of its own processes and, now and then, of the server.
fn among_pauses(scene: &mut Scene, run: Run) {
    let mut process = run.start();
    let mut groups = vec![process.pid()];
    if scene.random.coin() {
        groups.push(scene.server.as_mut().expect("a server").process().pid());
    }
    let pauses = Pauses::of(groups, Random::seeded(scene.random.bits()));
    let ended = process.wait_for(Duration::from_secs(60));
    drop(pauses);
    let output = process.output(Duration::from_secs(1));
    assert!(ended.is_some_and(|status| status.success()), "{output}");
}

#[test]
fn what_is_paused_goes_on() {
    let mut scene = Scene::synced("pauses", 16 * MIB);
    let far = Far::new(RSH);
    far.sync(&scene, &[], None).ok();
    for _ in 0..rounds(4, 100) {
        scene.change(200);
        let run = scene.sync(&["--keep-last", "3"]);
        among_pauses(&mut scene, run);
        scene.equal();
        let run = far.sync(&scene, &[], None);
        among_pauses(&mut scene, run);
        image::assert_equal(&scene.image, &far.replica());
        let run = scene.site.dsync(["verify"]).args([&scene.image, &scene.replica]);
        among_pauses(&mut scene, run);
        let run = scene.site.dsync(["status", "--check"]);
        among_pauses(&mut scene, run);
        // By the protocol that other clients use.
        let run =
            scene.site.dsync(["sync"]).arg(scene.server().uri("vm@view")).arg(scene.site.path("copy.raw"));
        among_pauses(&mut scene, run);
        image::assert_equal(&scene.image, &scene.site.path("copy.raw"));
    }
}
