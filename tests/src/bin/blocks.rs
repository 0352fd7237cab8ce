//! What the tests inside guests need of block devices, read and written with O_DIRECT:
//!
//! - `blocks judge DEVICE REPLICA FROZEN`: reads a frozen record of dm-track, compares the devices, copies what the
//!   record reports to the replica, and prints `reported N different N missed N surplus N regions N whole N`:
//!   blocks; then regions of 64 blocks with a surplus, and how many of these are reported whole.
//! - `blocks load DEVICE SEED THREADS SECONDS`: random writes of random sizes, in bursts here and there.
//! - `blocks follow DEVICE REPLICA UUID [die]`: what a sync does with the device's tracker. Prints whether the record is
//!   lost, what was released last, and how many blocks were copied; to standard error, how many of these were the same
//!   before. `die` is to do so before the release.
//! - `blocks time DEVICE COUNT SEED|+STRIDE`: writes of 4 KiB one by one, at random or STRIDE bytes apart; prints the
//!   nanoseconds that one took.
//! - `blocks pace SOCKET EXPORT FIRST COUNT RATE`: writes to an NBD server, so many blocks a second, scattered, none
//!   twice; of all the blocks in that order COUNT from the FIRST on.
//!
//! `BLOCKS_REGION` sets the blocks of a region.

use std::fs::{File, OpenOptions, read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::{Duration, Instant};

use dsync_tests::Random;
use dsync_tests::nbd::{Address, Client};

const DIRECT: i32 = 0o40000;
const CHUNK: usize = 1 << 20;

/// Memory that direct I/O takes.
struct Buffer {
    bytes: Vec<u8>,
    start: usize,
}

impl Buffer {
    fn new() -> Buffer {
        let bytes = vec![0; CHUNK + 4096];
        let start = bytes.as_ptr().align_offset(4096);
        Buffer { bytes, start }
    }

    fn get(&mut self, len: usize) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + len]
    }
}

fn open(path: &str) -> File {
    let file = OpenOptions::new().read(true).write(true).custom_flags(DIRECT).open(path);
    file.unwrap_or_else(|e| panic!("{path}: {e}"))
}

fn size(file: &File) -> u64 {
    rustix::fs::seek(file, rustix::fs::SeekFrom::End(0)).expect("the device's size")
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn judge(device: &str, replica: &str, frozen: &str) {
    let record = read(frozen).unwrap_or_else(|e| panic!("{frozen}: {e}"));
    assert_eq!(&record[..8], b"dmtrack1", "{frozen}");
    let (blocks, dirty) = (word(&record, 16), word(&record, 24));
    let block = 512 * (word(&record, 48) as u32) as usize;
    let bits = &record[64..];
    assert_eq!(bits.len() as u64, blocks.div_ceil(64) * 8, "{frozen}");
    let is_set = |n: u64| bits[(n / 8) as usize] >> (n % 8) & 1 == 1;

    let region = std::env::var("BLOCKS_REGION").map_or(64, |text| text.parse().expect("a number"));
    let (device, replica) = (open(device), open(replica));
    let end = size(&device);
    let (mut ours, mut theirs) = (Buffer::new(), Buffer::new());
    let (mut reported, mut different, mut missed, mut surplus) = (0, 0, 0, 0);
    let (mut regions, mut whole, mut all, mut over) = (0, 0, true, false);
    for at in (0..end).step_by(CHUNK) {
        let len = CHUNK.min((end - at) as usize);
        device.read_exact_at(ours.get(len), at).expect("the device");
        replica.read_exact_at(theirs.get(len), at).expect("the replica");
        for (i, (a, b)) in ours.get(len).chunks(block).zip(theirs.get(len).chunks(block)).enumerate() {
            let number = at / block as u64 + i as u64;
            let differs = a != b;
            match (number < blocks && is_set(number), differs) {
                (true, true) => {
                    reported += 1;
                    different += 1;
                }
                (true, false) => {
                    reported += 1;
                    surplus += 1;
                    over = true;
                }
                (false, true) => {
                    different += 1;
                    missed += 1;
                    all = false;
                    if missed <= 5 {
                        println!("# missed: block {number}");
                    }
                }
                (false, false) => all = false,
            }
            if number % region == region - 1 || number == blocks - 1 {
                regions += u64::from(over);
                whole += u64::from(over && all);
                (all, over) = (true, false);
            }
        }
        let first = at / block as u64;
        let mut i = 0;
        while i * block < len {
            if !is_set(first + i as u64) {
                i += 1;
                continue;
            }
            let begin = i;
            while i * block < len && is_set(first + i as u64) {
                i += 1;
            }
            let (from, to) = (begin * block, (i * block).min(len));
            let run = &ours.get(len)[from..to];
            replica.write_all_at(run, at + from as u64).expect("the replica");
        }
    }
    assert_eq!(reported, dirty, "the header's count of dirty blocks");
    println!(
        "reported {reported} different {different} missed {missed} surplus {surplus} regions {regions} whole {whole}"
    );
}

fn follow(path: &str, replica: &str, epoch: &str, die: bool) {
    let tracker = trackers::find(path.as_ref()).expect("a look").expect("a tracker");
    let dirty = tracker.dirty().expect("what is dirty");
    let changes = tracker.checkpoint().expect("a checkpoint");
    assert!(dirty.runs().all(|run| changes.all(run)), "what was dirty is frozen");
    let lost = tracker.lost().expect("trust").unwrap_or_else(|| "tracked".into());
    let released = tracker.released().expect("a name").map_or("-".into(), |id| id.to_string());
    let (device, replica) = (open(path), open(replica));
    assert_eq!(size(&device), tracker.size());
    let block = u64::from(tracker.block_size());
    let (mut buffer, mut before, mut same) = (Buffer::new(), Buffer::new(), 0);
    for run in changes.runs() {
        let end = (run.end * block).min(tracker.size());
        for at in (run.start * block..end).step_by(CHUNK) {
            let len = CHUNK.min((end - at) as usize);
            let (bytes, before) = (buffer.get(len), before.get(len));
            device.read_exact_at(bytes, at).expect("the device");
            replica.read_exact_at(before, at).expect("the replica");
            let blocks = bytes.chunks(block as usize).zip(before.chunks(block as usize));
            same += blocks.filter(|(now, before)| now == before).count();
            replica.write_all_at(bytes, at).expect("the replica");
        }
    }
    eprintln!("same {same}");
    println!("{} {lost} {released} {}", tracker.kind(), changes.count());
    if !die {
        tracker.release(epoch.parse().expect("a UUID")).expect("a release");
    }
}

fn load(device: &str, seed: u64, threads: u64, seconds: f64) {
    let until = Instant::now() + Duration::from_secs_f64(seconds);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                let file = open(device);
                let mut random = Random::seeded(seed.wrapping_mul(1000) + thread);
                let mut buffer = Buffer::new();
                let end = size(&file);
                let spot = (end / 16).max(1 << 20);
                let (mut from, mut leave) = (0, Instant::now());
                while Instant::now() < until {
                    if Instant::now() >= leave {
                        from = random.below((end - spot) / 4096 + 1) * 4096;
                        leave = Instant::now() + Duration::from_millis(random.within(10..500));
                    }
                    let len = 4096 * (1 + random.below(8));
                    let at = from + random.below((spot - len) / 4096 + 1) * 4096;
                    let bytes = buffer.get(len as usize);
                    for part in bytes.chunks_mut(4096) {
                        part[..8].copy_from_slice(&random.bits().to_le_bytes());
                    }
                    file.write_all_at(bytes, at).expect("a write");
                }
            });
        }
    });
}

