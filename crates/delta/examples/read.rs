//! Prints what a delta changes: `dsync extract vm --since 41 | cargo run -p delta --example read`

use std::io::{BufReader, stdin};

use delta::{Event, Reader, Record, Result};

fn main() -> Result<()> {
    let mut reader = Reader::new(BufReader::new(stdin().lock()));
    let header = reader.header()?;
    println!("source {}, epochs {:?}, {} bytes", header.source, header.chain, header.size_after);
    while let Some(event) = reader.next()? {
        let Event::Frame(frame) = event else { continue };
        for record in &frame.records {
            match record {
                Record::Data { offset, len } => println!("data  {offset} {len}"),
                Record::Zero { offset, len } => println!("zeros {offset} {len}"),
                other => println!("copy  {} {}", other.offset(), other.len()),
            }
        }
    }
    // Nothing of a delta counts before its trailer was seen and verified.
    reader.expect_end()
}
