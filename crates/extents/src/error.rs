//! Why an encoding is refused.

/// Why an encoded set can't be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The bytes end in the middle.
    #[error("the encoded set ends in the middle")]
    Truncated,
    /// A number takes more than 64 bits, or more bytes than it needs.
    #[error("the encoded set holds a malformed number")]
    Number,
    /// It is of a bitmap of another size.
    #[error("the encoded set covers {found} blocks, not {expected}")]
    Blocks {
        /// Blocks that the reader has.
        expected: u64,
        /// Blocks that the encoding has.
        found: u64,
    },
    /// A range reaches past the end.
    #[error("the encoded set reaches past its end")]
    PastEnd,
    /// Ranges touch, overlap or descend.
    #[error("the encoded set is not in order")]
    Order,
    /// The number of blocks is not what the end says.
    #[error("the encoded set holds {found} blocks, its end says {expected}")]
    Count {
        /// Blocks that the end states.
        expected: u64,
        /// Blocks that were found.
        found: u64,
    },
    /// Bytes follow the end.
    #[error("bytes follow the encoded set")]
    Trailing,
}
