//! The output of the demo: steps with their duration, and details, as text of 80 columns or as one
//! JSON object per line. Colours only on a terminal.
//!
//! When the reader closes the pipe, output ends and [`Report::closed`] completes.

use clap::ValueEnum;
use serde_json::{Value, json};
use std::cell::Cell;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// Width of the text. Details are indented by [`INDENT`].
const WIDTH: usize = 80;
const INDENT: usize = 5;

/// The format of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    Text,
    /// One object per line.
    Json,
}

/// Prints to standard output.
pub(crate) struct Report {
    format: Format,
    pub(crate) verbose: bool,
    is_terminal: bool,
    colours: bool,
    began: Instant,
    closed: CancellationToken,
    failures: Cell<usize>,
}

impl Report {
    pub(crate) fn new(format: Format, verbose: bool) -> Self {
        let is_terminal = std::io::stdout().is_terminal() && format == Format::Text;
        let colours = is_terminal && std::env::var_os("NO_COLOR").is_none();
        let (closed, failures) = (CancellationToken::new(), Cell::new(0));
        Self { format, verbose, is_terminal, colours, began: Instant::now(), closed, failures }
    }

    /// Whether the output is coloured.
    pub(crate) fn colours(&self) -> bool {
        self.colours
    }

    /// Whether lines can be drawn again.
    pub(crate) fn is_live(&self) -> bool {
        self.is_terminal && self.colours
    }

    pub(crate) fn is_json(&self) -> bool {
        self.format == Format::Json
    }

    /// Cancelled when nothing reads the output any more.
    pub(crate) fn closed(&self) -> &CancellationToken {
        &self.closed
    }

    /// Number of failed steps.
    pub(crate) fn failures(&self) -> usize {
        self.failures.get()
    }

    fn write(&self, text: &str) {
        let mut out = std::io::stdout().lock();
        if out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_err() {
            self.closed.cancel();
        }
    }

    fn text(&self, text: &str) {
        if self.format == Format::Text {
            self.write(text);
        }
    }

    fn json(&self, value: &Value) {
        if self.format == Format::Json {
            self.write(&format!("{value}\n"));
        }
    }

    fn paint(&self, code: &str, text: &str) -> String {
        if self.colours { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// A line with a mark before it, in several lines where it is too long.
    fn marked(&self, code: &str, mark: &str, text: &str) {
        let lines = wrapped(text, WIDTH - INDENT);
        let mark = self.paint(code, mark);
        let text = lines.join(&format!("\n{}", " ".repeat(INDENT)));
        self.text(&format!("  {mark} {text}\n"));
    }

    /// A heading.
    pub(crate) fn heading(&self, title: &str) {
        self.text(&format!("\n{}\n", self.paint("1", title)));
        self.json(&json!({"event": "section", "title": title}));
    }

    /// A successful step. `event` is an object with the name of the event.
    pub(crate) fn done(&self, text: &str, took: Duration, event: Value) {
        self.marked("32", "ok", &format!("{text}  {}", self.paint("2", &millis(took))));
        let mut event = event;
        event["ms"] = json!(took.as_secs_f64() * 1000.0);
        self.json(&event);
    }

    /// A claim that was refused, as expected.
    pub(crate) fn refused(&self, claim: &str, reason: &str) {
        self.marked("33", "--", &format!("{claim} is refused: {reason}"));
        self.json(&json!({"event": "refused", "claim": claim, "reason": reason}));
    }

    /// A failed step.
    pub(crate) fn failed(&self, what: &str, reason: &str) {
        self.failures.set(self.failures.get() + 1);
        self.marked("31", "no", &format!("{what}: {reason}"));
        self.json(&json!({"event": "failed", "object": what, "reason": reason}));
    }

    /// Something that the demo does not do.
    pub(crate) fn note(&self, text: &str) {
        self.marked("33", "--", text);
        self.json(&json!({"event": "note", "text": text}));
    }

    /// Details of the last step, indented.
    pub(crate) fn detail(&self, text: &str) {
        for line in text.lines() {
            // Lines with colours are drawings, which fit.
            let lines = match line.contains('\x1b') {
                true => vec![line.to_owned()],
                false => wrapped(line, WIDTH - INDENT),
            };
            for line in lines {
                self.text(&format!("{}{line}\n", " ".repeat(INDENT)));
            }
        }
    }

    /// A drawing, with at most 78 columns.
    pub(crate) fn drawing(&self, text: &str) {
        for line in text.lines() {
            self.text(&format!("  {line}\n"));
        }
    }

    /// Draws lines again in place of the last `above` lines.
    pub(crate) fn redraw(&self, above: usize, lines: &[String]) {
        let mut text = if above > 0 { format!("\x1b[{above}A") } else { String::new() };
        for line in lines {
            text += &format!("\x1b[2K{}{line}\n", " ".repeat(INDENT));
        }
        self.text(&text);
    }

    /// An event only for JSON.
    pub(crate) fn event(&self, event: &Value) {
        self.json(event);
    }

    /// The last line.
    pub(crate) fn summary(&self) {
        let took = millis(self.began.elapsed());
        let failures = self.failures();
        let (code, text) = match failures {
            0 => ("32;1", "Everything was released, and the GPUs are in their initial state".to_owned()),
            1 => ("31;1", "1 error, see above".to_owned()),
            n => ("31;1", format!("{n} errors, see above")),
        };
        self.text(&format!("\n{} in {took}\n", self.paint(code, &text)));
        self.json(&json!({"event": "summary", "errors": failures}));
    }
}

/// The lines of a text, broken at spaces. Lines after the first have its indent.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let body = text.trim_start();
    let indent = " ".repeat(text.len() - body.len());
    let (mut lines, mut line, mut used, mut is_empty) = (Vec::new(), indent.clone(), indent.len(), true);
    for word in body.split(' ') {
        // Colours have no width.
        let shown = |(at, part): (usize, &'_ str)| match part.split_once('m') {
            Some((_, rest)) if at > 0 => rest.chars().count(),
            _ => part.chars().count(),
        };
        let length: usize = word.split('\x1b').enumerate().map(shown).sum();
        if !is_empty && length > 0 && used + 1 + length > width {
            lines.push(line.trim_end().to_owned());
            (line, used, is_empty) = (indent.clone(), indent.len(), true);
        }
        if !is_empty {
            line.push(' ');
            used += 1;
        }
        line.push_str(word);
        used += length;
        is_empty = false;
    }
    lines.push(line.trim_end().to_owned());
    lines
}

fn millis(took: Duration) -> String {
    format!("{:.1} ms", took.as_secs_f64() * 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, width: usize, expected: &[&str]) {
        assert_eq!(wrapped(text, width), expected, "{text:?}");
    }

    #[test]
    fn long_lines_are_broken_at_spaces() {
        check("", 10, &[""]);
        check("one two three", 8, &["one two", "three"]);
        check("  one two three", 9, &["  one two", "  three"]);
        check("averyveryverylongword and", 8, &["averyveryverylongword", "and"]);
        check("one \x1b[2mtwo\x1b[0m three", 8, &["one \x1b[2mtwo\x1b[0m", "three"]);
    }
}
