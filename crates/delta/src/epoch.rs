//! What identifies a moment of a source.

use std::fmt;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// A moment of a source: what lies between two checkpoints begins with one. The number orders, the id alone identifies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Epoch {
    /// Rises with every checkpoint of the source.
    pub number: u64,
    /// Random: a copied or restored source repeats numbers, but not ids.
    pub id: Uuid,
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Enough of the id to tell apart what bears the same number.
        write!(f, "{} ({:.8})", self.number, self.id.simple().to_string())
    }
}
