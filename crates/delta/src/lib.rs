//! The delta format: changes of a disk together with their data, for pipes, files and network messages alike.
//!
//! A delta is a header, frames of records, and a trailer; `docs/delta-format.md` specifies every byte. [`Encoder`] and [`Decoder`] turn
//! frames into [`Unit`]s and back without copying data, and reject whatever is out of order. [`Writer`] and [`Reader`] carry units
//! over byte streams. [`Combined`] makes one delta of several.
//!
//! ```
//! use delta::{Encoder, Epoch, Event, Frame, Header, Method, Reader, Record, Writer};
//! use uuid::Uuid;
//!
//! # fn main() -> delta::Result<()> {
//! let epoch = |number| Epoch { number, id: Uuid::new_v4() };
//! let header = Header {
//!     stream: Uuid::new_v4(),
//!     source: Uuid::new_v4(),
//!     chain: vec![epoch(1), epoch(2)],
//!     size_before: 1 << 20,
//!     size_after: 1 << 20,
//!     block_size: 4096,
//!     method: Method::Tracked,
//!     binds: None,
//!     resumes: None,
//!     fuzzy: false,
//!     batch: false,
//!     partial: false,
//!     lives: lineage::Lives::default(),
//! };
//! let mut writer = Writer::new(Vec::new());
//! let (mut encoder, unit) = Encoder::new(&header, None)?;
//! writer.unit(&unit)?;
//! let data = device::Buf::from(&[7; 4096][..]);
//! writer.unit(&encoder.frame(Frame { records: vec![Record::Data { offset: 8192, len: 4096 }], data })?)?;
//! writer.unit(&encoder.trailer())?;
//!
//! let bytes = writer.into_inner();
//! let mut reader = Reader::new(bytes.as_slice());
//! assert_eq!(reader.header()?.to(), header.chain.last());
//! let mut changed = 0;
//! while let Some(event) = reader.next()? {
//!     if let Event::Frame(frame) = event {
//!         changed += frame.records.iter().map(Record::len).sum::<u64>();
//!     }
//! }
//! // Only now is it known to be complete.
//! reader.expect_end()?;
//! assert_eq!(changed, 4096);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod combine;
mod decoder;
mod encoder;
mod epoch;
mod error;
mod frame;
mod header;
mod ledger;
mod limits;
mod stream;
mod unit;
mod unit_kind;

pub use combine::Combined;
pub use decoder::{Decoder, Event};
pub use encoder::Encoder;
pub use epoch::Epoch;
pub use error::{Error, Result};
pub use frame::{Compressor, Decoded, Decompressor, Encoded, Frame, Record, decode_frame, encode_frame};
pub use header::{Header, Method, Resume, VERSION};
pub use ledger::Totals;
pub use limits::{MAX_CHAIN, MAX_DATA, MAX_RECORDS};
pub use stream::{Reader, Units, Writer};
pub use unit::Unit;
pub use unit_kind::UnitKind;
