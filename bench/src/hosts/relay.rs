//! A far line on one machine, of which packets are lost: two TUN devices in two network namespaces, and threads here that carry each IP packet
//! from one to the other, at the line's rate, after its delay, or not at all.
//!
//! The connections over it are the kernel's TCP from end to end, so what loss does to them is what it does on a line. Nothing is needed of the
//! kernel but TUN devices: many lack netem.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use dsync_tests::Random;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::measure::places::Network;
use crate::measure::process::{command, run};

const QUICK: Duration = Duration::from_secs(30);
const DEVICE: &str = "dsync-far";
/// Packets wait for the line no longer than this; those that would are dropped.
const QUEUE: Duration = Duration::from_millis(50);

/// What a line does to packets, each way.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    /// Bits a second.
    pub rate: u64,
    /// One way.
    pub delay: Duration,
}

/// A line between two namespaces. Dropped, it is taken down.
pub(crate) struct Relay {
    pub network: Network,
    stop: Arc<AtomicBool>,
    /// Of a million packets, so many are lost.
    loss: Arc<AtomicU64>,
    ways: Vec<JoinHandle<()>>,
}

impl Relay {
    /// The far side's address on the line.
    pub(crate) const FAR: &str = "10.213.8.2";
    const NEAR: &str = "10.213.8.1";

    pub(crate) fn new(shape: Shape, seed: u64) -> Result<Relay> {
        // Its own link stays unused.
        let network = Network::new(None)?;
        let mut ends = Vec::new();
        for (space, here, there) in
            [(network.spaces()[0], Self::NEAR, Self::FAR), (network.spaces()[1], Self::FAR, Self::NEAR)]
        {
            ends.push(Arc::new(tun(space)?));
            for line in [
                format!("-n {space} address add {here} peer {there} dev {DEVICE}"),
                // The relay is to drop packets, and not the device.
                format!("-n {space} link set {DEVICE} txqueuelen 20000 up"),
            ] {
                run(command("ip").args(line.split_whitespace()), QUICK)?;
            }
        }
        let (stop, loss) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let mut relay = Relay { network, stop, loss, ways: Vec::new() };
        for (from, to) in [(0, 1), (1, 0)] {
            let (from, to) = (ends[from].clone(), ends[to].clone());
            let (stop, loss) = (relay.stop.clone(), relay.loss.clone());
            let random = Random::seeded(seed.wrapping_add(relay.ways.len() as u64));
            relay.ways.push(std::thread::spawn(move || carry(&from, &to, shape, &stop, &loss, random)));
        }
        Ok(relay)
    }

    /// From now on so many of a million packets are lost, each way.
    pub(crate) fn lose(&self, of_a_million: u64) {
        self.loss.store(of_a_million, Relaxed);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        for way in self.ways.drain(..) {
            let _ = way.join();
        }
    }
}

/// A TUN device in a namespace. It goes with the file.
fn tun(space: &str) -> Result<File> {
    let inside = File::open(format!("/run/netns/{space}"))?;
    // Another thread, so that this one stays where it is.
    let made = std::thread::spawn(move || -> Result<File> {
        use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
        move_into_link_name_space(inside.as_fd(), Some(LinkNameSpaceType::Network))?;
        let file =
            OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun");
        let file = file.context("/dev/net/tun")?;
        // SAFETY: all-zero bytes are a valid ifreq.
        let mut wanted: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, from) in wanted.ifr_name.iter_mut().zip(DEVICE.bytes()) {
            *to = from as libc::c_char;
        }
        wanted.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI) as libc::c_short;
        // SAFETY: the file is open, and the kernel reads and writes an ifreq.
        let done =
            unsafe { libc::ioctl(std::os::fd::AsRawFd::as_raw_fd(&file), libc::TUNSETIFF as _, &mut wanted) };
        ensure!(done == 0, "a TUN device: {}", std::io::Error::last_os_error());
        Ok(file)
    });
    made.join().map_err(|_| anyhow!("a thread panicked"))?
}

/// Carries packets one way until it is stopped.
fn carry(from: &File, to: &File, shape: Shape, stop: &AtomicBool, loss: &AtomicU64, mut random: Random) {
    let mut under_way: VecDeque<(Instant, Vec<u8>)> = VecDeque::new();
    let (mut free, mut packet) = (Instant::now(), [0; 2048]);
    let (mut input, mut output) = (from, to);
    while !stop.load(Relaxed) {
        // A few at a time, so that those that are due do not wait.
        for _ in 0..32 {
            let len = match input.read(&mut packet) {
                Ok(len) => len,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // The device is down.
                Err(_) => return,
            };
            let now = Instant::now();
            free = free.max(now);
            if random.below(1_000_000) < loss.load(Relaxed) || free - now > QUEUE {
                continue;
            }
            free += Duration::from_nanos(len as u64 * 8_000_000_000 / shape.rate);
            under_way.push_back((free + shape.delay, packet[..len].to_vec()));
        }
        let now = Instant::now();
        while under_way.front().is_some_and(|(due, _)| *due <= now) {
            if let Some((_, packet)) = under_way.pop_front() {
                // One that the other side does not take is lost.
                let _ = output.write(&packet);
            }
        }
        let due = under_way
            .front()
            .map_or(Duration::from_millis(20), |(due, _)| due.saturating_duration_since(now));
        let wait = Timespec { tv_sec: 0, tv_nsec: due.as_nanos().min(20_000_000) as _ };
        let _ = poll(&mut [PollFd::new(from, PollFlags::IN)], Some(&wait));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_delays() {
        let shape = Shape { rate: 100_000_000, delay: Duration::from_millis(30) };
        let tools = ["ip", "nsenter", "bash"];
        if !crate::measure::places::root() || tools.iter().any(|tool| dsync_tests::find(tool).is_none()) {
            return println!("skipped: this needs root, ip, nsenter and bash");
        }
        let relay = match Relay::new(shape, 1) {
            Ok(relay) => relay,
            Err(error) => return println!("skipped: {error:#}"),
        };
        let [enter, rest @ ..] = relay.network.near();
        let mut knock = command(&enter);
        knock.args(rest).args(["bash", "-c", &format!("exec 3<>/dev/tcp/{}/9", Relay::FAR)]);
        let began = Instant::now();
        // A refusal is an answer too, after a round trip.
        assert!(run(&mut knock, QUICK).unwrap_err().to_string().contains("refused"));
        assert!(began.elapsed() >= Duration::from_millis(60), "{:?}", began.elapsed());
    }
}