fn time(device: &str, count: u64, order: &str) {
    let file = open(device);
    let blocks = size(&file) / 4096;
    let mut buffer = Buffer::new();
    let number = |text: &str| text.parse::<u64>().expect("a number");
    let places: Vec<u64> = match order.strip_prefix('+') {
        Some(stride) => (0..count).map(|n| n * number(stride)).collect(),
        None => {
            let mut random = Random::seeded(number(order));
            (0..count).map(|_| random.below(blocks) * 4096).collect()
        }
    };
    let started = Instant::now();
    for at in places {
        file.write_all_at(buffer.get(4096), at).expect("a write");
    }
    println!("{}", started.elapsed().as_nanos() as u64 / count);
}

fn pace(socket: &str, export: &str, numbers: std::ops::Range<u64>, rate: u64) {
    let address = Address::Unix(socket.into());
    let mut client = Client::connect(&address, export).expect("a server");
    let blocks = client.size / 4096;
    let (began, first) = (Instant::now(), numbers.start);
    for number in numbers {
        let due = Duration::from_micros((number - first) * 1_000_000 / rate);
        std::thread::sleep(due.saturating_sub(began.elapsed()));
        // An odd factor visits every block of a power of two.
        let at = number.wrapping_mul(0x9e37_79b1) % blocks * 4096;
        client.write(at, &Random::seeded(number).bytes(4096)).expect("a write");
    }
    client.close().expect("an end");
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let number = |text: &str| text.parse::<u64>().expect("a number");
    match args[1..] {
        ["judge", device, replica, frozen] => judge(device, replica, frozen),
        ["load", device, seed, threads, seconds] => {
            load(device, number(seed), number(threads), seconds.parse().expect("seconds"));
        }
        ["bpf", device] => {
            if let Err(e) = trackers::bpf::add(device.as_ref(), None) {
                println!("{e}");
                std::process::exit(1);
            }
        }
        ["unbpf", device] => assert!(trackers::bpf::remove(device.as_ref()).expect("an end")),
        ["follow", device, replica, epoch] => follow(device, replica, epoch, false),
        ["follow", device, replica, epoch, "die"] => follow(device, replica, epoch, true),
        ["time", device, count, order] => time(device, number(count), order),
        ["pace", socket, export, first, count, rate] => {
            let first = number(first);
            pace(socket, export, first..first + number(count), number(rate));
        }
        _ => panic!("blocks pace|judge|load|follow|bpf|unbpf|time: see its source"),
    }
}
