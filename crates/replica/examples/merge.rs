//! Merges a delta into a replica: `cargo run -p replica --example merge -- REPLICA < DELTA`

use std::error::Error;
use std::io::{BufReader, stdin};

use delta::Units;
use replica::{CommitMode, Replica, ReplicaOptions};

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).expect("usage: merge REPLICA < DELTA");
    // Completes or rolls back what a crash left.
    let mut replica = Replica::open(path.as_ref(), &ReplicaOptions::default())?;
    let mut units = Units::new(BufReader::new(stdin().lock()));
    let header = units.next()?.ok_or("the delta is empty")?;
    let mut receipt = replica.receive(header, CommitMode::Journal)?;
    while let Some(unit) = units.next()? {
        receipt.unit(unit)?;
    }
    let committed = receipt.finish()?;
    println!("{path} is at epoch {}", committed.epoch.number);
    Ok(())
}
