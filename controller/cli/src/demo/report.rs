//! The demo's output: steps with their duration, and details. Colours only on a terminal.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// Prints to standard output.
pub(crate) struct Report {
    colours: bool,
    began: Instant,
}

impl Report {
    pub(crate) fn new() -> Self {
        let colours = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        Self { colours, began: Instant::now() }
    }

    /// Whether the output is coloured.
    pub(crate) fn colours(&self) -> bool {
        self.colours
    }

    fn paint(&self, code: &str, text: &str) -> String {
        if self.colours { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// A heading.
    pub(crate) fn heading(&self, title: &str) {
        println!("\n{}", self.paint("1", title));
    }

    /// A successful step.
    pub(crate) fn done(&self, what: &str, took: Duration) {
        println!("  {} {what}  {}", self.paint("32", "ok"), self.paint("2", &millis(took)));
    }

    /// A claim that was refused, as expected.
    pub(crate) fn refused(&self, claim: &str, reason: &str) {
        println!("  {} {claim} is refused: {reason}", self.paint("33", "--"));
    }

    /// A failed step.
    pub(crate) fn failed(&self, what: &str, reason: &str) {
        println!("  {} {what}: {reason}", self.paint("31", "no"));
    }

    /// Details of the last step, indented.
    pub(crate) fn detail(&self, text: &str) {
        for line in text.lines() {
            println!("     {line}");
        }
    }

    /// The last line.
    pub(crate) fn summary(&self, failures: usize) {
        let took = millis(self.began.elapsed());
        match failures {
            0 => println!(
                "\n{} in {took}",
                self.paint(
                    "32;1",
                    "All claims were prepared and released, and the GPUs are in their initial state"
                )
            ),
            1 => println!("\n{} in {took}", self.paint("31;1", "1 error, see above")),
            n => println!("\n{} in {took}", self.paint("31;1", &format!("{n} errors, see above"))),
        }
    }
}

fn millis(took: Duration) -> String {
    format!("{:.1} ms", took.as_secs_f64() * 1000.0)
}
