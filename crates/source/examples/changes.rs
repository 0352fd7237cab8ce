//! Tracks an image in this process, writes to it, and prints what changed: `cargo run -p source --example changes -- IMAGE STATE-DIR`

use std::error::Error;

use device::Disk;
use extents::Bitmap;
use source::{KnownPosition, Source, SourceOptions, StateDir};

fn main() -> Result<(), Box<dyn Error>> {
    let [image, state] = [1, 2].map(|n| std::env::args().nth(n).expect("usage: changes IMAGE STATE-DIR"));
    let state = StateDir::find(Some(state.as_ref()));
    let source = Source::open(&state, image.as_ref(), &SourceOptions::default())?;
    let before = source.checkpoint(false)?.epoch;
    // All writes go through this disk, which records them.
    source.disk().write_at(0, b"hello")?;
    let after = source.checkpoint(false)?.epoch;

    let block_size = source.about().block_size;
    let changed = Bitmap::new(source.disk().len().div_ceil(block_size.into()));
    let since = [KnownPosition { epoch: before, upto: u64::MAX }];
    source.with_history(|history| history.changes_since(&since, block_size, &changed))?;
    println!(
        "blocks changed from epoch {} to {}: {:?}",
        before.number,
        after.number,
        changed.runs().collect::<Vec<_>>()
    );
    Ok(source.close()?)
}
