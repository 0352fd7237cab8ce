//! Sets of blocks: ranges, and bitmaps that skip what is clean. No I/O.
