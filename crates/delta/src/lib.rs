//! The delta: changes of a disk with their data, as units that travel through pipes, files and messages alike.
//!
//! A delta is a header, frames of records, and a trailer; `docs/delta-format.md` has every byte of it. [`Encoder`] and
//! [`Decoder`] turn frames into [`Unit`]s and back without copying data, and let nothing pass that is not in order.
//! [`Writer`] and [`Reader`] carry units over byte streams. [`combine`] makes one delta of two.

mod combine;
mod decoder;
mod encoder;
mod error;
mod frame;
mod header;
mod ledger;
mod limits;
mod stream;
mod unit;

pub use combine::combine;
pub use decoder::{Decoder, Event};
pub use encoder::Encoder;
pub use error::{Error, Result};
pub use frame::{Compressor, Decoded, Decompressor, Encoded, Frame, Record, decode_frame, encode_frame};
pub use header::{Epoch, Header, Method, Resume, VERSION};
pub use ledger::Totals;
pub use limits::{MAX_CHAIN, MAX_DATA, MAX_RECORDS};
pub use stream::{Reader, Units, Writer};
pub use unit::{Unit, UnitKind};
