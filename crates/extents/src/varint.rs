//! Numbers in as few bytes as they need: seven bits per byte, the lowest first, the top bit set in all but the last (LEB128).
//!
//! Every number has one encoding only; longer ones are refused.

use crate::DecodeError;

/// The longest encoding in bytes.
pub const MAX: usize = 10;

/// Appends `value`.
pub fn put(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Takes a number from the front of `bytes`.
pub fn get(bytes: &mut &[u8]) -> Result<u64, DecodeError> {
    let mut value = 0u64;
    for (i, &byte) in bytes.iter().take(MAX).enumerate() {
        let bits = u64::from(byte & 0x7f);
        // The tenth byte has room for the top bit only.
        if i == MAX - 1 && bits > 1 {
            return Err(DecodeError::Number);
        }
        value |= bits << (7 * i);
        if byte & 0x80 == 0 {
            if byte == 0 && i > 0 {
                return Err(DecodeError::Number);
            }
            *bytes = &bytes[i + 1..];
            return Ok(value);
        }
    }
    Err(if bytes.len() < MAX { DecodeError::Truncated } else { DecodeError::Number })
}

/// Appends a number that may be negative, small ones of either sign in few bytes.
pub fn put_signed(out: &mut Vec<u8>, value: i64) {
    put(out, ((value << 1) ^ (value >> 63)) as u64);
}

/// Takes a number written by [`put_signed`].
pub fn get_signed(bytes: &mut &[u8]) -> Result<i64, DecodeError> {
    let value = get(bytes)?;
    Ok((value >> 1) as i64 ^ -((value & 1) as i64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn edges() {
        for value in [0, 1, 127, 128, 16383, 16384, u64::MAX >> 1, u64::MAX] {
            let mut out = Vec::new();
            put(&mut out, value);
            assert!(out.len() <= MAX);
            let mut rest = &out[..];
            assert_eq!(get(&mut rest), Ok(value));
            assert!(rest.is_empty());
            for cut in 0..out.len() {
                assert_eq!(get(&mut &out[..cut]), Err(DecodeError::Truncated));
            }
        }
        assert_eq!(get(&mut &[0x80, 0][..]), Err(DecodeError::Number), "a longer form than needed");
        assert_eq!(get(&mut &[0xff; 11][..]), Err(DecodeError::Number), "more than 64 bits");
        let mut top = [0x80; 10];
        top[9] = 2;
        assert_eq!(get(&mut &top[..]), Err(DecodeError::Number), "the 65th bit");
    }

    proptest! {
        #[test]
        fn every_number_returns(value: u64, shift in 0u32..64, signed: i64) {
            let value = value >> shift;
            let mut out = Vec::new();
            put(&mut out, value);
            put_signed(&mut out, signed >> shift);
            let mut rest = &out[..];
            prop_assert_eq!(get(&mut rest), Ok(value));
            prop_assert_eq!(get_signed(&mut rest), Ok(signed >> shift));
            prop_assert!(rest.is_empty());
        }

        #[test]
        fn what_is_read_is_what_would_be_written(bytes in prop::collection::vec(any::<u8>(), 0..12)) {
            let mut rest = &bytes[..];
            if let Ok(value) = get(&mut rest) {
                let mut out = Vec::new();
                put(&mut out, value);
                prop_assert_eq!(&out[..], &bytes[..bytes.len() - rest.len()]);
            }
        }
    }
}
