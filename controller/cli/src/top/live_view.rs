//! The live view, without the terminal: sort order, scrolling, and the visible lines.

use super::snapshot::Snapshot;
use super::table::{self, NodeTime, Period, SortKey};

/// Size of a terminal in characters. 0 means unknown: nothing is cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) rows: u16,
    pub(super) columns: u16,
}

/// The table, and the state that keys change.
#[derive(Debug, Default)]
pub(super) struct LiveView {
    period: Period,
    sort: SortKey,
    /// Index of the first visible line, below the line with node and time.
    offset: usize,
}

/// Keys that scroll by a line: a letter, and the arrow key as terminals encode it.
const DOWN: [&[u8]; 3] = [b"j", b"\x1b[B", b"\x1bOB"];
const UP: [&[u8]; 3] = [b"k", b"\x1b[A", b"\x1bOA"];

impl LiveView {
    pub(super) fn new(period: Period) -> Self {
        Self { period, ..Self::default() }
    }

    /// Handles key presses and returns whether one of them quits the view. Unknown keys are ignored.
    pub(super) fn press(&mut self, mut keys: &[u8]) -> bool {
        while let Some(key) = keys.first() {
            let match_length =
                |sequences: &[&[u8]]| sequences.iter().find(|one| keys.starts_with(one)).map(|one| one.len());
            let mut length = 1;
            if let Some(down) = match_length(&DOWN) {
                self.offset = self.offset.saturating_add(1);
                length = down;
            } else if let Some(up) = match_length(&UP) {
                self.offset = self.offset.saturating_sub(1);
                length = up;
            } else if let Some(sort) = SortKey::ALL.into_iter().find(|sort| sort.key() == char::from(*key)) {
                (self.sort, self.offset) = (sort, 0);
            } else if matches!(key, b'q' | b'Q') {
                return true;
            }
            keys = &keys[length..];
        }
        false
    }

    /// The visible lines, cut to the size of the terminal. The first line and the help line do not scroll.
    pub(super) fn lines(&mut self, snapshot: &Snapshot, now: &NodeTime, size: Size) -> Vec<String> {
        let text = table::render(snapshot, now, self.sort, self.period);
        let mut lines = text.lines();
        let head = lines.next().unwrap_or_default().to_owned();
        let body: Vec<&str> = lines.collect();
        let or_unlimited = |size: u16| if size == 0 { usize::MAX } else { usize::from(size) };
        let rows = or_unlimited(size.rows).saturating_sub(2);
        // After scrolling past the end, or when the table became shorter, the end is visible.
        self.offset = self.offset.min(body.len().saturating_sub(rows));
        let visible = body.iter().skip(self.offset).take(rows).map(|line| (*line).to_owned());
        let mut all = vec![head];
        all.extend(visible);
        all.push(self.help(body.len(), rows));
        all.truncate(or_unlimited(size.rows));
        all.iter().map(|line| line.chars().take(or_unlimited(size.columns)).collect()).collect()
    }

    fn help(&self, lines: usize, rows: usize) -> String {
        let mut help = "q quit | sort by".to_owned();
        for sort in SortKey::ALL {
            let selected = if sort == self.sort { "*" } else { "" };
            help += &format!("  {} {}{selected}", sort.key(), sort.name());
        }
        if lines > rows {
            help += &format!(" | j k lines {}-{} of {lines}", self.offset + 1, self.offset + rows);
        }
        help
    }
}
