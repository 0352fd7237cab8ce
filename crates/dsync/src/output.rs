//! Output: lines of text, or one JSON object per line.

use std::collections::HashSet;
use std::io::{IsTerminal, Write};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use serde::Serialize;
use serde_json::{Value, json};

use crate::args::Cli;
use crate::terms::units;

/// Where and how to print.
pub(crate) struct Output {
    json: bool,
    quiet: bool,
    verbose: bool,
    /// The stream for results and summaries: standard output, or standard error if that carries a delta.
    to_stderr: bool,
    /// Warnings that are printed once, although a command makes several attempts.
    warned: Arc<Mutex<HashSet<String>>>,
    /// The first error of printing, shared with copies.
    failed: Arc<OnceLock<std::io::Error>>,
    bar: Mutex<Option<Bar>>,
}

struct Bar {
    bar: Option<ProgressBar>,
    began: Instant,
    said: Instant,
}

/// How often a JSON status is printed.
const STATUS_EVERY: Duration = Duration::from_millis(500);

impl Output {
    /// Output as the arguments request.
    pub(crate) fn new(cli: &Cli) -> Output {
        Output {
            json: cli.json,
            quiet: cli.quiet,
            verbose: cli.verbose > 0,
            to_stderr: false,
            warned: Arc::default(),
            failed: Arc::default(),
            bar: Mutex::new(None),
        }
    }

    /// For commands whose standard output is a delta.
    pub(crate) fn on_stderr(mut self) -> Output {
        self.to_stderr = true;
        self
    }

    /// A copy for another thread.
    pub(crate) fn alike(&self) -> Output {
        Output {
            bar: Mutex::new(None),
            failed: Arc::clone(&self.failed),
            warned: Arc::clone(&self.warned),
            ..*self
        }
    }

    fn line(&self, text: &str) {
        if self.to_stderr {
            let _ = writeln!(std::io::stderr(), "{text}");
        } else {
            self.printed(writeln!(std::io::stdout(), "{text}"));
        }
    }

    fn printed(&self, result: std::io::Result<()>) {
        match result {
            // A closed pipe is not an error: the work is done, and its reader wants no more.
            Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => drop(self.failed.set(error)),
            _ => {}
        }
    }

    /// Ends the output of a command that succeeded.
    ///
    /// # Errors
    /// If a part of the result could not be printed.
    pub(crate) fn end(&self) -> anyhow::Result<()> {
        self.finish();
        self.printed(std::io::stdout().flush());
        match self.failed.get() {
            Some(error) => {
                Err(anyhow::anyhow!("the command is done, but its result cannot be printed: {error}"))
            }
            None => Ok(()),
        }
    }

    /// A line of the result.
    pub(crate) fn say(&self, text: &str) {
        if !self.quiet && !self.json {
            self.line(&link::printable(text));
        }
    }

    /// A line that scripts wait for: flushed even if standard output is a pipe.
    pub(crate) fn ready(&self, text: &str) {
        if self.json {
            self.line(&json!({"message_type": "status", "message": text}).to_string());
        } else if !self.quiet {
            self.line(&link::printable(text));
        }
        self.printed(std::io::stdout().flush());
    }

    /// A line of a log, while the program continues.
    pub(crate) fn note(&self, text: &str) {
        if self.json {
            self.line(&json!({"message_type": "status", "message": text}).to_string());
        } else if !self.quiet {
            to_stderr(text);
        }
    }

    /// A line for -v.
    pub(crate) fn more(&self, text: &str) {
        if self.verbose && !self.json {
            to_stderr(text);
        }
    }

    /// True with -v.
    pub(crate) fn is_verbose(&self) -> bool {
        self.verbose
    }

    /// A warning.
    pub(crate) fn warn(&self, text: &str) {
        if self.json {
            self.line(&json!({"message_type": "status", "warning": text}).to_string());
        } else {
            to_stderr(&format!("dsync: warning: {text}"));
        }
    }

    /// A warning that another attempt would repeat.
    pub(crate) fn warn_once(&self, text: &str) {
        if self.warned.lock().unwrap_or_else(PoisonError::into_inner).insert(text.to_owned()) {
            self.warn(text);
        }
    }

    /// True with --json.
    pub(crate) fn is_json(&self) -> bool {
        self.json
    }

    /// A status object with `message_type`.
    pub(crate) fn status(&self, value: &impl Serialize) {
        self.object("status", value);
    }

    /// The summary, as an object with `message_type`.
    pub(crate) fn summary(&self, value: &impl Serialize) {
        self.object("summary", value);
    }

    /// A summary that is itself the result, printed with and without --json.
    ///
    /// # Errors
    /// If it cannot be printed: a partial result would be taken for the whole.
    pub(crate) fn print_summary(&self, value: &impl Serialize) -> anyhow::Result<()> {
        let text = object("summary", value).context("cannot print the summary")?;
        let mut out = std::io::stdout().lock();
        writeln!(out, "{text}").and_then(|()| out.flush()).context("cannot print the summary")
    }

