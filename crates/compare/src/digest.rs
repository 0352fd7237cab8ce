//! Digests of blocks.

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;

/// Bytes of the digest of a block.
pub const DIGEST: usize = 16;

/// The digest of a block.
pub type Digest = [u8; DIGEST];

/// Hash function for blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Hash {
    /// The first half of BLAKE3: collisions cannot be crafted, even by a guest that chooses its blocks.
    #[default]
    Blake3,
    /// XXH3-128: several times as fast, for disks whose writers are trusted. Collisions can be crafted.
    Xxh3,
}

impl Hash {
    /// The digest of a block.
    pub fn digest(self, block: &[u8]) -> Digest {
        match self {
            Hash::Blake3 => {
                let mut short = [0; DIGEST];
                short.copy_from_slice(&blake3::hash(block).as_bytes()[..DIGEST]);
                short
            }
            Hash::Xxh3 => XxHash3_128::oneshot(block).to_le_bytes(),
        }
    }
}

/// True if every byte is zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    // In steps, so that the search mostly ends after the first one if there is data.
    bytes.chunks(64).all(|step| step.iter().fold(0, |all, b| all | b) == 0)
}
