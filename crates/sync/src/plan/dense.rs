//! Dense regions: where many blocks of a window are marked, moving all of it costs less than picking blocks.

use extents::Bitmap;

/// Blocks of a window; all of it is moved if one in [`DENSE_PART`] of them is marked.
const WINDOW: u64 = 2048;
const DENSE_PART: u64 = 3;

/// Marks what is between the marked blocks of dense windows.
pub(crate) fn fill_dense(changes: &Bitmap) {
    let mut at = 0;
    while let Some(first) = changes.runs_in(at..changes.blocks()).next() {
        let window = first.start..(first.start + WINDOW).min(changes.blocks());
        let (mut marked, mut end) = (0, first.start);
        for run in changes.runs_in(window.clone()) {
            marked += run.end - run.start;
            end = run.end;
        }
        if marked * DENSE_PART >= window.end - window.start {
            changes.set(first.start..end);
        }
        at = window.end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dense_windows_are_filled_and_others_left() {
        let changes = Bitmap::new(10 * WINDOW);
        // Every second block of the first window, every tenth of a later one, and two strays.
        (0..WINDOW).step_by(2).for_each(|b| {
            changes.set(b..b + 1);
        });
        (4 * WINDOW..5 * WINDOW).step_by(10).for_each(|b| {
            changes.set(b..b + 1);
        });
        changes.set(9 * WINDOW..9 * WINDOW + 1);
        changes.set(10 * WINDOW - 1..10 * WINDOW);
        let sparse = changes.count() - WINDOW / 2;
        fill_dense(&changes);
        assert!(changes.all(0..WINDOW - 1));
        assert_eq!(changes.count(), WINDOW - 1 + sparse);
    }
}
