//! What the demo prints: steps with the time each took, tables, the map.
//! Colours only on a terminal.

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

    /// Whether drawings may be coloured.
    pub(crate) fn colours(&self) -> bool {
        self.colours
    }

    fn paint(&self, code: &str, text: &str) -> String {
        if self.colours { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// The head of a part of the journey.
    pub(crate) fn part(&self, title: &str) {
        println!("\n{}", self.paint("1", title));
    }

    /// A step that worked.
    pub(crate) fn done(&self, what: &str, took: Duration) {
        println!("  {} {what}  {}", self.paint("32", "ok"), self.paint("2", &millis(took)));
    }

    /// What was refused, as it must be.
    pub(crate) fn refused(&self, what: &str, why: &str) {
        println!("  {} {what} gets nothing: {why}", self.paint("33", "--"));
    }

    /// A step that did not.
    pub(crate) fn failed(&self, what: &str, why: &str) {
        println!("  {} {what}: {why}", self.paint("31", "no"));
    }

    /// Text that belongs to the last step, indented.
    pub(crate) fn detail(&self, text: &str) {
        for line in text.lines() {
            println!("     {line}");
        }
    }

    /// The last line.
    pub(crate) fn end(&self, failures: usize) {
        let took = millis(self.began.elapsed());
        match failures {
            0 => println!(
                "\n{} in {took}",
                self.paint("32;1", "Every claim was prepared and released, the GPUs are whole")
            ),
            1 => println!("\n{} in {took}", self.paint("31;1", "1 thing went wrong, see above")),
            n => println!("\n{} in {took}", self.paint("31;1", &format!("{n} things went wrong, see above"))),
        }
    }
}

fn millis(took: Duration) -> String {
    format!("{:.1} ms", took.as_secs_f64() * 1000.0)
}
