//! The live view without its terminal: what stands on which line, and what keys do.

use super::look::Shown;
use super::view::{self, Moment, Order};

/// Of a terminal, in characters; 0 where it does not say, and then nothing is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) rows: u16,
    pub(super) columns: u16,
}

/// What somebody chose by keys.
#[derive(Debug, Default)]
pub(super) struct Screen {
    order: Order,
    /// The first line of the table that is shown.
    from: usize,
}

/// What moves by a line, with an arrow as terminals send it.
const DOWN: [&[u8]; 3] = [b"j", b"\x1b[B", b"\x1bOB"];
const UP: [&[u8]; 3] = [b"k", b"\x1b[A", b"\x1bOA"];

impl Screen {
    /// Keys that came at once; whether one of them ends the view. Keys that mean nothing do nothing.
    pub(super) fn press(&mut self, mut keys: &[u8]) -> bool {
        while let Some(key) = keys.first() {
            let starts =
                |moves: &[&[u8]]| moves.iter().find(|one| keys.starts_with(one)).map(|one| one.len());
            let mut length = 1;
            if let Some(down) = starts(&DOWN) {
                self.from = self.from.saturating_add(1);
                length = down;
            } else if let Some(up) = starts(&UP) {
                self.from = self.from.saturating_sub(1);
                length = up;
            } else if let Some(order) = Order::ALL.into_iter().find(|order| order.key() == char::from(*key)) {
                (self.order, self.from) = (order, 0);
            } else if matches!(key, b'q' | b'Q') {
                return true;
            }
            keys = &keys[length..];
        }
        false
    }

    /// The lines from the top, none longer and no more than there is room for. The first and the last stay where they are.
    pub(super) fn lines(&mut self, shown: &Shown, moment: &Moment, size: Size) -> Vec<String> {
        let text = view::text(shown, moment, self.order);
        let mut lines = text.lines();
        let head = lines.next().unwrap_or_default().to_owned();
        let body: Vec<&str> = lines.collect();
        let or_all = |size: u16| if size == 0 { usize::MAX } else { usize::from(size) };
        let room = or_all(size.rows).saturating_sub(2);
        // Who scrolled past the end, or whose table became shorter, sees the end.
        self.from = self.from.min(body.len().saturating_sub(room));
        let seen = body.iter().skip(self.from).take(room).map(|line| (*line).to_owned());
        let mut all = vec![head];
        all.extend(seen);
        all.push(self.help(body.len(), room));
        all.truncate(or_all(size.rows));
        all.iter().map(|line| line.chars().take(or_all(size.columns)).collect()).collect()
    }

    fn help(&self, lines: usize, room: usize) -> String {
        let mut help = "q quit | sort by".to_owned();
        for order in Order::ALL {
            let chosen = if order == self.order { "*" } else { "" };
            help += &format!("  {} {}{chosen}", order.key(), order.name());
        }
        if lines > room {
            help += &format!(" | j k lines {}-{} of {lines}", self.from + 1, self.from + room);
        }
        help
    }
}