    fn object(&self, message_type: &str, value: &impl Serialize) {
        if let (true, Some(text)) = (self.json, object(message_type, value)) {
            self.line(&text);
        }
    }

    /// An error, as the program ends.
    pub(crate) fn error(&self, message: &str, code: u8) {
        self.finish();
        if message.is_empty() {
            return;
        }
        if self.json {
            self.line(&json!({"message_type": "error", "message": message, "code": code}).to_string());
        }
        to_stderr(&format!("dsync: {message}"));
    }

    /// Shows the progress, in bytes of `total`.
    pub(crate) fn progress(&self, done: u64, total: u64) {
        let mut slot = self.bar.lock().unwrap_or_else(|e| e.into_inner());
        let bar = slot.get_or_insert_with(|| {
            let shown = !self.quiet && !self.json && std::io::stderr().is_terminal();
            Bar {
                bar: shown.then(|| new_bar(total, ProgressDrawTarget::stderr())),
                began: Instant::now(),
                said: Instant::now(),
            }
        });
        if let Some(bar) = &bar.bar {
            bar.set_length(total);
            bar.set_position(done);
        }
        if self.json && bar.said.elapsed() >= STATUS_EVERY {
            bar.said = Instant::now();
            let seconds = bar.began.elapsed().as_secs_f64();
            let rate = done as f64 / seconds.max(1e-3);
            let left = if rate > 0.0 { Some(total.saturating_sub(done) as f64 / rate) } else { None };
            let status = json!({
                "message_type": "status",
                "bytes_done": done,
                "bytes_total": total,
                "bytes_per_second": rate as u64,
                "seconds_elapsed": seconds,
                "seconds_left": left,
            });
            self.line(&status.to_string());
        }
    }

    /// Removes the progress.
    pub(crate) fn finish(&self) {
        if let Some(Bar { bar: Some(bar), .. }) = self.bar.lock().unwrap_or_else(|e| e.into_inner()).take() {
            bar.finish_and_clear();
        }
    }
}

/// A value as an object with its type.
fn object(message_type: &str, value: &impl Serialize) -> Option<String> {
    let Ok(Value::Object(fields)) = serde_json::to_value(value) else { return None };
    let mut all = serde_json::Map::new();
    all.insert("message_type".into(), message_type.into());
    all.extend(fields);
    Some(Value::Object(all).to_string())
}

/// Lines, escaped so that names and messages of others cannot affect a terminal or a log. All but the first are indented, so that they
/// pass for no message of their own.
fn to_stderr(text: &str) {
    let _ = writeln!(std::io::stderr(), "{}", link::printable_lines(text).replace('\n', "\n  "));
}

fn new_bar(total: u64, target: ProgressDrawTarget) -> ProgressBar {
    let size = |s: &ProgressState, w: &mut dyn std::fmt::Write| {
        let _ = write!(w, "{} of {}", units::size(s.pos()), units::size(s.len().unwrap_or(0)));
    };
    let rate = |s: &ProgressState, w: &mut dyn std::fmt::Write| {
        let _ = write!(w, "{}/s", units::size(s.per_sec() as u64));
    };
    let left = |s: &ProgressState, w: &mut dyn std::fmt::Write| {
        let _ = write!(w, "{} left", units::seconds(s.eta().as_secs_f64().round()));
    };
    let bar = ProgressBar::with_draw_target(Some(total), target);
    // The bar takes the remaining width: a line that wraps would be drawn repeatedly.
    if let Ok(style) = ProgressStyle::with_template("{wide_bar} {percent:>3}%  {size}  {rate}  {left}") {
        bar.set_style(style.with_key("size", size).with_key("rate", rate).with_key("left", left));
    }
    bar
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use indicatif::TermLike;

    use super::*;

    /// A terminal of 80 columns; keeps the longest line.
    #[derive(Debug, Clone, Default)]
    struct Narrow(Arc<Mutex<(String, usize)>>);

    impl TermLike for Narrow {
        fn width(&self) -> u16 {
            80
        }
        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, line: &str) -> io::Result<()> {
            self.write_str(line)?;
            self.clear_line()
        }
        fn write_str(&self, text: &str) -> io::Result<()> {
            let mut seen = self.0.lock().unwrap();
            seen.0.push_str(text);
            seen.1 = seen.1.max(seen.0.trim_end().chars().count());
            Ok(())
        }
        fn clear_line(&self) -> io::Result<()> {
            self.0.lock().unwrap().0.clear();
            Ok(())
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn progress_fits_a_terminal_of_80_columns() {
        for total in [1000, 1023 << 20, 1023 << 40] {
            let terminal = Narrow::default();
            let bar = new_bar(total, ProgressDrawTarget::term_like(Box::new(terminal.clone())));
            for part in 1..=4 {
                bar.set_position(total / 4 * part);
                std::thread::sleep(Duration::from_millis(10));
                bar.tick();
            }
            let longest = terminal.0.lock().unwrap().1;
            assert!((40..=80).contains(&longest), "{longest} columns of {total} bytes");
        }
    }
}
